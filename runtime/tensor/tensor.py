"""The Tensor: a storage, an element type, a shape, strides and an offset.

Views (`reshape`, `transpose`, slices, `expand` ...) share their storage. Arithmetic, reductions, casts and
copies make new tensors by the functions of `runtime.tensor.arithmetic`, which has their rules; those of conversions are
in `runtime.tensor.cast`.

A tensor's shape, strides and offset never change once it is made. Strides count elements; they may be zero
(expanded axes, read-only) or negative (slices with a negative step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kernels.cpu.running.recording import NotRecordableError, current
from runtime.device.device import CPU, Device
from runtime.device.gpu import Gpu
from runtime.dtype import DType, NDArray, dtype_of_array, float32, int64
from runtime.errors import DeviceError, InvalidArgumentError
from runtime.tensor import dlpack, operators, views
from runtime.tensor.cast import cast_array
from runtime.tensor.storage import Storage
from runtime.tensor.views import Shape

Scalar = bool | int | float
Operand = Any
"""An operand beside a Tensor: a Tensor, a Python number (weak), a numpy array or scalar."""

Axes = int | Sequence[int] | None


def operation(op: str) -> Callable[..., Any]:
    """An operation of arithmetic by its name. Raises NotRecordableError while the thread's kernels are recorded:
    on the cpu they are numpy's."""
    if current() is not None:
        raise NotRecordableError(f"{op} is not a kernel on the cpu")
    found: Callable[..., Any] = getattr(operators(), op)
    return found


def _call(op: str, *arguments: Any) -> Tensor:
    result: Tensor = operation(op)(*arguments)
    return result


def _operator(op: str, *, is_reflected: bool = False) -> Callable[[Tensor, Operand], Tensor]:
    """The method of a binary operator."""

    def method(self: Tensor, other: Operand) -> Tensor:
        if not isinstance(other, (Tensor, bool, int, float, np.ndarray, np.generic)):
            return NotImplemented  # type: ignore[no-any-return]
        return _call(op, other, self) if is_reflected else _call(op, self, other)

    return method


