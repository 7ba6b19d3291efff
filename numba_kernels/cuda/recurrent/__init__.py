"""Layers with a recurrent state: short convolution, gated delta rule, Mamba-2, for chunks of any length.

    short_conv   y = C conv(B x), all tokens in parallel
    step         the recurrence, token by token: a warp holds rows of the state in registers over all tokens of a chunk
    chunk_form   prompts on the tensor cores, 64 tokens at a time: what needs no state, then the chain of states
    gated_norm   the norm of its outputs, with a gate

`runtime.state_ops` says what a chunk reads and writes. No block changes a page that is read, so blocks need no order,
and a step that runs again gives the same. But for the chunk form, a token's bits follow from the sequence alone,
however it was cut: its inputs are rounded to the activations' type, a state of bfloat16 is rounded after each token,
and the order of sums follows from a head's size. The chunk form rounds such a state only where a launch writes it.
"""

from collections.abc import Iterator

from numba_kernels.cuda.recurrent import chunk_form, gated_norm, short_conv, step
from numba_kernels.cuda.specialisation import Specialisation


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family that common models take."""
    for kernels in (short_conv, step, chunk_form, gated_norm):
        yield from kernels.specialisations()
