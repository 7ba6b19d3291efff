"""A GPU, real or emulated: its memory, copies, kernels and streams."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda.specialisation import Launch, Specialisation, TensorMapLayout
from runtime.device.allocator import Allocator, DeviceBlock
from runtime.device.context import Context, Event, Stream, query_properties
from runtime.device.device import Device
from runtime.device.driver import Driver, open_driver
from runtime.device.errors import CaptureError, CompileError, LaunchError
from runtime.device.host_copies import HostCopies
from runtime.device.kernel import Argument, Bound, Kernel, Streams, bind, describe
from runtime.device.kernel_cache import KernelCache, is_meant_for, needs_of
from runtime.device.pinned import LEAST_BYTES, PinnedBlock, PinnedPool, mapped_part, upload_pieces
from runtime.device.tensor_map import TensorMaps
from runtime.errors import DeviceError, InvalidArgumentError
from runtime.later import later

_probes = later("numba_kernels.cuda.probes")  # brings numba

_MOST_LAYOUTS, _MOST_LAUNCHES = 4_096, 4_096
"""The most remembered tensor maps, and the most remembered launches; the oldest are dropped."""
STAGING_BYTES = 8 << 20
"""Copies to memory that is not pinned go through pinned pieces of this size, each emptied while the next is filled."""


class Gpu:
    """One device. `Gpu.of` returns the process's only object for it.

    Work goes to `stream`, which is one of ours and not the legacy default stream; `use` chooses another for a while.
    That choice holds for the process, so one thread at a time drives a device; others name their stream in each call.

    Attributes:
        device: its name.
        driver: its driver.
        context: its primary context.
        properties: its sizes and limits.
        arch: the architecture that kernels are compiled for, "sm_90a".
        capability: (9, 0).
        allocator: its memory.
        pinned: pinned host memory.
        kernel_cache: compiled kernels on disk.
        kept: layouts and numbers that were sent there, by stream and content; the backend's.
        plans: of products there, by kind of weight, as long as there is such a weight; the backend's.
    """

    def __init__(self, device: Device, driver: Driver, *, kernel_cache: KernelCache | None = None) -> None:
        """Called by `of`, and by tests with a driver of their own."""
        self.device = device
        self.driver = driver
        self.context = Context(driver, device.index)
        self.context.make_current()
        self.properties = query_properties(driver, device.index)
        self.capability = self.properties.capability
        self.arch = device.arch or self.properties.arch
        self.default_stream = Stream(self.context)
        self.allocator = Allocator(self.context, self.default_stream, name=device.type)
        self.pinned = PinnedPool(self.context)
        self.kernel_cache = kernel_cache or KernelCache()
        self._streams = Streams(self.default_stream)
        self._kernels: dict[Specialisation, Kernel] = {}
        self._lock = threading.Lock()  # of the kernels
        self._bound = _BoundOfThread()
        self._tensor_maps: OrderedDict[TensorMapLayout, TensorMaps] = OrderedDict()
        self.kept: dict[tuple[Stream, bytes], Any] = {}
        self.plans: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self._copies: HostCopies | None = None

    @staticmethod
    def of(device: Device | str) -> Gpu:
        """The object of a device, made at the first call.

        Raises:
            InvalidArgumentError: for the cpu.
            NoDriverError, DriverTooOldError, InvalidDeviceError: where it is not available, with advice.
        """
        gpu = _opened.get(device.type if isinstance(device, Device) else device)
        return gpu if gpu is not None else _open(Device.parse(device))

    def install(self) -> None:
        """Makes this object the one that `of` gives for its device, from now on."""
        with _opening:
            _opened[self.device.type] = self

    @contextmanager
    def installed(self) -> Iterator[None]:
        """`install`, until the block ends: then the device's former object, if any, is back."""
        before = _opened.get(self.device.type)
        self.install()
        try:
            yield
        finally:
            with _opening:
                if before is None:
                    del _opened[self.device.type]
                else:
                    _opened[self.device.type] = before

    @property
    def stream(self) -> Stream:
        """The stream of work that names none."""
        return self._streams.current

    @contextmanager
    def use(self, stream: Stream) -> Iterator[Stream]:
        """Work goes to `stream` until the block ends."""
        before = self._streams.current
        self._streams.current = stream
        try:
            yield stream
        finally:
            self._streams.current = before

    @property
    def stream_is_captured(self) -> bool:
        """Whether the current stream is recorded into a graph."""
        return self._streams.captured is self._streams.current

    @contextmanager
    def captured(self, stream: Stream) -> Iterator[None]:
        """Marks `stream` as recorded into a graph until the block ends; called by `runtime.device.graph`."""
        self._streams.captured = stream
        try:
            yield
        finally:
            self._streams.captured = None

    @contextmanager
    def chained(self) -> Iterator[None]:
        """Until the block ends, kernels that `launch` launches start before the previous kernel has ended, if
        they wait for it themselves (``griddepcontrol.wait``): programmatic dependent launch.

        The first does not; nor do those that follow a copy or a fill. All work goes to one stream meanwhile.
        """
        streams = self._streams
        streams.is_chained, streams.ends_with_kernel = True, False
        try:
            yield
        finally:
            streams.is_chained = False

    def break_chain(self) -> None:
        """Notes foreign work in the current stream: the next kernel is not launched dependent."""
        self._streams.ends_with_kernel = False

    def new_stream(self, *, priority: int = 0) -> Stream:
        """A stream of this device; lower priorities run first."""
        return Stream(self.context, priority=priority)

    def new_event(self, *, is_timed: bool = False) -> Event:
        """An event of this device, not recorded yet."""
        return Event(self.context, is_timed=is_timed)

    def synchronize(self) -> None:
        """Waits for everything on the device.

        Raises LaunchError where a kernel failed, with the launch made last and, of an emulated device, the fault.
        """
        try:
            self.context.call("cuCtxSynchronize")
        except LaunchError as error:
            raise self._with_last_launch(error) from error.__cause__

    # Memory

    @contextmanager
    def uploading_from(self, copies: HostCopies) -> Iterator[None]:
        """Until the block ends, `write` notes in `copies` which parts of files it uploads, and uploads from them what
        they hold. They must not be dropped before the stream has finished these uploads."""
        before, self._copies = self._copies, copies
        try:
            yield
        finally:
            self._copies = before

    def allocate(self, size_bytes: int, stream: Stream | None = None) -> DeviceBlock:
        """Memory for work on `stream`, as `Allocator.allocate`."""
        return self.allocator.allocate(size_bytes, stream or self._streams.current)

    def upload_to_keep(self, array: np.ndarray[Any, Any]) -> DeviceBlock:
        """Memory with an array's elements that outlives the pass being recorded: never from a graph's pool, where
        replays of the pool's other graphs would write over it."""
        block = self.allocator.allocate(array.nbytes, self._streams.current, is_redirected=False)
        self.write(block.address, array)
        return block

    def declare_immutable(self, block: object, *, is_immutable: bool = True) -> None:
        """Freezes a block of the allocator once the work now in the stream has run, or thaws it. Ignores other memory.
        Raises CaptureError where the stream is recorded into a graph."""
        stream = self._not_captured("declare_immutable", None)
        if isinstance(block, DeviceBlock):
            block.declare_immutable(stream, is_immutable=is_immutable)

    def write(self, address: int, array: np.ndarray[Any, Any], stream: Stream | None = None) -> None:
        """Copies an array's elements, in C order, to the device. The array may be changed once this returns.

        The copy is ordered on the stream and goes through pinned memory, piece by piece; large parts of a mapped file
        are read there. Raises CaptureError where the stream is recorded into a graph, OSError where a file cannot be
        read.
        """
        stream = self._not_captured("write", stream)

        def copy(start: int, piece: PinnedBlock) -> None:
            self.upload(address + start, piece, stream=stream)

        if not array.nbytes:
            return
        if self._copies is not None and (copied := self._copies.find(array)) is not None:
            copy(0, copied)
        elif array.nbytes < LEAST_BYTES:
            staging = self.pinned.allocate(array.nbytes)
            staging.array[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            copy(0, staging)
            staging.release_after(stream)
        elif (mapped := mapped_part(array)) is not None:
            mapping, offset = mapped

            def read(target: NDArray[np.uint8], start: int) -> None:
                mapping.read_into(target, offset + start)

            upload_pieces(array.nbytes, read, copy, self.pinned, stream)
        else:
            source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

            def take(target: NDArray[np.uint8], start: int) -> None:
                target[:] = source[start : start + target.size]

            upload_pieces(array.nbytes, take, copy, self.pinned, stream)

    def read(self, address: int, array: np.ndarray[Any, Any], stream: Stream | None = None) -> None:
        """Fills a C-contiguous array from the device, after the stream's earlier work, and waits for it.

        Raises:
            InvalidArgumentError: where the array is not contiguous or cannot be written.
            CaptureError: where the stream is recorded into a graph.
            LaunchError: where work before the copy failed.
        """
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise InvalidArgumentError("read needs a C-contiguous array that can be written", param="array")
        stream = self._not_captured("read", stream)
        target = array.reshape(-1).view(np.uint8)
        pieces = [(start, min(STAGING_BYTES, target.size - start)) for start in range(0, target.size, STAGING_BYTES)]
        pending: list[tuple[int, PinnedBlock, Event]] = []
        for start, size in pieces:
            staging = self.pinned.allocate(size)
            self.download(staging, address + start, stream=stream)
            pending.append((start, staging, stream.record()))
            if len(pending) == 2:
                self._take_piece(target, *pending.pop(0))
        for piece in pending:
            self._take_piece(target, *piece)

    def _not_captured(self, what: str, stream: Stream | None) -> Stream:
        stream = stream or self._streams.current
        if stream is self._streams.captured:
            raise CaptureError(
                f"{what}: a stream that is recorded into a graph copies from and to pinned memory only "
                "(upload, download)"
            )
        return stream

    def _take_piece(self, target: np.ndarray[Any, Any], start: int, staging: PinnedBlock, event: Event) -> None:
        try:
            event.synchronize()
        except LaunchError as error:
            raise self._with_last_launch(error) from error.__cause__
        target[start : start + staging.size_bytes] = staging.array
        staging.release()

    def upload(
        self, address: int, source: PinnedBlock, size_bytes: int | None = None, stream: Stream | None = None
    ) -> None:
        """Copies from pinned memory, asynchronously: `source` must not change until the stream has come past it."""
        size = source.size_bytes if size_bytes is None else size_bytes
        self._check_size("upload", size, source.size_bytes)
        self._streams.ends_with_kernel = False
        self.context.call("cuMemcpyHtoDAsync", address, source.address, size, (stream or self.stream).handle)

    def download(
        self, target: PinnedBlock, address: int, size_bytes: int | None = None, stream: Stream | None = None
    ) -> None:
        """Copies into pinned memory, asynchronously: it is there when the stream has come past it."""
        size = target.size_bytes if size_bytes is None else size_bytes
        self._check_size("download", size, target.size_bytes)
        self._streams.ends_with_kernel = False
        self.context.call("cuMemcpyDtoHAsync", target.address, address, size, (stream or self.stream).handle)

    def copy(self, target: int, source: int, size_bytes: int, stream: Stream | None = None) -> None:
        """Copies within the device, by addresses, asynchronously; the two must not overlap."""
        if size_bytes:
            self._streams.ends_with_kernel = False
            self.context.call("cuMemcpyDtoDAsync", target, source, size_bytes, (stream or self.stream).handle)

    def copy_batch(
        self, targets: list[int], sources: list[int], sizes_bytes: list[int], stream: Stream | None = None
    ) -> None:
        """Copies many pieces in one call, by addresses on the device and in pinned memory, asynchronously.

        The pieces go in any order, so none may touch what another writes. The copies let kernels run meanwhile. Sizes
        are at least 1. The stream must not be recorded into a graph.
        """
        if sizes_bytes:
            types = self.driver.types
            attributes = types.CUmemcpyAttributes()
            attributes.srcAccessOrder = types.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            attributes.flags = int(types.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
            to, origin = ([types.CUdeviceptr(address) for address in each] for each in (targets, sources))
            pieces = (to, origin, sizes_bytes, len(sizes_bytes), [attributes], [0], 1)
            self.context.call("cuMemcpyBatchAsync", *pieces, (stream or self.stream).handle)

    def fill(self, address: int, byte: int, size_bytes: int, stream: Stream | None = None) -> None:
        """Sets bytes, asynchronously."""
        if size_bytes:
            self._streams.ends_with_kernel = False
            self.context.call("cuMemsetD8Async", address, byte, size_bytes, (stream or self.stream).handle)

    def copy_to_peer(self, peer: Gpu, target: int, source: int, size_bytes: int, stream: Stream | None = None) -> None:
        """Copies from this device's memory to another's, asynchronously, on a stream of this one: after the work now in
        the peer's current stream, and before its later work."""
        if size_bytes:
            stream = stream or self.stream
            stream.wait(peer.stream.record())
            contexts = (target, peer.context.handle, source, self.context.handle)
            self.context.call("cuMemcpyPeerAsync", *contexts, size_bytes, stream.handle)
            peer.stream.wait(stream.record())

    def enable_peer_access(self, peer: Gpu) -> bool:
        """Lets kernels here use the other device's memory. False where the machine cannot; may be called twice."""
        if not self.driver.call("cuDeviceCanAccessPeer", self.context.device, peer.context.device):
            return False
        self.context.make_current()
        (status,) = self.driver.api.cuCtxEnablePeerAccess(peer.context.handle, 0)
        if status and int(status) != 704:  # it was enabled before
            raise self.driver.error("cuCtxEnablePeerAccess", status)
        return True

    @staticmethod
    def _check_size(name: str, size: int, most: int) -> None:
        if not 0 <= size <= most:
            raise InvalidArgumentError(f"{name}: {size} bytes are not 0 to the block's {most}", param="size_bytes")

    # Kernels

    def tensor_map(self, address: int, layout: TensorMapLayout) -> bytes:
        """The map of a tensor in this device's memory, an argument of type `TENSOR_MAP`; the latest are remembered.

        Raises InvalidArgumentError for a layout that no map can describe.
        """
        return self._maps_of(layout)[address]

    def _maps_of(self, layout: TensorMapLayout) -> TensorMaps:
        found = self._tensor_maps.get(layout)
        if found is None:
            found = self._tensor_maps[layout] = TensorMaps(self.driver, layout)
            _forget_oldest(self._tensor_maps, _MOST_LAYOUTS)
        return found

    @functools.cached_property
    def max_clusters(self) -> tuple[tuple[int, int], ...]:
        """(blocks a cluster, clusters that run at once where a multiprocessor holds one block); the driver is queried
        once. None for a device without clusters."""
        if self.capability < (9, 0):
            return ()
        found = []
        for size in _probes.CLUSTER_SIZES:
            bound = self.bind(_probes.plan_cluster(size, self.properties.shared_bytes_per_block))
            found.append((size, int(self.context.call("cuOccupancyMaxActiveClusters", *bound.configuration))))
        return tuple(found)

    def launch(self, launch: Launch, *arguments: Argument, stream: Stream | None = None) -> None:
        """Launches a kernel; arguments as `Bound` takes them, but the addresses of the tensors in `launch.maps`. Bind a
        launch that is repeated.

        Raises: as `bind`, `Bound` and `tensor_map`.
        """
        streams = self._streams
        if streams.is_chained:
            launch = self._in_chain(launch)
        _, bound, maps = self._bound.latest.get(id(launch)) or self._bound_of(launch)
        if maps:
            arguments = tuple(_with_maps(launch, maps, arguments))
        if stream is None or stream is streams.current:
            bound(*arguments)
        else:
            with self.use(stream):
                bound(*arguments)

    def _bound_of(self, launch: Launch) -> _Ready:
        """The Bound of an equal launch in this thread, or a new one."""
        remembered = self._bound
        ready = remembered.launches.get(launch)
        if ready is None:
            maps = tuple(
                (number, self._maps_of(layout), is_more)
                for is_more, each in enumerate((launch.maps, launch.more_maps)) for number, layout in each
            )  # fmt: skip
            ready = remembered.launches[launch] = launch, self.bind(launch), maps
            _forget_oldest(remembered.launches, _MOST_LAUNCHES)
        remembered.latest[id(launch)] = launch, *ready[1:]
        _forget_oldest(remembered.latest, _MOST_LAUNCHES)
        return ready

    def _in_chain(self, launch: Launch) -> Launch:
        """The launch, dependent if it may be."""
        if 0 in launch.grid:  # launches nothing
            return launch
        streams = self._streams
        follows, streams.ends_with_kernel = streams.ends_with_kernel, True
        if follows and not launch.starts_late and self.kernel(launch.specialisation).compiled.waits_for_dependency:
            return replace(launch, is_dependent=True)
        return launch

    def bind(self, launch: Launch) -> Bound:
        """The launch with all but its arguments; its kernel is compiled or read from disk, and loaded.

        Raises:
            CompileError: where the kernel does not compile, or not for this device.
            LaunchError: where the configuration breaks a limit.
        """
        most = self.properties.shared_bytes_per_block
        if launch.shared_bytes > most:
            raise LaunchError(
                f"{describe(launch)}: a block of {self.device} has at most {most} bytes of shared memory",
                kernel=launch.specialisation.name,
                grid=launch.grid,
                block=launch.block,
                shared_bytes=launch.shared_bytes,
            )
        return bind(self.kernel(launch.specialisation), launch, self._streams)

    def kernel(self, specialisation: Specialisation) -> Kernel:
        """The kernel, compiled and loaded at the first use."""
        with self._lock:
            kernel = self._kernels.get(specialisation)
            if kernel is None:
                if not is_meant_for(specialisation, self.arch):
                    raise CompileError(
                        f"kernel {specialisation.name} needs {needs_of(specialisation)}; {self.device} is {self.arch}"
                    )
                compiled = self.kernel_cache.get(specialisation, self.arch, is_ptx=self.driver.is_emulated)
                kernel = self._kernels[specialisation] = Kernel(self.context, specialisation, compiled)
            return kernel

    def loaded_kernels(self) -> list[Kernel]:
        """Every kernel that was loaded here."""
        with self._lock:
            return list(self._kernels.values())

    def kernel_of(self, function: Any) -> Kernel:
        """The loaded kernel of that function of the driver. Raises DeviceError for one that was not loaded here."""
        with self._lock:
            for kernel in self._kernels.values():
                if int(kernel.function) == int(function):
                    return kernel
        raise DeviceError(f"{self.device}: function {int(function):#x} is no kernel that was loaded here")

    def _with_last_launch(self, error: LaunchError) -> LaunchError:
        last = self._streams.last
        return LaunchError(f"{error} (launched last: {describe(last.launch)})") if last is not None else error


_Maps = tuple[tuple[int, TensorMaps, int], ...]
_Ready = tuple["Launch", Bound, _Maps]
"""A launch, its Bound, and the arguments that are tensors' addresses, with the maps of their layouts, and whether these
are further arguments."""


class _BoundOfThread(threading.local):
    """Launches that `Gpu.launch` has bound, in this thread: a Bound has one buffer.

    latest: by the launch's id, which stays unique while the launch is kept here. Hashing a launch takes longer than
    launching it.
    """

    def __init__(self) -> None:
        self.launches: OrderedDict[Launch, _Ready] = OrderedDict()
        self.latest: OrderedDict[int, _Ready] = OrderedDict()


def _with_maps(launch: Launch, maps: _Maps, arguments: tuple[Argument, ...]) -> list[Argument]:
    """The arguments, with tensors' addresses replaced by maps, or followed by them."""
    found = list(arguments)
    for number, addresses, is_more in maps:
        address = arguments[number] if number < len(arguments) else None
        if not isinstance(address, int):
            raise InvalidArgumentError(
                f"{describe(launch)}: argument {number} is {address!r}, must be a tensor's address",
                param=str(number),
            )
        if is_more:
            found.append(addresses[address])
        else:
            found[number] = addresses[address]
    return found


def _forget_oldest(remembered: OrderedDict[Any, Any], most: int) -> None:
    if len(remembered) > most:
        remembered.popitem(last=False)


_opened: dict[str, Gpu] = {}  # by the device's full name; only grows
_opening = threading.Lock()


def _open(device: Device) -> Gpu:
    if device.kind == "cpu":
        raise InvalidArgumentError("device 'cpu' is no GPU", param="device")
    with _opening:
        if device.type not in _opened:
            _opened[device.type] = Gpu(device, open_driver(device.arch))
        return _opened[device.type]
