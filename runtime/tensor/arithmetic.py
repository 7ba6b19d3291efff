"""Generic arithmetic on tensors: the implementation of Tensor's operators, reached through `runtime.ops`.

For glue, tests and small things: the operations that carry a model's weight are kernels of their own. Every
result is a new, contiguous tensor. The rules are the same on every device:

- Operands broadcast as in numpy and meet in `promote(left, right)`; Python numbers are weak
  (`promote_scalar`), but an integer must fit the type that it meets. Arithmetic counts bools as int64.
- Floating point of any width is computed in float32 and rounded once to the result's type. A Python number
  beside a narrow tensor enters as float32.
- `/` of integers gives float32. `//` and `%` round towards minus infinity; an integer divisor of 0 is an
  error, as is a negative integer exponent. Integers that overflow wrap.
- NaN travels: arithmetic, minimum, maximum and every reduction hand it on, and argmax finds the first one.
  Comparisons with it are False, `!=` is True.
- sum of bools and integers is int64, mean of them float32; both keep a floating-point type and accumulate in
  at least float32. The mean of no elements is NaN, its sum 0, its maximum an error.
- matmul accumulates in float32; 8-bit integers give int32.

Every error is an InvalidArgumentError that names the operation. On the cpu numpy computes, in float64 where that costs
little; on a GPU `runtime.backends.cuda_arithmetic` does, and numpy operands are copied to the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime.backends import backend_of, cuda_tensor
from runtime.device.device import Device
from runtime.dtype import DType, NDArray, bool_, float32, int32, int64, promote, promote_scalar
from runtime.errors import InvalidArgumentError
from runtime.tensor import views
from runtime.tensor.cast import cast_array
from runtime.tensor.tensor import Operand, Scalar, Tensor

__all__ = [
    "absolute", "add", "arange", "argmax", "assign", "bitwise_and", "bitwise_or", "bitwise_xor", "cast", "copy",
    "divide", "equal", "exp", "floor_divide", "greater", "greater_equal", "invert", "less", "less_equal", "log",
    "matmul", "maximum", "minimum", "multiply", "negative", "not_equal", "power", "reduce_max", "reduce_mean",
    "reduce_min", "reduce_sum", "remainder", "sqrt", "subtract", "tanh", "to_device", "where",
]  # fmt: skip

Axes = int | Sequence[int] | None

# ------------------------------------------------------------------------------------------ memory


def arange(start: int, stop: int, step: int, dtype: DType | str, device: Device | str) -> Tensor:
    """The integers of `range(start, stop, step)`."""
    target = DType.parse(dtype)
    try:
        values = range(start, stop, step)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"arange: {error}") from None
    for end in values[:1], values[-1:]:
        for value in end:
            _scalar("arange", value, target)
    return to_device(_result(np.arange(start, stop, step, dtype=np.int64), target), device)


def assign(target: Tensor, source: Operand) -> Tensor:
    """Writes `source`, a tensor that broadcasts to the target's shape or a Python number, over the target,
    and returns the target.

    A tensor of another type is cast by the rules of `runtime.tensor.cast`; a Python number must be of a kind and a
    size that the type can hold.
    """
    if target.is_read_only:
        raise InvalidArgumentError("assign: the tensor is read-only; write to a clone()", param="target")
    if isinstance(source, (bool, int, float)):
        value = _scalar("assign", source, target.dtype)
    else:
        tensor = _tensor("assign", source)
        views.expanded_strides("assign", tensor.shape, tensor.strides, target.shape)
        if target.device.kind != "cpu":
            return _gpu_assign(target, tensor)
        value = _one_device("assign", target.device, tensor).array
    if target.device.kind != "cpu":
        return _gpu_assign(target, Tensor.from_numpy(value))
    target.array[...] = cast_array(value, target.dtype)
    return target


def _gpu_assign(target: Tensor, source: Tensor) -> Tensor:
    if source.device.kind == "cpu" and target.is_contiguous:
        if source.size == 1:
            cuda_tensor.fill(target, source.array)
        else:
            cuda_tensor.write(target, np.broadcast_to(source.array, target.shape))
        return target
    if source.device.kind == "cpu":
        source = source.to(target.device)
    _one_device("assign", target.device, source)
    if source.storage is target.storage:
        source = copy(source)
    compute = float32 if source.dtype.is_floating or target.dtype.is_floating else int64
    backend_of(target.device).write_elementwise("copy", [source], target, compute)
    return target


def copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in memory of its own."""
    if tensor.device.kind != "cpu":
        return _gpu_cast(tensor, tensor.dtype)
    result = Tensor.empty(tensor.shape, tensor.dtype, tensor.device)
    result.array[...] = tensor.array
    return result


