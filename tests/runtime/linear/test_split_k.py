"""Exact products on 1, 2, 4 and 8 ranks have the same bits: K in segments and a tree, as `numba_kernels.split_k` says.

Ranks are emulated: each multiplies its part of the weight with its part of x. On the cpu under the tile in force
(`tests/numba_kernels/cpu/test_tiles.py` takes others), and on emulated GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import split_k as gpu_segments
from runtime import ops
from runtime.device.device import Device
from runtime.errors import InvalidArgumentError
from runtime.linear.options import LoadOptions, Split
from runtime.linear.weight import LinearWeight
from runtime.tensor.tensor import Tensor
from tests.oracles.tiles import as_multiplied

Array = np.ndarray[Any, Any]

KINDS = ("float32", "bfloat16", "float16", "int8")
RANKS = (2, 4, 8)
STEPS = {"int8": 64}  # of segments; else 16


@dataclass(frozen=True)
class Rank:
    """A communicator that says which rank this is, and nothing else."""

    rank: int
    num_ranks: int

    def all_reduce(self, tensor: Tensor) -> None:
        raise AssertionError("nobody is there")

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError("nobody is there")


def borders(depth: int, step: int, count: int = 8) -> list[int]:
    """Where segments begin, and K's end."""
    steps = -(-depth // step)
    return [min(depth, steps * number // count * step) for number in range(count + 1)]


def tree(sums: list[Array]) -> Array:
    """Float32 sums of a power of two arrays, added in pairs."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def same_bits(ours: Array, theirs: Array) -> bool:
    """NaN and the sign of zero included."""
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


class Map:
    """A linear map and rows for it, on a device; `kind` is the weight's type or "int8"."""

    def __init__(self, n: int, k: int, m: int, kind: str, device: str = "cpu", gemm: str = "auto") -> None:
        rng = np.random.default_rng([n, k, m])
        self.kind, self.device, self.gemm = kind, Device.parse(device), gemm
        stored = np.dtype(ml_dtypes.bfloat16) if kind in ("int8", "bfloat16") else np.dtype(kind)
        activations = np.dtype(np.float32) if device == "cpu" else stored
        self.weight = rng.standard_normal((n, k), dtype=np.float32).astype(stored)
        self.bias = rng.standard_normal(n, dtype=np.float32)
        self.x = rng.standard_normal((m, k), dtype=np.float32).astype(activations)
        self.residual = rng.standard_normal((m, n), dtype=np.float32).astype(activations)

    def on_device(self, array: Array) -> Tensor:
        return Tensor.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def options(self, rank: int = 0, num_ranks: int = 1, *, exact: bool = True) -> LoadOptions:
        quantization = "int8" if self.kind == "int8" else "none"
        communicator = Rank(rank, num_ranks) if num_ranks > 1 else None
        return LoadOptions.parse(
            device=self.device, quantization=quantization, gemm=self.gemm, exact=exact, communicator=communicator
        )

    def prepared(self, split: Split, rank: int = 0, num_ranks: int = 1, *, exact: bool = True) -> LinearWeight:
        """A rank's part of the weight."""
        rows, columns = self.part(split, rank, num_ranks)
        options = self.options(rank, num_ranks, exact=exact)
        given = [Tensor.from_numpy(part) for part in (self.weight[rows, columns], self.bias[rows])]
        whole = [Tensor.from_numpy(self.weight)]
        return ops.prepare_linear(given[0], given[1], options, split=split, whole_rows=whole)

    def part(self, split: Split, rank: int, num_ranks: int) -> tuple[slice, slice]:
        """Rows and columns of the weight."""
        size = self.weight.shape[0 if split == "outputs" else 1] // num_ranks
        share = slice(rank * size, (rank + 1) * size)
        return (share, slice(None)) if split == "outputs" else (slice(None), share)

    def product(self, weight: LinearWeight, rows: slice = slice(None)) -> Array:
        """Of all of K."""
        x, residual = self.on_device(self.x[rows]), self.on_device(self.residual[rows])
        return ops.linear(x, weight, residual=residual).to("cpu").numpy()

    def on_ranks(self, num_ranks: int) -> Array:
        """The map split over its inputs."""
        partials = []
        for rank in range(num_ranks):
            weight = self.prepared("inputs", rank, num_ranks)
            _, columns = self.part("inputs", rank, num_ranks)
            partials.append(ops.linear_partial(self.on_device(self.x[:, columns]), weight).to("cpu").numpy())
        added = ops.add_partials(self.on_device(np.stack(partials)), weight, residual=self.on_device(self.residual))
        return added.to("cpu").numpy()

    def outputs_on_ranks(self, num_ranks: int) -> Array:
        """The map split over its outputs, without a residual."""
        x = self.on_device(self.x)
        parts = [
            ops.linear(x, self.prepared("outputs", rank, num_ranks)).to("cpu").numpy() for rank in range(num_ranks)
        ]
        return np.concatenate(parts, 1)

    def check(self) -> None:
        """Against float64 or, of int8, the same without segments: other sums, hardly other results."""
        ours = self.product(self.prepared("inputs")).astype(np.float64)
        if self.kind == "int8":
            expected = self.product(self.prepared("inputs", exact=False)).astype(np.float64)
        else:
            x = as_multiplied(self.x, self.weight.dtype) if self.device.kind == "cpu" else self.x
            expected = x.astype(np.float64) @ self.weight.astype(np.float64).T + self.bias + self.residual
        rounding = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[self.residual.dtype.name]
        assert (np.abs(ours - expected) <= 1e-5 * np.sqrt(self.x.shape[1]) + rounding * np.abs(expected)).all()


def fuzzed(seed: int, kind: str, *, most_rows: int = 70, most_columns: int = 300, most_steps: int = 6) -> Map:
    """A map whose inputs 8 ranks can share, of odd sizes else."""
    rng = np.random.default_rng(seed)
    k = 8 * STEPS.get(kind, 16) * int(rng.integers(1, most_steps + 1))
    return Map(int(rng.integers(1, most_columns)), k, int(rng.integers(1, most_rows + 1)), kind)


def check_ranks(case: Map) -> None:
    """Every number of ranks gives one rank's bits, and every row those that it has alone."""
    weight = case.prepared("inputs")
    alone = case.product(weight)
    for num_ranks in RANKS:
        assert same_bits(case.on_ranks(num_ranks), alone), (case.weight.shape, case.x.shape, num_ranks)
    count = len(case.x)
    for rows in (slice(0, 1), slice(count // 2, count // 2 + 1), slice(count // 3, count), slice(0, 3)):
        assert same_bits(case.product(weight, rows), alone[rows]), (case.weight.shape, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_over_inputs_give_the_bits_of_one(kind: str) -> None:
    for m in (1, 2, 3, 5, 8, 9, 16, 33, 70):
        check_ranks(Map(70 + m, 8 * STEPS.get(kind, 16) * 3, m, kind))
    Map(100, 1000, 7, kind).check()


@pytest.mark.parametrize("kind", KINDS)
def test_many_sizes(kind: str) -> None:
    for seed in range(40):
        check_ranks(fuzzed(seed, kind))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_sizes(kind: str) -> None:
    for seed in range(1000, 2000):
        check_ranks(fuzzed(seed, kind, most_columns=600, most_steps=20))


def test_rows_beyond_a_work_item_and_a_launch() -> None:
    for m in (130, 1030):
        check_ranks(Map(100, 8 * 16 * 20, m, "float32"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 5, 16, 17, 63, 130, 500, 1001, 2048])
def test_any_depth_is_cut_as_defined(kind: str, depth: int) -> None:
    """Each segment alone, by rows that are zero elsewhere; the tree of these sums is the product."""
    case = Map(61, depth, 6, kind)
    weight = case.prepared("inputs")
    x = case.x
    whole = ops.linear_partial(case.on_device(x), weight).numpy()
    sums = []
    for first, end in zip(places := borders(depth, STEPS.get(kind, 16)), places[1:]):
        masked = np.zeros_like(x)
        masked[:, first:end] = x[:, first:end]
        sums.append(ops.linear_partial(case.on_device(masked), weight).numpy())
    assert same_bits(tree(sums), whole)
    case.check()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_segment_is_added_up_as_a_product_of_its_own(kind: str) -> None:
    """From zero, whatever lies around it; then bias, then residual."""
    case = Map(61, 1000, 9, kind)
    sums = []
    for first, end in zip(places := borders(1000, 16), places[1:]):
        part = ops.prepare_linear(Tensor.from_numpy(case.weight[:, first:end]), None, case.options())
        sums.append(ops.linear(case.on_device(case.x[:, first:end]), part).numpy())
    assert same_bits(case.product(case.prepared("inputs")), tree(sums) + case.bias + case.residual)


def test_other_maps_and_the_default_mode_are_not_cut() -> None:
    case = Map(61, 1000, 9, "float32")
    plain = case.product(ops.prepare_linear(Tensor.from_numpy(case.weight), Tensor.from_numpy(case.bias)))
    assert same_bits(case.product(case.prepared("inputs", exact=False)), plain)
    assert same_bits(case.product(case.prepared("outputs")), plain)
    assert not same_bits(case.product(case.prepared("inputs")), plain), "segments change nothing: this proves nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_over_outputs_give_the_bits_of_one(kind: str) -> None:
    for n, k, m in ((8 * 48, 100, 3), (8 * 7, 257, 20), (8 * 50, 64, 1)):
        case = Map(n, k, m, kind)
        alone = ops.linear(case.on_device(case.x), case.prepared("outputs")).numpy()
        for num_ranks in RANKS:
            assert same_bits(case.outputs_on_ranks(num_ranks), alone)


def test_parts_of_several_types_are_added_each_by_its_steps() -> None:
    """On the cpu a map's parts may keep their types."""
    rng = np.random.default_rng(1)
    k = 8 * 16 * 3
    parts = [rng.standard_normal((30, k), dtype=np.float32).astype(kind) for kind in ("float32", "float16", "float32")]
    x, residual = rng.standard_normal((5, k), dtype=np.float32), rng.standard_normal((5, 90), dtype=np.float32)
    biases = [Tensor.from_numpy(rng.standard_normal(30, dtype=np.float32)) for _ in parts]
    weights = [Tensor.from_numpy(part) for part in parts]
    one = ops.prepare_linear(weights, biases, LoadOptions(exact=True), split="inputs")
    alone = ops.linear(Tensor.from_numpy(x), one, residual=Tensor.from_numpy(residual)).numpy()
    partials = []
    for rank in range(4):
        share, options = slice(rank * k // 4, (rank + 1) * k // 4), LoadOptions(exact=True, communicator=Rank(rank, 4))
        here = [Tensor.from_numpy(part[:, share]) for part in parts]
        weight = ops.prepare_linear(here, biases, options, split="inputs")
        rows = Tensor.from_numpy(np.ascontiguousarray(x[:, share]))
        partials.append(ops.linear_partial(rows, weight).numpy())
    out = Tensor.from_numpy(residual.copy())
    ops.add_partials(Tensor.from_numpy(np.stack(partials)), weight, residual=out, out=out)
    assert same_bits(out.numpy(), alone)


def test_int8_rounds_a_rank_s_weights_by_the_whole_rows() -> None:
    """One large number in another rank's inputs makes this rank's steps coarser."""
    case = Map(20, 8 * 64, 4, "int8")
    case.weight[:, 5] = 100.0
    check_ranks(case)
    given = Tensor.from_numpy(case.weight[:, :256])
    with pytest.raises(InvalidArgumentError, match=r"whole_rows must have the shapes \[\(20, 512\)\]"):
        ops.prepare_linear(given, None, case.options(0, 2), split="inputs")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_what_is_not_finite_stays_in_its_row(kind: str, bad: float) -> None:
    case = Map(40, 8 * 64, 5, kind)
    case.x[3, 100] = bad
    out = case.product(case.prepared("inputs"))
    assert not np.isfinite(out[3]).any()
    assert np.isfinite(np.delete(out, 3, 0)).all()


def test_what_is_refused() -> None:
    case = Map(20, 128, 4, "float32")
    x, whole, part = case.on_device(case.x), case.prepared("inputs"), case.prepared("inputs", 0, 2)
    partials = Tensor.from_numpy(np.zeros((2, 4, 20), np.float32))
    with pytest.raises(InvalidArgumentError, match="linear_partial: weight must be exact and split over its inputs"):
        ops.linear_partial(x, case.prepared("outputs"))
    with pytest.raises(InvalidArgumentError, match="add_partials: weight has all inputs"):
        ops.add_partials(partials, whole)
    with pytest.raises(InvalidArgumentError, match=r"partials has shape \(3, 4, 20\), must be \[2, any, 20\]"):
        ops.add_partials(Tensor.from_numpy(np.zeros((3, 4, 20), np.float32)), part)
    with pytest.raises(InvalidArgumentError, match="add_partials: out shares memory with partials"):
        ops.add_partials(partials, part, out=Tensor.from_numpy(partials.numpy()[0]))
    with pytest.raises(InvalidArgumentError, match="8 segments, which 3 ranks cannot share"):
        case.options(0, 3)


# ---------------------------------------------------------------- emulated GPUs

DEVICES = ("emulated:sm_80", "emulated:sm_90a")
TIERS = ("auto", "naive", "tiled", "register", "tensor_core", "hopper")


def _gpu_cases() -> list[Any]:
    cases = []
    for device in DEVICES:
        for tier in TIERS:
            for kind in ("float32", "bfloat16", "float16"):
                if tier == "hopper" and device == DEVICES[0]:
                    continue
                is_telling = (device == DEVICES[0]) == (kind == "float32") and kind != "float16"
                is_costly = tier != "auto" or not is_telling
                marks = [pytest.mark.emulator, *[pytest.mark.exhaustive] * is_costly]
                cases.append(pytest.param(device, tier, kind, marks=marks))
    return cases


@pytest.mark.parametrize(("device", "tier", "kind"), _gpu_cases())
@pytest.mark.exhaustive_cases("bfloat16")
def test_ranks_on_gpus(device: str, tier: str, kind: str) -> None:
    for n, k, m in ((130, 8 * 16 * 3, 70), (33, 8 * 16, 3), (49, 8 * 16 * 5, 1)):
        case = Map(n, k, m, kind, device, tier)
        check_ranks(case)
        case.check()
    case = Map(8 * 9, 136, 20, kind, device, tier)
    alone = ops.linear(case.on_device(case.x), case.prepared("outputs")).to("cpu").numpy()
    for num_ranks in RANKS:
        assert same_bits(case.outputs_on_ranks(num_ranks), alone)


@pytest.mark.emulator
@pytest.mark.exhaustive  # ranks on GPUs have it each time
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_any_depth_on_a_gpu(kind: str) -> None:
    """Rows on no 16-byte bounds, too; each segment alone is a product of its own."""
    for k in (5, 130, 137, 600):
        case = Map(40, k, 19, kind, DEVICES[1])
        sums = []
        for first, end in zip(places := borders(k, 16), places[1:]):
            sums.append(np.zeros((19, 40), np.float32))
            if first < end:
                part = ops.prepare_linear(Tensor.from_numpy(case.weight[:, first:end]), None, case.options())
                sums[-1] = ops.logits_linear(case.on_device(case.x[:, first:end]), part).to("cpu").numpy()
        expected = (tree(sums) + case.bias + case.residual.astype(np.float32)).astype(case.residual.dtype)
        assert same_bits(case.product(case.prepared("inputs")), expected)


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_many_rows_take_turns_in_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Map(70, 8 * 16, 70, "bfloat16", DEVICES[1])
    at_once = case.product(case.prepared("inputs"))
    monkeypatch.setattr(gpu_segments, "most_rows", lambda count, n: 16)
    assert same_bits(case.product(case.prepared("inputs")), at_once)


def test_a_rank_s_kernel_is_chosen_by_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a model that takes another tier for few outputs, or few inputs, or few rows."""
    machine = gemm.machine_of("sm_90a")

    def product(m: int, n: int, k: int, whole: tuple[int, int] | None) -> gemm.Product:
        return gemm.Product(m, n, k, "f32", exact=True, whole=whole)

    monkeypatch.setattr(gemm.tiled, "seconds", lambda each, _: 0.0 if each.n < 500 or each.k < 500 else 1e9)
    monkeypatch.setattr(gemm.naive, "seconds", lambda each, _: 0.0 if each.m == 1 else 1e9)
    monkeypatch.setattr(gemm.register, "seconds", lambda each, _: 1.0)
    gemm.choose.cache_clear()
    try:
        for whole, expected in (((1000, 1000), "naive"), ((1000, 400), "naive")):
            for m, n, k in ((1, 1000, 1000), (70, 1000, 1000), (70, 125, 1000), (9, 1000, 125)):
                launch = gemm.plan(product(m, n, k, whole), machine)
                assert launch is not None
                assert launch.specialisation.name.startswith(f"gemm_{expected}_")
        monkeypatch.setattr(gemm.naive, "seconds", lambda each, _: 1e9)
        gemm.choose.cache_clear()
        for whole, expected in (((1000, 1000), "register"), ((499, 1000), "tiled"), (None, "tiled")):
            launch = gemm.plan(product(70, 125, 1000, whole), machine)
            assert launch is not None
            assert launch.specialisation.name.startswith(f"gemm_{expected}_")
    finally:
        gemm.choose.cache_clear()
