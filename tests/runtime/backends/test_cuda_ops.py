"""The model's operations on an emulated GPU: what the cpu gives; every wrong argument named, and nothing launched."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.quantized.on_load import HEAD
from runtime import ops
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from runtime.dtype import DType, bfloat16
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.linear.linear import Linear
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantise import quantise
from runtime.tensor.tensor import Tensor
from tests.oracles.dense import relative_error

DEVICE = "emulated:sm_80"


def zeros(*shape: int, dtype: str = "float32") -> Tensor:
    return Tensor.zeros(shape, dtype, DEVICE)


def weight() -> ops.LinearWeight:
    return ops.prepare_linear(Tensor.zeros((6, 8)), options=LoadOptions(device=Device(DEVICE)))


def cache(heads: int = 1, head_dim: int = 8) -> tuple[Tensor, Tensor]:
    return KVCache(KVCacheSpec.uniform(1, heads, head_dim, 8, zeros(1).dtype, Device(DEVICE)), 2).layer(0)


def qkv(**changes: Any) -> Tensor:
    k_cache, v_cache = cache()
    arguments: dict[str, Any] = {
        "qkv": zeros(3, 32), "positions": zeros(3, dtype="int32"), "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8,
        "rope": None, "q_norm": None, "k_norm": None, "norm_eps": 1e-6, "k_cache": k_cache, "v_cache": v_cache,
        "slot_mapping": zeros(3, dtype="int64"),
    } | changes  # fmt: skip
    return ops.qkv_prepare(arguments.pop("qkv"), arguments.pop("positions"), **arguments)


def attend(queries: Tensor, window: int | None = None, sinks: Tensor | None = None, **changes: Any) -> Tensor:
    fields: dict[str, Any] = {
        "token_ids": zeros(4, dtype="int32"), "positions": zeros(4, dtype="int32"),
        "query_start": Tensor.from_numpy(np.array([0, 4], np.int32)).to(DEVICE),
        "seq_lens": Tensor.from_numpy(np.array([4], np.int32)).to(DEVICE), "slot_mappings": (zeros(4, dtype="int64"),),
        "block_tables": (zeros(1, 2, dtype="int32"),), "logits_indices": zeros(1, dtype="int32"), "max_query_len": 4,
        "max_seq_len": 4,
    } | changes  # fmt: skip
    return ops.attention(queries, *cache(), Batch(**fields), 0, scale=1.0, window=window, sinks=sinks)


REFUSALS: list[tuple[str, str, Callable[[], Any], str]] = [
    ("linear", "x", lambda: ops.linear(zeros(2, 5), weight()), r"shape \(2, 5\), must be \[any, 8\]"),
    ("linear", "x", lambda: ops.linear(zeros(2, 8, dtype="int32"), weight()), "is int32, must be float32"),
    ("linear", "x", lambda: ops.linear(zeros(8, 2).transpose(0, 1), weight()), "must be C-contiguous"),
    ("linear", "weight", lambda: ops.linear(zeros(2, 8), ops.prepare_linear(Tensor.zeros((6, 8)))), "not on cpu"),
    ("linear", "x", lambda: ops.linear(zeros(2, 8, dtype="bfloat16"), weight()), "is bfloat16, must be float32"),
    ("linear", "residual", lambda: ops.linear(zeros(2, 8), weight(), residual=zeros(3, 6)), r"\(3, 6\)"),
    ("linear", "residual", lambda: ops.linear(zeros(2, 8), weight(), residual=Tensor.zeros((2, 6))), "is on cpu"),
    ("linear", "out", lambda: ops.linear(zeros(2, 8), weight(), out=zeros(2, 5)), r"\(2, 5\)"),
    ("embedding", "token_ids", lambda: ops.embedding(zeros(2), zeros(5, 3)), "is float32, must be int32"),
    ("embedding", "table", lambda: ops.embedding(zeros(2, dtype="int32"), zeros(5)), r"\(5,\)"),
    ("embedding", "table", lambda: ops.embedding(zeros(2, dtype="int32"), Tensor.zeros((5, 3))), "is on cpu"),
    ("add_embedding", "positions", lambda: ops.add_embedding(zeros(1, 2), zeros(2, dtype="int32"), zeros(5, 2)),
     r"\(2,\)"),
    ("gather_rows", "indices", lambda: ops.gather_rows(zeros(2, 2), zeros(2, dtype="int64")), "int64"),
    ("rms_norm", "weight", lambda: ops.rms_norm(zeros(2, 3), zeros(4), 1e-6), r"\(4,\)"),
    ("rms_norm", "weight", lambda: ops.rms_norm(zeros(2, 4), zeros(4, dtype="float16"), 1e-6), "float16"),
    ("layer_norm", "bias", lambda: ops.layer_norm(zeros(2, 3), zeros(3), zeros(2), 1e-6), r"\(2,\)"),
    ("gelu", "x", lambda: ops.gelu(zeros(3, dtype="int32"), "erf"), "int32"),
    ("silu", "out", lambda: ops.silu(zeros(3), out=zeros(4)), r"\(4,\)"),
    ("silu", "x", lambda: ops.silu(zeros(3, 4)[:, ::2]), "must be C-contiguous"),
    ("glu", "gate_up", lambda: ops.glu(zeros(2, 5), "silu"), "5 columns"),
    ("qkv_prepare", "qkv", lambda: qkv(qkv=zeros(3, 15)), "15"),
    ("qkv_prepare", "positions", lambda: qkv(positions=zeros(3, dtype="int64")), "int64"),
    ("qkv_prepare", "slot_mapping", lambda: qkv(slot_mapping=zeros(2, dtype="int64")), r"\(2,\)"),
    ("qkv_prepare", "q_norm", lambda: qkv(q_norm=zeros(5), k_norm=zeros(8)), r"\(5,\)"),
    ("qkv_prepare", "k_norm", lambda: qkv(q_norm=zeros(8)), "where q_norm is"),
    ("qkv_prepare", "k_cache", lambda: qkv(k_cache=cache(2)[0], v_cache=cache(2)[1]), "2 heads"),
    ("qkv_prepare", "v_cache", lambda: qkv(v_cache=cache(2)[1]), "has shape"),
    ("qkv_prepare", "rope.cos", lambda: qkv(rope=ops.RopeTable(zeros(9, 5), zeros(9, 5), False)), "10 dimensions"),
    ("qkv_prepare", "rope.sin", lambda: qkv(rope=ops.RopeTable(zeros(9, 2), zeros(9, 1), False)), r"\(9, 1\)"),
    ("attention", "q", lambda: attend(zeros(8, 8)), r"\(8, 8\)"),
    ("attention", "k_cache", lambda: attend(zeros(4, 2, 20)), r"must be \[any, any, any, 24\]"),
    ("attention", "window", lambda: attend(zeros(4, 2, 8), window=0), "at least 1"),
    ("attention", "sinks", lambda: attend(zeros(4, 2, 8), sinks=zeros(3)), r"\(3,\), must be \[2\]"),
    ("attention", "sinks", lambda: attend(zeros(4, 2, 8), sinks=zeros(2, dtype="bfloat16")), "bfloat16"),
    ("attention", "sinks", lambda: attend(zeros(4, 2, 8), sinks=Tensor.zeros(2)), "is on cpu"),
    ("attention", "batch.seq_lens", lambda: attend(zeros(4, 2, 8), seq_lens=zeros(1, dtype="int64")), "int64"),
    ("attention", "batch.max_seq_len", lambda: attend(zeros(4, 2, 8), max_seq_len=17), "is 17, must be at most 16"),
    ("sample", "logits", lambda: ops.sample(zeros(2, 5, dtype="bfloat16"), None), "bfloat16"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that the test launches."""
    launched: list[str] = []
    launch = Gpu.launch

    def watched(self: Gpu, what: Any, *arguments: Any, **options: Any) -> None:
        launched.append(what.specialisation.name)
        launch(self, what, *arguments, **options)

    monkeypatch.setattr(Gpu, "launch", watched)
    return launched


