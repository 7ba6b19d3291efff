"""The emulated CUDA driver: the functions of `cuda.bindings.driver` that the runtime uses, on emulated devices.

Names, arguments and return shapes are those of `cuda.bindings.driver`, whose enumerations, handles and structures it
uses; no driver's library is needed. Queued work runs late, in an order that a seed chooses among all that streams and
events allow (`work_queues.py`), and memory that two works touch without an order between them is a fault
(`races/stream_order.py`). Here are the functions for devices, contexts and tensor maps, and the texts of errors.

Unsupported features are refused with CUDA_ERROR_NOT_SUPPORTED: memory nodes and child graphs, external event nodes,
events between processes, launch attributes that no kernel here uses. Functions that do not exist here raise
AttributeError.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.async_copies.tensor_map import encode
from runtime.emulator.driver.architectures import REGISTERS_PER_SM, GpuModel, model_of
from runtime.emulator.driver.copies import MemoryFunctions
from runtime.emulator.driver.graphs import GraphFunctions
from runtime.emulator.driver.launches import read_attributes
from runtime.emulator.driver.pool_blocks import PoolFunctions
from runtime.emulator.driver.state import OK, Context, Device, DriverState, R, Refused, entry, handle_of
from runtime.emulator.driver.streams import StreamFunctions
from runtime.emulator.execution.launch import Checks
from runtime.emulator.memory.device_memory import Allocation, connect
from runtime.emulator.races.stream_order import leak
from runtime.errors import InvalidArgumentError

DRIVER_VERSION = 13_000

_A = cu.CUdevice_attribute


def device_attributes(model: GpuModel) -> dict[Any, int]:
    """The attributes that an emulated device answers for, as cuDeviceGetAttribute returns them."""
    major, minor = model.capability
    return {
        _A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
        _A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
        _A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: model.num_sms,
        _A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: model.shared_bytes_per_block,
        _A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: model.shared_bytes_per_sm,
        _A.CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: REGISTERS_PER_SM,
        _A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: model.threads_per_sm,
        _A.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: model.l2_bytes,
        _A.CU_DEVICE_ATTRIBUTE_CLOCK_RATE: model.clock_khz,
        _A.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: model.memory_clock_khz,
        _A.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: model.memory_bus_bits,
    }


class DeviceFunctions(DriverState):
    """cuInit, cuDriver…, cuDevice…, cuCtx…, cuGetError…, cuTensorMapEncodeTiled"""

    @entry(before_init=True)
    def cuInit(self, Flags: int) -> None:
        if Flags:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"flags {Flags}: must be 0")
        if not self.is_ready:
            connect(device.machine for device in self.devices)
            self.is_ready = True

    @entry(1, before_init=True)
    def cuDriverGetVersion(self) -> int:
        return DRIVER_VERSION

    @entry(1, before_init=True)
    def cuGetErrorName(self, error: Any) -> bytes:
        name: str = _result(error).name
        return name.encode()

    @entry(1, before_init=True)
    def cuGetErrorString(self, error: Any) -> bytes:
        name: str = _result(error).name
        words = name.removeprefix("CUDA_").removeprefix("ERROR_").replace("_", " ").lower()
        return b"no error" if words == "success" else words.encode()

    # -- devices --------------------------------------------------------------------------------------------------

    def _device(self, dev: Any) -> Device:
        ordinal = handle_of(dev)
        if not 0 <= ordinal < len(self.devices):
            raise Refused(R.CUDA_ERROR_INVALID_DEVICE, f"device {ordinal} of {len(self.devices)}")
        return self.devices[ordinal]

    @entry(1)
    def cuDeviceGetCount(self) -> int:
        return len(self.devices)

    @entry(1)
    def cuDeviceGet(self, ordinal: int) -> Any:
        return cu.CUdevice(self._device(ordinal).ordinal)

    @entry(1)
    def cuDeviceGetName(self, length: int, dev: Any) -> bytes:
        return self._device(dev).model.device_name.encode()[: max(length - 1, 0)]

    @entry(1)
    def cuDeviceTotalMem(self, dev: Any) -> int:
        return self._device(dev).machine.size_bytes

    @entry(1)
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> int:
        value = device_attributes(self._device(dev).model).get(attrib)
        if value is None:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{attrib!r} is not one that emulated devices answer for")
        return value

    @entry(1)
    def cuDeviceCanAccessPeer(self, dev: Any, peerDev: Any) -> int:
        return int(self._can_access_peer(self._device(dev), self._device(peerDev)))

    @staticmethod
    def _can_access_peer(device: Device, peer: Device) -> bool:
        return device is not peer and device.model.capability[0] == peer.model.capability[0]

    # -- contexts -------------------------------------------------------------------------------------------------

    @entry(1)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        device = self._device(dev)
        if device.context is None:
            context = Context(self.new_handle(), device)
            self.contexts[context.handle] = context
            self.new_stream(context, 0, is_legacy=True)
            device.context = context
        return cu.CUcontext(device.context.handle)

    @entry()
    def cuCtxSetCurrent(self, ctx: Any) -> None:
        handle = handle_of(ctx)
        if handle and handle not in self.contexts:
            raise Refused(R.CUDA_ERROR_INVALID_CONTEXT, f"context {handle:#x} does not exist")
        self.thread.context = self.contexts[handle] if handle else None

    @entry(is_release=True)
    def cuCtxSynchronize(self) -> None:
        context = self.context()
        self.refuse_while_captured(context, "cuCtxSynchronize")
        self.synchronize_context(context)

    @entry()
    def cuCtxEnablePeerAccess(self, peerContext: Any, Flags: int) -> None:
        context = self.context()
        peer = self.contexts.get(handle_of(peerContext))
        if peer is None or peer is context:
            raise Refused(R.CUDA_ERROR_INVALID_CONTEXT, "the peer is no other context")
        if Flags:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"flags {Flags}: must be 0")
        if not self._can_access_peer(context.device, peer.device):
            raise Refused(R.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peers are of one major compute capability")
        if peer.handle in context.peers:
            raise Refused(R.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        context.peers.add(peer.handle)
        context.machine.enable_peer(peer.machine)

    # -- tensor maps ----

    def cuTensorMapEncodeTiled(
        self, tensorMap: int, tensorDataType: int, tensorRank: int, globalAddress: int | None, globalDim: Sequence[int],
        globalStrides: Sequence[int], boxDim: Sequence[int], elementStrides: Sequence[int], interleave: int,
        swizzle: int, l2Promotion: int, oobFill: int,
    ) -> int:  # fmt: skip
        """The status, as C calls it (`Driver.c_function`). Addresses, and pointers to the numbers of each dimension;
        promotion into L2 is a hint, which must be one of the enumeration's."""

        def numbers(pointer: Sequence[int], count: int) -> list[int]:
            return [pointer[index] for index in range(count)]

        @entry()
        def write(self: DeviceFunctions) -> None:
            self.context()
            if not tensorMap or tensorMap % _ALIGNMENT:
                raise Refused(
                    R.CUDA_ERROR_INVALID_VALUE, f"tensorMap is {tensorMap or 0:#x}, no multiple of {_ALIGNMENT}"
                )
            if not 1 <= tensorRank <= 5:
                raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"tensorRank is {tensorRank}, must be 1 to 5")
            try:
                cu.CUtensorMapL2promotion(l2Promotion)
                data = encode(
                    tensorDataType,
                    globalAddress or 0,
                    numbers(globalDim, tensorRank),
                    numbers(globalStrides, tensorRank - 1),
                    numbers(boxDim, tensorRank),
                    numbers(elementStrides, tensorRank),
                    swizzle=swizzle,
                    interleave=interleave,
                    fill=oobFill,
                )
            except (InvalidArgumentError, ValueError) as error:
                raise Refused(R.CUDA_ERROR_INVALID_VALUE, str(error)) from None
            ctypes.memmove(tensorMap, data, len(data))

        return int(write(self)[0])


