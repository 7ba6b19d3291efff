"""Routing and products of experts on emulated GPUs, against float64 and against what stands alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.quantized.on_load import ROUNDINGS
from numba_kernels.cuda import gemm
from numba_kernels.cuda.experts import hopper, packed, packed_gather, packed_rows, tensor_core
from numba_kernels.cuda.packing import packing_of
from runtime import ops
from runtime.backends import cuda_experts, cuda_plans
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import bfloat16, float16, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.adapter_pairs import Pair
from runtime.linear.expert_adapters import LowRankExperts
from runtime.linear.experts import ExpertsWeight, can_stay_packed
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantise import Rounding, quantise
from runtime.linear.weight import Plans
from runtime.routing import Routing, RoutingRule
from runtime.tensor.tensor import Tensor
from tests.models.driver import relative_error
from tests.numba_kernels.cpu.cases import normal
from tests.numba_kernels.cpu.test_experts import RULES, SPARSE, routed, routing_of
from tests.numba_kernels.cuda.harness import DEFAULT_DEVICE, both_archs, numpy_dtype
from tests.oracles import dense

Array = np.ndarray[Any, Any]

TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "bf16": 1.5e-2}


def put(array: Array, device: Device) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array)).to(device)


def floats(tensor: Tensor) -> Array:
    return tensor.to("cpu").numpy().astype(np.float64)


def moved(routing: Routing, device: Device) -> Routing:
    return Routing(routing.ids.to(device), routing.weights.to(device), routing.rule)


@pytest.mark.exhaustive
@both_archs
def test_routes_of_sparsemixer(gpu: Gpu) -> None:
    for rule in SPARSE:
        logits = np.random.default_rng(4).standard_normal((41, rule.num_experts)).astype(np.float32) * 2
        logits[:9] -= 9
        found = ops.route(put(logits, gpu.device), rule)
        wanted = [routed(row, rule, None) for row in logits]
        np.testing.assert_array_equal(found.ids.to("cpu").numpy(), [ids for ids, _ in wanted])
        weights = np.array([weights for _, weights in wanted])
        assert relative_error(found.weights.to("cpu").numpy(), weights) <= 2e-6


@both_archs
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.exhaustive
def test_routes(gpu: Gpu, has_bias: bool) -> None:
    for rule in [*RULES, RoutingRule(num_experts=500, top_k=40, normalises=True)]:
        rng = np.random.default_rng(rule.num_experts)
        logits = rng.standard_normal((41, rule.num_experts)).astype(np.float32)
        bias = rng.standard_normal(rule.num_experts).astype(np.float32) if has_bias else None
        found = ops.route(put(logits, gpu.device), rule, None if bias is None else put(bias, gpu.device))
        wanted = [routed(row, rule, bias) for row in logits]
        np.testing.assert_array_equal(found.ids.to("cpu").numpy(), [ids for ids, _ in wanted])
        weights = np.array([weights for _, weights in wanted])
        assert relative_error(found.weights.to("cpu").numpy(), weights) <= 2e-6


def test_of_equals_the_lower_is_chosen_and_nan_stays_in_its_row(gpu: Gpu) -> None:
    rule = RoutingRule(num_experts=70, top_k=3, normalises=True)
    logits = np.zeros((5, 70), np.float32)
    logits[1, 67] = np.nan
    logits[2, 2] = np.inf
    logits[3, 69] = 1.0
    logits[4, 33:35] = -np.inf
    found = ops.route(put(logits, gpu.device), rule)
    assert found.ids.to("cpu").numpy().tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [69, 0, 1], [0, 1, 2]]
    assert np.isfinite(found.weights.to("cpu").numpy()).all(1).tolist() == [True, False, False, True, True]


def test_more_experts_than_a_warp_has_places_for(gpu: Gpu) -> None:
    rule = RoutingRule(num_experts=513, top_k=1)
    with pytest.raises(InvalidArgumentError, match="513 experts, at most 512"):
        ops.route(put(np.zeros((1, 513), np.float32), gpu.device), rule)


NORMED = (1, 64, 5, 2), (9, 136, 70, 8), (3, 2880, 32, 4)  # rows, columns, experts, of which so many are chosen


@both_archs
@pytest.mark.parametrize(
    ("dtype", "scores", "sizes"),
    [
        ("bf16", "sigmoid", NORMED[1:2]),
        pytest.param("bf16", "sigmoid", NORMED, marks=pytest.mark.exhaustive),
        pytest.param("f16", "softmax", NORMED, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive_cases("bf16")
def test_normed_routes(gpu: Gpu, dtype: str, scores: Any, sizes: Any) -> None:
    """In one launch, near what three give, and each row as alone; logits far apart, so that rounding chooses alike."""
    kind = numpy_dtype(dtype)
    for rows, hidden, num_experts, top_k in sizes:
        rng = np.random.default_rng(hidden)
        rule = RoutingRule(num_experts=num_experts, top_k=top_k, normalises=True, scores=scores, scale=1.5)
        x = (rng.standard_normal((rows, hidden)) * 3).astype(kind)
        norm = RmsNorm(put(rng.uniform(0.5, 2, hidden).astype(np.float32), gpu.device), 1e-5, 1.0)
        matrix = Tensor.from_numpy((rng.standard_normal((num_experts, hidden)) / 4).astype(kind))
        bias = Tensor.from_numpy(rng.standard_normal(num_experts).astype(np.float32))
        weight = ops.prepare_linear(matrix, bias, LoadOptions.parse(device=str(gpu.device)))
        given = put(x, gpu.device)
        found = cuda_experts.normed_route(given, norm, weight, rule)
        assert found is not None
        normalised, routing = found
        wanted = ops.rms_norm(given, norm.weight, norm.eps)
        assert relative_error(floats(normalised), floats(wanted)) <= TOLERANCE[dtype]
        expected = ops.route(ops.logits_linear(wanted, weight), rule)
        assert relative_error(floats(routing.weights), floats(expected.weights)) <= 10 * TOLERANCE[dtype]
        same = (routing.ids.to("cpu").numpy() == expected.ids.to("cpu").numpy()).mean()
        assert same >= 0.9
        last = given[rows - 1 :]
        alone = cuda_experts.normed_route(last, norm, weight, rule) if last.address % 16 == 0 else None
        if alone is not None:
            np.testing.assert_array_equal(alone[1].ids.to("cpu").numpy(), routing.ids.to("cpu").numpy()[-1:])
            np.testing.assert_array_equal(floats(alone[1].weights), floats(routing.weights)[-1:])


@pytest.mark.exhaustive
def test_what_takes_three_launches(gpu: Gpu) -> None:
    norm = RmsNorm(put(np.ones(64, np.float32), gpu.device), 1e-5, 1.0)
    for rows, num_experts, exact, dtype, groups in (
        (257, 8, False, "bf16", 1), (2, 300, False, "bf16", 1), (2, 8, True, "bf16", 1), (2, 8, False, "f32", 1),
        (2, 8, False, "bf16", 2), (0, 8, False, "bf16", 1),
    ):  # fmt: skip
        kind = numpy_dtype(dtype)
        options = LoadOptions.parse(device=str(gpu.device), exact=exact)
        weight = ops.prepare_linear(Tensor.from_numpy(np.ones((num_experts, 64), kind)), None, options)
        rule = RoutingRule(num_experts=num_experts, top_k=2, num_groups=groups)
        x = put(np.ones((rows, 64), kind), gpu.device)
        assert cuda_experts.normed_route(x, norm, weight, rule) is None
        assert ops.normed_route(x, norm, weight, rule)[1].ids.shape == (rows, 2)


class Layer:
    """gate_up and down of so many experts, with biases or without, and the same in float64."""

    def __init__(
        self, device: Device, count: int, hidden: int, inner: int, dtype: str, *, exact: bool = False,
        has_bias: bool = True, has_gate: bool = True,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng([count, hidden, inner])
        options = LoadOptions.parse(device=str(device), exact=exact)
        self.dtype, self.device, self.hidden = numpy_dtype(dtype), device, hidden
        self.weights: list[list[Array]] = []
        made = []
        for width, depth in ((2 * inner if has_gate else inner, hidden), (hidden, inner)):
            matrices = [(rng.standard_normal((width, depth)) / depth**0.5).astype(self.dtype) for _ in range(count)]
            biases = [rng.standard_normal(width).astype(np.float32) * has_bias for _ in range(count)]
            made.append(
                ExpertsWeight([
                    ops.prepare_linear(Tensor.from_numpy(m), Tensor.from_numpy(b) if has_bias else None, options)
                    for m, b in zip(matrices, biases)
                ])
            )  # fmt: skip
            joined = [np.concatenate([m, b[:, None]], 1) for m, b in zip(matrices, biases)]
            self.weights.append([each.astype(np.float64) for each in joined])
        self.gate_up, self.down = made

    def __call__(self, x: Array, routing: Routing, activation: Any = "silu", **added: Array) -> Array:
        tensors = {name: put(array.astype(self.dtype), self.device) for name, array in added.items()}
        result = ops.experts(
            put(x.astype(self.dtype), self.device), moved(routing, self.device), self.gate_up, self.down, activation,
            **tensors,
        )  # fmt: skip
        squares = result.deferred_norm
        found = result.to("cpu").numpy().astype(np.float64)
        if squares is not None:
            assert relative_error(squares.to("cpu").numpy().sum(1), (found**2).sum(1)) <= TOLERANCE[result.dtype.ptx]
        return found

    def wanted(self, x: Array, routing: Routing, activation: str = "silu", **added: Array) -> Array:
        x = x.astype(self.dtype).astype(np.float64)
        added = {name: array.astype(self.dtype).astype(np.float64) for name, array in added.items()}
        result = np.zeros((len(x), self.hidden))
        for row, (ids, weights) in enumerate(zip(routing.ids.numpy(), routing.weights.numpy())):
            for expert, weight in zip(ids, weights):
                both = self.weights[0][expert] @ np.append(x[row], 1)
                between = dense.squared_relu(both)
                if activation != "squared_relu":
                    between = gated(*np.split(both, 2), activation)
                result[row] += weight * (self.weights[1][expert] @ np.append(between, 1))
        if "shared" in added:
            gate = 1 / (1 + np.exp(-added["shared_gate"])) if "shared_gate" in added else 1
            result += added["shared"] * gate
        return result + added.get("residual", 0)


def gated(gate: Array, up: Array, activation: str) -> Array:
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "clamped_silu":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


CASES = [
    (1, 7, 3, 136, 48, "random"), (1, 1, 1, 33, 1, "random"), (4, 4, 4, 64, 72, "random"),
    (3, 9, 2, 264, 520, "random"), (37, 11, 2, 48, 64, "random"), (130, 6, 2, 64, 32, "first"),
    (60, 40, 5, 128, 24, "random"),
]  # fmt: skip


@both_archs
@pytest.mark.parametrize("dtype", ["f32", pytest.param("f16", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.exhaustive
def test_experts_against_float64(gpu: Gpu, dtype: str) -> None:
    for tokens, count, top_k, hidden, inner, how in CASES:
        rng = np.random.default_rng([tokens, count, hidden])
        layer = Layer(gpu.device, count, hidden, inner, dtype, has_bias=count != 7)
        routing = routing_of(rng, how, tokens, RoutingRule(num_experts=count, top_k=top_k))
        x, shared, residual = rng.standard_normal((3, tokens, hidden))
        gate = rng.standard_normal((tokens, 1))
        for added in ({}, {"shared": shared, "residual": residual}, {"shared": shared, "shared_gate": gate}):
            found = layer(x, routing, **added)
            assert relative_error(found, layer.wanted(x, routing, **added)) <= TOLERANCE[dtype]


def test_experts_without_a_gate(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens go straight over their experts, more are grouped."""
    names = launched_names(monkeypatch)
    for tokens in (3, 5):
        rng = np.random.default_rng(tokens)
        layer = Layer(gpu.device, 6, 48, 40, "bf16", has_gate=False, has_bias=tokens == 3)
        routing = routing_of(rng, "random", tokens, RoutingRule(num_experts=6, top_k=2))
        x, residual = rng.standard_normal((2, tokens, 48))
        names.clear()
        found = layer(x, routing, "squared_relu", residual=residual)
        wanted = layer.wanted(x, routing, "squared_relu", residual=residual)
        assert relative_error(found, wanted) <= TOLERANCE["bf16"]
        assert any(name.startswith("experts_gather") for name in names) == (tokens == 3)


