"""The device that GPU kernels are tested on: emulated, so that every machine runs them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import DEFAULT_DEVICE
from tests.runtime.device.emulated import new_gpu
from tests.selection import KERNELS, refuse_unknown

_OTHERS: tuple[tuple[str, set[object]], ...] = (
    *(
        (file, {"f16"})
        for file in (
            "test_attention",
            "test_gemm.py",
            "test_gemm_hopper",
            "test_gemv",
            "test_few_rows",
            "test_rope",
            "test_norm",
            "test_activation",
            "test_packed_tiles",
            "test_dequantize",
        )
    ),
    ("test_attention_exact", {"decode", "f32"}),  # models have it
    ("test_attention_hopper", {128}),  # a head, or a window that has sinks
    ("test_dequantize", {"u4_g128", "bf16"}),
    ("test_dequantize", {"u4_g32"}),
    ("test_gemm_fused", {"hopper/large"}),  # clusters: hopper/narrow/2
    ("test_gemm_fused", {"hopper/middle"}),
    ("test_gemm_fused", {"hopper/small", (70, 512, 72)}),
    ("test_gemm_fused", {"gemv", "gelu_tanh"}),
    ("test_gemm_fused", {"tensor_core", "silu", (70, 77, 136)}),
    ("test_few_rows_packed", {"e2m1_g16_e4m3"}),
    ("test_packed_tiles", {"e2m1_g16_e4m3"}),
    ("test_packed_tiles", {"u4_g32"}),
)
"""Of each file, the parameters whose tests are for `make test-all`: kernels that differ from those of another test in a
type, a tile or a format alone. A test has to have all of a row's to be one."""
_gpus: dict[str, Gpu] = {}  # one of each architecture, for all tests until one of them breaks it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Compiling a kernel is what most of these tests cost, so that `make test` takes one of those that are alike."""
    found: set[int] = set()
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        callspec = getattr(item, "callspec", None)
        given = [] if callspec is None else list(callspec.params.values())
        given += [each for value in given if isinstance(value, tuple) for each in value]
        for number, (file, values) in enumerate(_OTHERS):
            if item.path.name.startswith(file) and all(value in given for value in values):
                found.add(number)
                item.add_marker(pytest.mark.exhaustive)
    unknown = [f"{file} {values}" for number, (file, values) in enumerate(_OTHERS) if number not in found]
    refuse_unknown(config, "tests/numba_kernels/cuda/conftest.py", ((KERNELS, each) for each in unknown))


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """A device whose memory is whole, and all returned, when the test ends. `harness.both_archs` chooses others.

    A kernel's fault ends the device, as a real one's context; the next test then gets another.
    """
    name = getattr(request, "param", DEFAULT_DEVICE)
    device = _gpus.get(name) or _gpus.setdefault(name, new_gpu(name.partition(":")[2]))
    gc.freeze()  # what there is stays: the collection below then looks at what the test has made
    before = device.allocator.statistics.requested_bytes
    yield device
    try:
        device.synchronize()
    finally:
        if device.driver.fault() is not None:
            del _gpus[name]
    gc.collect()
    device.allocator.check_integrity()
    assert device.allocator.statistics.requested_bytes <= before, "the test has left memory in use"


@pytest.fixture(scope="session", autouse=True)
def everything_is_collected_at_the_end() -> Iterator[None]:
    """What `gpu` froze is let go while the interpreter is whole."""
    yield
    gc.unfreeze()
    _gpus.clear()
    gc.collect()
