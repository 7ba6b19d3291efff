"""Tensors on a GPU: what they do on the cpu they do there, value for value. The GPU is emulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime import ops
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph, GraphPool
from runtime.dtype import ALL_DTYPES, DType, bfloat16, bool_, float32, int32, int64
from runtime.errors import DeviceError, InvalidArgumentError
from runtime.tensor.tensor import Tensor

DEVICE = "emulated:sm_80"
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 3.5, 447.9, 448.0, 464.1, 1e-3, -2e-3, 300.0, -300.0, 65504.0, 65520.0, 1e5]
SPECIAL += [1e-8, 6e-8, 1e-40, 3e9, -3e9, 1e19, -1e19, 2.0**31, 61440.0, np.inf, -np.inf, np.nan, 0.0625, 1 / 1024]


def values(dtype: DType, count: int, seed: int = 0) -> np.ndarray:
    """Numbers of the type, hard cases among them."""
    rng = np.random.default_rng(seed)
    if dtype.is_floating:
        with np.errstate(over="ignore", invalid="ignore"):
            return (
                np.resize(np.concatenate([SPECIAL, rng.standard_normal(max(1, count)) * 20]), count)
                .astype(np.float32)
                .astype(dtype.numpy)
            )
    if dtype is bool_:
        return rng.integers(0, 2, count).astype(bool)
    limits = np.iinfo(dtype.numpy)
    hard = np.array([0, 1, limits.max, limits.min, limits.max - 1, 7], dtype.numpy)
    return np.resize(np.concatenate([hard, rng.integers(limits.min, limits.max, max(1, count), dtype.numpy)]), count)


def same(actual: Tensor, expected: Tensor, *, units: float = 0.0) -> None:
    """Equal types, shapes and bits (NaN beside NaN), or within `units` in the last place of the type."""
    assert str(actual.device) == DEVICE
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    got, want = actual.to("cpu").array, expected.array
    if not actual.dtype.is_floating:
        assert np.array_equal(got, want)
        return
    left, right = got.astype(np.float32), want.astype(np.float32)
    assert np.array_equal(np.isnan(left), np.isnan(right))
    left, right = left[~np.isnan(left)].astype(np.float64), right[~np.isnan(right)].astype(np.float64)
    infinite = np.isinf(right)
    assert np.array_equal(left[infinite], right[infinite])
    left, right = left[~infinite], right[~infinite]
    bound = units * np.maximum(np.abs(right), 2.0**-126) * np.finfo(np.float32).eps
    assert (np.abs(left - right) <= bound).all()


@pytest.mark.parametrize("source", ALL_DTYPES, ids=str)
def test_casts_between_all_dtypes(source: DType) -> None:
    on_cpu = Tensor.from_numpy(values(source, 97))
    on_gpu = on_cpu.to(DEVICE)
    for target in ALL_DTYPES:
        same(on_gpu.to(target) if target is not source else on_gpu.clone(), on_cpu.to(target))


BINARY: list[tuple[str, tuple[DType, ...], float]] = [
    *((op, (float32, bfloat16, int64, int32), 0.0) for op in ("add", "subtract", "multiply", "minimum", "maximum")),
    *((op, (float32, int64), 0.0) for op in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")),
    *((op, (int64, bool_), 0.0) for op in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    ("divide", (float32, bfloat16, int32), 0.0),
]


EACH_TIME = ("add", "less", "divide")


@pytest.mark.parametrize(
    ("op", "dtypes", "units"),
    [pytest.param(*each, id=each[0], marks=[pytest.mark.exhaustive] * (each[0] not in EACH_TIME)) for each in BINARY],
)
@pytest.mark.exhaustive_cases("divide", "less")
def test_two_operands(op: str, dtypes: tuple[DType, ...], units: float) -> None:
    for left, right in itertools.product(dtypes, dtypes):
        a, b = Tensor.from_numpy(values(left, 131, 1)), Tensor.from_numpy(values(right, 131, 2)[::-1].copy())
        operation: Callable[..., Tensor] = getattr(ops, op)
        same(operation(a.to(DEVICE), b.to(DEVICE)), operation(a, b), units=units)


@pytest.mark.parametrize("op", ["floor_divide", pytest.param("remainder", marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_floors_and_remainders(op: str) -> None:
    operation: Callable[..., Tensor] = getattr(ops, op)
    rng = np.random.default_rng(3)
    whole = rng.integers(-50, 50, 200), np.where((d := rng.integers(-9, 9, 200)) == 0, 3, d)
    lowest = np.array([-(2**63), -(2**63), 2**63 - 1]), np.array([-1, 1, -1])
    for left, right in (whole, lowest):
        a, b = Tensor.from_numpy(left.astype(np.int64)), Tensor.from_numpy(right.astype(np.int64))
        same(operation(a.to(DEVICE), b.to(DEVICE)), operation(a, b))
    a = Tensor.from_numpy((rng.standard_normal(200) * 9).astype(np.float32))
    b = Tensor.from_numpy(np.append(rng.standard_normal(199), 0.0).astype(np.float32))
    same(operation(a.to(DEVICE), b.to(DEVICE)), operation(a, b), units=1)
    with pytest.raises(InvalidArgumentError, match=f"{op}: division of integers by zero"):
        operation(Tensor.arange(3, device=DEVICE), Tensor.zeros(3, "int64", DEVICE))


def test_a_number_whose_bytes_are_alike_is_not_copied_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu.of(DEVICE)
    whole = Tensor.full((5, 3), 7, "int32", DEVICE)
    written: list[int] = []
    write = gpu.write
    monkeypatch.setattr(gpu, "write", lambda address, array: written.append(array.nbytes) or write(address, array))
    same(Tensor.zeros((3, 5), "bfloat16", DEVICE), Tensor.zeros((3, 5), "bfloat16"))
    same(Tensor.full(9, -1, "int64", DEVICE), Tensor.full(9, -1, "int64"))
    whole[1:3] = 0
    assert written == []
    same(Tensor.full(4, 1, "int32", DEVICE), Tensor.full(4, 1, "int32"))
    assert written == [16]
    assert whole.to("cpu").array.tolist() == [[7] * 3, [0] * 3, [0] * 3, [7] * 3, [7] * 3]
    assert Tensor.zeros((0, 3), "float32", DEVICE).shape == (0, 3)


FUNCTIONS = (("exp", 3.0), ("tanh", 3.0), ("sqrt", 0.0), ("log", 3.0), ("negative", 0.0), ("absolute", 0.0))


@pytest.mark.parametrize(
    ("op", "units"),
    [FUNCTIONS[0], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in FUNCTIONS[1:])],
)
def test_functions(op: str, units: float) -> None:
    normal = (np.random.default_rng(4).standard_normal(300) * 3).astype(np.float32)
    for x in (Tensor.from_numpy(normal), Tensor.from_numpy(values(float32, 60))):
        same(getattr(ops, op)(x.to(DEVICE)), getattr(ops, op)(x), units=units)


@pytest.mark.exhaustive
def test_powers_and_signs() -> None:
    rng = np.random.default_rng(4)
    a = Tensor.from_numpy((rng.random(300) * 8 + 0.01).astype(np.float32))
    b = Tensor.from_numpy((rng.standard_normal(300) * 3).astype(np.float32))
    same(a.to(DEVICE) ** b.to(DEVICE), a**b, units=8)
    whole = Tensor.from_numpy(rng.integers(-9, 9, 50))
    same(whole.to(DEVICE) ** 7, whole**7)
    with pytest.raises(InvalidArgumentError, match="power: integers to a negative power"):
        whole.to(DEVICE) ** -1
    integers = Tensor.from_numpy(values(int64, 40))
    for op in ("negative", "absolute", "invert"):
        same(getattr(ops, op)(integers.to(DEVICE)), getattr(ops, op)(integers))
    truths = Tensor.from_numpy(values(bool_, 40))
    same(~truths.to(DEVICE), ~truths)


@pytest.mark.exhaustive
def test_strides_broadcasting_and_scalars() -> None:
    base = Tensor.from_numpy(np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5))
    row = Tensor.from_numpy(np.arange(5, dtype=np.int32))
    device_base, device_row = base.to(DEVICE), row.to(DEVICE)
    cases: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, y: x.transpose(0, 3)[::2, 1:] + 1,
        lambda x, y: x + y,
        lambda x, y: x.permute(3, 1, 0, 2)[..., ::-1].clone(),
        lambda x, y: x[:, :, 1:3, ::-2] * y[::2].unsqueeze(0)[..., :3],
        lambda x, y: 2 - x[1],
        lambda x, y: x.reshape(6, 20).transpose(0, 1).reshape(4, 30),
        lambda x, y: ops.where(x > 50.5, x, y),
        lambda x, y: x[0:0] + 1,
        lambda x, y: y.expand(4, 5).clone(),
    ]
    for case in cases:
        same(case(device_base, device_row), case(base, row))
    many = Tensor.from_numpy(np.arange(2**8, dtype=np.int64).reshape((2,) * 8))
    order = (7, 0, 5, 2, 3, 4, 1, 6)
    same(many.to(DEVICE).permute(order).clone(), many.permute(order).clone())


def test_writing() -> None:
    for on in ("cpu", DEVICE):
        x = Tensor.zeros((4, 6), "float32", on)
        x[1:3, ::2] = Tensor.from_numpy(np.arange(6, dtype=np.int32).reshape(2, 3)).to(on)
        x[:, 5] = 2.5
        x[0] = np.arange(6, dtype=np.float32)
        x[2:, 1:] = x[1:3, :-1]
        if on == "cpu":
            expected = x
    same(x, expected)
    with pytest.raises(InvalidArgumentError, match="read-only"):
        x[0].expand(3, 6)[:] = 1


@pytest.mark.parametrize(
    "dtype",
    [float32, *(pytest.param(dtype, marks=pytest.mark.exhaustive) for dtype in (int64, bfloat16, int32, bool_))],
    ids=str,
)
@pytest.mark.exhaustive_cases("float32")
def test_reductions(dtype: DType) -> None:
    data = values(dtype, 7 * 5 * 300, 5).reshape(7, 5, 300)
    if dtype.is_floating:  # sums of hard cases are NaN: those are for maximum and minimum
        plain = np.random.default_rng(6).integers(-8, 8, data.shape).astype(dtype.numpy)
    else:
        plain = data
    x, hard = Tensor.from_numpy(plain), Tensor.from_numpy(data)
    # A sum of integers wraps; their mean, which does not, is of small ones.
    small = x if dtype.is_floating or dtype is bool_ else Tensor.from_numpy(data % 1000)
    for axis in (None, 0, 1, 2, (0, 2), (1, 2)):
        for name in ("sum", "mean", "max", "min"):
            tensor = {"max": hard, "min": hard, "mean": small, "sum": x}[name]
            same(getattr(tensor.to(DEVICE), name)(axis), getattr(tensor, name)(axis), units=2)
        if not isinstance(axis, tuple):
            same(hard.to(DEVICE).argmax(axis), hard.argmax(axis))
    same(x.to(DEVICE).transpose(0, 2).sum(1, keepdims=True), x.transpose(0, 2).sum(1, keepdims=True))
    same(x.to(DEVICE)[:, 0:0].sum(1), x[:, 0:0].sum(1))


@pytest.mark.exhaustive
def test_matmul() -> None:
    rng = np.random.default_rng(7)
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((3, 4), (4, 5)), ((4,), (4,)), ((2, 3, 4), (4, 7)), ((5, 1, 3, 8), (2, 8, 4)), ((17, 33), (33,)),
        ((3, 0), (0, 2)),
    ]  # fmt: skip
    for dtype in (float32, bfloat16, int32, int64, DType.parse("int8"), DType.parse("float8_e4m3")):
        for left, right in shapes:
            a = Tensor.from_numpy(rng.integers(-4, 4, left).astype(dtype.numpy))
            b = Tensor.from_numpy(rng.integers(-4, 4, right).astype(dtype.numpy))
            same(a.to(DEVICE) @ b.to(DEVICE), a @ b)
    a = Tensor.from_numpy(rng.integers(-4, 4, (6, 9)).astype(np.float32))
    same(a.to(DEVICE).transpose(0, 1) @ a.to(DEVICE), a.transpose(0, 1) @ a)


def test_devices_do_not_mix() -> None:
    here, there = Tensor.ones(3), Tensor.ones(3, device=DEVICE)
    uses: list[Callable[[], Any]] = [
        lambda: here + there, lambda: there @ here, lambda: ops.where(there > 0, there, here),
        lambda: there + Tensor.ones(3, device="emulated:sm_90a"),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(InvalidArgumentError, match=r"on emulated:sm_80.*\.to\(\)|on cpu.*\.to\(\)"):
            use()
    with pytest.raises(DeviceError, match=r"call .to\('cpu'\)"):
        there.numpy()
    same(there + np.ones(3, np.float32), here + 1)
    assert there.tolist() == [1.0, 1.0, 1.0]
    assert there.sum().item() == 3


def test_between_devices() -> None:
    array = np.random.default_rng(8).standard_normal((37, 5)).astype(np.float32)
    x = Tensor.from_numpy(array).to("emulated:sm_80")
    for device in ("emulated:sm_90a", "emulated:sm_80:1"):
        assert np.array_equal(x.to(device).to("cpu").array, array)
    assert np.array_equal(x.transpose(0, 1).to("cpu").array, array.T)
    assert x.to(DEVICE) is x


def test_strided_copies_can_be_recorded() -> None:
    """What has run once: their layouts are on the device by then."""
    gpu = Gpu.of(DEVICE)
    source = Tensor.from_numpy(np.arange(24, dtype=np.float32).reshape(2, 3, 4)).to(DEVICE)

    def work() -> Tensor:
        result = Tensor.empty((3, 7), float32, source.device)
        for part in range(2):
            first, end = part * 4, min(part * 4 + 4, 7)
            result[:, first:end] = source[part][:, : end - first]
        return result

    graph = Graph.capture(gpu, work)
    graph.replay()
    expected = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(1, 0, 2).reshape(3, 8)[:, :7]
    assert np.array_equal(graph.result.to("cpu").array, expected)


def test_numbers_and_reductions_can_be_recorded() -> None:
    """They copy nothing from the host once they have run."""
    gpu = Gpu.of(DEVICE)
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = Tensor.from_numpy(array).to(DEVICE)
    graph = Graph.capture(gpu, lambda: ((x + 1) * 0.5).sum(axis=0) + 2)
    x[:] = x + x
    graph.replay()
    assert np.array_equal(graph.result.to("cpu").array, (array + 0.5).sum(axis=0) + 2)


def test_a_recording_keeps_no_layout_in_memory_of_others() -> None:
    """A layout that a recording is the first to need stays valid when the pool's other graphs write their memory."""
    gpu = Gpu.of(DEVICE)
    pool = GraphPool(gpu)
    array = np.arange(16 * 7, dtype=np.float32).reshape(16, 7)
    x = Tensor.from_numpy(array).to(DEVICE)
    first = Graph.capture(gpu, lambda: (x + x) * (x * x), pool=pool)
    second = Graph.capture(gpu, lambda: x[:, 2:5].contiguous(), pool=pool)
    for graph, expected in ((first, 2 * array**3), (second, array[:, 2:5])):
        graph.replay()
        gpu.synchronize()
        assert np.array_equal(graph.result.to("cpu").array, expected)