@pytest.mark.exhaustive
@both_archs
def test_float16_sums_of_adapters_may_be_large(gpu: Gpu) -> None:
    """``down x`` of a pair is beyond float16's 65,504, what it adds is not."""
    rng, half, hidden, inner, rank = np.random.default_rng(3), np.float16, 64, 32, 8
    options = LoadOptions(device=gpu.device, dtype=float16)
    x = (rng.standard_normal((3, hidden)) * 3000).astype(half)
    gate_up = (rng.standard_normal((2, 2 * inner, hidden)) * 1e-3).astype(half)
    down = (rng.standard_normal((2, hidden, inner)) * 0.1).astype(half)
    layers, pairs = [], []
    for place, matrices in enumerate((gate_up, down)):
        names, shape = [f"{expert}.{place}" for expert in range(2)], matrices.shape[1:]
        declared: list[Any] = [
            SimpleNamespace(shape=shape, adds_unsplit=True, parts=[(name, slice(0, shape[0]), slice(0, shape[1]))])
            for name in names
        ]
        addend = LowRankExperts(declared, 1, rank)
        addend.allocate(options)
        scale = (60.0, 2000.0)[place]
        found = [Pair(normal(rng, (rank, shape[1])) * scale, normal(rng, (shape[0], rank)) / 65504) for _ in names]
        addend.write(0, dict(zip(names, found, strict=True)))
        made = ExpertsWeight([ops.prepare_linear(Tensor.from_numpy(each), None, options) for each in matrices])
        made.addend = addend
        layers.append(made)
        pairs.append(found)
    rule = RoutingRule(num_experts=2, top_k=1)
    ids, weights = np.array([[0], [1], [1]], np.int32), np.ones((3, 1), np.float32)
    routing = Routing(put(ids, gpu.device), put(weights, gpu.device), rule)
    batch: Any = SimpleNamespace(adapters=put(np.array([0, 0, -1], np.int32), gpu.device))
    out = floats(ops.adapted_experts(put(x, gpu.device), routing, layers[0], layers[1], "silu", batch))
    for row, (expert, has_one) in enumerate([(0, True), (1, True), (1, False)]):
        values = x[row].astype(np.float64)
        for place, matrix in enumerate((gate_up[expert], down[expert])):
            between = pairs[place][expert].down.astype(np.float64) @ values
            added = pairs[place][expert].up.astype(np.float64) @ between
            assert np.abs(between).max() > 65504
            values = matrix.astype(np.float64) @ values + has_one * added
            if not place:
                values = gated(values[:inner], values[inner:], "silu")
        assert np.abs(out[row] - values).max() <= 4e-3 * np.abs(values).max() < 4e-3 * 65504


