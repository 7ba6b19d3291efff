"""Layers with a recurrent state on the cpu beside numpy in float64; cuts, batches and replays give the same bits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import record
from runtime import ops
from runtime.backends import cpu_threads
from runtime.batch import Batch
from runtime.dtype import DType, bfloat16, float32
from runtime.errors import InvalidArgumentError
from runtime.kv.forms import Recurrent
from runtime.linear.recurrent import DeltaRule, Mamba, ShortConv
from runtime.tensor.tensor import Tensor
from tests.oracles import recurrent as oracle

NUM_PAGES = 48


def tensor(array: Any) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array))


class Layer:
    """A layer's weights, the form of its pages, and what numpy says of a sequence's rows."""

    width: int
    form: Recurrent

    def run(self, x: Tensor, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def expected(self, x: Any) -> Any:
        raise NotImplementedError

    def rows(self, rng: Any, count: int) -> Any:
        return rng.standard_normal((count, self.width)).astype(np.float32)


class ShortLayer(Layer):
    def __init__(self, channels: int = 40, taps: int = 3, has_bias: bool = False, pending: int = 0) -> None:
        rng = np.random.default_rng(channels)
        self.width, self.form = 3 * channels, Recurrent(channels=channels, taps=taps, pending=pending)
        self.conv = rng.standard_normal((channels, taps)).astype(np.float32)
        self.bias = rng.standard_normal(channels).astype(np.float32) if has_bias else None
        self.weights = ShortConv(conv=tensor(self.conv), bias=None if self.bias is None else tensor(self.bias))

    def run(self, x: Tensor, **kwargs: Any) -> Tensor:
        return ops.short_conv(x, self.weights, **kwargs)

    def expected(self, x: Any) -> Any:
        return oracle.short_conv(x, self.conv, self.bias)


class DeltaLayer(Layer):
    def __init__(
        self, hk: int = 2, hv: int = 4, dk: int = 24, dv: int = 20, *, tiled: bool = False, gate: Any = "silu",
        pending: int = 0, taps: int = 4, state_dtype: DType = float32, decay: float = 1.0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(hk + hv + dk + dv)
        self.num_gates, channels = 2 * hv, 2 * hk * dk + hv * dv
        self.width = channels + hv * dv + self.num_gates
        self.form = Recurrent(
            channels=channels, taps=taps, gates=2 * hv, heads=hv, rows=dk, columns=dv, state_dtype=state_dtype,
            pending=pending,
        )  # fmt: skip
        self.sizes: dict[str, Any] = {
            "eps": 1e-6, "num_key_heads": hk, "num_value_heads": hv, "key_dim": dk, "value_dim": dv, "tiled": tiled,
            "gate": gate,
        }  # fmt: skip
        self.arrays = {
            "conv": rng.uniform(-0.6, 0.6, (channels, taps)),
            "a": -decay * np.exp(rng.uniform(-3, 2, hv)),
            "dt_bias": rng.uniform(-2, 2, hv),
            "norm": rng.uniform(0.5, 1.5, dv),
        }
        self.arrays = {name: array.astype(np.float32) for name, array in self.arrays.items()}
        self.weights = DeltaRule(**{name: tensor(array) for name, array in self.arrays.items()}, **self.sizes)

    def run(self, x: Tensor, **kwargs: Any) -> Tensor:
        return ops.delta_rule(x, self.weights, **kwargs)

    def expected(self, x: Any) -> Any:
        if self.form.state_dtype == float32:
            return oracle.delta_rule(x, **self.arrays, **self.sizes)[0]
        return oracle.delta_rule(x, **self.arrays, **self.sizes, rounded=to_bfloat16)[0]


class MambaLayer(Layer):
    def __init__(
        self, heads: int = 4, head_dim: int = 20, groups: int = 2, size: int = 24, *, norm_groups: int = 2,
        has_bias: bool = True, limit: tuple[float, float] = (0.0, float("inf")), pending: int = 0,
        state_dtype: DType = float32,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(heads + head_dim + size)
        inner, channels = heads * head_dim, heads * head_dim + 2 * groups * size
        self.num_gates, self.width = heads, inner + channels + heads
        self.form = Recurrent(
            channels=channels, taps=4, gates=heads, heads=heads, rows=size, columns=head_dim, pending=pending,
            state_dtype=state_dtype,
        )  # fmt: skip
        self.sizes: dict[str, Any] = {
            "eps": 1e-5, "num_heads": heads, "head_dim": head_dim, "num_groups": groups, "state_size": size,
            "norm_groups": norm_groups, "dt_limit": limit,
        }  # fmt: skip
        arrays = {
            "conv": rng.uniform(-0.6, 0.6, (channels, 4)),
            "conv_bias": rng.uniform(-0.5, 0.5, channels) if has_bias else None,
            "a": -np.exp(rng.uniform(-3, 1, heads)),
            "dt_bias": rng.uniform(-2, 2, heads),
            "d": rng.uniform(-1, 1, heads),
            "norm": rng.uniform(0.5, 1.5, inner),
        }
        self.arrays = {name: None if array is None else array.astype(np.float32) for name, array in arrays.items()}
        tensors = {name: None if array is None else tensor(array) for name, array in self.arrays.items()}
        self.weights = Mamba(**tensors, **self.sizes)  # type: ignore[arg-type]

    def run(self, x: Tensor, **kwargs: Any) -> Tensor:
        return ops.mamba(x, self.weights, **kwargs)

    def expected(self, x: Any) -> Any:
        if self.form.state_dtype == float32:
            return oracle.mamba(x, **self.arrays, **self.sizes)[0]
        return oracle.mamba(x, **self.arrays, **self.sizes, rounded=to_bfloat16)[0]


def to_bfloat16(state: Any) -> Any:
    return state.astype(np.float32).astype(bfloat16.numpy).astype(np.float64)


class Pages:
    """A layer's pages, full of NaN but for what is written, and the entries of each sequence."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.planes = []
        for plane in layer.form.planes(8, float32, is_cpu=True):
            array = np.zeros((NUM_PAGES, *plane.shape), plane.dtype.numpy)
            array[...] = -7 if plane.name == "length" else np.nan
            self.planes.append(tensor(array))
        self.lives: dict[Any, int] = {}
        self.free = list(np.random.default_rng(0).permutation(NUM_PAGES))

    def step(self, chunks: list[tuple[Any, int, Any]], *, padding: int = 0, recorded: bool = False) -> list[Any]:
        """Chunks (sequence, tokens before it, rows) in one batch; each gets its rows' results."""
        table, lens, start = [], [], [0]
        for name, before, rows in chunks:
            written = self.free.pop(0)
            read = self.lives.get(name, -9) if before else -9
            table.append([written, read])
            lens.append(before + len(rows))
            start.append(start[-1] + len(rows))
        for _ in range(padding):
            table.append([NUM_PAGES + 5, -3])
            lens.append(0)
            start.append(start[-1] + 1)
        x = np.concatenate([*(rows for _, _, rows in chunks), np.zeros((padding, self.layer.width), np.float32)])
        nothing = tensor(np.zeros(len(x), np.int32))
        batch = Batch(
            nothing, nothing, tensor(np.array(start, np.int32)), tensor(np.array(lens, np.int32)), (),
            (tensor(np.array(table, np.int32)),), nothing, max_query_len=1, max_seq_len=1,
        )  # fmt: skip
        arguments: Any = {"pages": tuple(self.planes), "batch": batch, "group": 0}
        given = tensor(x)
        if recorded:
            with record(Arena()) as recording:
                found = self.layer.run(given, **arguments)
            recording.replay()
            recording.replay()  # a step that runs again gives the same
        else:
            found = self.layer.run(given, **arguments)
        assert not found.array[start[len(chunks)] :].any()
        for (name, _, _), (written, _) in zip(chunks, table):
            if (old := self.lives.pop(name, None)) is not None:
                self.free.append(old)
            self.lives[name] = written
        return [found.array[first:end].copy() for first, end in itertools.pairwise(start)][: len(chunks)]

    def kept(self, name: Any) -> list[Any]:
        return [plane.array[self.lives[name]].copy() for plane in self.planes]


