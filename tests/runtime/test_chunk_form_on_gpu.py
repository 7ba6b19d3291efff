"""Prompts of recurrent layers in the chunk form on an emulated GPU beside numpy in float64, in batches with short
chunks, after states and pending tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from numba_kernels.cuda.recurrent import chunk_form
from numba_kernels.cuda.recurrent.chunk_layout import ChunkForm
from runtime.backends import cuda_state
from runtime.dtype import DType, bfloat16
from tests.runtime.test_state_ops import DeltaLayer, MambaLayer
from tests.runtime.test_state_ops_on_gpu import OnGpu

BOUNDS = {"float16": 8e-4, "bfloat16": 5e-3}
"""Of the root mean square of the difference; factors have 16 bits."""

LAYERS: dict[str, Any] = {
    "delta": lambda **kwargs: DeltaLayer(2, 4, 64, 64, **kwargs),
    "delta, tiled": lambda **kwargs: DeltaLayer(2, 8, 16, 48, tiled=True, gate="sigmoid", taps=2, **kwargs),
    "delta, whole": lambda **kwargs: DeltaLayer(4, 4, 128, 128, **kwargs),
    "delta, strong": lambda **kwargs: DeltaLayer(2, 4, 64, 64, decay=10.0, **kwargs),
    "mamba": lambda **kwargs: MambaLayer(8, 64, 2, 64, **kwargs),
    "mamba, one group": lambda **kwargs: MambaLayer(16, 32, 1, 128, norm_groups=1, has_bias=False, **kwargs),
}
DEFAULT = {("delta", "bfloat16"), ("mamba", "bfloat16")}


def error(found: Any, expected: Any) -> float:
    difference = found.astype(np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))  # NaN fails every comparison


@pytest.fixture(autouse=True)
def short_prompts_are_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what a page may hold as pending."""
    monkeypatch.setattr(cuda_state, "_most_steps", lambda *_: 0)


@pytest.mark.parametrize(
    ("arch", "name", "dtype"),
    [
        pytest.param(
            arch, name, dtype, id=f"{arch} {name} {dtype}",
            marks=() if arch == "sm_90a" and (name, dtype) in DEFAULT else pytest.mark.exhaustive,
        )
        for arch in ("sm_90a", "sm_80") for name in LAYERS for dtype in BOUNDS
    ],
)  # fmt: skip
def test_prompts_after_prompts_tries_and_decodes(arch: str, name: str, dtype: str) -> None:
    layer = OnGpu(LAYERS[name](pending=3), arch, dtype)
    rows = {seq: layer.rows(seq, count) for seq, count in enumerate((5 + 130 + 1 + 64, 70 + 2 + 9, 2 + 3 + 65))}
    found: dict[int, list[Any]] = {seq: [] for seq in rows}
    before = dict.fromkeys(rows, 0)
    for counts, kept in (
        ((5, 70, 2), (5, 70, 1)),
        ((130, 2, 4), (130, 2, 2)),
        ((1, 9, 67), (1, 9, 67)),
        ((64,), (64,)),
    ):
        chunks = [(seq, before[seq], rows[seq][before[seq] : before[seq] + count]) for seq, count in enumerate(counts)]
        for seq, result in enumerate(layer.step(chunks, padding=1, chained=True)):
            found[seq].append(result[: kept[seq]])
            before[seq] += kept[seq]
    for seq, each in rows.items():
        whole = np.concatenate(found[seq])
        assert before[seq] == len(each)
        assert error(whole, layer.layer.expected(each)) < BOUNDS[dtype], seq


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_a_state_of_bfloat16_is_rounded_after_each_launch(name: str) -> None:
    """The oracle rounds after each token, which costs more."""
    layer = OnGpu(LAYERS[name](pending=2, state_dtype=bfloat16), "sm_90a", "bfloat16")
    rows = layer.rows(1, 150)
    assert error(layer.run(0, rows, [70, 80]), layer.layer.expected(rows)) < 2e-2


@pytest.mark.parametrize("state", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_exact_batches_have_the_same_bits_for_any_cut(state: str) -> None:
    layer = OnGpu(DeltaLayer(1, 1, 64, 16, state_dtype=DType.parse(state)), "sm_90a", "bfloat16", exact=True)
    rows = layer.rows(1, 70)
    assert np.array_equal(layer.run(0, rows, [66, 4]), layer.run(1, rows, [3, 67]))


@pytest.mark.exhaustive
def test_extreme_gates_and_keys() -> None:
    """Steps of 0 and 1, no decay and decay to nothing, keys of zeros."""
    layer = OnGpu(DeltaLayer(2, 4, 64, 64), "sm_90a", "bfloat16")
    rows = layer.rows(11, 140)
    rows[::3, -8:-4], rows[1::3, -8:-4] = -200.0, 200.0
    rows[::5, -4:], rows[1::5, -4:] = -200.0, 60.0
    rows[10:20, : 2 * 128] = 0.0
    assert error(layer.run(0, rows, [90, 50]), layer.layer.expected(rows)) < 1e-2


def test_other_sizes_take_the_recurrence() -> None:
    form = ChunkForm("bf16", 128, 128, True)
    assert chunk_form.why_not(form, 4, 8, 163 << 10) == ""
    for other, taps, multiple, shared in (
        (replace(form, dtype="f32"), 4, 8, 163 << 10), (replace(form, rows=96), 4, 8, 163 << 10),
        (replace(form, columns=24), 4, 8, 163 << 10), (form, 5, 8, 163 << 10), (form, 4, 4, 163 << 10),
        (form, 4, 8, 99 << 10),
    ):  # fmt: skip
        assert chunk_form.why_not(other, taps, multiple, shared)


def test_long_prompts_take_the_chunk_form() -> None:
    form = ChunkForm("bf16", 128, 128, True)
    alone, together = (chunk_form.most_steps(form, seqs, 4096, 32, 132) for seqs in (1, 8))
    assert 4 < together <= alone < 200
