"""Creation and views of tensors against the same views of numpy arrays."""

from __future__ import annotations

import math
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import Tensor as LazyTensor
from runtime.device.device import CPU, Device
from runtime.dtype import ALL_DTYPES, DType, bfloat16, float32, int64
from runtime.errors import DeviceError, InvalidArgumentError
from runtime.tensor.tensor import Tensor
from tests.runtime.tensor_cases import LAYOUTS, assert_same, cases, laid_out, random_array


def check(tensor: Tensor, expected: Any) -> None:
    """The tensor shows exactly `expected`: through `.array`, and by its own account of its layout."""
    assert_same(tensor.array, expected)
    assert tensor.shape == expected.shape
    assert tensor.ndim == expected.ndim
    assert tensor.size == expected.size
    assert tensor.size_bytes == expected.nbytes
    assert tensor.dtype.numpy == expected.dtype
    assert tensor.is_contiguous == tensor.array.flags.c_contiguous
    fresh = Tensor(tensor.storage, tensor.dtype, tensor.shape, tensor.strides, tensor.offset)
    assert_same(fresh.array, expected)


def test_the_package_hands_on_the_same_class() -> None:
    assert LazyTensor is Tensor


# ------------------------------------------------------------------------------------ creation


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), 3, (0,), (2, 3), (2, 0, 4)])
def test_filled(dtype: DType, shape: Any) -> None:
    check(Tensor.zeros(shape, dtype), np.zeros(shape, dtype.numpy))
    check(Tensor.ones(shape, dtype.name), np.ones(shape, dtype.numpy))
    check(Tensor.full(shape, True, dtype), np.full(shape, 1, dtype.numpy))
    assert Tensor.empty(shape, dtype, "cpu").array.shape == np.empty(shape).shape


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("i8", 128), ("u8", -1), ("i32", 2**31), ("i64", 2**63), ("bool", 2), ("i8", 0.5), ("bool", 0.0)],
)
def test_a_number_that_the_type_cannot_hold_is_refused(dtype: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{value}.*{DType.parse(dtype)}"):
        Tensor.full((2,), value, dtype)


@pytest.mark.parametrize("arguments", [(5,), (2, 9), (2, 9, 3), (9, 2, -2), (3, 3), (-4, 5, 1), (5, 2)])
@pytest.mark.parametrize("dtype", ALL_DTYPES[:-1], ids=str)
def test_arange(arguments: tuple[int, ...], dtype: DType) -> None:
    if dtype.name == "uint8" and any(value < 0 for value in range(*arguments)):
        with pytest.raises(InvalidArgumentError, match="uint8"):
            Tensor.arange(*arguments, dtype=dtype)
    else:
        check(Tensor.arange(*arguments, dtype=dtype), np.array(range(*arguments), np.int64).astype(dtype.numpy))
    assert Tensor.arange(3).dtype is int64


def test_creation_refuses_nonsense() -> None:
    for bad in (lambda: Tensor.zeros((2, -1)), lambda: Tensor.zeros((2.0,)), lambda: Tensor.zeros("3")):
        with pytest.raises(InvalidArgumentError, match="shape"):
            bad()
    for bad in (
        lambda: Tensor.arange(0, 5, 0),
        lambda: Tensor.arange(1.5),
        lambda: Tensor.arange(0, 1 << 70),
    ):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="arange"):
            bad()
    with pytest.raises(InvalidArgumentError, match="dtype"):
        Tensor.zeros(3, "float64")
    with pytest.raises(DeviceError, match=r"no CUDA driver|cuda:99"):
        Tensor.zeros(3, device="cuda:99")
    for array in ([1, 2], 3, None):
        with pytest.raises(InvalidArgumentError, match="from_numpy"):
            Tensor.from_numpy(array)  # type: ignore[arg-type]
    crooked = np.zeros(4, np.dtype([("a", np.float32), ("b", np.int8)]))["a"]
    with pytest.raises(InvalidArgumentError, match="strides"):
        Tensor.from_numpy(crooked)
    with pytest.raises(InvalidArgumentError, match="float64"):
        Tensor.from_numpy(np.zeros(3))


# ------------------------------------------------------------------------------------ numpy


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_numpy_shares_memory_both_ways(dtype: DType, layout: str) -> None:
    rng = np.random.default_rng(5)
    array = laid_out(rng, random_array(rng, dtype, (3, 4, 5)), layout)
    tensor = Tensor.from_numpy(array)
    check(tensor, array)
    assert np.shares_memory(tensor.numpy(), array)
    assert tensor.numpy().ctypes.data == array.ctypes.data
    assert tensor.array is tensor.array
    assert tensor.storage.owner is array
    assert (
        tensor.storage.size_bytes == np.lib.array_utils.byte_bounds(array)[1] - np.lib.array_utils.byte_bounds(array)[0]
    )
    if not tensor.is_read_only:
        array[0, 1, 2] = 0
        assert tensor[0, 1, 2].item() == 0
        tensor[2, 3] = True
        assert array[2, 3].astype(np.float32).tolist() == [1.0] * 5