def cast(tensor: Tensor, dtype: DType | str) -> Tensor:
    """The same values in another type, by the rules of `runtime.tensor.cast`; the tensor itself where it has it."""
    target = DType.parse(dtype)
    if target is tensor.dtype:
        return tensor
    return _gpu_cast(tensor, target) if tensor.device.kind != "cpu" else _result(tensor.array, target)


def _gpu_cast(tensor: Tensor, dtype: DType) -> Tensor:
    compute = float32 if tensor.dtype.is_floating or dtype.is_floating else int64
    result: Tensor = backend_of(tensor.device).elementwise("copy", [tensor], dtype, compute)
    return result


def to_device(tensor: Tensor, device: Device | str) -> Tensor:
    """The same values on another device; the tensor itself where it is there.

    Raises:
        DeviceError: for a device that is not there.
    """
    target = Device.parse(device)
    if target == tensor.device:
        return tensor
    return cuda_tensor.to_device(tensor, target)


# ------------------------------------------------------------------------------------- elementwise


def where(condition: Tensor, left: Operand, right: Operand) -> Tensor:
    """Elements of `left` where the bool tensor `condition` is True, of `right` elsewhere."""
    if condition.dtype is not bool_:
        raise InvalidArgumentError(f"where: condition is {condition.dtype}, not bool", param="condition")
    if (device := _gpu_among(condition, left, right)) is not None:
        operands, dtype = _on_gpu("where", device, left, right)
        _one_device("where", device, condition)
        result: Tensor = backend_of(device).elementwise("where", [condition, *operands], dtype, _gpu_computes_in(dtype))
        return result
    arrays, dtype = _operands("where", left, right)
    views.broadcast_shapes("where", condition.shape, *(array.shape for array in arrays))
    return _result(np.where(condition.array, *arrays), dtype)


def invert(tensor: Tensor) -> Tensor:
    """Logical not of bools; every bit of an integer turned."""
    _refuse_float("invert", tensor, tensor)
    return _unary(np.invert, tensor, gpu_name="invert_bool" if tensor.dtype is bool_ else None)


# -------------------------------------------------------------------------------------- reductions


