"""Errors of devices, as leaves of the engine's tree of errors.

DeviceError
├── NoDriverError           no driver, or no library for it; with advice
├── DriverTooOldError       there is a driver, but older than the compiled kernels need
├── InvalidDeviceError      no such device
├── DriverError             any other call that failed: `call`, `code`, `name`
├── CompileError            a kernel did not compile or assemble
├── LaunchError             a kernel was refused, or failed while it ran: `kernel`, `grid`, `block`, `shared_bytes`
└── CaptureError            an operation that a captured stream does not allow
    └── PoolTooSmallError   an allocation that its graph's pool has no room for
OutOfMemoryError
└── DeviceOutOfMemoryError  with the sizes and the table of the device's memory
"""

from __future__ import annotations

from runtime.errors import DeviceError, OutOfMemoryError


class NoDriverError(DeviceError):
    """No driver, or no library to call it with."""


class DriverTooOldError(DeviceError):
    """The driver is older than what the kernels are compiled for."""


class InvalidDeviceError(DeviceError):
    """There is no such device."""


class DriverError(DeviceError):
    """A driver's function failed.

    Attributes:
        call: the function, `cuMemAlloc`.
        code: its CUresult as a number.
        name: its CUresult's name, `CUDA_ERROR_INVALID_VALUE`.
    """

    def __init__(self, message: str, *, call: str, code: int, name: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class CompileError(DeviceError):
    """A kernel could not be compiled, assembled or loaded."""


class LaunchError(DeviceError):
    """A kernel was not launched, or failed while it ran.

    A failure of a kernel that runs is reported by the next call; where that is not the launch itself,
    `kernel` is None and the message names the last launch. On an emulated device the cause is the `EmulatorFault`,
    which names kernel, line, block and thread.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str | None = None,
        grid: tuple[int, int, int] | None = None,
        block: tuple[int, int, int] | None = None,
        shared_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self.shared_bytes = shared_bytes


class CaptureError(DeviceError):
    """An operation that a captured stream does not allow, or a capture that it broke."""


class PoolTooSmallError(CaptureError):
    """A graph's pool has no room while it is captured. `missing_bytes`: of the block that was to be cut."""

    def __init__(self, message: str, *, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class DeviceOutOfMemoryError(OutOfMemoryError):
    """A device has no room. `requested_bytes` is the size requested."""

    def __init__(self, message: str, *, requested_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