def test_numpy_cannot_bend_the_tensor() -> None:
    source = np.zeros((2, 3), np.float32)
    tensor = Tensor.from_numpy(source)
    for theirs in (source, tensor.numpy()):
        theirs.flags.writeable = False
    tensor.array[0, 0] = 1
    assert source[0, 0] == 1


def test_asarray() -> None:
    tensor = Tensor.arange(6, dtype="f32").view(2, 3)
    assert np.shares_memory(np.asarray(tensor), tensor.array)
    assert not np.shares_memory(np.array(tensor), tensor.array)
    assert np.asarray(tensor, np.int64).tolist() == [[0, 1, 2], [3, 4, 5]]


# ------------------------------------------------------------------------------------ views


def random_index(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Integers, slices, None and perhaps "..." for a random choice of the first and the last axes."""
    num_front = int(rng.integers(0, len(shape) + 1))
    num_back = int(rng.integers(0, len(shape) + 1 - num_front)) if rng.random() < 0.5 else -1
    front, back = shape[:num_front], shape[len(shape) - num_back :] if num_back > 0 else ()
    index: list[Any] = []
    for size in (*front, Ellipsis, *back) if num_back >= 0 else front:
        if rng.random() < 0.2:
            index.append(None)
        if size is Ellipsis:
            index.append(size)
        elif size and rng.random() < 0.4:
            index.append(rng.choice([int, np.int64, np.int8])(rng.integers(-size, size)))
        else:
            ends = [None if rng.random() < 0.3 else int(rng.integers(-size - 2, size + 3)) for _ in range(2)]
            index.append(slice(*ends, rng.choice([None, -3, -2, -1, 1, 2, 3])))
    return tuple(index)


def random_view(rng: np.random.Generator, tensor: Tensor, array: Any) -> tuple[Tensor, Any, bool]:
    """One random view of both, and whether it must share memory."""
    match int(rng.integers(0, 8)):
        case 0 | 1:
            index = random_index(rng, array.shape)
            return tensor[index], array[index + (() if Ellipsis in index else (Ellipsis,))], True
        case 2 if array.ndim:
            first, second = (int(axis) for axis in rng.integers(-array.ndim, array.ndim, 2))
            return tensor.transpose(first, second), array.swapaxes(first, second), True
        case 3:
            order = [int(axis) for axis in rng.permutation(array.ndim)]
            return (
                (tensor.permute(order) if rng.random() < 0.5 else tensor.permute(*order)),
                array.transpose(order),
                True,
            )
        case 4:
            axis = int(rng.integers(-array.ndim - 1, array.ndim + 1))
            return tensor.unsqueeze(axis), np.expand_dims(array, axis), True
        case 5:
            ones = [index for index, size in enumerate(array.shape) if size == 1]
            some = tuple(index - array.ndim * int(rng.integers(0, 2)) for index in ones if rng.random() < 0.5)
            if rng.random() < 0.5:
                return tensor.squeeze(), array.squeeze(), True
            return tensor.squeeze(some), np.squeeze(array, some), True
        case 6:
            front = tuple(int(size) for size in rng.integers(0, 3, rng.integers(0, 3)))
            sizes = tuple(int(rng.integers(0, 4)) if size == 1 else size for size in array.shape)
            named = tuple(-1 if rng.random() < 0.3 and size == old else size for size, old in zip(sizes, array.shape))
            return tensor.expand(*front, *named), np.broadcast_to(array, front + sizes), True
        case _:
            factors = [size for size in array.shape if size]
            random.Random(int(rng.integers(1 << 30))).shuffle(factors)
            shape = tuple(factors) if array.size else array.shape[::-1]
            if array.size and shape and rng.random() < 0.5:
                shape = (-1, *shape[1:])
            return tensor.reshape(shape), array.reshape(shape), False


@pytest.mark.parametrize("seed", range(4))
def test_random_chains_of_views(seed: int) -> None:
    """300 chains of up to six views; every link equals numpy's, and all but reshape share the storage."""
    for rng, array in cases(seed, 75):
        tensor, whole = Tensor.from_numpy(array), array
        for _ in range(int(rng.integers(1, 7))):
            previous = tensor
            tensor, array, must_share = random_view(rng, tensor, array)
            if math.prod(array.shape) > 5000:
                break
            check(tensor, array)
            assert tensor.storage is previous.storage or not must_share
        del whole
        contiguous = tensor.contiguous()
        assert contiguous.is_contiguous
        assert (contiguous is tensor) == tensor.is_contiguous
        check(contiguous, array)
        clone = tensor.clone()
        assert clone.storage is not tensor.storage
        assert not clone.is_read_only
        check(clone, array)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_view_is_reshape_where_it_exists(data: st.DataObject) -> None:
    array = np.arange(24, dtype=np.int32).reshape(
        data.draw(st.sampled_from([(24,), (2, 12), (4, 6), (2, 3, 4), (1, 24, 1)]))
    )
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    tensor = Tensor.from_numpy(array)
    shape = data.draw(
        st.sampled_from([(24,), (2, 12), (3, 8), (4, 6), (2, 3, 4), (2, 2, 6), (-1,), (2, -1), (6, -1, 1)])
    )
    reshaped = tensor.reshape(*shape)
    check(reshaped, array.reshape(shape))
    if reshaped.storage is tensor.storage:
        check(tensor.view(shape), array.reshape(shape))
    else:
        with pytest.raises(InvalidArgumentError, match="view: shape"):
            tensor.view(shape)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda t: t.view(5), "hold 6 elements"),
        (lambda t: t.reshape(-1, -1), "more than one"),
        (lambda t: t.reshape(-1, 4), "divide 6"),
        (lambda t: t.reshape(0, -1), "divide 6"),
        (lambda t: t.reshape(-2, -3), "negative"),
        (lambda t: t.reshape(2.0, 3), "integers"),
        (lambda t: t.transpose(0, 2), "axis 2"),
        (lambda t: t.permute(0, 0), "each of 2"),
        (lambda t: t.permute(0), "each of 2"),
        (lambda t: t.squeeze(0), "size 2"),
        (lambda t: t.unsqueeze(3), "axis 3"),
        (lambda t: t.expand(4, 3), "expanded"),
        (lambda t: t.expand(3), "expanded"),
        (lambda t: t.expand(-1, 2, 3), "negative"),
        (lambda t: t[2], "2 is out of range for axis 0 of size 2"),
        (lambda t: t[0, -4], "-4 is out of range for axis 1 of size 3"),
        (lambda t: t[0, 0, 0], "3 indices"),
        (lambda t: t[..., ...], "more than one"),
        (lambda t: t[::0], "step"),
        (lambda t: t["a":], "slice"),
        (lambda t: t[True], "bool"),
        (lambda t: t[[0, 1]], "list"),
        (lambda t: t[np.array([0, 1])], "ndarray"),
        (lambda t: t[t], "Tensor"),
        (lambda t: t[1.0], "float"),
        (lambda t: t.item(), "6 elements"),
        (lambda t: bool(t), "6 elements"),
        (lambda t: t.to("cuda:99"), "no CUDA driver|cuda:99"),
        (lambda t: t.to("float128"), "float128"),
        (lambda t: t.to(None), "None"),
    ],
)
def test_errors_are_ours_and_say_why(use: Any, message: str) -> None:
    with pytest.raises((InvalidArgumentError, DeviceError), match=message):
        use(Tensor.zeros((2, 3)))


