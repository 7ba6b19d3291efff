"""The driver's functions for devices, contexts and tensor maps, and the texts of its errors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.async_copies.tensor_map import encode
from runtime.emulator.driver.architectures import REGISTERS_PER_SM, GpuModel
from runtime.emulator.driver.state import Context, Device, DriverState, R, Refused, entry, handle_of
from runtime.emulator.memory.device_memory import connect
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
    """cuInit, cuDriver…, cuDevice…, cuCtx…, cuGetError…"""

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
        self.scheduler.finish_all(context)
        for stream in context.streams.values():
            self.order.host_knows(stream.queue.last)
        self.raise_if_failed(context)

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


def _result(error: Any) -> Any:
    try:
        return R(int(error))
    except ValueError:
        raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{error!r} is no CUresult") from None


_ALIGNMENT = 64


class TensorMapFunctions(DriverState):
    """cuTensorMapEncodeTiled, called as C calls it (`Driver.c_function`)"""

    def cuTensorMapEncodeTiled(
        self, tensorMap: int, tensorDataType: int, tensorRank: int, globalAddress: int | None, globalDim: Sequence[int],
        globalStrides: Sequence[int], boxDim: Sequence[int], elementStrides: Sequence[int], interleave: int,
        swizzle: int, l2Promotion: int, oobFill: int,
    ) -> int:  # fmt: skip
        """The status. Addresses, and pointers to the numbers of each dimension; promotion into L2 is a hint, which
        must be one of the enumeration's."""

        def numbers(pointer: Sequence[int], count: int) -> list[int]:
            return [pointer[index] for index in range(count)]

        @entry()
        def write(self: TensorMapFunctions) -> None:
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
