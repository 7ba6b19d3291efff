"""The seam between this engine and a CUDA driver: the only place that chooses one.

A driver is a set of functions with the names, arguments and return shapes of `cuda.bindings.driver`: a tuple that
begins with a CUresult; of `Driver.c_function` it is C functions that return one. `open_driver` returns the real one, or
an emulated one (`runtime.emulator`), which offers the functions that we call. Structures and enumerations are those of
`cuda.bindings.driver` for both.

`Driver.call` is the one place where a result is checked and becomes a typed error.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from typing import Any

from runtime.device.errors import (
    CaptureError,
    DeviceOutOfMemoryError,
    DriverError,
    DriverTooOldError,
    InvalidDeviceError,
    LaunchError,
    NoDriverError,
)
from runtime.errors import DeviceError
from runtime.later import later

_emulated_driver = later("runtime.emulator.driver.emulated_driver")

OLDEST_DRIVER = 13_000
"""CUDA version of the oldest driver that loads what nvJitLink 13 links, as `cuDriverGetVersion` counts."""

_INSTEAD = "--device cpu needs no GPU, and --device emulated runs the same GPU kernels on the processor"

_NO_DEVICE = {100: "CUDA_ERROR_NO_DEVICE", 101: "CUDA_ERROR_INVALID_DEVICE"}
_OUT_OF_MEMORY = 2
# A kernel was refused (701, 720) or failed while it ran.
_LAUNCH = frozenset({700, 701, 702, 710, 714, 715, 716, 717, 718, 719, 720})
_CAPTURE = frozenset(range(900, 909))


class Driver:
    """One driver, initialised.

    Attributes:
        api: its functions; for calls that cannot afford `call`, which then check the result themselves.
        types: structures and enumerations of `cuda.bindings.driver`.
        is_emulated: whether images are PTX texts and devices are made up.
        arch: of an emulated driver's devices ("sm_90a"), else None.
    """

    def __init__(self, api: Any, types: Any, *, arch: str | None = None) -> None:
        self.api = api
        self.types = types
        self.arch = arch
        self.is_emulated = arch is not None
        self._c_functions: dict[tuple[str, Any], Any] = {}

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls a driver's function. Returns its results without the status: None, a value, or a tuple.

        Raises:
            DriverError, or a closer one of `runtime.device.errors`, where the status is not CUDA_SUCCESS.
        """
        result = getattr(self.api, function)(*arguments)
        if result[0]:
            raise self.error(function, result[0])
        return result[1] if len(result) == 2 else (result[1:] or None)

    def c_function(self, name: str, prototype: Any) -> Any:
        """A function as C calls it, where its binding does not serve. `prototype`: a `ctypes.CFUNCTYPE`."""
        key = name, prototype
        if key not in self._c_functions:
            library = self.api if self.is_emulated else ctypes.CDLL("libcuda.so.1")  # which the bindings have loaded
            self._c_functions[key] = prototype(getattr(library, name) if self.is_emulated else (name, library))
        return self._c_functions[key]

    def error(self, function: str, status: Any, *, about: str = "") -> Exception:
        """The error for a status that is not CUDA_SUCCESS. `about` describes the call further."""
        code = int(status)
        name, description = self._words(status)
        text = f"{function}{f' ({about})' if about else ''} failed: {name} ({code}): {description}"
        if reason := getattr(self.api, "last_reason", ""):  # an emulated driver's
            text += f": {reason}"
        if code == _OUT_OF_MEMORY:
            return DeviceOutOfMemoryError(text, requested_bytes=0)
        if code in _NO_DEVICE:
            return InvalidDeviceError(text)
        if code in _CAPTURE:
            return CaptureError(text)
        if code in _LAUNCH:
            fault = self.fault()
            error: Exception = LaunchError(f"{text}: {fault}" if fault and str(fault) not in text else text)
            error.__cause__ = fault
            return error
        return DriverError(text, call=function, code=code, name=name)

    def fault(self) -> Exception | None:
        """The fault that an emulated kernel raised; None of a real device's."""
        fault = getattr(self.api, "last_fault", None)
        return fault if isinstance(fault, Exception) else None

    def _words(self, status: Any) -> tuple[str, str]:
        words = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            result = getattr(self.api, function)(status)
            text = str(status) if result[0] else result[1]
            words.append(text.decode() if isinstance(text, bytes) else str(text))
        return words[0], words[1]


def cuda_bindings(user: str) -> Any:
    """`cuda.bindings.driver`.

    Raises `NoDriverError` where it or numba-cuda is not installed; `user` names the feature that needs them.
    """
    try:
        from cuda.bindings import driver

        if importlib.util.find_spec("numba_cuda") is None:
            raise ImportError("No module named 'numba_cuda'")
    except ImportError as error:
        raise NoDriverError(
            f"{user} needs cuda-python and numba-cuda, which are not installed ({error}): "
            "pip install '.[cuda]' in xserv's checkout; --device cpu needs neither"
        ) from None
    return driver


@functools.cache
def open_driver(arch: str | None = None) -> Driver:
    """The machine's CUDA driver; for an `arch` ("sm_90a") an emulated one of such devices. One object for each.

    Raises:
        NoDriverError: with the missing part and advice.
        DriverTooOldError: with the driver's version and the one needed.
        DeviceError: where the driver is there but does not start.
    """
    bindings = cuda_bindings("the real driver" if arch is None else "the emulator's compiler")
    if arch is not None:
        driver = Driver(_emulated_driver.EmulatedDriver(arch), bindings, arch=arch)
        driver.call("cuInit", 0)
        return driver
    driver = Driver(bindings, bindings)
    try:
        (status,) = bindings.cuInit(0)
    except Exception as error:  # cuda.pathfinder's DynamicLibNotFoundError, or RuntimeError by its version
        raise NoDriverError(
            "no CUDA driver: libcuda.so.1 is not to be found. On a machine with an NVIDIA GPU install its driver "
            f"(R580 or newer); in a container start it with the GPU (docker run --gpus all). {_INSTEAD}"
        ) from error
    if int(status):
        _refuse_start(driver, status)
    version = driver.call("cuDriverGetVersion")
    if version < OLDEST_DRIVER:
        raise DriverTooOldError(
            f"the CUDA driver is of CUDA {version // 1000}.{version % 1000 // 10}, the kernels need "
            f"{OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10} or newer: install NVIDIA's driver R580 or newer. "
            f"{_INSTEAD}"
        )
    return driver


def _refuse_start(driver: Driver, status: Any) -> None:
    if int(status) in _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={visible!r} hides all others)" if visible is not None else ""
        raise NoDriverError(f"the CUDA driver is installed, but it sees no GPU{why}: check nvidia-smi. {_INSTEAD}")
    raise DeviceError(f"the CUDA driver does not start: {driver.error('cuInit', status)}. {_INSTEAD}")
