"""All kernels, for building them ahead of time, reports, checks.

A family is a module (or a package of tiers) with ``specialisations() -> Iterable[Specialisation]``: those that its
plans choose for common models' shapes. An unusual shape may need one more, which is then compiled at its first launch.
"""

from __future__ import annotations

from collections.abc import Iterator

from numba_kernels.cuda import (
    activation,
    adapter_ids,
    attention,
    chain_sampling,
    decode_inputs,
    dequantize,
    dynamic_quantisation,
    embedding,
    experts,
    gemm,
    latent,
    logprobs,
    norm,
    probes,
    qkv,
    recurrent,
    rounded_norm,
    sampling,
)
from numba_kernels.cuda.arithmetic import elementwise, integer_matmul, reduce, softmax
from numba_kernels.cuda.specialisation import Specialisation

FAMILIES = (
    activation, adapter_ids, attention, chain_sampling, decode_inputs, dequantize, elementwise, embedding, experts,
    gemm, integer_matmul, latent, logprobs, norm, probes, qkv, recurrent, reduce, rounded_norm,
    dynamic_quantisation, sampling, softmax,
)  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Each kernel once, family by family. Raises ValueError where two have one name."""
    seen: dict[str, Specialisation] = {}
    for family in FAMILIES:
        for specialisation in family.specialisations():
            known = seen.get(specialisation.name)
            if known is None:
                seen[specialisation.name] = specialisation
                yield specialisation
            elif known is not specialisation:
                raise ValueError(f"two kernels are called {specialisation.name}")
