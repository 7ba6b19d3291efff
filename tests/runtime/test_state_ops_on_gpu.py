"""Layers with a recurrent state on an emulated GPU beside numpy in float64; cuts, batches and replays give the same
bits."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from runtime.batch import Batch
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import DType, bfloat16, float32
from runtime.tensor.tensor import Tensor
from tests.oracles.dense import relative_error
from tests.runtime.test_state_ops import DeltaLayer, Layer, MambaLayer, ShortLayer

NUM_PAGES = 16
BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}

LAYERS: dict[str, Any] = {
    "short": lambda **kwargs: ShortLayer(**kwargs),
    "short, odd": lambda **kwargs: ShortLayer(37, 4, True, **kwargs),
    "delta": lambda **kwargs: DeltaLayer(2, 4, 64, 20, **kwargs),
    "delta, odd": lambda **kwargs: DeltaLayer(1, 3, 24, 17, taps=2, gate="sigmoid", **kwargs),
    "delta, tiled": lambda **kwargs: DeltaLayer(2, 6, 128, 9, tiled=True, **kwargs),
    "delta, wide": lambda **kwargs: DeltaLayer(1, 2, 300, 5, **kwargs),
    "mamba": lambda **kwargs: MambaLayer(4, 20, 2, 64, **kwargs),
    "mamba, odd": lambda **kwargs: MambaLayer(3, 7, 1, 33, norm_groups=1, has_bias=False, limit=(0.3, 0.9), **kwargs),
    "mamba, one norm": lambda **kwargs: MambaLayer(8, 80, 2, 128, norm_groups=1, **kwargs),
}
DEFAULT = {("short", "bfloat16"), ("delta", "bfloat16"), ("delta, odd", "float32"), ("mamba", "bfloat16")}
everywhere = pytest.mark.parametrize(
    ("arch", "name", "dtype"),
    [
        pytest.param(
            arch, name, dtype, id=f"{arch} {name} {dtype}",
            marks=() if arch == "sm_90a" and (name, dtype) in DEFAULT else pytest.mark.exhaustive,
        )
        for arch in ("sm_90a", "sm_80") for name in LAYERS for dtype in BOUNDS
    ],
)  # fmt: skip


class OnGpu:
    """A layer on an emulated device with pages full of NaN but for what is written, and each sequence's page."""

    def __init__(self, layer: Layer, arch: str, dtype: str, *, exact: bool = False) -> None:
        self.exact = exact
        self.device, self.dtype, self.layer = Device(f"emulated:{arch}"), DType.parse(dtype), layer
        self.gpu = Gpu.of(self.device)
        weights: Any = layer.weights  # type: ignore[attr-defined]
        moved = {each.name: getattr(weights, each.name) for each in fields(weights)}
        moved = {name: each.to(self.device) if isinstance(each, Tensor) else each for name, each in moved.items()}
        layer.weights = type(weights)(**moved)  # type: ignore[attr-defined]
        form, self.planes = replace(layer.form, activations=self.dtype), []
        for plane in form.planes(8, float32, is_cpu=False):
            array = np.full((NUM_PAGES, *plane.shape), -7 if plane.name == "length" else np.nan, np.float32)
            self.planes.append(self.put(array.astype(plane.dtype.numpy)))
        self.lives: dict[int, int] = {}
        self.free = list(np.random.default_rng(0).permutation(NUM_PAGES))

    def put(self, array: Any) -> Tensor:
        return Tensor.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def rows(self, seed: int, count: int) -> Any:
        return self.layer.rows(np.random.default_rng(seed), count).astype(self.dtype.numpy)

    def step(self, chunks: list[tuple[int, int, Any]], *, padding: int = 0, chained: bool = False) -> list[Any]:
        """Chunks (sequence, tokens before it, rows) in one batch; each gets its rows' results."""
        table, lens, start = [], [], [0]
        for name, before, rows in chunks:
            table.append([self.free.pop(0), self.lives.get(name, -9) if before else -9])
            lens.append(before + len(rows))
            start.append(start[-1] + len(rows))
        for count in range(1, padding + 1):
            table.append([NUM_PAGES + 5, -3])
            lens.append(0)
            start.append(start[-1] + count)
        given = np.zeros((start[-1], self.layer.width), self.dtype.numpy)
        given[: start[len(chunks)]] = np.concatenate([rows for _, _, rows in chunks])
        nothing, longest = self.put(np.zeros(1, np.int32)), max(np.diff(start))
        lists = (self.put(np.array(each, np.int32)) for each in (start, lens, table))
        query_start, seq_lens, tables = lists
        batch = Batch(
            nothing, nothing, query_start, seq_lens, (), (tables,), nothing, max_query_len=int(longest),
            max_seq_len=max(lens), exact=self.exact,
        )  # fmt: skip
        x = self.put(given)
        for _ in range(2):  # a step that runs again gives the same
            with self.gpu.chained() if chained else nullcontext():
                result = self.layer.run(x, pages=tuple(self.planes), batch=batch, group=0)
        found = result.to("cpu").array
        assert not found[start[len(chunks)] :].any()
        for (name, _, _), (written, _) in zip(chunks, table):
            if (old := self.lives.pop(name, None)) is not None:
                self.free.append(old)
            self.lives[name] = written
        return [found[first:end] for first, end in itertools.pairwise(start)][: len(chunks)]

    def run(self, name: int, rows: Any, cuts: list[int]) -> Any:
        """A sequence in chunks of these lengths, alone."""
        found, before = [], 0
        for count in cuts:
            found += self.step([(name, before, rows[before : before + count])])
            before += count
        assert before == len(rows)
        return np.concatenate(found)