class Tensor:
    """An n-dimensional array on a device. Made by the class methods below, rarely by the constructor.

    Attributes:
        storage: the shared bytes.
        device: where they lie.
        dtype: the element type.
        shape: sizes.
        strides: distance between neighbours along each axis, in elements.
        offset: position of the first element in the storage, in elements.
        array: the numpy view of a cpu tensor, made at the first use and kept: hot paths read it like a
            field. DeviceError on any other device.
        address: where the first element lies, on whichever device, kept likewise: a kernel's argument.
        deferred_norm: of a matrix ``[T, N]`` on a GPU, float32 ``[T, parts]`` whose rows add up to its rows' sums of
            squares, where the kernel that wrote it has left them; else None. A later write to the tensor must reset it.
    """

    __slots__ = (
        "__weakref__",
        "_share",
        "address",
        "array",
        "deferred_norm",
        "device",
        "dtype",
        "offset",
        "shape",
        "storage",
        "strides",
    )  # fmt: skip

    __array_ufunc__ = None  # numpy leaves `array + tensor` to us
    __hash__ = object.__hash__  # `==` compares elements; a tensor as a key is itself

    storage: Storage
    device: Device
    dtype: DType
    shape: Shape
    strides: Shape
    offset: int
    array: NDArray
    address: int
    deferred_norm: Tensor | None

    def __init__(self, storage: Storage, dtype: DType, shape: Shape, strides: Shape, offset: int = 0) -> None:
        self.storage = storage
        self.device = storage.device
        self._share = storage._share
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.deferred_norm = None
        if storage.address:
            self.address = storage.address + offset * dtype.itemsize

    if not TYPE_CHECKING:  # or every misspelt attribute would pass the type checker

        def __getattr__(self, name: str) -> NDArray | int:
            """Called only while a field is missing: `array` and `address` are on the cpu, until their first use."""
            if name == "address":
                self.address = self.array.__array_interface__["data"][0]
                return self.address
            if name != "array":
                raise AttributeError(f"Tensor has no attribute {name!r}")
            if self.device != CPU:
                raise DeviceError(f"numpy: the tensor is on {self.device}; call .to('cpu') first")
            self.array = self.storage.ndarray(self.dtype, self.shape, self.strides, self.offset)
            return self.array

    # ---------------------------------------------------------------- creation

    @classmethod
    def empty(cls, shape: int | Sequence[int], dtype: DType | str = float32, device: Device | str = CPU) -> Tensor:
        """Uninitialised memory. Shape: an int or a sequence of ints."""
        return cls.new(views.check_shape("empty", (shape,)), DType.parse(dtype), Device.parse(device))

    @classmethod
    def new(cls, shape: Shape, dtype: DType, device: Device) -> Tensor:
        """As `empty`, of a shape that is not checked: for results of ours."""
        storage = Storage.allocate(device, math.prod(shape) * dtype.itemsize)
        return cls(storage, dtype, shape, views.contiguous_strides(shape))

    @classmethod
    def full(
        cls,
        shape: int | Sequence[int],
        value: Scalar,
        dtype: DType | str = float32,
        device: Device | str = CPU,
    ) -> Tensor:
        """Every element is `value`, which an integer type must be able to hold."""
        tensor = cls.empty(shape, dtype, device)
        tensor[...] = value
        return tensor

    @classmethod
    def zeros(cls, shape: int | Sequence[int], dtype: DType | str = float32, device: Device | str = CPU) -> Tensor:
        return cls.full(shape, 0, dtype, device)

    @classmethod
    def ones(cls, shape: int | Sequence[int], dtype: DType | str = float32, device: Device | str = CPU) -> Tensor:
        return cls.full(shape, 1, dtype, device)

    @classmethod
    def arange(
        cls,
        start: int,
        stop: int | None = None,
        step: int = 1,
        dtype: DType | str = int64,
        device: Device | str = CPU,
    ) -> Tensor:
        """The integers of `range(start, stop, step)`, or of `range(start)`, as elements of `dtype`.

        Raises:
            InvalidArgumentError: for no integers, a step of 0, or an integer type that cannot hold them.
        """
        if stop is None:
            start, stop = 0, start
        return _call("arange", start, stop, step, dtype, device)

    @classmethod
    def from_numpy(cls, array: NDArray) -> Tensor:
        """A cpu tensor over the array's own memory: not copied, not converted, read-only where the array is.

        Any strides of whole elements and any alignment (a mapped file's, for one) will do.

        Raises:
            InvalidArgumentError: for anything but an ndarray, a dtype that no Tensor has, strides of broken
                elements.
        """
        if not isinstance(array, np.ndarray):
            raise InvalidArgumentError(f"from_numpy: expected an ndarray, got {type(array).__name__}", param="array")
        dtype = dtype_of_array(array)
        itemsize = dtype.itemsize
        if array.flags.c_contiguous:
            strides = views.contiguous_strides(array.shape)
        else:
            if any(stride % itemsize for stride in array.strides):
                raise InvalidArgumentError(
                    f"from_numpy: strides {array.strides} bytes are not whole elements of {itemsize} bytes",
                    param="array",
                )
            strides = tuple(stride // itemsize for stride in array.strides)
        storage, offset_bytes = Storage.of_array(array)
        tensor = cls(storage, dtype, array.shape, strides, offset_bytes // itemsize)
        if type(array) is np.ndarray and not views.has_overlap(array.shape, strides):
            tensor.array = array.view()
        return tensor

    @classmethod
    def over(cls, array: NDArray, dtype: DType) -> Tensor:
        """A cpu tensor over a new C-contiguous array of `dtype`, which is not checked: for results of ours."""
        storage = Storage(CPU, array.nbytes, array, array)
        tensor = cls(storage, dtype, array.shape, views.contiguous_strides(array.shape))
        tensor.array = array
        return tensor

    @classmethod
    def from_dlpack(cls, source: Any) -> Tensor:
        """A tensor over the memory of any object that speaks DLPack (numpy, torch, jax ...), without a copy.

        Raises:
            InvalidArgumentError: for an object that does not speak it, is on neither the cpu nor a CUDA device, or has
                a type that we lack.
        """
        kind, index = source.__dlpack_device__() if hasattr(source, "__dlpack_device__") else dlpack.CPU_DEVICE
        if kind != dlpack.CUDA:
            return cls.from_numpy(dlpack.import_array(source))
        device = Device(f"cuda:{index}")
        stream = int(Gpu.of(device).stream.handle)
        try:
            try:
                capsule = source.__dlpack__(stream=stream, max_version=(1, 0))
            except TypeError:  # a producer from before DLPack 1
                capsule = source.__dlpack__(stream=stream)
            held = dlpack.Imported(capsule)
        except (BufferError, RuntimeError, ValueError) as error:
            raise InvalidArgumentError(
                f"from_dlpack: cannot take a {type(source).__name__}: {error}", param="source"
            ) from error
        if held.is_read_only:
            raise InvalidArgumentError("from_dlpack: the memory is read-only", param="source")
        return cls.over_device(device, held.address, held.dtype, held.shape, held.strides, held)

    @classmethod
    def from_cuda(cls, source: Any) -> Tensor:
        """A tensor over the memory of any object with ``__cuda_array_interface__`` (CuPy, Numba ...), without a copy.

        Waits for the object's stream, where it names one.

        Raises:
            InvalidArgumentError: for an object without this interface, a type that we lack, or read-only memory.
        """
        if not hasattr(source, "__cuda_array_interface__"):
            raise InvalidArgumentError(
                f"from_cuda: a {type(source).__name__} has no __cuda_array_interface__", param="source"
            )
        address, dtype, shape, strides = dlpack.parse_array_interface(source)
        device = Device("cuda:0")
        if source.__cuda_array_interface__.get("stream") is not None:
            Gpu.of(device).synchronize()
        return cls.over_device(device, address, dtype, shape, strides, source)

    @classmethod
    def over_device(
        cls, device: Device, address: int, dtype: DType, shape: Shape, strides: Shape | None, owner: object
    ) -> Tensor:
        """A tensor over another library's memory on a GPU, which `owner` keeps valid."""
        steps = views.contiguous_strides(shape) if strides is None else strides
        lowest = sum((size - 1) * step for size, step in zip(shape, steps) if size and step < 0)
        extent = 1 + sum((size - 1) * abs(step) for size, step in zip(shape, steps) if size)
        size_bytes = extent * dtype.itemsize if all(shape) else 0
        storage = Storage(device, size_bytes, None, owner, address + lowest * dtype.itemsize)
        return cls(storage, dtype, shape, steps, -lowest)

    # ---------------------------------------------------------------- what it is

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements: fewer than the storage's for a slice, more for an expanded tensor."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return views.is_contiguous(self.shape, self.strides)

    @property
    def is_read_only(self) -> bool:
        """Whether writing is refused: the storage is read-only, or an expanded axis makes it overlap."""
        return self.storage.is_read_only or views.has_overlap(self.shape, self.strides)

    # ---------------------------------------------------------------- views

    def _view(self, shape: Shape, strides: Shape, offset: int) -> Tensor:
        return Tensor(self.storage, self.dtype, shape, strides, offset)

    def view(self, *shape: Any) -> Tensor:
        """The same elements in another shape, of which one size may be -1, without a copy.

        Raises:
            InvalidArgumentError: for another number of elements, or where the strides allow only a copy.
        """
        new_shape = views.resolve_shape("view", shape, self.size)
        strides = views.reshaped_strides(self.shape, self.strides, new_shape)
        if strides is None:
            raise InvalidArgumentError(
                f"view: shape {self.shape} with strides {self.strides} cannot be seen as {new_shape}",
                param="shape",
            )
        return self._view(new_shape, strides, self.offset)

    def reshape(self, *shape: Any) -> Tensor:
        """As `view`, but a copy where there is no view.

        Raises:
            InvalidArgumentError: for another number of elements.
        """
        new_shape = views.resolve_shape("reshape", shape, self.size)
        strides = views.reshaped_strides(self.shape, self.strides, new_shape)
        if strides is None:
            return self.clone().view(new_shape)
        return self._view(new_shape, strides, self.offset)

    def transpose(self, axis0: int, axis1: int) -> Tensor:
        """The view with two axes exchanged."""
        axes = list(range(self.ndim))
        first = views.check_axis("transpose", axis0, self.ndim)
        second = views.check_axis("transpose", axis1, self.ndim)
        axes[first], axes[second] = second, first
        return self.permute(axes)

    def permute(self, *axes: Any) -> Tensor:
        """The view whose axis i is axis `axes[i]` of this one.

        Raises:
            InvalidArgumentError: where `axes` is not each axis once.
        """
        given = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        order = [views.check_axis("permute", axis, self.ndim) for axis in given]
        if sorted(order) != list(range(self.ndim)):
            raise InvalidArgumentError(
                f"permute: axes {tuple(given)} are not each of {self.ndim} axes once", param="axes"
            )
        shape = tuple(self.shape[axis] for axis in order)
        return self._view(shape, tuple(self.strides[axis] for axis in order), self.offset)

    def __getitem__(self, index: Any) -> Tensor:
        """A view by integers, slices (any step but 0), `...` and None, as in numpy.

        Raises:
            InvalidArgumentError: for an index out of range, or of another kind.
        """
        return self._view(*views.index_view(self.shape, self.strides, self.offset, index))

    def squeeze(self, axis: int | Sequence[int] | None = None) -> Tensor:
        """The view without the given axes, all of size 1, or without every axis of size 1.

        Raises:
            InvalidArgumentError: for an axis of another size.
        """
        if axis is None:
            axes = tuple(index for index, size in enumerate(self.shape) if size == 1)
        else:
            axes = views.check_axes("squeeze", axis, self.ndim)
        for index in axes:
            if self.shape[index] != 1:
                raise InvalidArgumentError(f"squeeze: axis {index} has size {self.shape[index]}, not 1", param="axis")
        kept = [index for index in range(self.ndim) if index not in axes]
        shape = tuple(self.shape[index] for index in kept)
        return self._view(shape, tuple(self.strides[index] for index in kept), self.offset)

    def unsqueeze(self, axis: int) -> Tensor:
        """The view with a new axis of size 1 at position `axis` of the result."""
        position = views.check_axis("unsqueeze", axis, self.ndim + 1)
        return self[(slice(None),) * position + (None,)]

    def expand(self, *shape: Any) -> Tensor:
        """The view that repeats axes of size 1 to the given sizes and adds axes in front; -1 keeps a size.

        Repeated elements are one in memory, so the result is read-only.

        Raises:
            InvalidArgumentError: where an axis of another size than 1 would change.
        """
        return self._view(*views.expanded_strides("expand", self.shape, self.strides, shape), self.offset)

    # ---------------------------------------------------------------- copies and writes

    def clone(self) -> Tensor:
        """A contiguous, writeable copy in memory of its own."""
        return _call("copy", self)

    def contiguous(self) -> Tensor:
        """This tensor where it is contiguous, else a contiguous copy."""
        return self if self.is_contiguous else self.clone()

    def to(self, *targets: DType | Device | str) -> Tensor:
        """This tensor on a device, in an element type, or both, in any order; itself where it is so already.

        Example: `tensor.to("cpu", bfloat16)`. `runtime.tensor.cast` has the rules of conversion.

        Raises:
            DeviceError: for a device that this build does not have.
            InvalidArgumentError: for an argument that is neither a device nor a type.
        """
        tensor = self
        for target in targets:
            is_device = isinstance(target, Device) or (isinstance(target, str) and Device.is_name(target))
            tensor = _call("to_device" if is_device else "cast", tensor, target)
        return tensor

    def __setitem__(self, index: Any, value: Operand) -> None:
        """Writes a tensor that broadcasts, cast to this type, or a Python number, over `self[index]`.

        Raises:
            InvalidArgumentError: where the memory is read-only, or shapes or values do not fit.
        """
        _call("assign", self[index], value)

    # ---------------------------------------------------------------- arithmetic (runtime.ops)

    __add__, __radd__ = _operator("add"), _operator("add", is_reflected=True)
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", is_reflected=True)
    __mul__, __rmul__ = _operator("multiply"), _operator("multiply", is_reflected=True)
    __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", is_reflected=True)
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _operator("floor_divide", is_reflected=True)
    __mod__, __rmod__ = _operator("remainder"), _operator("remainder", is_reflected=True)
    __pow__, __rpow__ = _operator("power"), _operator("power", is_reflected=True)
    __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", is_reflected=True)
    __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", is_reflected=True)
    __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", is_reflected=True)
    __matmul__, __rmatmul__ = _operator("matmul"), _operator("matmul", is_reflected=True)
    __eq__ = _operator("equal")  # type: ignore[assignment]
    __ne__ = _operator("not_equal")  # type: ignore[assignment]
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")

    def __neg__(self) -> Tensor:
        return _call("negative", self)

    def __abs__(self) -> Tensor:
        return _call("absolute", self)

    def __invert__(self) -> Tensor:
        return _call("invert", self)

    def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Sum over an axis, several, or all; of bools and integers in int64."""
        return _call("reduce_sum", self, axis, keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Mean over an axis, several, or all; of bools and integers in float32."""
        return _call("reduce_mean", self, axis, keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Largest element over an axis, several, or all; NaN where there is one."""
        return _call("reduce_max", self, axis, keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Smallest element over an axis, several, or all; NaN where there is one."""
        return _call("reduce_min", self, axis, keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """int64 position of the first largest element (or NaN) along an axis, or of all in order."""
        return _call("argmax", self, axis, keepdims)

    # ---------------------------------------------------------------- as values of others

    def numpy(self) -> NDArray:
        """A numpy view of the same memory, with the dtypes of ml_dtypes for bfloat16 and fp8.

        Raises:
            DeviceError: where the tensor is not on the cpu.
        """
        return self.array.view()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule over the same memory (https://data-apis.org/array-api), which it keeps alive.

        Raises:
            BufferError: for another device, negative strides, or read-only memory and a consumer from before
                DLPack 1.
        """
        if self.device.kind == "cpu":
            return dlpack.export_array(
                self.array, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
            )
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"DLPack: a tensor on {self.device} is shared where it lies, not copied")
        if stream != -1:  # the consumer's stream is not ordered with ours
            self._gpu().stream.synchronize()
        return dlpack.export(
            self, self.address, self.device, self.dtype, self.shape, self.strides,
            is_versioned=max_version is not None and max_version[0] >= 1, is_read_only=self.is_read_only,
        )  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.device.kind == "cpu":
            return dlpack.CPU_DEVICE
        if self.device.kind != "cuda":
            raise BufferError(f"DLPack: memory of {self.device} is no GPU's; export .to('cpu')")
        return dlpack.CUDA, self.device.index

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3, of a tensor on a CUDA device."""
        stream = self._gpu().stream.handle if self.device.kind == "cuda" else 0
        return dlpack.array_interface(
            self.address if self.device.kind == "cuda" else 0, self.device, self.dtype, self.shape, self.strides,
            is_contiguous=self.is_contiguous, stream=int(stream),
        )  # fmt: skip

    def _gpu(self) -> Gpu:
        return Gpu.of(self.device)

    def item(self) -> Scalar:
        """The only element as a Python number.

        Raises:
            InvalidArgumentError: where there is not exactly one.
        """
        if self.size != 1:
            raise InvalidArgumentError(f"item: shape {self.shape} has {self.size} elements, not one")
        value: Scalar = self.reshape(()).tolist()
        return value

    def tolist(self) -> Any:
        """The elements as Python numbers, in lists nested as the axes are; a number for a 0-d tensor."""
        array = self.to("cpu").array
        return (cast_array(array, float32) if self.dtype.is_floating else array).tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        if self.device != CPU:
            return f"Tensor(shape={self.shape}, dtype={self.dtype}, device={self.device})"
        body = np.array2string(self.array, separator=", ", prefix="Tensor(", threshold=100)
        return f"Tensor({body}, shape={self.shape}, dtype={self.dtype})"
