"""Kernels that are loaded on a device, and launches whose configuration is built once."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

from numba_kernels.cuda.specialisation import Launch, Specialisation
from runtime.device.compiled_kernel import CompiledKernel
from runtime.device.context import Context, Stream, current
from runtime.device.errors import LaunchError
from runtime.errors import InvalidArgumentError

Argument = int | float | bytes
"""A kernel's argument: a number, an address, or a tensor map."""

UNASKED_SHARED_BYTES = 48 << 10
"""Shared memory that a kernel may have without asking for more, its own arrays included."""

MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)
MOST_THREADS = 1024
MOST_CLUSTER_BLOCKS = 8  # more are not portable


class Kernel:
    """A kernel in a device's memory."""

    def __init__(self, context: Context, specialisation: Specialisation, compiled: CompiledKernel) -> None:
        self.context = context
        self.specialisation = specialisation
        self.compiled = compiled
        self._module = context.call("cuModuleLoadData", compiled.image)
        self.function = context.call("cuModuleGetFunction", self._module, compiled.name.encode())
        # A PTX's static size is unknown here, so each larger size is set.
        self._shared_bytes = 0 if compiled.is_ptx else UNASKED_SHARED_BYTES - compiled.static_shared_bytes

    def allow_shared(self, size_bytes: int) -> None:
        """Lets launches have so much dynamic shared memory."""
        if size_bytes > self._shared_bytes:
            attribute = self.context.driver.types.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.context.call("cuFuncSetAttribute", self.function, attribute, size_bytes)
            self._shared_bytes = size_bytes


class Arguments:
    """A kernel's arguments in memory, as the driver takes them: an array of pointers to one value each.

    `address`: of the pointers.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.specialisation = kernel.specialisation
        self.codes, packing, offsets = _packing_of(kernel.compiled.argument_format)
        self.buffer = (ctypes.c_char * max(1, packing.size))()
        self.pack_into = packing.pack_into
        base = ctypes.addressof(self.buffer)
        self._pointers = (ctypes.c_void_p * max(1, len(offsets)))(*[base + offset for offset in offsets])
        self.address = ctypes.addressof(self._pointers)

    def pack(self, *arguments: Argument) -> None:
        """Raises InvalidArgumentError for a wrong number or type of arguments."""
        try:
            self.pack_into(self.buffer, 0, *arguments)
        except struct.error as error:
            raise self.wrong(arguments, error) from None

    def wrong(self, arguments: tuple[Any, ...], error: struct.error) -> InvalidArgumentError:
        """The error that names the argument at fault."""
        name, kinds = self.specialisation.name, self.specialisation.argument_types
        if len(arguments) != len(kinds):
            return InvalidArgumentError(f"kernel {name} takes {len(kinds)} arguments, got {len(arguments)}")
        for number, (code, argument) in enumerate(zip(self.codes, arguments)):
            try:
                struct.pack(code, argument)
            except struct.error as reason:
                what = f"argument {number} of type {kinds[number]}, got {argument!r}: {reason}"
                return InvalidArgumentError(f"kernel {name}: {what}", param=str(number))
        return InvalidArgumentError(f"kernel {name}: {error}")


@functools.lru_cache(1024)
def _packing_of(argument_format: str) -> tuple[list[str], struct.Struct, list[int]]:
    """The codes of arguments, their `struct.Struct`, and each one's offset."""
    codes = argument_format.split()
    ends = [struct.calcsize("@" + " ".join(codes[: n + 1])) for n in range(len(codes))]
    offsets = [end - struct.calcsize(code) for code, end in zip(codes, ends)]
    return codes, struct.Struct("@" + " ".join(codes)), offsets


class Streams:
    """A device's stream for work that names none.

    Attributes:
        current: the stream.
        captured: the one that is recorded into a graph now.
        last: the latest launch, for messages.
        is_chained: whether kernels that can are launched dependently (`Gpu.chained`).
        ends_with_kernel: while chained, whether the last queued work is a kernel.
    """

    __slots__ = ("captured", "current", "ends_with_kernel", "is_chained", "last")

    def __init__(self, current: Stream) -> None:
        self.current = current
        self.captured: Stream | None = None
        self.last: Bound | None = None
        self.is_chained = self.ends_with_kernel = False