# ------------------------------------------------------------------------------------ as Python values


def test_python_values() -> None:
    tensor = Tensor.arange(6, dtype="bf16").view(2, 3)
    assert len(tensor) == 2
    assert [row.tolist() for row in tensor] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    value = tensor[1, 2].item()
    assert (value, type(value)) == (5.0, float)
    assert (int(tensor[1, 1]), float(tensor[1, 1]), bool(tensor[0, 0])) == (4, 4.0, False)
    assert type(Tensor.ones(1, "i64").item()) is int
    assert Tensor.ones(1, "bool").item() is True
    with pytest.raises(TypeError, match="0-d"):
        len(tensor[0, 0])
    with pytest.raises(AttributeError, match="shap"):
        _ = tensor.shap  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        tensor.colour = 1  # type: ignore[attr-defined]
    assert {tensor: 1}[tensor] == 1


def test_repr_shows_values_shape_and_type() -> None:
    text = repr(Tensor.from_numpy(np.array([1.5, -2], ml_dtypes.bfloat16)))
    assert text == "Tensor([1.5, -2], shape=(2,), dtype=bfloat16)"
    assert len(repr(Tensor.zeros(10**6))) < 200
    tensor = Tensor.zeros(4)
    assert repr(tensor.storage) == "Storage(16 bytes on cpu, 1 tensors)"


def test_to() -> None:
    tensor = Tensor.ones((2, 3))
    assert tensor.device == CPU
    for same in ("cpu", "auto", CPU, Device("cpu"), "f32", float32, "torch.float32"):
        assert tensor.to(same) is tensor
    for both in (("cpu", "bf16"), (bfloat16, CPU), ("torch.bfloat16",)):
        moved = tensor.to(*both)
        assert (moved.dtype, moved.device) == (bfloat16, CPU)
    assert tensor.to() is tensor
