"""What every test is under: a kernel that it launches on an emulated device must be fit for hardware, too; and Python's
collector, which would else take a sixth of the time, goes through what was collected once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from runtime.device.errors import CompileError
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelCache
from runtime.device.kernel_list import KernelList
from runtime.device.toolkit import require_compiler

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation
    from runtime.device.kernel import Kernel

OURS = "numba_kernels.cuda."  # tests have kernels of their own, which may do as they like

_loaded: list[tuple[Specialisation, str]] = []
_examined: set[tuple[Specialisation, str]] = set()
_load = Gpu.kernel


def _record(gpu: Gpu, specialisation: Specialisation) -> Kernel:
    kernel = _load(gpu, specialisation)
    key = specialisation, gpu.arch
    is_ours = specialisation.kernel.py_func.__module__.startswith(OURS)
    if key not in _examined and gpu.driver.is_emulated and is_ours and not isinstance(gpu.kernel_cache, KernelList):
        _examined.add(key)
        _loaded.append(key)
    return kernel


Gpu.kernel = _record  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()  # modules and items, a million objects, live until the end


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def kernels_are_fit_for_hardware() -> Iterator[None]:
    """Fails a test that is the first to load a kernel which spills, uses local memory or float64, or about which ptxas
    complains, or whose machine code is not as meant (it is read where nvdisasm is installed): the emulator would not
    mind. `tests/tools/test_kernel_report.py` examines those that no test loads. Without the kernels' compiler they come
    out of a bundle, and were examined where that was made."""
    yield
    if _loaded and _has_compiler():
        from tools.kernel_costs.machine_code import nvdisasm_if_any
        from tools.kernel_costs.static import examine
        from tools.kernel_report import offenders

        cache, nvdisasm = KernelCache(), nvdisasm_if_any()
        facts = [found for each, arch in _loaded for found in examine(each, (arch,), cache, nvdisasm)]
        _loaded.clear()
        assert offenders(facts, []) == []


def _has_compiler() -> bool:
    try:
        require_compiler()
    except CompileError:
        return False
    return True