class Bound:
    """A launch on a device without its arguments: ``bound(x.address, y.address, n)`` launches it.

    Arguments are numbers, an address for each pointer, bytes for each tensor map, in the order of the specialisation's
    types. The call packs them into the object's buffer, so one thread at a time may call it.
    """

    __slots__ = (
        "_arguments", "_buffer", "_config", "_context", "_current_stream", "_function", "_launch", "_pack",
        "_parameters", "_streams", "kernel", "launch",
    )  # fmt: skip

    def __init__(self, kernel: Kernel, launch: Launch, streams: Streams) -> None:
        """Raises LaunchError where the configuration breaks a limit."""
        check_launch(kernel, launch)
        kernel.allow_shared(launch.shared_bytes)
        context = kernel.context
        self.kernel = kernel
        self.launch = launch
        self._context = context
        self._streams = streams
        self._current_stream: Stream | None = None
        self._function = kernel.function
        self._launch = context.driver.api.cuLaunchKernelEx
        self._config = launch_config(context.driver.types, launch)
        self._arguments = Arguments(kernel)
        self._pack = self._arguments.pack_into
        self._buffer = self._arguments.buffer
        self._parameters = self._arguments.address

    def __call__(self, *arguments: Argument) -> None:
        """Launches on the device's current stream.

        Raises:
            InvalidArgumentError: for a wrong number or type of arguments.
            LaunchError: where the driver refuses the launch, or a kernel before it failed.
        """
        try:
            self._pack(self._buffer, 0, *arguments)
        except struct.error as error:
            raise self._arguments.wrong(arguments, error) from None
        if getattr(current, "context", None) is not self._context:
            self._context.make_current()
        streams = self._streams
        stream = streams.current
        if stream is not self._current_stream:
            self._config.hStream = stream.handle
            self._current_stream = stream
        streams.last = self
        status = self._launch(self._config, self._function, self._parameters, 0)[0]
        if status:
            raise self._failed(status)

    @property
    def configuration(self) -> tuple[Any, Any]:
        """The driver's function and CUlaunchConfig."""
        return self._function, self._config

    def _failed(self, status: Any) -> Exception:
        driver, launch = self._context.driver, self.launch
        error = driver.error("cuLaunchKernelEx", status, about=describe(launch))
        if isinstance(error, LaunchError):
            error.kernel, error.grid, error.block = launch.specialisation.name, launch.grid, launch.block
            error.shared_bytes = launch.shared_bytes
        elif int(status) == 1:  # invalid value: of the configuration
            return LaunchError(
                str(error),
                kernel=launch.specialisation.name,
                grid=launch.grid,
                block=launch.block,
                shared_bytes=launch.shared_bytes,
            )
        return error


class EmptyBound(Bound):
    """A launch of no blocks: its arguments are checked, but there is no launch."""

    __slots__ = ()

    def __call__(self, *arguments: Argument) -> None:
        self._arguments.pack(*arguments)


def bind(kernel: Kernel, launch: Launch, streams: Streams) -> Bound:
    """The launch on a loaded kernel; for a grid without blocks an empty one."""
    return (EmptyBound if 0 in launch.grid else Bound)(kernel, launch, streams)


def describe(launch: Launch) -> str:
    """A launch in words."""
    cluster = f", cluster {launch.cluster}" if launch.cluster != (1, 1, 1) else ""
    return (
        f"kernel {launch.specialisation.name}, grid {launch.grid}, block {launch.block}, "
        f"{launch.shared_bytes} bytes of dynamic shared memory{cluster}"
    )


def check_launch(kernel: Kernel, launch: Launch) -> None:
    """Raises LaunchError, naming the number and its limit, where a configuration can run on no device."""
    specialisation = launch.specialisation
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    blocks = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    broken = None
    if any(not 0 <= size <= most for size, most in zip(launch.grid, MOST_BLOCKS)):
        broken = f"a grid is at most {MOST_BLOCKS} blocks and none of its sizes below 0"
    elif min(launch.block) < 1 or threads > min(specialisation.max_threads, MOST_THREADS):
        broken = f"a block of this kernel has 1 to {min(specialisation.max_threads, MOST_THREADS)} threads"
    elif min(launch.cluster) < 1 or blocks > MOST_CLUSTER_BLOCKS:
        broken = f"a cluster has 1 to {MOST_CLUSTER_BLOCKS} blocks"
    elif any(size % part for size, part in zip(launch.grid, launch.cluster)):
        broken = "the grid is not a multiple of the cluster"
    elif launch.shared_bytes < 0:
        broken = "shared memory is at least 0 bytes"
    elif launch.is_dependent and not kernel.compiled.waits_for_dependency:
        broken = "a dependent launch needs a kernel that executes griddepcontrol.wait, and this one does not"
    if broken is not None:
        raise LaunchError(
            f"{describe(launch)}: {broken}",
            kernel=specialisation.name,
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
        )


def launch_config(types: Any, launch: Launch) -> Any:
    """The driver's CUlaunchConfig, all but the stream."""
    config = types.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_bytes
    attributes = []
    if launch.cluster != (1, 1, 1):
        attribute = types.CUlaunchAttribute()
        attribute.id = types.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = launch.cluster
        attributes.append(attribute)
    if launch.is_dependent:
        attribute = types.CUlaunchAttribute()
        attribute.id = types.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