@pytest.mark.parametrize(("op", "argument", "call", "words"), REFUSALS, ids=[f"{r[0]}-{r[1]}" for r in REFUSALS])
def test_refuses_by_operation_and_argument(
    op: str, argument: str, call: Callable[[], Any], words: str, launched: list[str]
) -> None:
    """`call` makes its arguments, for which memory is filled, and then must fail before it launches anything."""
    with pytest.raises(InvalidArgumentError, match=f"^{op}: {argument} .*{words}") as caught:
        call()
    assert caught.value.param == argument
    assert not launched


def test_nothing_in_nothing_out() -> None:
    assert ops.linear(zeros(0, 8), weight()).shape == (0, 6)
    assert ops.logits_linear(zeros(0, 8), weight()).shape == (0, 6)
    assert ops.embedding(zeros(0, dtype="int32"), zeros(5, 3)).shape == (0, 3)
    assert ops.gather_rows(zeros(3, 4), zeros(0, dtype="int32")).shape == (0, 4)
    for rows, width in ((0, 4), (3, 0)):
        assert ops.rms_norm(zeros(rows, width), zeros(width), 1e-6).shape == (rows, width)
        assert ops.layer_norm(zeros(rows, width), zeros(width), None, 1e-6).shape == (rows, width)
        assert ops.gelu(zeros(rows, width), "tanh").shape == (rows, width)
        assert ops.glu(zeros(rows, 2 * width), "silu").shape == (rows, width)
    assert qkv(qkv=zeros(0, 32), positions=zeros(0, dtype="int32"), slot_mapping=zeros(0, dtype="int64")).shape[0] == 0
    assert attend(zeros(0, 2, 8)).shape == (0, 16)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.exhaustive), "bfloat16"])