def reduce_sum(tensor: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Sum over an axis, several, or all (None)."""
    axes = views.check_axes("sum", axis, tensor.ndim)
    dtype = tensor.dtype if tensor.dtype.is_floating else int64
    if tensor.device.kind != "cpu":
        return _gpu_reduce("sum", tensor, axes, keepdims)
    # float64 costs the cpu little and makes the result independent of the memory's order but for rounding.
    accumulator = np.float64 if dtype.is_floating else np.int64
    return _result(_reduce(np.add, tensor, axes, keepdims, accumulator), dtype)


def reduce_mean(tensor: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Arithmetic mean over an axis, several, or all (None)."""
    axes = views.check_axes("mean", axis, tensor.ndim)
    if tensor.device.kind != "cpu":
        return _gpu_reduce("mean", tensor, axes, keepdims)
    total = _reduce(np.add, tensor, axes, keepdims, np.float64)
    count = math.prod(tensor.shape[index] for index in axes)
    with np.errstate(all="ignore"):
        return _result(np.true_divide(total, count), _as_float(tensor.dtype))


def argmax(tensor: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """int64 position of the first largest element along an axis, or among all in row-major order (None)."""
    position = None if axis is None else views.check_axis("argmax", axis, tensor.ndim)
    _refuse_nothing("argmax", tensor, views.check_axes("argmax", axis, tensor.ndim))
    if tensor.device.kind != "cpu":
        return _gpu_reduce("argmax", tensor, views.check_axes("argmax", axis, tensor.ndim), keepdims)
    array = cast_array(tensor.array, _computed_in(tensor.dtype))
    return _result(np.argmax(array, axis=position, keepdims=keepdims), int64)


# ------------------------------------------------------------------------------------------ matmul


def matmul(left: Operand, right: Operand) -> Tensor:
    """Matrix product `[..., M, K] @ [..., K, N] -> [..., M, N]`; vectors and batches as in numpy."""
    first, second = _tensor("matmul", left), _tensor("matmul", right)
    device = _gpu_among(first, second)
    if device is not None:
        first, second = _taken_to("matmul", device, left, first), _taken_to("matmul", device, right, second)
    dtype = promote(first.dtype, second.dtype)
    if dtype is bool_ or not first.shape or not second.shape:
        raise InvalidArgumentError(
            f"matmul: {first.dtype} {first.shape} with {second.dtype} {second.shape}; it takes vectors, "
            "matrices and batches of them, of numbers"
        )
    if first.shape[-1] != second.shape[-2:][0]:
        raise InvalidArgumentError(f"matmul: inner sizes of {first.shape} and {second.shape} differ")
    views.broadcast_shapes("matmul", first.shape[:-2], second.shape[:-2])
    if device is not None:
        on_gpu: Tensor = backend_of(device).matmul(first, second, dtype)
        return on_gpu
    if dtype.itemsize == 1 and not dtype.is_floating:
        # 8-bit products and their sums are exact in float64 for up to 2**37 terms, and BLAS is fast there.
        product = np.matmul(first.array.astype(np.float64), second.array.astype(np.float64))
        return _result(product.astype(np.int64), int32)
    compute = _computed_in(dtype)
    with np.errstate(all="ignore"):
        product = np.matmul(cast_array(first.array, compute), cast_array(second.array, compute))
    return _result(product, dtype)


# ------------------------------------------------------------------------------------- how it is done

_Lift = Callable[[DType], DType]
_Check = Callable[[str, Tensor, Tensor], None]


def _as_is(dtype: DType) -> DType:
    return dtype


def _as_number(dtype: DType) -> DType:
    return int64 if dtype is bool_ else dtype


def _as_comparable(dtype: DType) -> DType:
    return dtype if dtype.is_floating else int64


def _as_float(dtype: DType) -> DType:
    return dtype if dtype.is_floating else float32


def _computed_in(dtype: DType) -> DType:
    return float32 if dtype.is_floating else dtype


def _result(values: Any, dtype: DType) -> Tensor:
    """A contiguous tensor of what numpy computed, in the type that the rules give it.

    float64, which only accumulators have, is rounded to float32 first.
    """
    array = np.asarray(values)
    if array.dtype == np.float64:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    return Tensor.from_numpy(np.asarray(cast_array(array, dtype), order="C"))


def _tensor(op: str, operand: Operand) -> Tensor:
    if isinstance(operand, Tensor):
        return operand
    if isinstance(operand, (np.ndarray, np.generic)):
        return Tensor.from_numpy(np.asarray(operand))
    raise InvalidArgumentError(f"{op}: {type(operand).__name__} is neither a tensor nor a number")


def _scalar(op: str, value: Scalar, dtype: DType) -> NDArray:
    """A Python number as a 0-d array of the type that `dtype` is computed in."""
    if dtype.is_floating:
        try:
            with np.errstate(over="ignore"):
                return np.asarray(float(value)).astype(np.float32)
        except OverflowError:
            raise InvalidArgumentError(f"{op}: an integer is too large for {dtype}") from None
    if isinstance(value, float):
        raise InvalidArgumentError(f"{op}: {value} is not of type {dtype}")
    lowest, highest = (0, 1) if dtype is bool_ else (np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max)
    if not lowest <= value <= highest:
        raise InvalidArgumentError(f"{op}: {value} is outside {dtype}, which holds {lowest} to {highest}")
    return np.asarray(value, dtype.numpy)


def _gpu_among(*operands: Operand) -> Device | None:
    """The GPU that the operands' tensors lie on, or None for the cpu."""
    devices = [operand.device for operand in operands if isinstance(operand, Tensor)]
    return next((device for device in devices if device.kind != "cpu"), None)


def _one_device(op: str, device: Device, tensor: Tensor) -> Tensor:
    """The tensor, if it is on this device."""
    if tensor.device != device:
        raise InvalidArgumentError(f"{op}: one tensor is on {device}, another on {tensor.device}; call .to()")
    return tensor


def _taken_to(op: str, device: Device, original: Operand, tensor: Tensor) -> Tensor:
    """Moves a numpy array or number to the device; a Tensor must be there already."""
    return _one_device(op, device, tensor) if isinstance(original, Tensor) else cuda_tensor.operand(tensor, device)


def _gpu_computes_in(dtype: DType) -> DType:
    return float32 if dtype.is_floating else int64


def _on_gpu(op: str, device: Device, left: Operand, right: Operand, lift: _Lift = _as_is) -> tuple[list[Tensor], DType]:
    """Both operands as tensors on a GPU, and the type in which they meet."""
    given, met = _met(op, left, right)
    dtype = lift(met)
    tensors = [
        operand if isinstance(operand, Tensor) else Tensor.from_numpy(_scalar(op, operand, dtype)) for operand in given
    ]
    return [_taken_to(op, device, *pair) for pair in zip((left, right), tensors)], dtype


def _gpu_reduce(operation: str, tensor: Tensor, axes: views.Shape, keepdims: bool) -> Tensor:
    result: Tensor = backend_of(tensor.device).reduce(operation, tensor, axes, keepdims)
    return result


def _met(op: str, left: Operand, right: Operand) -> tuple[list[Tensor | Scalar], DType]:
    """Both operands as tensors and numbers, and the type in which they meet."""
    operands = [
        operand if isinstance(operand, (bool, int, float)) else _tensor(op, operand) for operand in (left, right)
    ]
    match operands:
        case Tensor() as first, Tensor() as second:
            met = promote(first.dtype, second.dtype)
        case (Tensor() as tensor, bool() | int() | float() as number) | (
            bool() | int() | float() as number,
            Tensor() as tensor,
        ):
            met = promote_scalar(tensor.dtype, number)
        case _:
            raise InvalidArgumentError(f"{op}: neither operand is a tensor")
    return operands, met


def _operands(op: str, left: Operand, right: Operand, lift: _Lift = _as_is) -> tuple[list[NDArray], DType]:
    """Both operands in the type that they are computed in, and the type in which they meet."""
    operands, met = _met(op, left, right)
    dtype = lift(met)
    compute = _computed_in(dtype)
    arrays = [
        cast_array(operand.array, compute) if isinstance(operand, Tensor) else _scalar(op, operand, dtype)
        for operand in operands
    ]
    return arrays, dtype


def _binary(
    op: str,
    function: np.ufunc,
    left: Operand,
    right: Operand,
    lift: _Lift = _as_is,
    *,
    result: DType | None = None,
    check: _Check | None = None,
) -> Tensor:
    if (device := _gpu_among(left, right)) is not None:
        tensors, dtype = _on_gpu(op, device, left, right, lift)
        views.broadcast_shapes(op, tensors[0].shape, tensors[1].shape)
        if check is not None:
            check(op, tensors[0], tensors[1])
        computed: Tensor = backend_of(device).elementwise(op, tensors, result or dtype, _gpu_computes_in(dtype))
        return computed
    arrays, dtype = _operands(op, left, right, lift)
    views.broadcast_shapes(op, arrays[0].shape, arrays[1].shape)
    if check is not None:
        check(op, Tensor.from_numpy(arrays[0]), Tensor.from_numpy(arrays[1]))
    with np.errstate(all="ignore"):
        return _result(function(*arrays), result or dtype)


def _unary(function: np.ufunc, tensor: Tensor, lift: _Lift = _as_is, *, gpu_name: str | None = None) -> Tensor:
    """`gpu_name` is the GPU operation's name where it differs from numpy's."""
    dtype = lift(tensor.dtype)
    if tensor.device.kind != "cpu":
        name = gpu_name or function.__name__
        result: Tensor = backend_of(tensor.device).elementwise(name, [tensor], dtype, _gpu_computes_in(dtype))
        return result
    with np.errstate(all="ignore"):
        return _result(function(cast_array(tensor.array, _computed_in(dtype))), dtype)


def _reduce(function: np.ufunc, tensor: Tensor, axes: views.Shape, keepdims: bool, accumulator: Any = None) -> NDArray:
    array = cast_array(tensor.array, _computed_in(tensor.dtype))
    with np.errstate(all="ignore"):
        reduced: NDArray = function.reduce(array, axis=axes, dtype=accumulator, keepdims=keepdims)
    return reduced


def _refuse_float(op: str, left: Tensor, right: Tensor) -> None:
    if left.dtype.is_floating or right.dtype.is_floating:
        raise InvalidArgumentError(f"{op}: takes bools and integers, not floating point")


def _refuse_zero(op: str, left: Tensor, right: Tensor) -> None:
    is_integer = not left.dtype.is_floating and not right.dtype.is_floating
    if is_integer and left.size and not right.to("cpu").array.all():
        raise InvalidArgumentError(f"{op}: division of integers by zero")


def _refuse_negative(op: str, left: Tensor, right: Tensor) -> None:
    is_integer = not left.dtype.is_floating and not right.dtype.is_floating
    if is_integer and left.size and (right.to("cpu").array < 0).any():
        raise InvalidArgumentError(f"{op}: integers to a negative power")


def _refuse_nothing(op: str, tensor: Tensor, axes: views.Shape) -> None:
    if any(tensor.shape[index] == 0 for index in axes):
        raise InvalidArgumentError(f"{op}: nothing to choose from along axes {axes} of shape {tensor.shape}")


# ------------------------------------------------------------------------------------------- tables


def _binary_operation(
    op: str, function: np.ufunc, lift: _Lift = _as_is, *, result: DType | None = None, check: _Check | None = None
) -> Callable[[Operand, Operand], Tensor]:
    return lambda left, right: _binary(op, function, left, right, lift, result=result, check=check)


def _unary_operation(function: np.ufunc, lift: _Lift) -> Callable[[Tensor], Tensor]:
    return lambda tensor: _unary(function, tensor, lift)


def _extreme(op: str, function: np.ufunc) -> Callable[..., Tensor]:
    def reduce(tensor: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
        axes = views.check_axes(op, axis, tensor.ndim)
        _refuse_nothing(op, tensor, axes)
        if tensor.device.kind != "cpu":
            return _gpu_reduce(op, tensor, axes, keepdims)
        return _result(_reduce(function, tensor, axes, keepdims), tensor.dtype)

    return reduce


add = _binary_operation("add", np.add, _as_number)
subtract = _binary_operation("subtract", np.subtract, _as_number)
multiply = _binary_operation("multiply", np.multiply, _as_number)
divide = _binary_operation("divide", np.true_divide, _as_float)
floor_divide = _binary_operation("floor_divide", np.floor_divide, _as_number, check=_refuse_zero)
remainder = _binary_operation("remainder", np.remainder, _as_number, check=_refuse_zero)
power = _binary_operation("power", np.power, _as_number, check=_refuse_negative)
minimum = _binary_operation("minimum", np.minimum)
maximum = _binary_operation("maximum", np.maximum)
bitwise_and = _binary_operation("bitwise_and", np.bitwise_and, check=_refuse_float)
bitwise_or = _binary_operation("bitwise_or", np.bitwise_or, check=_refuse_float)
bitwise_xor = _binary_operation("bitwise_xor", np.bitwise_xor, check=_refuse_float)
equal = _binary_operation("equal", np.equal, _as_comparable, result=bool_)
not_equal = _binary_operation("not_equal", np.not_equal, _as_comparable, result=bool_)
less = _binary_operation("less", np.less, _as_comparable, result=bool_)
less_equal = _binary_operation("less_equal", np.less_equal, _as_comparable, result=bool_)
greater = _binary_operation("greater", np.greater, _as_comparable, result=bool_)
greater_equal = _binary_operation("greater_equal", np.greater_equal, _as_comparable, result=bool_)
negative = _unary_operation(np.negative, _as_number)
absolute = _unary_operation(np.absolute, _as_number)
exp = _unary_operation(np.exp, _as_float)
log = _unary_operation(np.log, _as_float)  # -inf at 0, NaN below
sqrt = _unary_operation(np.sqrt, _as_float)  # NaN below 0
tanh = _unary_operation(np.tanh, _as_float)
reduce_max, reduce_min = _extreme("max", np.maximum), _extreme("min", np.minimum)
"""Largest and smallest element over an axis, several, or all (None)."""