def test_no_tokens(gpu: Gpu) -> None:
    layer = Layer(gpu.device, 3, 16, 16, "bf16")
    routing = routing_of(np.random.default_rng(0), "random", 0, RoutingRule(num_experts=3, top_k=1))
    assert layer(np.zeros((0, 16)), routing).shape == (0, 16)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.exhaustive
def test_exact_bits_depend_on_nobody_else(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Alone, in any company, and in several passes."""
    rng = np.random.default_rng(5)
    layer = Layer(gpu.device, 9, 200, 72, dtype, exact=True)
    rule = RoutingRule(num_experts=9, top_k=3)
    routing, x = routing_of(rng, "random", 80, rule), rng.standard_normal((80, 200))

    def some(rows: Any) -> Array:
        chosen = Routing(
            Tensor.from_numpy(routing.ids.numpy()[rows]), Tensor.from_numpy(routing.weights.numpy()[rows]), rule
        )
        return layer(x[rows], chosen)

    whole = some(slice(0, 80))
    for rows in ([3], [79, 3, 11], list(range(7, 40))):
        np.testing.assert_array_equal(some(rows), whole[rows])
    monkeypatch.setattr(cuda_experts, "_MOST_ROWS", 50)
    np.testing.assert_array_equal(some(slice(0, 80)), whole)


@pytest.mark.exhaustive
def test_launches_do_not_depend_on_what_is_chosen(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many experts there are, but for the grid of the list of rows."""
    launches: list[Any] = []
    launch = Gpu.launch

    def recorded(self: Gpu, planned: Any, *arguments: Any, **more: Any) -> Any:
        launches.append((planned.specialisation.name, planned.grid))
        return launch(self, planned, *arguments, **more)

    monkeypatch.setattr(Gpu, "launch", recorded)
    rng = np.random.default_rng(2)
    seen = []
    for tokens in (1, 20):
        x = rng.standard_normal((tokens, 64))
        for count in (4, 32):
            layer = Layer(gpu.device, count, 64, 32, "bf16")
            for how in ("first", "random"):
                routing = routing_of(rng, how, tokens, RoutingRule(num_experts=count, top_k=2))
                launches.clear()
                layer(x, routing)
                seen.append(list(launches))
    for first, second in zip(seen[::2], seen[1::2]):
        assert first == second
    assert [len(each) for each in seen] == [2] * 4 + [4] * 4


def test_declared_types_of_a_layer(gpu: Gpu) -> None:
    layer = Layer(gpu.device, 2, 16, 16, "bf16")
    assert layer.gate_up.shape == (2, 32, 16)
    assert layer.gate_up.experts[0].activations is bfloat16
    assert gpu.device == Device.parse(DEFAULT_DEVICE)


@both_archs
@pytest.mark.exhaustive  # those of Hopper are below
def test_tiles_of_tensor_cores_give_the_same_bits(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, whose gate is clamped, and with experts of no row, a few rows, and more than a tile of them."""
    rng = np.random.default_rng(3)
    layer, rule = Layer(gpu.device, 6, 72, 40, "bf16"), RoutingRule(num_experts=6, top_k=2)
    chosen = np.array([[0, 4]] * 150 + [[4, 1]] * 3 + [[3, 0]] * 16, np.int32)
    weights = rng.uniform(size=chosen.shape).astype(np.float32)
    routing = Routing(Tensor.from_numpy(chosen), Tensor.from_numpy(weights), rule)
    x = rng.standard_normal((len(chosen), 72)) * 4
    found = []
    for tile in tensor_core.TILES:
        monkeypatch.setattr(tensor_core, "choose_tile", lambda *_, tile=tile: tile)
        found.append(layer(x, routing, "clamped_silu"))
        assert relative_error(found[-1], layer.wanted(x, routing, "clamped_silu")) <= TOLERANCE["bf16"]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_rows_that_tensor_cores_do_not_take(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    names = launched_names(monkeypatch)
    rng = np.random.default_rng(4)
    routing = routing_of(rng, "random", 6, RoutingRule(num_experts=3, top_k=2))
    hidden = 64
    for inner, dtype, tiers in (
        (32, "bf16", ("tensor_core", "tensor_core")), (33, "bf16", ("tensor_core", "tiled")),
        (32, "f32", ("tiled", "tiled")),
    ):  # fmt: skip
        names.clear()
        Layer(gpu.device, 3, hidden, inner, dtype)(rng.standard_normal((6, hidden)), routing)
        assert all(name.startswith(f"experts_{tier}") for name, tier in zip(names[1:3], tiers, strict=True)), names


EACH = {
    "mxfp4": ROUNDINGS["mxfp4"], "int4": Rounding("int4", (1, 64), np.dtype(np.float16)), "fp8": ROUNDINGS["fp8"],
    "int8": Rounding("int8", (1, 0), np.dtype(np.float32)),
}  # fmt: skip


PACKED = {"mxfp4": "e2m1_g32_exponents", "int4": "u4_g64", "fp8": "e4m3", "int8": "u8"}


def quantised_layer(gpu: Gpu, rng: np.random.Generator, kind: str, count: int, hidden: int, inner: int) -> Layer:
    layer = Layer(gpu.device, count, hidden, inner, "bf16")
    options = LoadOptions.parse(device=str(gpu.device), dtype="bfloat16")
    for number, (width, depth) in enumerate(((2 * inner, hidden), (hidden, inner))):
        made = []
        for expert in range(count):
            matrix = quantise(rng.standard_normal((width, depth)).astype(np.float32) / depth**0.5, EACH[kind])
            bias = rng.standard_normal(width).astype(np.float32)
            part = MatrixPart(matrix, slice(0, width), slice(0, depth))
            made.append(prepare_packed([part], [Tensor.from_numpy(bias)], options, None))
            layer.weights[number][expert] = np.concatenate([matrix.dequantise(float32), bias[:, None]], 1)
        assert can_stay_packed(made[0].packing, bfloat16, (width // 2, width // 2), depth)
        setattr(layer, ("gate_up", "down")[number], ExpertsWeight(made))
    return layer


def one_multiprocessor(plan: Any, arch: str) -> Any:
    """A plan of `packed_gather` for a device of one multiprocessor."""
    return lambda *sizes: plan(*sizes[:-2], 1, arch)


ROUTED = (("random", 1), ("random", 3), ("first", 140))
BOTH_HEIGHTS = packed.FEW_ROWS, packed.BLOCK_M


@both_archs
@pytest.mark.parametrize(
    ("kind", "routed_as", "heights"),
    [
        ("mxfp4", ROUTED[1:2], ()),
        *(pytest.param(each, ROUTED, BOTH_HEIGHTS, marks=pytest.mark.exhaustive) for each in EACH),
    ],
    ids=["mxfp4-few", *EACH],
)
def test_quantised_experts(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kind: str, routed_as: Any, heights: tuple[int, ...]
) -> None:
    """As their dequantised numbers, with few rows an expert and many, in tiles of both heights, to the same bits."""
    rng = np.random.default_rng(6)
    count, hidden, inner = 5, 160, 96
    layer = quantised_layer(gpu, rng, kind, count, hidden, inner)
    rule = RoutingRule(num_experts=count, top_k=2)
    activation = "clamped_silu" if kind == "mxfp4" else "silu"
    for how, tokens in routed_as:
        routing = routing_of(rng, how, tokens, rule)
        x, residual = rng.standard_normal((2, tokens, hidden))
        if tokens <= 4:  # straight over their experts
            names = launched_names(monkeypatch)
            wanted = layer.wanted(x, routing, activation, residual=residual)
            found = [layer(x, routing, activation, residual=residual)]
            assert relative_error(found[0], wanted) <= TOLERANCE["bf16"]
            assert [name.startswith("experts_packed_gather") for name in names] == [True, True]
            with monkeypatch.context() as patched:  # blocks that take tile after tile
                for arch in (gpu.arch, "sm_80"):  # which reads the weight through registers
                    for plan in ("plan_gate_up", "plan_down"):
                        on_one = one_multiprocessor(getattr(packed_gather, plan), arch)
                        patched.setattr(cuda_plans, f"_plan_packed_{plan.removeprefix('plan_')}", on_one)
                    names.clear()
                    np.testing.assert_array_equal(layer(x, routing, activation, residual=residual), found[0])
                    assert [("_ring_" in name) for name in names] == [arch == "sm_90a"] * 2
        monkeypatch.setattr(cuda_plans, "_GATHERED_TOKENS", 0)
        found = []
        for rows in heights if tokens > 1 else heights[:1]:
            with monkeypatch.context() as patched:
                patched.setattr(packed_rows, "tile_rows", lambda *_: 0)
                patched.setattr(packed, "choose_tile_rows", lambda *_, rows=rows: rows)
                found.append(layer(x, routing, activation, residual=residual))
            wanted = layer.wanted(x, routing, activation, residual=residual)
            assert relative_error(found[-1], wanted) <= TOLERANCE["bf16"]
            np.testing.assert_array_equal(found[0], found[-1])
        monkeypatch.setattr(cuda_plans, "_GATHERED_TOKENS", 4)


@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "count", "tokens"),
    [
        ("mxfp4", 5, 11), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
            ("mxfp4", 3, 24), ("int4", 7, 9), ("int8", 4, 8), ("fp8", 5, 16),
        ))
    ],
)  # fmt: skip
def test_a_few_rows_of_quantised_experts(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kind: str, count: int, tokens: int
) -> None:
    """Experts of no row, of one, and of more than a tile's; blocks go on from one expert to the next. A row has the
    same bits beside others, and on any number of blocks."""
    rng = np.random.default_rng([count, tokens])
    layer = quantised_layer(gpu, rng, kind, count, 1184, 112)
    rule = RoutingRule(num_experts=count, top_k=2)
    activation = "clamped_silu" if kind == "mxfp4" else "silu"
    chosen = routing_of(rng, "random", tokens, rule).ids.numpy().copy()
    chosen[chosen == count - 1] = 0  # nobody's
    chosen[0] = [count - 2, 0]
    weights = rng.uniform(size=chosen.shape).astype(np.float32)
    x = rng.standard_normal((tokens, 1184)) * np.logspace(-3, 1, tokens)[:, None]
    monkeypatch.setattr(cuda_plans, "_GATHERED_TOKENS", 0)
    monkeypatch.setattr(packed_rows, "_FULL", 99)
    names = launched_names(monkeypatch)

    def some(rows: slice) -> Array:
        routing = Routing(Tensor.from_numpy(chosen[rows]), Tensor.from_numpy(weights[rows]), rule)
        return layer(x[rows], routing, activation)

    found = some(slice(0, tokens))
    assert sum(name.startswith("experts_packed_rows") for name in names) == 2, names
    routing = Routing(Tensor.from_numpy(chosen), Tensor.from_numpy(weights), rule)
    wanted = layer.wanted(x, routing, activation)
    assert (np.abs(found - wanted).max(1) <= TOLERANCE["bf16"] * np.abs(wanted).max(1)).all()
    np.testing.assert_array_equal(some(slice(tokens - 1, tokens)), found[tokens - 1 :])
    of = packed_rows.plan
    for num_sms in (1, 2):
        monkeypatch.setattr(packed_rows, "plan", lambda *sizes, num_sms=num_sms: of(*sizes[:-1], num_sms))
        layer.gate_up.plans, layer.down.plans = Plans(), Plans()
        np.testing.assert_array_equal(some(slice(0, tokens)), found)


def uneven(rng: np.random.Generator, num_first: int) -> tuple[Routing, Array]:
    """Choices of two of 5 experts, and rows of 160: one expert has none, others three, 16 and more than a tile's."""
    chosen = np.array([[0, 4]] * num_first + [[4, 1]] * 3 + [[3, 0]] * 16, np.int32)
    weights = rng.uniform(size=chosen.shape).astype(np.float32)
    rule = RoutingRule(num_experts=5, top_k=2)
    routing = Routing(Tensor.from_numpy(chosen), Tensor.from_numpy(weights), rule)
    return routing, rng.standard_normal((len(chosen), 160))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", EACH)
def test_quantised_experts_that_are_dequantised(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Tiles of `wgmma` over one map of all experts, which end among the columns of the next one: experts of no row, and
    all tiles, to the same bits."""
    rng, names = np.random.default_rng(9), launched_names(monkeypatch)
    layer = quantised_layer(gpu, rng, kind, 5, 160, 144)
    activation = "clamped_silu" if kind == "mxfp4" else "silu"
    routing, x = uneven(rng, 200)
    monkeypatch.setattr(hopper, "unpacking_tile", lambda *_: None)
    monkeypatch.setattr(cuda_plans, "_tile_of_dequantised", lambda *_: None)
    wanted = [layer.wanted(x, routing, activation), layer(x, routing, activation)]
    found: list[Array] = []
    for tile in hopper.TILES:
        monkeypatch.setattr(cuda_plans, "_tile_of_dequantised", lambda *_, tile=tile: tile)
        names.clear()
        found.append(layer(x, routing, activation))
        assert [name for name in names if "joined" in name] == [
            f"experts_hopper_joined_bf16_{tile}_{activation}",
            f"experts_hopper_joined_bf16_{tile}",
        ]
        assert sum(name.startswith("dequantize_experts") for name in names) == 2
        for each in wanted:
            assert relative_error(found[-1], each) <= TOLERANCE["bf16"]
        np.testing.assert_array_equal(found[-1], found[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", EACH)
def test_quantised_experts_that_are_unpacked_for_wgmma(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Tiles of both heights, to the same bits: experts of no row, three and more than a tile's; K and columns that end
    within theirs."""
    rng, names = np.random.default_rng(10), launched_names(monkeypatch)
    layer = quantised_layer(gpu, rng, kind, 5, 160, 144)
    activation = "clamped_silu" if kind == "mxfp4" else "silu"
    routing, x = uneven(rng, 140)
    found: list[Array] = []
    for tile in hopper.UNPACKING_TILES:
        monkeypatch.setattr(cuda_plans, "hopper_tile", lambda *_, tile=tile: tile)
        names.clear()
        found.append(layer(x, routing, activation))
        both = [name for name in names if name.startswith("experts_hopper")]
        assert both == [f"experts_hopper_{PACKED[kind]}_bf16_{tile}{way}" for way in (f"_{activation}", "")]
        assert relative_error(found[-1], layer.wanted(x, routing, activation)) <= TOLERANCE["bf16"]
        np.testing.assert_array_equal(found[-1], found[0])


def test_when_experts_are_dequantised(gpu: Gpu) -> None:
    """By how many rows each has, by what the matrices would take, and never exactly; of each kind, the tile chosen."""
    machine = gemm.machine_of("sm_90a", 132)
    packing = packing_of("e2m1_g32_exponents")
    x = Tensor.empty((1, 2880), bfloat16, gpu.device)

    def tile(rows: int, *sizes: int) -> Any:
        num_experts, hidden, inner = sizes
        shapes = ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
        weights = tuple(SimpleNamespace(shape=shape, packing=packing) for shape in shapes)
        return cuda_plans._tile_of_dequantised(x, rows * num_experts, weights, machine)  # type: ignore[arg-type]

    assert [tile(rows, 32, 2880, 2880) for rows in (16, 64, 128)] == [None] * 3
    assert tile(512, 32, 2880, 2880) is hopper.PAIR
    assert tile(512, 128, 2048, 768) is hopper.PAIR
    assert tile(512, 256, 7168, 2048) is None, "15 GB"
    assert hopper.choose_tile(16 * 32, 32, 5760, 2880, machine) is None
    chosen = [hopper.choose_tile(rows * 32, 32, 5760, 2880, machine) for rows in (32, 128, 512)]
    assert chosen == [hopper.LOW, hopper.ALONE, hopper.PAIR]


@pytest.mark.parametrize(
    ("dtype", "hidden", "inner", "activation", "has_bias", "tiles"),
    [
        ("bf16", 72, 136, "clamped_silu", True, (hopper.PAIR,)),
        *(
            pytest.param(*each, hopper.TILES, marks=pytest.mark.exhaustive)
            for dtype in ("bf16", "f16")
            for each in ((dtype, 72, 136, "clamped_silu", True), (dtype, 520, 64, "silu", False))
        ),
    ],
)
@pytest.mark.exhaustive_cases("bf16")
def test_hopper_tiles(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, dtype: str, hidden: int, inner: int, activation: str, has_bias: bool,
    tiles: Any,
) -> None:  # fmt: skip
    """All tiles, to the same bits: experts of no row, one, a tile's and more; K, gates and columns that end within
    theirs; a gate that is clamped, with biases and without."""
    rng, names = np.random.default_rng(8), launched_names(monkeypatch)
    layer = Layer(gpu.device, 6, hidden, inner, dtype, has_bias=has_bias)
    rule = RoutingRule(num_experts=6, top_k=2)
    chosen = np.array([[0, 4]] * 257 + [[4, 1]] * 1 + [[3, 0]] * 16, np.int32)
    weights = rng.uniform(size=chosen.shape).astype(np.float32)
    routing = Routing(Tensor.from_numpy(chosen), Tensor.from_numpy(weights), rule)
    x = rng.standard_normal((len(chosen), hidden)) * 4
    found: list[Array] = []
    for tile in tiles:
        monkeypatch.setattr(hopper, "choose_tile", lambda *_, tile=tile: tile)
        names.clear()
        found.append(layer(x, routing, activation))
        assert [name for name in names if "hopper" in name] == [
            f"experts_hopper_{dtype}_{tile}_{activation}",
            f"experts_hopper_{dtype}_{tile}",
        ]
        assert relative_error(found[-1], layer.wanted(x, routing, activation)) <= TOLERANCE[dtype]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def launched_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that are launched from now on."""
    names: list[str] = []
    launch = Gpu.launch

    def recorded(self: Gpu, planned: Any, *arguments: Any, **more: Any) -> Any:
        names.append(planned.specialisation.name)
        return launch(self, planned, *arguments, **more)

    monkeypatch.setattr(Gpu, "launch", recorded)
    return names