@pytest.mark.exhaustive_cases("bfloat16")
def test_what_the_cpu_gives(dtype: str) -> None:
    rng = np.random.default_rng(1)

    def both(*shape: int) -> tuple[Tensor, Tensor]:
        """(float32 on the cpu, the same numbers on the GPU)."""
        on_gpu = Tensor.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype).to(DEVICE)
        return on_gpu.to("cpu").to("float32"), on_gpu

    bound = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    x, x_gpu = both(5, 24)
    residual, residual_gpu = both(5, 17)
    matrix, matrix_gpu = both(17, 24)
    bias = Tensor.from_numpy(rng.standard_normal(17).astype(np.float32))
    ours = ops.prepare_linear(matrix_gpu.to("cpu"), bias, LoadOptions(device=Device(DEVICE)))
    theirs = ops.prepare_linear(matrix, bias)
    scale, shift = (Tensor.from_numpy(rng.standard_normal(24).astype(np.float32)) for _ in range(2))
    pairs = [
        (ops.linear(x_gpu, ours, residual=residual_gpu), ops.linear(x, theirs, residual=residual)),
        (ops.logits_linear(x_gpu, ours), ops.linear(x, theirs)),
        (ops.rms_norm(x_gpu, scale.to(DEVICE), 1e-6), ops.rms_norm(x, scale, 1e-6)),
        (
            ops.layer_norm(x_gpu, scale.to(DEVICE), shift.to(DEVICE), 1e-5),
            ops.layer_norm(x, scale, shift, 1e-5),
        ),
        (ops.glu(x_gpu, "silu"), ops.glu(x, "silu")),
        (ops.silu(x_gpu), ops.silu(x)),
        (ops.gelu(x_gpu, "erf"), ops.gelu(x, "erf")),
    ]
    for actual, expected in pairs:
        assert str(actual.device) == DEVICE
        assert relative_error(actual.to("cpu").to("float32").array, expected.array) <= bound
    assert pairs[1][0].dtype.name == "float32"