def run_in(pages: Pages, name: Any, rows: Any, cuts: list[int], **kwargs: Any) -> Any:
    """A sequence in chunks of these lengths, alone."""
    found, before = [], 0
    for count in cuts:
        found += pages.step([(name, before, rows[before : before + count])], **kwargs)
        before += count
    assert before == len(rows)
    return np.concatenate(found)


LAYERS = {
    "short": lambda **kwargs: ShortLayer(**kwargs),
    "short, bias": lambda **kwargs: ShortLayer(300, 4, True, **kwargs),
    "delta": lambda **kwargs: DeltaLayer(**kwargs),
    "delta, tiled, ratio 3": lambda **kwargs: DeltaLayer(2, 6, 32, 64, tiled=True, gate="sigmoid", **kwargs),
    "delta, one row": lambda **kwargs: DeltaLayer(1, 1, 1, 33, taps=2, **kwargs),
    "delta, strong decay": lambda **kwargs: DeltaLayer(1, 3, 16, 32, decay=8.0, **kwargs),
    "mamba": lambda **kwargs: MambaLayer(**kwargs),
    "mamba, limits": lambda **kwargs: MambaLayer(
        6, 32, 3, 16, norm_groups=1, has_bias=False, limit=(0.3, 0.9), **kwargs
    ),
}


