"""Names of devices: the cpu, and the plain refusal of those that are not built."""

from __future__ import annotations

import pytest

from runtime.device.device import CPU, Device
from runtime.errors import DeviceError, InvalidArgumentError


@pytest.mark.parametrize("name", ["cpu", "auto", CPU, Device("cpu")])
def test_cpu(name: str | Device) -> None:
    device = Device.parse(name)
    assert device == CPU
    assert (device.type, str(device)) == ("cpu", "cpu")
    assert hash(device) == hash(CPU)


@pytest.mark.parametrize(
    "name", ["cuda", "cuda:0", "cuda:17", "emulated", "emulated:sm_90a", "emulated:sm_80"]
)
def test_unbuilt_devices_say_so(name: str) -> None:
    for make in (Device.parse, Device):
        with pytest.raises(DeviceError, match=rf"'{name}'.*not built yet"):
            make(name)
    assert Device.is_name(name)


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda:", "cuda:x", "CPU", "cpu:0", "auto ", "emulated:90", 0, None]
)
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(InvalidArgumentError, match="device") as caught:
        Device.parse(name)  # type: ignore[arg-type]
    assert caught.value.param == "device"
    assert not isinstance(name, str) or not Device.is_name(name)


def test_auto_is_a_wish_and_no_device() -> None:
    with pytest.raises(InvalidArgumentError):
        Device("auto")