def test_a_layer_norm_without_a_bias_can_be_recorded() -> None:
    """The zeros in its place are on the device by then."""
    gpu = Gpu.of(DEVICE)
    x = Tensor.from_numpy(np.random.default_rng(1).standard_normal((5, 24)).astype(np.float32))
    x_gpu, ones = x.to(DEVICE), Tensor.from_numpy(np.ones(24, np.float32))
    ones_gpu = ones.to(DEVICE)
    graph = Graph.capture(gpu, lambda: ops.layer_norm(x_gpu, ones_gpu, None, 1e-5))
    graph.replay()
    assert relative_error(graph.result.to("cpu").array, ops.layer_norm(x, ones, None, 1e-5).array) <= 1e-5


@pytest.mark.exhaustive
def test_linear_glu(launched: list[str]) -> None:
    """In one launch, but with a bias."""
    rng = np.random.default_rng(5)
    x, matrix = (Tensor.from_numpy(rng.standard_normal(size).astype(np.float32)) for size in ((130, 72), (48, 72)))
    x, matrix = x.to("bfloat16"), matrix.to("bfloat16")
    for bias in (None, Tensor.from_numpy(rng.standard_normal(48).astype(np.float32))):
        ours = ops.prepare_linear(matrix, bias, LoadOptions(device=Device("emulated:sm_90a")))
        launched.clear()
        actual = ops.linear_glu(x.to("emulated:sm_90a"), ours, "silu")
        assert [name.split("_")[0] for name in launched] == (["gemm"] if bias is None else ["gemm", "glu"])
        expected = ops.linear_glu(x.to("float32"), ops.prepare_linear(matrix.to("float32"), bias), "silu")
        assert relative_error(actual.to("cpu").to("float32").array, expected.array) <= 2e-2


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.exhaustive
def test_a_norm_between_products(launched: list[str], exact: bool) -> None:
    """The product in front leaves its rows' squares, and the one behind scales by them. A launch adds them up for rows
    of which nobody has. In exact mode a row has the same bits alone."""
    rng, device = np.random.default_rng(6), Device("emulated:sm_90a")
    x, first, second, weights, residual = (
        Tensor.from_numpy(rng.standard_normal(size).astype(np.float32) + np.float32(size == (512,)))
        for size in ((20, 72), (512, 72), (48, 512), (512,), (20, 512))
    )
    x, first, second, residual = (tensor.to("bfloat16") for tensor in (x, first, second, residual))
    options = LoadOptions(device=device, exact=exact)
    norm = RmsNorm(weights.to(device), 1e-5, median=1.0)
    ours = ops.prepare_linear(first, options=options, split="inputs")
    behind = ops.prepare_linear(second, options=options, norm=norm)

    def run(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden = ops.linear(x.to(device), ours, residual=residual.to(device))
        return hidden, ops.linear_glu(hidden, behind, "silu", norm=norm)

    launched.clear()
    hidden, gated = run(x, residual)
    assert [name for name in launched if "norm" in name or "squares" in name or "glu" in name] == []
    assert len(launched) == 2 + exact
    if exact:
        alone = run(x[3:4].clone(), residual[3:4].clone())[1]
        np.testing.assert_array_equal(alone.to("cpu").array, gated.to("cpu").array[3:4])
    launched.clear()
    copied = hidden.to("cpu").to(device)
    again = ops.linear(copied, behind, norm=norm)
    assert launched[0] == "deferred_norm_bf16_x8"
    assert len(launched) == 2
    ops.linear(copied, behind, norm=norm)
    assert len(launched) == 3  # they are kept with the rows
    wide = [tensor.to("float32") for tensor in (x, first, second, residual)]
    theirs = ops.rms_norm(ops.linear(wide[0], ops.prepare_linear(wide[1]), residual=wide[3]), weights, norm.eps)
    for actual, expected in (
        (gated, ops.linear_glu(theirs, ops.prepare_linear(wide[2]), "silu")),
        (again, ops.linear(theirs, ops.prepare_linear(wide[2]))),
    ):
        assert relative_error(actual.to("cpu").to("float32").array, expected.array) <= 2e-2
    with pytest.raises(InvalidArgumentError, match="norm is None, but a norm's weights are multiplied"):
        ops.linear(hidden, behind)


def test_a_packed_weight_normalises_few_rows(launched: list[str]) -> None:
    """In the product's launch."""
    rng, device = np.random.default_rng(7), Device("emulated:sm_90a")
    matrix, weights = rng.standard_normal((70, 264)).astype(np.float32), rng.uniform(-2, 2, 264).astype(np.float32)
    rounded = quantise(matrix, HEAD)
    options = LoadOptions(device=device, dtype=DType.parse("bfloat16"))
    packed = prepare_packed([MatrixPart(rounded, slice(None), slice(None))], None, options, None)
    norm = RmsNorm(Tensor.from_numpy(weights).to(device), 1e-5, median=1.0)
    rows = Tensor.from_numpy(rng.standard_normal((4, 264)).astype(np.float32)).to("bfloat16")
    x = rows.to(device)[1:]
    expected = rows.to("float32").array[1:].astype(np.float64)
    expected = expected / np.sqrt((expected**2).mean(1, keepdims=True) + 1e-5) * weights
    expected = expected @ rounded.dequantise(DType.parse("float32")).astype(np.float64).T
    launched.clear()
    actual = Linear(packed, norm=norm)(x)
    assert [name.split("_ring")[0] for name in launched] == ["gemm_quantised_gemv_u8_bf16_4"]
    assert relative_error(actual.to("cpu").to("float32").array, expected) <= 4e-3


class Shift:
    """An addend that adds one row, and keeps the rows that it gets."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def add_to(self, residual: Tensor | None, x: Tensor, batch: Batch) -> Tensor:
        self.x = x
        return self.row + (0.0 if residual is None else residual)


@pytest.mark.parametrize("median", [0.5, 0.004])
def test_an_addend_gets_normalised_rows_and_enters_before_the_gate(launched: list[str], median: float) -> None:
    """Whether the norm is in the matrix or in a launch of its own."""
    rng, device = np.random.default_rng(8), Device("emulated:sm_90a")
    x, matrix, row = (Tensor.from_numpy(rng.standard_normal(size, np.float32)) for size in ((3, 64), (48, 64), (3, 48)))
    x, matrix, row = x.to("float16"), matrix.to("float16"), row.to("float16")
    weights = Tensor.from_numpy(np.full(64, median, np.float32))
    norm, shift = RmsNorm(weights.to(device), 1e-5, median), Shift(row.to(device))
    linear = Linear(
        ops.prepare_linear(matrix, options=LoadOptions(device=device), norm=norm), norm=norm, addends=[shift]
    )
    assert linear.weight.is_normed == (median == 0.5)  # type: ignore[attr-defined]
    batch: Any = SimpleNamespace(adapters=True)
    plain, gated = linear(x.to(device), batch), linear.glu(x.to(device), "silu", batch)
    wide = x.array.astype(np.float64)
    normalised = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * median
    expected = normalised @ matrix.array.astype(np.float64).T + row.array
    gate, up = np.split(expected, 2, axis=1)
    for actual, wanted in ((shift.x, normalised), (plain, expected), (gated, gate / (1 + np.exp(-gate)) * up)):
        assert relative_error(actual.to("cpu").to("float32").array, wanted) <= 2e-3


@pytest.mark.parametrize(("dtype", "median", "joins"), [
    ("float16", 0.04, True), ("float16", 0.004, False), ("bfloat16", 0.004, True),
])  # fmt: skip
@pytest.mark.exhaustive
def test_a_norm_of_small_weights_stays_apart_in_float16(
    launched: list[str], dtype: str, median: float, joins: bool
) -> None:
    """Multiplied into the matrix, most of its numbers would be subnormal there, and results twice as far off."""
    rng, device = np.random.default_rng(7), Device("emulated:sm_90a")
    x, matrix = (Tensor.from_numpy(rng.standard_normal(size, np.float32)) for size in ((2, 256), (64, 256)))
    x, matrix = x.to(dtype), (matrix * 0.004).to(dtype)
    weights = Tensor.from_numpy((median * np.exp(0.5 * rng.standard_normal(256))).astype(np.float32))
    norm = RmsNorm(weights.to(device), 1e-5, float(np.median(weights.array)))
    assert norm.can_join(DType.parse(dtype)) == joins
    linear = Linear(ops.prepare_linear(matrix, options=LoadOptions(device=device), norm=norm), norm=norm)
    launched.clear()
    actual = linear(x.to(device)).to("cpu").to("float32").array
    assert any(name.startswith("rms_norm") for name in launched) == (not joins)
    wide = x.array.astype(np.float64)
    scaled = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weights.array
    assert relative_error(actual, scaled @ matrix.array.astype(np.float64).T) <= (6e-4 if dtype == "float16" else 1e-2)


@pytest.mark.planted
def test_a_tier_that_the_device_has_not() -> None:
    with pytest.raises(InvalidArgumentError, match="gemm is 'hopper', which needs sm_90a: emulated:sm_80 is sm_80"):
        LoadOptions(device=Device("emulated:sm_80"), gemm="hopper")
    mixed = [Tensor.zeros((8, 8), "bfloat16"), Tensor.zeros((8, 8))]
    with pytest.raises(InvalidArgumentError, match="weight 1 has dtype float32, must have bfloat16"):
        ops.prepare_linear(mixed, options=LoadOptions(device=Device(DEVICE)))


def test_qkv_attention_is_its_two_operations() -> None:
    """Of two sequences with one new token each, in one launch; with the same bits, in the pages too."""
    rng, heads, kv_heads, head_dim, lengths = np.random.default_rng(2), 4, 2, 64, np.array([37, 5], np.int32)
    pages = rng.standard_normal((2, 5, kv_heads, 16, head_dim)).astype(bfloat16.numpy)
    angles = np.outer(np.arange(40), 100.0 ** -np.linspace(0, 1, head_dim // 2)).astype(np.float32)
    rows = rng.standard_normal((2, (heads + 2 * kv_heads) * head_dim)).astype(bfloat16.numpy)

    def put(array: np.ndarray) -> Tensor:
        return Tensor.from_numpy(array).to(DEVICE)

    found = []
    for is_one in (False, True):
        k_cache, v_cache, tables = put(pages[0]), put(pages[1]), np.array([[3, 1, 4], [2, 0, 0]], np.int32)
        batch = Batch(
            token_ids=zeros(2, dtype="int32"), positions=put(lengths - 1), seq_lens=put(lengths),
            query_start=put(np.arange(3, dtype=np.int32)), slot_mappings=(put(np.array([4 * 16 + 4, 2 * 16 + 4])),),
            block_tables=(put(tables),), logits_indices=zeros(2, dtype="int32"), max_query_len=1, max_seq_len=40,
        )  # fmt: skip
        of_heads: dict[str, Any] = {
            "num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim,
            "rope": ops.RopeTable(put(np.cos(angles)), put(np.sin(angles)), False), "q_norm": None, "k_norm": None,
            "norm_eps": 1e-6, "k_cache": k_cache, "v_cache": v_cache,
        }  # fmt: skip
        if is_one:
            out = ops.qkv_attention(put(rows), batch, 0, **of_heads, scale=0.2)
            assert [plan.prepares for key, plan in batch.plans.items() if key[0] == "attention"] == [True]
        else:
            q = ops.qkv_prepare(put(rows), batch.positions, slot_mapping=batch.slot_mappings[0], **of_heads)
            out = ops.attention(q, k_cache, v_cache, batch, 0, scale=0.2)
        found.append([tensor.to("cpu").numpy().view(np.uint16) for tensor in (out, k_cache, v_cache)])
    for two, one in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)
    assert (found[0][1] != pages[0].view(np.uint16)).any()