def close(found: Any, wanted: Any, bound: float = 2e-5) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= bound * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("length", [1, 2, 5, 33, 64, 130])
def test_values(name: str, length: int) -> None:
    layer, rng = LAYERS[name](), np.random.default_rng(length)
    rows = layer.rows(rng, length)
    close(run_in(Pages(layer), 0, rows, [length]), layer.expected(rows))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("pending", [0, 3])
def test_any_cut_and_batch_gives_the_same_bits(name: str, pending: int) -> None:
    layer, rng = LAYERS[name](pending=pending), np.random.default_rng(7)
    rows = {seq: layer.rows(rng, 70 - 9 * seq) for seq in range(4)}
    whole = {seq: run_in(Pages(layer), seq, each, [len(each)]) for seq, each in rows.items()}
    pages, before = Pages(layer), dict.fromkeys(rows, 0)
    while any(before[seq] < len(each) for seq, each in rows.items()):
        chunks = []
        for seq, each in rows.items():
            rest = len(each) - before[seq]
            if rest and rng.random() < 0.8:
                count = min(rest, int(rng.choice([1, 1, 2, 3, 4, 5, 9, 35])))
                chunks.append((seq, before[seq], each[before[seq] : before[seq] + count]))
        if not chunks:
            continue
        results = pages.step(chunks, padding=int(rng.integers(0, 3)), recorded=bool(rng.integers(2)))
        for (seq, first, _), found in zip(chunks, results, strict=True):
            assert np.array_equal(found, whole[seq][first : first + len(found)]), (seq, first)
            before[seq] += len(found)
    tokens, piece = Pages(layer), Pages(layer)  # the same pages, too
    assert np.array_equal(run_in(tokens, 0, rows[0], [1] * 70), run_in(piece, 0, rows[0], [70]))
    for one, other in zip(tokens.kept(0), piece.kept(0), strict=True):
        assert np.array_equal(one, other, equal_nan=True)  # rows that are not pending are as they were


@pytest.mark.parametrize("name", LAYERS)
def test_rejected_tokens_leave_no_trace(name: str) -> None:
    layer, rng = LAYERS[name](pending=4), np.random.default_rng(3)
    rows = layer.rows(rng, 40)
    whole = run_in(Pages(layer), 0, rows, [40])
    pages, first, found = Pages(layer), 0, []
    while first < len(rows):
        count = int(rng.integers(1, 6))
        tried = np.concatenate([rows[first : first + 1], layer.rows(rng, count - 1)])
        kept = int(rng.integers(1, count + 1))
        tried[:kept] = rows[first : first + kept][: len(tried[:kept])] if first + kept <= len(rows) else tried[:kept]
        kept = min(kept, len(rows) - first)
        tried[:kept] = rows[first : first + kept]
        found.append(pages.step([(0, first, tried)])[0][:kept])
        first += kept
    assert np.array_equal(np.concatenate(found), whole)


def test_a_state_of_bfloat16_is_rounded_after_each_token() -> None:
    for layer in (
        DeltaLayer(state_dtype=bfloat16, pending=2),
        DeltaLayer(2, 2, 32, 64, state_dtype=bfloat16, pending=2),
        MambaLayer(state_dtype=bfloat16, pending=2),
    ):
        rows = layer.rows(np.random.default_rng(1), 50)
        whole = run_in(Pages(layer), 0, rows, [50])
        assert np.array_equal(run_in(Pages(layer), 0, rows, [1, 2, 1, 3, 20, 23]), whole)
        close(whole, layer.expected(rows), 3e-2)


def test_no_number_of_threads_changes_a_bit() -> None:
    layer = DeltaLayer(4, 8, 64, 96)
    rows = layer.rows(np.random.default_rng(5), 100)
    before, found = cpu_threads.num_workers(), []
    try:
        for count in range(1, cpu_threads.MAX_WORKERS + 1):
            cpu_threads.set_num_workers(count)
            found.append(run_in(Pages(layer), 0, rows, [60, 1, 39]))
    finally:
        cpu_threads.set_num_workers(before)
    assert all(np.array_equal(each, found[0]) for each in found)


def test_extreme_gates_and_keys() -> None:
    """Steps of 0 and 1, no decay and decay to nothing, keys of zeros."""
    layer, rng = DeltaLayer(2, 4, 32, 32), np.random.default_rng(11)
    rows = layer.rows(rng, 64)
    rows[::3, -8:-4], rows[1::3, -8:-4] = -200.0, 200.0
    rows[::5, -4:], rows[1::5, -4:] = -200.0, 60.0
    rows[10:20, : 2 * 2 * 32] = 0.0
    found = run_in(Pages(layer), 0, rows, [30, 34])
    close(found, layer.expected(rows))


