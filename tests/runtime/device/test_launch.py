"""Launches on a driver that records them: how arguments are packed, what is built once and refused, what it costs."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import pytest
from cuda.bindings import driver as bindings

from numba_kernels.cuda.specialisation import TensorMapLayout
from runtime.device import gpu as gpu_module
from runtime.device import tensor_map
from runtime.device.errors import CompileError, LaunchError
from runtime.device.gpu import Gpu
from runtime.device.kernel import Arguments
from runtime.errors import InvalidArgumentError
from tests.runtime.device.emulated import new_gpu
from tests.runtime.device.fake_driver import FakeDriver
from tests.runtime.device.kernels import launch_of, scale, scale_dependent


def arguments_of(parameters: int) -> tuple[int, int, int, float]:
    """What the driver finds at `parameters`: the arguments of `scale`."""
    pointers = (ctypes.c_void_p * 4).from_address(parameters)
    kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float)
    return tuple(kind.from_address(pointer or 0).value for kind, pointer in zip(kinds, pointers))  # type: ignore[return-value]


def test_a_launch_reaches_the_driver(fake_gpu: Gpu, fake: FakeDriver) -> None:
    launch = launch_of(scale(), 1000, shared_bytes=4096)
    fake_gpu.launch(launch, 2**64 - 1, 7 << 40, 2**32 - 1, -2.5)
    function, grid, parameters, stream, config = fake.launches[0]
    assert function == int(fake_gpu.kernel(scale()).function)
    assert grid == (4, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (256, 1, 1)
    assert (config.sharedMemBytes, config.numAttrs, stream) == (4096, 0, int(fake_gpu.stream.handle))
    assert arguments_of(parameters) == (2**64 - 1, 7 << 40, 2**32 - 1, -2.5)
    assert fake.counts["cuFuncSetAttribute"] == 0  # 48 KiB need no permission


def test_what_can_be_is_built_once(fake_gpu: Gpu, fake: FakeDriver) -> None:
    launch = launch_of(scale(), 512)
    for number in range(5):
        fake_gpu.launch(launch, 1, 2, number, 1.0)
    assert len({config for *_, config in fake.launches}) == 1
    assert len({parameters for _, _, parameters, *_ in fake.launches}) == 1
    assert (fake.counts["cuModuleLoadData"], len(fake.launches)) == (1, 5)
    assert fake_gpu.kernel_cache.num_compiled == 1


def test_a_thread_has_its_own_arguments(fake_gpu: Gpu, fake: FakeDriver) -> None:
    launch = launch_of(scale(), 512)
    gc.collect()  # what earlier tests left: its finalisers make its own context this thread's, whenever they run
    fake_gpu.context.make_current()
    fake.counts.clear()
    fake_gpu.launch(launch, 1, 2, 3, 1.0)
    thread = threading.Thread(target=fake_gpu.launch, args=(launch, 4, 5, 6, 2.0))
    thread.start()
    thread.join()
    assert fake.launches[0][2] != fake.launches[1][2]
    assert arguments_of(fake.launches[0][2]) == (1, 2, 3, 1.0)
    assert fake.counts["cuCtxSetCurrent"] == 1  # in the new thread; this one has it


def test_streams(fake_gpu: Gpu, fake: FakeDriver) -> None:
    launch, other = launch_of(scale(), 512), fake_gpu.new_stream()
    bound = fake_gpu.bind(launch)
    bound(1, 2, 3, 1.0)
    with fake_gpu.use(other):
        bound(1, 2, 3, 1.0)
        fake_gpu.launch(launch, 1, 2, 3, 1.0)
    bound(1, 2, 3, 1.0)
    fake_gpu.launch(launch, 1, 2, 3, 1.0, stream=other)
    mine, others = int(fake_gpu.stream.handle), int(other.handle)
    assert [stream for _, _, _, stream, _ in fake.launches] == [mine, others, others, mine, others]
    assert fake_gpu.stream is fake_gpu.default_stream


def test_attributes(fake_gpu: Gpu, fake: FakeDriver) -> None:
    ids = bindings.CUlaunchAttributeID
    fake_gpu.launch(launch_of(scale(), 512, cluster=(2, 1, 1), shared_bytes=200_000), 1, 2, 3, 1.0)
    fake_gpu.launch(launch_of(scale_dependent(), 512, is_dependent=True), 1, 2, 3, 1.0)
    cluster, dependent = (config.attrs for *_, config in fake.launches)
    assert [attribute.id for attribute in cluster] == [ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION]
    size = cluster[0].value.clusterDim
    assert (size.x, size.y, size.z) == (2, 1, 1)
    assert [attribute.id for attribute in dependent] == [ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
    assert dependent[0].value.programmaticStreamSerializationAllowed == 1
    assert fake.counts["cuFuncSetAttribute"] == 1  # of the 200,000 bytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 2, 3), "takes 4 arguments, got 3"),
        ((1, 2, 3, 4.0, 5), "takes 4 arguments, got 5"),
        ((-1, 2, 3, 1.0), "argument 0 of type float32"),
        ((1, 2, 2**32, 1.0), "argument 2 of type uint32, got 4294967296"),
        ((1, 2, 3.5, 1.0), "argument 2 of type uint32, got 3.5"),
        ((1, 2, 3, "x"), "argument 3 of type float32, got 'x'"),
        ((1, None, 3, 1.0), "argument 1 of type float32"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_launched(
    fake_gpu: Gpu, fake: FakeDriver, arguments: tuple[Any, ...], words: str
) -> None:
    for launch in (launch_of(scale(), 512), launch_of(scale(), 0)):
        with pytest.raises(InvalidArgumentError) as caught:
            fake_gpu.launch(launch, *arguments)
        assert "kernel scale" in str(caught.value)
        assert words in str(caught.value)
    assert fake.launches == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": (-1, 1, 1)}, "none of its sizes below 0"),
        ({"grid": (1, 65_536, 1)}, "65535"),
        ({"grid": (2**31, 1, 1)}, "2147483647"),
        ({"block": (0, 1, 1)}, "1 to 256 threads"),
        ({"block": (257, 1, 1)}, "1 to 256 threads"),
        ({"block": (16, 16, 2)}, "1 to 256 threads"),
        ({"grid": (9, 1, 1), "cluster": (9, 1, 1)}, "1 to 8 blocks"),
        ({"cluster": (0, 1, 1)}, "1 to 8 blocks"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple"),
        ({"shared_bytes": -1}, "at least 0"),
        ({"shared_bytes": 232_449}, "at most 232448 bytes"),
        ({"is_dependent": True}, "griddepcontrol.wait"),
    ],
)
def test_impossible_launches_say_which_limit(
    fake_gpu: Gpu, fake: FakeDriver, changes: dict[str, Any], words: str
) -> None:
    launch = launch_of(scale(), 512, **changes)
    with pytest.raises(LaunchError) as caught:
        fake_gpu.launch(launch, 1, 2, 3, 1.0)
    error = caught.value
    assert words in str(error)
    assert (error.kernel, error.grid, error.block, error.shared_bytes) == (
        "scale", launch.grid, launch.block, launch.shared_bytes,
    )  # fmt: skip
    assert fake.launches == []


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (1, LaunchError, "CUDA_ERROR_INVALID_VALUE"),
        (701, LaunchError, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        (719, LaunchError, "CUDA_ERROR_LAUNCH_FAILED"),
    ],
)
def test_a_refused_launch_is_described(
    fake_gpu: Gpu, fake: FakeDriver, code: int, error: type[Exception], words: str
) -> None:
    bound = fake_gpu.bind(launch_of(scale(), 512, shared_bytes=64))
    bound._launch = lambda *_: (bindings.CUresult(code),)
    with pytest.raises(error) as caught:
        bound(1, 2, 3, 1.0)
    for word in (words, "kernel scale", "grid (2, 1, 1)", "block (256, 1, 1)", "64 bytes of dynamic shared memory"):
        assert word in str(caught.value)
    assert isinstance(caught.value, LaunchError)
    assert (caught.value.kernel, caught.value.shared_bytes) == ("scale", 64)


def test_a_failure_that_comes_later_names_the_last_launch(fake_gpu: Gpu, fake: FakeDriver) -> None:
    fake_gpu.launch(launch_of(scale(), 512), 1, 2, 3, 1.0)
    fake.failing["cuCtxSynchronize"] = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=r"ILLEGAL_ADDRESS.*launched last: kernel scale, grid \(2, 1, 1\)"):
        fake_gpu.synchronize()


def test_an_empty_grid_launches_nothing(fake_gpu: Gpu, fake: FakeDriver) -> None:
    fake_gpu.launch(launch_of(scale(), 0), 1, 2, 0, 1.0)
    assert fake.launches == []


def test_a_kernel_of_another_architecture_is_refused(fake_gpu: Gpu, fake: FakeDriver) -> None:
    import dataclasses

    blackwell = dataclasses.replace(scale(), min_capability=100, needs_arch_features=True)
    with pytest.raises(CompileError, match=r"scale needs sm_100a; cuda:0 is sm_90a"):
        fake_gpu.launch(launch_of(blackwell, 512), 1, 2, 3, 1.0)


def test_all_kinds_of_numbers_are_packed(fake_gpu: Gpu) -> None:
    import dataclasses

    kernel = fake_gpu.kernel(scale())
    letters = "? b B h H i I q Q f d B"
    kernel.compiled = dataclasses.replace(kernel.compiled, argument_format=letters)
    packed = Arguments(kernel)
    values = (True, -1, 255, -2, 65_535, -3, 2**32 - 1, -4, 2**64 - 1, 0.5, 0.1, 9)
    packed.pack(*values)
    kinds = (
        ctypes.c_bool, ctypes.c_int8, ctypes.c_uint8, ctypes.c_int16, ctypes.c_uint16, ctypes.c_int32, ctypes.c_uint32,
        ctypes.c_int64, ctypes.c_uint64, ctypes.c_float, ctypes.c_double, ctypes.c_uint8,
    )  # fmt: skip
    pointers = (ctypes.c_void_p * len(values)).from_address(packed.address)
    assert all(pointer and pointer % ctypes.alignment(kind) == 0 for pointer, kind in zip(pointers, kinds))
    assert tuple(kind.from_address(pointer or 0).value for kind, pointer in zip(kinds, pointers)) == values


def test_launches_and_maps_are_remembered_up_to_a_limit(fake_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "_MOST_LAUNCHES", 3)
    monkeypatch.setattr(gpu_module, "_MOST_LAYOUTS", 2)
    monkeypatch.setattr(tensor_map, "MOST_ADDRESSES", 2)
    launches = [launch_of(scale(), 256 * blocks) for blocks in (1, 2, 3, 4)]
    for launch in (*launches, launches[3]):
        fake_gpu.launch(launch, 1, 2, 3, 1.0)
    assert list(fake_gpu._bound.launches) == launches[1:]
    assert [launch for launch, *_ in fake_gpu._bound.latest.values()] == launches[1:]
    gpu = new_gpu("sm_90a")
    layouts = [TensorMapLayout("bf16", (64, rows), (128,), (64, 8), 128) for rows in (8, 16, 24)]
    maps = [gpu.tensor_map(address, layouts[0]) for address in (1 << 20, 2 << 20, 3 << 20)]
    assert len(set(maps)) == 3
    assert list(gpu._tensor_maps[layouts[0]].values()) == maps[1:]
    for layout in layouts[1:]:
        assert gpu.tensor_map(1 << 20, layout) not in maps
    assert list(gpu._tensor_maps) == layouts[1:]


def test_a_launch_is_not_taken_for_another_in_its_place(fake_gpu: Gpu, fake: FakeDriver, monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_module, "_MOST_LAUNCHES", 2)
    for blocks in range(1, 40):  # each goes when it was launched, and the next may lie where it lay
        fake_gpu.launch(launch_of(scale(), 256 * blocks), 1, 2, 3, 1.0)
    assert [grid for _, grid, *_ in fake.launches] == [(blocks, 1, 1) for blocks in range(1, 40)]
