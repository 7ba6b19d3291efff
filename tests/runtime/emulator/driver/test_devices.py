"""Devices, contexts and errors of the emulated driver."""

from __future__ import annotations

import threading

import pytest
from cuda.bindings import driver as cu

from runtime.emulator.driver.architectures import GPU_MODELS, H100, MODEL_OF_ARCH, model_of
from runtime.emulator.driver.emulated_driver import EmulatedDriver
from runtime.errors import InvalidArgumentError
from tests.runtime.emulator.driver.driver_harness import Harness, R

A = cu.CUdevice_attribute


def test_nothing_works_before_cuInit() -> None:
    driver = EmulatedDriver("sm_80")
    assert driver.cuDeviceGetCount() == (R.CUDA_ERROR_NOT_INITIALIZED, None)
    assert driver.cuMemGetInfo() == (R.CUDA_ERROR_NOT_INITIALIZED, None, None)
    assert driver.cuCtxSynchronize() == (R.CUDA_ERROR_NOT_INITIALIZED,)
    assert driver.cuInit(1) == (R.CUDA_ERROR_INVALID_VALUE,)
    assert driver.cuDriverGetVersion()[0] == R.CUDA_SUCCESS
    assert driver.cuInit(0) == (R.CUDA_SUCCESS,)
    assert driver.cuDeviceGetCount() == (R.CUDA_SUCCESS, 2)
    driver.close()


def test_names_and_words_of_errors() -> None:
    harness = Harness()
    assert harness("cuGetErrorName", R.CUDA_ERROR_OUT_OF_MEMORY) == b"CUDA_ERROR_OUT_OF_MEMORY"
    assert harness("cuGetErrorString", R.CUDA_ERROR_ILLEGAL_ADDRESS) == b"illegal address"
    assert harness("cuGetErrorString", R.CUDA_SUCCESS) == b"no error"
    assert harness.status("cuGetErrorName", 123456) == R.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("arch", list(MODEL_OF_ARCH))
def test_each_architecture_poses_as_its_product(arch: str) -> None:
    harness = Harness(arch, num_devices=1)
    model = model_of(arch)
    device = harness("cuDeviceGet", 0)

    def attribute(name: str) -> int:
        value: int = harness("cuDeviceGetAttribute", getattr(A, "CU_DEVICE_ATTRIBUTE_" + name), device)
        return value

    assert harness("cuDeviceGetName", 100, device) == f"Emulated {model.name} ({model.arch})".encode()
    assert harness("cuDeviceGetName", 9, device) == b"Emulated"
    major, minor = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    assert f"sm_{major}{minor}" == arch.rstrip("a")
    assert attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") <= attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") - 1024
    assert attribute("MULTIPROCESSOR_COUNT") == model.num_sms
    bandwidth = 2 * attribute("MEMORY_CLOCK_RATE") * 1e3 * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
    assert bandwidth == pytest.approx(model.memory_bytes_per_s, rel=0.03)
    assert harness("cuDeviceTotalMem", device) == harness.driver.devices[0].machine.size_bytes
    assert harness.status("cuDeviceGetAttribute", A.CU_DEVICE_ATTRIBUTE_MAX, device) == R.CUDA_ERROR_INVALID_VALUE


def test_the_figures_of_the_products_fit_each_other() -> None:
    for model in GPU_MODELS.values():
        assert model.shared_bytes_per_block == model.shared_bytes_per_sm - 1024
        assert model.threads_per_sm % 512 == 0
        # float32 peak: 128 lanes a multiprocessor (64 of A100), an fma each cycle
        lanes = 64 if model.arch == "sm_80" else 128
        peak = model.num_sms * lanes * 2 * model.clock_khz * 1e3
        assert peak == pytest.approx(model.float32_flops, rel=0.07)


def test_which_ptx_runs_where() -> None:
    assert model_of("sm_80").runs("sm_80")
    assert not model_of("sm_80").runs("sm_86")
    assert model_of("sm_90a").runs("sm_80")
    assert model_of("sm_90a").runs("sm_90a")
    assert not model_of("sm_100a").runs("sm_90a")
    assert not model_of("sm_120a").runs("sm_100f")
    assert model_of("sm_100a").runs("sm_100f")


def test_what_cannot_be_emulated_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="sm_75"):
        EmulatedDriver("sm_75")
    with pytest.raises(InvalidArgumentError, match="at least one"):
        EmulatedDriver([])
    with pytest.raises(InvalidArgumentError, match="num_devices 3"):
        EmulatedDriver(["sm_80", "sm_90a"], num_devices=3)
    with pytest.raises(InvalidArgumentError, match="num_threads"):
        EmulatedDriver(num_threads=0)


def test_several_devices() -> None:
    harness = Harness(["sm_80", H100, "sm_90a"])
    assert harness("cuDeviceGetCount") == 3
    assert harness.status("cuDeviceGet", 3) == R.CUDA_ERROR_INVALID_DEVICE
    assert harness.status("cuDeviceGet", -1) == R.CUDA_ERROR_INVALID_DEVICE
    names = [harness("cuDeviceGetName", 100, harness("cuDeviceGet", index)) for index in range(3)]
    assert names == [b"Emulated A100 (sm_80)", b"Emulated H100 (sm_90a)", b"Emulated H200 (sm_90a)"]
    assert harness("cuDeviceCanAccessPeer", 1, 2) == 1
    assert harness("cuDeviceCanAccessPeer", 0, 1) == 0
    assert harness("cuDeviceCanAccessPeer", 1, 1) == 0


def test_contexts() -> None:
    harness = Harness(num_devices=2)
    second = harness.use(1)
    assert int(harness("cuDevicePrimaryCtxRetain", 1)) == int(second) != int(harness.context)
    assert harness.status("cuCtxSetCurrent", 4242) == R.CUDA_ERROR_INVALID_CONTEXT
    harness("cuCtxSetCurrent", None)
    assert harness.status("cuMemAlloc", 16) == R.CUDA_ERROR_INVALID_CONTEXT
    harness("cuCtxSetCurrent", harness.context)
    harness("cuMemAlloc", 16)


def test_the_current_context_belongs_to_the_thread() -> None:
    harness = Harness()
    seen = []

    def other() -> None:
        seen.append(harness.status("cuMemAlloc", 16))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [R.CUDA_ERROR_INVALID_CONTEXT]


def test_peers() -> None:
    harness = Harness(["sm_90a", "sm_90a", "sm_80"])
    second, third = harness.use(1), harness.use(2)
    harness("cuCtxSetCurrent", harness.context)
    assert harness.status("cuCtxEnablePeerAccess", harness.context, 0) == R.CUDA_ERROR_INVALID_CONTEXT
    assert harness.status("cuCtxEnablePeerAccess", second, 1) == R.CUDA_ERROR_INVALID_VALUE
    assert harness.status("cuCtxEnablePeerAccess", third, 0) == R.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    harness("cuCtxEnablePeerAccess", second, 0)
    assert harness.status("cuCtxEnablePeerAccess", second, 0) == R.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