def _result(error: Any) -> Any:
    try:
        return R(int(error))
    except ValueError:
        raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{error!r} is no CUresult") from None


_ALIGNMENT = 64


DEFAULT_MEMORY_BYTES = 2 << 30
DEFAULT_NUM_DEVICES = 2


class EmulatedDriver(
    DeviceFunctions,
    MemoryFunctions,
    StreamFunctions,
    GraphFunctions,
    PoolFunctions,
):
    """One driver with its devices, as a process would find it.

    Beside the driver's functions it has, unlike a real one: `last_fault`, `last_reason`, `counters`, `leaks`,
    `close`, and checks that may be changed at any time.

    Attributes: those of `DriverState` and `LaunchFunctions`.
    """

    def __init__(
        self,
        devices: str | GpuModel | Sequence[str | GpuModel] = "sm_90a",
        *,
        num_devices: int | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        checks: Checks = Checks.ALL,
        is_order_checked: bool = True,
        seed: int = 1,
        num_threads: int = 2,
    ) -> None:
        """
        Args:
            devices: an architecture or a product for all devices ("sm_80", "H100"), or one for each.
            num_devices: how many where one is named for all; default 2.
            memory_bytes: device memory of each; only touched memory costs anything.
            checks: the checks of kernels.
            is_order_checked: whether works of different streams are.
            seed: of every order that may be chosen; 0 runs blocks and warps in their natural order.
            num_threads: OS threads that a kernel may use.

        Raises:
            InvalidArgumentError: for a device that cannot be emulated, or for no device.
        """
        if isinstance(devices, str | GpuModel):
            count = DEFAULT_NUM_DEVICES if num_devices is None else num_devices
            devices = [devices] * count
        elif num_devices is not None and num_devices != len(devices):
            raise InvalidArgumentError(f"num_devices {num_devices}: {len(devices)} are named", param="num_devices")
        if not devices:
            raise InvalidArgumentError("a driver needs at least one device", param="devices")
        if num_threads < 1:
            raise InvalidArgumentError(f"num_threads is {num_threads}: at least 1", param="num_threads")
        models = [device if isinstance(device, GpuModel) else model_of(device) for device in devices]
        super().__init__(models, memory_bytes, seed=seed, is_order_checked=is_order_checked)
        self.checks = checks
        self.num_threads = num_threads

    def live_allocations(self) -> list[Allocation]:
        """Live allocations on all devices, with pinned memory, oldest first on each."""
        return [allocation for device in self.devices for allocation in device.machine.live_allocations()]

    def close(self) -> None:
        """Ends the driver as a program's exit would: all contexts are destroyed, and their memory is gone.

        Raises:
            DriverFault: LEAK, when allocations are alive: each with the place that made it.
            Exception: the fault of work that was still queued.
        """
        with self.lock:
            before = self.last_fault
            for context in list(self.contexts.values()):
                self.destroy_context(context)
            for device in self.devices:
                device.machine.close()
            leaks, self.leaks = self.leaks, []
            self.is_ready = False
        if self.last_fault is not None and self.last_fault is not before:
            raise self.last_fault
        if leaks:
            raise leak(leaks)