def any_layer(rng: Any) -> Layer:
    """A layer of random odd sizes."""
    pending, taps = int(rng.integers(0, 6)), int(rng.integers(2, 6))
    if rng.random() < 0.2:
        return ShortLayer(int(rng.integers(1, 600)), taps, bool(rng.integers(2)), pending)
    heads, ratio, rows, columns = (int(rng.integers(1, most)) for most in (4, 4, 140, 140))
    state = bfloat16 if rng.random() < 0.2 else float32
    if rng.random() < 0.5:
        return DeltaLayer(
            heads, heads * ratio, rows, columns, tiled=bool(rng.integers(2)), gate=str(rng.choice(["silu", "sigmoid"])),
            pending=pending, taps=taps, state_dtype=state, decay=float(rng.choice([0.01, 1.0, 20.0])),
        )  # fmt: skip
    limit = (0.0, float("inf")) if rng.integers(2) else (0.1, 1.0)
    return MambaLayer(
        heads * ratio, columns, heads, rows, norm_groups=int(rng.choice([1, heads * ratio])), limit=limit,
        has_bias=bool(rng.integers(2)), pending=pending, state_dtype=state,
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_any_sizes_and_cuts(seed: int) -> None:
    """Values beside numpy, and the bits of a sequence alone and in one piece, for three sequences in any cuts."""
    rng = np.random.default_rng(seed)
    layer = any_layer(rng)
    rows = {seq: layer.rows(rng, int(rng.integers(1, 131))) for seq in range(3)}
    whole = {seq: run_in(Pages(layer), seq, each, [len(each)]) for seq, each in rows.items()}
    bound = 2e-4 if layer.form.state_dtype == float32 else 0.2
    for seq, each in rows.items():
        close(whole[seq], layer.expected(each), bound)
    pages, before = Pages(layer), dict.fromkeys(rows, 0)
    while chunks := [
        (seq, before[seq], each[before[seq] :][: int(rng.integers(1, 9 if rng.integers(4) else 70))])
        for seq, each in rows.items()
        if before[seq] < len(each)
    ]:
        found = pages.step(chunks, padding=int(rng.integers(0, 2)), recorded=bool(rng.integers(2)))
        for (seq, first, _), each in zip(chunks, found, strict=True):
            assert np.array_equal(each, whole[seq][first : first + len(each)])
            before[seq] += len(each)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": [[3, 3]]}, "batch.block_tables"),
        ({"table": [[3, NUM_PAGES]]}, "batch.block_tables"),
        ({"table": [[-1, 2]]}, "batch.block_tables"),
        ({"length": 9}, "pages.length"),
        ({"length": 5}, "pages.length"),
    ],
)
@pytest.mark.parametrize("name", ["short", "delta", "mamba"])
def test_wrong_pages_are_errors(name: str, change: dict[str, Any], message: str) -> None:
    layer = LAYERS[name](pending=2)
    pages = Pages(layer)
    pages.planes[0].array[:] = change.get("length", 8)
    nothing = tensor(np.zeros(1, np.int32))
    batch = Batch(
        nothing, nothing, tensor(np.array([0, 1], np.int32)), tensor(np.array([9], np.int32)), (),
        (tensor(np.array(change.get("table", [[3, 2]]), np.int32)),), nothing, max_query_len=1, max_seq_len=9,
    )  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=message):
        layer.run(tensor(np.zeros((1, layer.width), np.float32)), pages=tuple(pages.planes), batch=batch, group=0)


def test_arguments_are_checked() -> None:
    layer = DeltaLayer()
    pages = Pages(layer)
    nothing = tensor(np.zeros(1, np.int32))
    batch = Batch(
        nothing, nothing, tensor(np.array([0, 1], np.int32)), tensor(np.array([1], np.int32)), (),
        (tensor(np.array([[3, 2]], np.int32)),), nothing, max_query_len=1, max_seq_len=1,
    )  # fmt: skip
    x = tensor(np.zeros((1, layer.width), np.float32))
    for planes, message in ((pages.planes[:2], "no plane of states"), (pages.planes * 2, "more than the operation")):
        with pytest.raises(InvalidArgumentError, match=message):
            layer.run(x, pages=tuple(planes), batch=batch, group=0)
    with pytest.raises(InvalidArgumentError, match="delta_rule: x has shape"):
        layer.run(tensor(np.zeros((1, 9), np.float32)), pages=tuple(pages.planes), batch=batch, group=0)
    with pytest.raises(InvalidArgumentError, match="state_dtype is int32"):
        Recurrent(channels=1, taps=2, state_dtype=DType.parse("int32"))
    with pytest.raises(InvalidArgumentError, match="taps is 1, must be at least 2"):
        Recurrent(channels=1, taps=1)
