"""The kernel report's cases of recurrent layers: a prompt in the chunk form."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from numba_kernels.cuda.recurrent import chunk_form
from numba_kernels.cuda.recurrent.chunk_layout import CHUNK, ChunkForm
from runtime.bench.kernels.case import Case, Inputs, Prepared

TOKENS, TAPS, NUM_SMS = 192, 4, 132
_SLIDES = (
    "a thread slides over the tokens of 8 channels: it reads the 3 rows before its first one, and filters of 32 numbers"
)


def chunk_cases() -> Iterator[Case]:
    """Both launches of a delta rule and of Mamba-2."""
    for name, form, key_heads, value_heads in (
        ("delta", ChunkForm("bf16", 128, 128, True), 1, 4), ("mamba", ChunkForm("bf16", 128, 64, False), 1, 8),
    ):  # fmt: skip
        for is_scan in (False, True):
            yield _chunk_case(name, form, key_heads, value_heads, is_scan)


def _chunk_case(name: str, form: ChunkForm, key_heads: int, value_heads: int, is_scan: bool) -> Case:
    values, keys = value_heads * form.columns, key_heads * form.rows
    channels, num_gates, count = values + 2 * keys, value_heads * (1 + form.has_delta), TOKENS // CHUNK
    stride = channels + values + num_gates
    factors_bytes = count * (key_heads * form.key_part + value_heads * form.value_part)
    state_bytes = value_heads * form.rows * form.columns * 4

    def prepare(inputs: Inputs) -> Prepared:
        plan = chunk_form.plan(
            form, "f32", TAPS, TOKENS, 1, TOKENS, 0, key_heads, value_heads, NUM_SMS, has_bias=not form.has_delta
        )
        x, conv = inputs.put_normal(TOKENS, stride), inputs.put_normal(channels, TAPS, dtype="f32")
        bias = 0 if form.has_delta else inputs.put_normal(channels, dtype="f32")
        rates = inputs.put(-np.exp(inputs.rng.uniform(-3, 1, value_heads)).astype(np.float32))
        of_heads = [inputs.put_normal(value_heads, dtype="f32") for _ in range(2)]
        tables = [inputs.put(np.array(each, np.int32)) for each in ([0, TOKENS], [TOKENS], [[0, 1]])]
        lengths, state = inputs.put(np.zeros(2, np.int32)), inputs.empty(2 * state_bytes)
        kept, workspace = inputs.empty(2 * (TAPS - 1) * channels * 2), inputs.empty(plan.workspace_bytes)
        out, share = inputs.empty(TOKENS * values * 4), value_heads // key_heads
        places = (0, keys, 2 * keys) if form.has_delta else (values + keys, values, 0)
        first_column = 0 if form.has_delta else values
        run = inputs.bind(
            (plan.factors, (
                x, workspace, conv, bias, rates, *of_heads, *tables, lengths, kept, 0, 2, stride, first_column,
                stride - num_gates, channels, 0, 0, plan.slots, key_heads, value_heads, plan.heads_of_block, *places,
                share, 1, 0.0, 100.0,
            )),
        )  # fmt: skip
        if not is_scan:
            return Prepared(run)
        run()
        arguments = (
            workspace,
            out,
            *tables,
            lengths,
            state,
            2,
            0,
            0,
            plan.slots,
            key_heads,
            value_heads,
            share,
            key_heads,
        )
        return Prepared(inputs.bind((plan.scan, arguments)))

    shape = f"{TOKENS} x {value_heads} heads of {form.rows} x {form.columns}"
    if not is_scan:
        read = TOKENS * (channels + num_gates) * 2 + channels * TAPS * 4
        return Case(
            f"{name} chunk factors bf16", shape, read + factors_bytes, 0, 0.0, prepare, "recurrent",
            scattered_because=_SLIDES,
        )  # fmt: skip
    written = TOKENS * values * 4 + state_bytes
    launch = chunk_form.plan(
        form, "f32", TAPS, TOKENS, 1, TOKENS, 0, key_heads, value_heads, NUM_SMS, has_bias=False
    ).scan
    shared = value_heads * (form.key_part + form.copied) * launch.grid[0]
    tiled_bytes = count * (shared + value_heads * CHUNK * form.columns * 2) + written
    return Case(
        f"{name} chunk scan bf16", shape, factors_bytes + written, 0, 0.0, prepare, "recurrent", tiled_bytes, True, True
    )
