"""Which device a tensor lives on, and how a user names one.

Only the cpu is built so far. The other kinds of the design, `cuda:N` and `emulated:sm_90a`, are understood
and refused by name: nothing stands in for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from runtime.errors import DeviceError, InvalidArgumentError

_UNBUILT = re.compile(r"(cuda)(?::\d+)?|(emulated)(?::sm_\d+[af]?)?")


@dataclass(frozen=True, slots=True)
class Device:
    """A device, as in `Device("cpu")`; `type` is its family.

    Raises:
        DeviceError: for a device that this build does not have.
        InvalidArgumentError: for a name that is no device's.
    """

    type: str

    def __post_init__(self) -> None:
        if self.type == "cpu":
            return
        if unbuilt := _UNBUILT.fullmatch(self.type):
            raise DeviceError(
                f"device {self.type!r}: {unbuilt[1] or unbuilt[2]} devices are not built yet; there is only 'cpu'"
            )
        raise InvalidArgumentError(
            f"device {self.type!r} is not one of 'auto', 'cpu', 'cuda:N', 'emulated:sm_NN'", param="device"
        )

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether a string has the form of a device's name, be the device built or not."""
        return name in ("auto", "cpu") or _UNBUILT.fullmatch(name) is not None

    @staticmethod
    def parse(name: str | Device) -> Device:
        """The device meant by a name: "cpu", or "auto" for the best there is, the cpu.

        Raises: as the constructor.
        """
        if isinstance(name, Device):
            return name
        if not isinstance(name, str):
            raise InvalidArgumentError(f"device must be a string or a Device, not {name!r}", param="device")
        return CPU if name in ("cpu", "auto") else Device(name)

    def __str__(self) -> str:
        return self.type


CPU = Device("cpu")
