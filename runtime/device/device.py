"""Names of devices, as users write them. `runtime.device.gpu` is the device itself."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field

from runtime.device.driver import open_driver
from runtime.device.errors import DriverTooOldError, InvalidDeviceError, NoDriverError
from runtime.errors import InvalidArgumentError

DEFAULT_EMULATED_ARCH = "sm_90a"

_NAME = re.compile(
    r"(?P<cpu>cpu)|cuda(?::(?P<cuda>\d{1,4}))?|emulated(?::(?P<arch>sm_\d{2,3}[af]?)(?::(?P<index>\d{1,4}))?)?"
)


@dataclass(frozen=True, slots=True)
class Device:
    """A device, as in `Device("cpu")`, `Device("cuda:1")`, `Device("emulated:sm_90a")`.

    "cuda" is "cuda:0"; "emulated" is "emulated:sm_90a", the first of the emulated devices of that architecture, and
    "emulated:sm_90a:1" the second. A device with a valid name may not exist: `parse` checks.

    Attributes:
        type: the full name, in its one form.
        kind: "cpu", "cuda" or "emulated".
        index: its number among the devices of its kind and architecture.
        arch: an emulated device's architecture, as "sm_90a"; else None.

    Raises:
        InvalidArgumentError: for an invalid name.
    """

    type: str
    kind: str = field(init=False, compare=False)
    index: int = field(init=False, compare=False)
    arch: str | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        match = _NAME.fullmatch(self.type) if isinstance(self.type, str) else None
        if match is None:
            raise InvalidArgumentError(
                f"device {self.type!r} is not one of 'auto', 'cpu', 'cuda', 'cuda:N', 'emulated', 'emulated:sm_NN'",
                param="device",
            )
        kind = self.type.partition(":")[0]
        index = int(match["cuda"] or match["index"] or 0)
        arch = (match["arch"] or DEFAULT_EMULATED_ARCH) if kind == "emulated" else None
        name = {"cpu": "cpu", "cuda": f"cuda:{index}"}.get(kind) or f"emulated:{arch}{f':{index}' if index else ''}"
        for attribute, value in (("type", name), ("kind", kind), ("index", index), ("arch", arch)):
            object.__setattr__(self, attribute, value)

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether a string has the form of a device's name, be the device there or not."""
        return name == "auto" or _NAME.fullmatch(name) is not None

    @staticmethod
    def parse(name: str | Device) -> Device:
        """The device of a name, checked to exist; "auto" is the first GPU, or the cpu where there is none.

        Raises:
            InvalidArgumentError: for an invalid name.
            NoDriverError, DriverTooOldError, InvalidDeviceError: where the device is not available, with advice.
        """
        if isinstance(name, Device):
            return name
        if not isinstance(name, str):
            raise InvalidArgumentError(f"device must be a string or a Device, not {name!r}", param="device")
        if name == "auto":
            return best_device()
        device = Device(name)
        if device.kind != "cpu":
            device.require()
        return device

    def require(self) -> None:
        """Raises `parse`'s errors where the device is not available."""
        if self.kind == "cpu":
            return
        count = open_driver(self.arch).call("cuDeviceGetCount")
        if self.index >= count:
            raise InvalidDeviceError(f"device {self.type!r}: the driver has {count} such devices, numbered from 0")

    def __str__(self) -> str:
        return self.type


CPU = Device("cpu")


def best_device() -> Device:
    """The first GPU, or the cpu where there is no driver that can be used."""
    try:
        ctypes.CDLL("libcuda.so.1")  # where there is none, its bindings need not be read
    except OSError:
        return CPU
    try:
        device = Device("cuda:0")
        device.require()
    except (NoDriverError, DriverTooOldError, InvalidDeviceError):
        return CPU
    return device
