"""Names of devices, and what is said where a device is not to be had. Needs no driver."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings import driver as bindings

from runtime.device import device as device_module
from runtime.device.device import CPU, Device, best_device
from runtime.device.driver import Driver, open_driver
from runtime.device.errors import DriverTooOldError, InvalidDeviceError, NoDriverError
from runtime.errors import DeviceError, InvalidArgumentError
from tests.runtime.device.fake_driver import FakeDriver


@pytest.mark.parametrize(
    ("name", "full_name", "kind", "index", "arch"),
    [
        ("cpu", "cpu", "cpu", 0, None),
        ("cuda", "cuda:0", "cuda", 0, None),
        ("cuda:0", "cuda:0", "cuda", 0, None),
        ("cuda:17", "cuda:17", "cuda", 17, None),
        ("emulated", "emulated:sm_90a", "emulated", 0, "sm_90a"),
        ("emulated:sm_80", "emulated:sm_80", "emulated", 0, "sm_80"),
        ("emulated:sm_120a:1", "emulated:sm_120a:1", "emulated", 1, "sm_120a"),
        ("emulated:sm_80:0", "emulated:sm_80", "emulated", 0, "sm_80"),
    ],
)
def test_names(name: str, full_name: str, kind: str, index: int, arch: str | None) -> None:
    device = Device(name)
    assert (device.type, str(device)) == (full_name, full_name)
    assert (device.kind, device.index, device.arch) == (kind, index, arch)
    assert device == Device(full_name)
    assert hash(device) == hash(Device(full_name))
    assert device != Device("cuda:3")
    assert Device.is_name(name)


@pytest.mark.parametrize("name", ["cpu", CPU, Device("cpu")])
def test_parse_of_the_cpu(name: str | Device) -> None:
    assert Device.parse(name) == CPU


@pytest.mark.parametrize(
    "name",
    ["", "gpu", "cuda:", "cuda:x", "CPU", "cpu:0", "auto ", "emulated:90", "emulated:sm_9", "emulated::1", 0, None],
)
def test_other_names_are_refused(name: object) -> None:
    for make in (Device.parse, Device):
        with pytest.raises(InvalidArgumentError, match="device") as caught:
            make(name)  # type: ignore[arg-type]
        assert caught.value.param == "device"
    assert not isinstance(name, str) or not Device.is_name(name)


def test_auto_is_a_wish_and_no_device() -> None:
    assert Device.is_name("auto")
    with pytest.raises(InvalidArgumentError):
        Device("auto")


class Machine:
    """What `open_driver` finds: a driver whose start says `status`, of a version; or an error in loading it."""

    def __init__(self, status: int = 0, version: int = 13_000, error: Exception | None = None) -> None:
        self.status, self.version, self.error = bindings.CUresult(status), version, error

    def cuInit(self, flags: int) -> tuple[Any]:
        if self.error is not None:
            raise self.error
        return (self.status,)

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return bindings.CUresult(0), self.version

    cuGetErrorName = FakeDriver.cuGetErrorName
    cuGetErrorString = FakeDriver.cuGetErrorString


@pytest.mark.parametrize(
    ("machine", "error", "words"),
    [
        (Machine(error=RuntimeError("no libcuda.so.1")), NoDriverError, ["no CUDA driver", "install", "--gpus all"]),
        (Machine(status=100), NoDriverError, ["sees no GPU", "CUDA_VISIBLE_DEVICES='7'", "nvidia-smi"]),
        (Machine(status=999), DeviceError, ["does not start", "CUDA_ERROR_UNKNOWN"]),
        (Machine(version=12_090), DriverTooOldError, ["CUDA 12.9", "13.0 or newer", "R580"]),
    ],
)
def test_a_missing_driver_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, error: type[DeviceError], words: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for function in ("cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"):
        monkeypatch.setattr(bindings, function, getattr(machine, function))
    monkeypatch.setattr(device_module, "open_driver", open_driver.__wrapped__)
    with pytest.raises(error) as caught:
        Device.parse("cuda")
    for word in [*words, "--device cpu", "--device emulated"]:
        assert word in str(caught.value)
    if error is not DeviceError:
        monkeypatch.setattr(device_module.ctypes, "CDLL", lambda name: None)
        assert best_device() == CPU


def test_without_the_drivers_library_its_bindings_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(device_module.ctypes, "CDLL", refuse)
    monkeypatch.setattr(device_module, "open_driver", None)
    assert best_device() == CPU


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError("No module named 'cuda'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for arch in (None, "sm_80"):
        with pytest.raises(NoDriverError, match=r"pip install '\.\[cuda\]'"):
            open_driver.__wrapped__(arch)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(FakeDriver(num_devices=2), bindings)
    monkeypatch.setattr(device_module, "open_driver", lambda arch: driver)
    monkeypatch.setattr(device_module.ctypes, "CDLL", lambda name: None)
    assert Device.parse("cuda:1").index == 1
    assert Device.parse("auto") == Device("cuda:0")
    with pytest.raises(InvalidDeviceError, match=r"'cuda:2'.* 2 such devices"):
        Device.parse("cuda:2")