MEMORY_BYTES = 1 << 38
"""The device's memory: more than any model needs. It is never touched, so it costs nothing."""


class DryDriver(EmulatedDriver):
    """One device of an architecture that runs no work."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch, num_devices=1, memory_bytes=MEMORY_BYTES, checks=Checks.NONE, is_order_checked=False)
        self._next_handle = itertools.count(1)

    def _accept(self, *_: Any) -> tuple[Any]:
        return OK

    def _new(self, *_: Any) -> tuple[Any, int]:
        return cu.CUresult.CUDA_SUCCESS, next(self._next_handle)

    def cuMemAlloc(self, bytesize: int) -> tuple[Any, Any]:
        """An address of its own; the size does not matter, since it is never written."""
        return cu.CUresult.CUDA_SUCCESS, cu.CUdeviceptr(next(self._next_handle) << 44)

    def cuOccupancyMaxActiveClusters(self, func: Any, config: Any) -> tuple[Any, int]:
        """The answer for a kernel that has a multiprocessor's shared memory to itself, for any kernel."""
        size = read_attributes(config).cluster[0]
        return cu.CUresult.CUDA_SUCCESS, self.devices[0].model.clusters_at_once(size, 1)

    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: int, ByteCount: int, hStream: Any) -> tuple[Any]:
        """Zeros, at once."""
        ctypes.memset(dstHost, 0, ByteCount)
        return OK

    cuMemFree = cuFuncSetAttribute = cuLaunchKernelEx = emuDivide = emuMarkAsync = _accept  # type: ignore[assignment]
    emuDeclareImmutableAsync = _accept  # type: ignore[assignment]
    cuMemcpyHtoDAsync = cuMemcpyDtoDAsync = cuMemcpyBatchAsync = cuMemsetD8Async = _accept  # type: ignore[assignment]
    cuModuleLoadData = cuModuleGetFunction = _new  # type: ignore[assignment]
