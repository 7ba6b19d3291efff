"""Prompts in the chunk form: whether a layer can take it, from how many tokens on, and its two launches.

Bits depend on how a prompt is cut, since chunks are counted from the first token of each step, and a state of bfloat16
is rounded once a launch, not after each token; exact mode takes the recurrence (`step`) for all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from numba_kernels.cuda.recurrent import chunk_factors, chunk_scan
from numba_kernels.cuda.recurrent.chunk_inputs import THREADS
from numba_kernels.cuda.recurrent.chunk_layout import CHUNK, ChunkForm, num_slots
from numba_kernels.cuda.specialisation import Launch, Specialisation

ALWAYS_STEPS = 2**31 - 1
"""`most_steps` of a batch without the chunk form."""
_KEY_DIMS = (16, 32, 64, 128)
_MOST_COLUMNS = 256
_TAPS = (2, 3, 4)
_TOKEN_S = 0.12e-6  # the recurrence's dependent instructions a token
_CLOCK_HZ = 1.5e9
_ROW_INSTRUCTIONS = 40  # of a warp, for a token and a column of the state, which is a row of the page
_LAUNCHES_S = 4e-6  # two launches more
_FACTORS_S, _SCAN_S = 8e-6, 1.2e-6  # a block's chunk and value head, and a step of the chain
_MOST_CROSSOVER = 4 * CHUNK


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The launches of a batch. Their arguments: `chunk_factors.ARGUMENT_TYPES`, `chunk_scan.ARGUMENT_TYPES`.

    Attributes:
        slots: of the workspace.
        heads_of_block: value heads of a block of the first launch.
    """

    factors: Launch
    scan: Launch
    slots: int
    workspace_bytes: int
    heads_of_block: int


def why_not(form: ChunkForm, taps: int, multiple: int, most_shared: int) -> str:
    """Why a state cannot be computed in chunks, or "".

    `multiple`: a divisor of x's address and of its rows, columns and channels, in elements; `most_shared`: bytes of
    shared memory that a block may have.
    """
    if form.dtype not in ("bf16", "f16"):
        return f"x is of {form.dtype}, must have 16 bits"
    if form.rows not in _KEY_DIMS or form.columns % 16 or form.columns > _MOST_COLUMNS:
        return f"states are {form.rows} x {form.columns}, must be {_KEY_DIMS} x multiples of 16 up to {_MOST_COLUMNS}"
    if taps not in _TAPS or multiple % 8:
        return f"convolutions of {taps} taps, rows on multiples of {multiple}, must be {_TAPS}, on multiples of 8"
    needed = max(chunk_factors.shared_bytes(form), chunk_scan.shared_bytes(form))
    return f"needs {needed} bytes of shared memory, limit {most_shared}" if needed > most_shared else ""


def most_steps(form: ChunkForm, num_seqs: int, num_tokens: int, value_heads: int, num_sms: int) -> int:
    """The longest query that the recurrence is modelled to serve faster, in a batch of so many sequences and tokens."""
    heads = num_seqs * value_heads
    instructions = _ROW_INSTRUCTIONS * form.columns * value_heads * num_tokens / max(1, num_sms * 4)

    def steps_s(length: int) -> float:
        share = min(1.0, length * num_seqs / max(1, num_tokens))
        return max(length * _TOKEN_S, share * instructions / _CLOCK_HZ)

    def chunks_s(length: int) -> float:
        count = -(-length // CHUNK)
        factors = -(-heads * count // (2 * num_sms)) * _FACTORS_S
        return _LAUNCHES_S + factors + count * -(-heads * _blocks_of_head(form, heads, num_sms) // num_sms) * _SCAN_S

    return next((n - 1 for n in range(2, _MOST_CROSSOVER) if chunks_s(n) < steps_s(n)), _MOST_CROSSOVER)


def _blocks_of_head(form: ChunkForm, heads: int, num_sms: int) -> int:
    return form.columns // (16 * _warps(form, heads, num_sms))


def _warps(form: ChunkForm, heads: int, num_sms: int) -> int:
    """Warps of a block of the scan: few for few heads, so that more multiprocessors have some."""
    strips = form.columns // 16
    choices = [warps for warps in (1, 2, 4, 8) if strips % warps == 0]
    filling = [warps for warps in choices if heads * (strips // warps) >= num_sms]
    return max(filling) if filling else min(choices, key=lambda warps: abs(warps - 2))


def plan(
    form: ChunkForm, state_dtype: str, taps: int, num_tokens: int, num_seqs: int, max_query_len: int, pending: int,
    key_heads: int, value_heads: int, num_sms: int, *, has_bias: bool,
) -> ChunkPlan:  # fmt: skip
    """The launches for a batch with at least one token."""
    slots, chunks = num_slots(num_tokens, num_seqs, pending), -(-(max_query_len + pending) // CHUNK)
    heads_of_block = min(value_heads // key_heads, chunk_factors.MOST_HEADS)
    parts = -(-(value_heads // key_heads) // heads_of_block)
    warps = _warps(form, num_seqs * value_heads, num_sms)
    factors = Launch(
        chunk_factors.chunk_factors(form, taps, has_bias), (chunks, key_heads * parts, num_seqs), (THREADS, 1, 1),
        chunk_factors.shared_bytes(form),
    )  # fmt: skip
    scan = Launch(
        chunk_scan.chunk_scan(form, warps, state_dtype), (form.columns // (16 * warps), value_heads, num_seqs),
        (32 * warps, 1, 1), chunk_scan.shared_bytes(form),
    )  # fmt: skip
    workspace = slots * (key_heads * form.key_part + value_heads * form.value_part)
    return ChunkPlan(factors, scan, slots, workspace, heads_of_block)


def specialisations() -> Iterator[Specialisation]:
    """Qwen3.5's heads; Nemotron's and Granite's."""
    for dtype in ("bf16", "f16"):
        for form, has_bias in (
            (ChunkForm(dtype, 128, 128, True), False), (ChunkForm(dtype, 128, 64, False), True),
        ):  # fmt: skip
            yield chunk_factors.chunk_factors(form, 4, has_bias)
            for warps in (2, 4, 8):
                if form.columns % (16 * warps) == 0:
                    yield chunk_scan.chunk_scan(form, warps, "f32")