@everywhere
def test_values_and_cuts(arch: str, name: str, dtype: str) -> None:
    """Float64's values; the same bits for any cut and batch, after rejected tokens, in chained launches."""
    layer = OnGpu(LAYERS[name](pending=3), arch, dtype)
    rows = {seq: layer.rows(seq, 40 - 11 * seq) for seq in range(3)}
    whole = {seq: layer.run(seq, each, [len(each)]) for seq, each in rows.items()}
    for seq, each in rows.items():
        assert relative_error(whole[seq], layer.layer.expected(each)) < BOUNDS[dtype]
    rng, before = np.random.default_rng(7), dict.fromkeys(rows, 0)
    while any(before[seq] < len(each) for seq, each in rows.items()):
        chunks, kept = [], []
        for seq, each in rows.items():
            if (rest := len(each) - before[seq]) and rng.random() < 0.8:
                count = min(rest, int(rng.choice([1, 2, 3, 4, 5, 9])))
                taken = int(rng.integers(1, count + 1)) if 1 < count <= 4 else count  # the others were rejected
                tried = each[before[seq] : before[seq] + count].copy()
                tried[taken:] = layer.rows(int(rng.integers(99)), count - taken)
                chunks.append((seq, before[seq], tried))
                kept.append(taken)
        if not chunks:
            continue
        results = layer.step(chunks, padding=int(rng.integers(0, 3)), chained=bool(rng.integers(2)))
        for (seq, first, _), taken, found in zip(chunks, kept, results, strict=True):
            assert np.array_equal(found[:taken], whole[seq][first : first + taken]), (seq, first)
            before[seq] += taken


def test_a_short_conv_of_a_long_chunk_and_a_decode() -> None:
    """The decode is the last row: blocks of the long chunk's later tokens read nothing after it."""
    layer = OnGpu(ShortLayer(pending=1), "sm_90a", "bfloat16")
    rows = [layer.rows(seq, 90) for seq in range(2)]
    whole = [layer.run(2 + seq, each, [90]) for seq, each in enumerate(rows)]
    layer.step([(1, 0, rows[1][:89])])
    first, last = layer.step([(0, 0, rows[0]), (1, 89, rows[1][89:])])
    assert np.array_equal(first, whole[0])
    assert np.array_equal(last, whole[1][89:])


@pytest.mark.parametrize("name", ["delta", "mamba"])
@pytest.mark.exhaustive
def test_a_state_of_bfloat16_is_rounded_after_each_token(name: str) -> None:
    layer = OnGpu(LAYERS[name](pending=2, state_dtype=bfloat16), "sm_90a", "bfloat16")
    rows = layer.rows(1, 50)
    whole = layer.run(0, rows, [50])
    assert np.array_equal(layer.run(0, rows, [1, 2, 1, 3, 20, 23]), whole)
    assert relative_error(whole, layer.layer.expected(rows)) < 3e-2


@pytest.mark.exhaustive
def test_extreme_gates_and_keys() -> None:
    """Steps of 0 and 1, no decay and decay to nothing, keys of zeros."""
    layer = OnGpu(DeltaLayer(1, 3, 24, 17, taps=2), "sm_90a", "float32")
    rows = layer.rows(11, 64)
    rows[::3, -6:-3], rows[1::3, -6:-3] = -200.0, 200.0
    rows[::5, -3:], rows[1::5, -3:] = -200.0, 60.0
    rows[10:20, : 2 * 24] = 0.0
    assert relative_error(layer.run(0, rows, [30, 34]), layer.layer.expected(rows)) < 1e-5


@pytest.mark.exhaustive
def test_a_long_memory_keeps_its_accuracy() -> None:
    """A thousand tokens that decay by a thousandth each."""
    layer = OnGpu(MambaLayer(3, 7, 1, 33, norm_groups=1), "sm_90a", "float32")
    layer.layer.arrays["a"][:] = -1e-3  # type: ignore[attr-defined]
    layer.layer.weights = replace(layer.layer.weights, a=layer.put(np.full(3, -1e-3, np.float32)))  # type: ignore[attr-defined]
    rows = layer.rows(2, 1000)
    assert relative_error(layer.run(0, rows, [1000]), layer.layer.expected(rows)) < 2e-5
