"""Modules and launches of the emulated driver: images, arguments, limits, attributes, faults that stick."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from runtime.emulator.async_copies.tensor_map import encode
from runtime.emulator.execution import launch
from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.emulator.driver.driver_harness import PTX, Checks, Harness, R, config

F = cu.CUfunction_attribute
HEAD = ".version 8.0\n.target {}\n.address_size 64\n"
EMPTY = ".visible .entry {name}() {directives} {{ {body} ret; }}\n"


def entry_text(name: str = "k", *, target: str = "sm_90", directives: str = "", body: str = "") -> str:
    return HEAD.format(target) + EMPTY.format(name=name, directives=directives, body=body)


def test_garbage_in_a_kernels_thread_does_not_wait_for_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collection finds calls the driver, whose lock the launching thread holds while it waits for the others."""
    harness = Harness("sm_80", checks=Checks.NONE, num_threads=2)
    scale, stream, count = harness.function("scale"), harness.stream(), 1 << 18
    memory = harness.put(np.ones(count, np.float32))
    found: list[tuple[bool, Any]] = []

    class Owner:
        def __init__(self) -> None:
            self.event = harness.event()
            self.me = self

        def __del__(self) -> None:
            found.append((threading.current_thread() is threading.main_thread(), self.event))
            harness("cuEventDestroy", self.event)

    garbage = [Owner() for _ in range(8)]
    run = launch._Run._work

    def work(self: Any, worker: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            garbage.clear()
            assert [[[] for _ in range(100)] for _ in range(10)]  # as much as makes Python collect
        run(self, worker)

    monkeypatch.setattr(launch._Run, "_work", work)
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(100, 1, 1)
    try:
        harness.scale(scale, memory, count, 3.0, stream)
        harness("cuStreamSynchronize", stream)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert not garbage, "no second thread took part"
    assert [is_main for is_main, _ in found] == [True] * 8
    assert (harness.get(memory, count) == 3.0).all()


def test_images() -> None:
    harness = Harness("sm_90a")

    def status(image: Any) -> Any:
        return harness.status("cuModuleLoadData", image)

    assert status(PTX.encode() + b"\0") == R.CUDA_SUCCESS
    buffer = ctypes.create_string_buffer(PTX.encode())
    assert status(ctypes.addressof(buffer)) == R.CUDA_SUCCESS
    assert status(np.frombuffer(PTX.encode(), np.uint8)) == R.CUDA_SUCCESS
    assert status(b"\x7fELF machine code") == R.CUDA_ERROR_NO_BINARY_FOR_GPU
    assert status(b"no PTX at all") == R.CUDA_ERROR_INVALID_IMAGE
    assert status(0) == R.CUDA_ERROR_INVALID_VALUE
    assert status(PTX.replace("sm_80", "sm_100a").encode()) == R.CUDA_ERROR_NO_BINARY_FOR_GPU
    assert "sm_100a" in harness.driver.last_reason
    assert status(PTX.replace("mul.f32", "mul.f32 {{").encode()) == R.CUDA_ERROR_INVALID_PTX
    assert "line" in harness.driver.last_reason


def test_functions_by_name() -> None:
    harness = Harness()
    text = HEAD.format("sm_80") + ".global .align 8 .b32 table[4] = {1, 2, 3, 4};\n" + entry_text().split("64\n", 1)[1]
    before = harness("cuMemGetInfo")[0]
    module = harness("cuModuleLoadData", text.encode())
    assert harness.status("cuModuleGetFunction", module, b"other") == R.CUDA_ERROR_NOT_FOUND
    assert "'other': k" in harness.driver.last_reason
    function = harness("cuModuleGetFunction", module, b"k")
    assert int(harness("cuModuleGetFunction", module, b"k")) == int(function)
    harness("cuModuleUnload", module)
    assert harness("cuMemGetInfo")[0] == before
    for call in (("cuModuleUnload", module), ("cuModuleGetFunction", module, b"k")):
        assert harness.status(*call) == R.CUDA_ERROR_INVALID_HANDLE


@pytest.mark.parametrize("form", ["tuple", "addresses"])
def test_arguments_in_both_forms(form: str) -> None:
    harness = Harness()
    scale, stream = harness.function("scale"), harness.stream()
    x = harness.put(np.arange(70, dtype=np.float32))
    values = (ctypes.c_uint64(x), ctypes.c_uint32(70), ctypes.c_float(1.5))
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    params: Any = ctypes.addressof(pointers)
    if form == "tuple":
        params = ((x, 70, 1.5), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float))
    harness("cuLaunchKernelEx", config((2, 1, 1), (64, 1, 1), stream), scale, params, 0)
    np.testing.assert_array_equal(harness.get(x, 70), np.arange(70) * np.float32(1.5))


def test_arguments_are_read_when_the_kernel_is_launched() -> None:
    harness = Harness()
    scale, stream = harness.function("scale"), harness.stream()
    x = harness.put(np.ones(8, np.float32))
    values = (ctypes.c_uint64(x), ctypes.c_uint32(8), ctypes.c_float(2.0))
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    harness("cuLaunchKernelEx", config((1, 1, 1), (64, 1, 1), stream), scale, ctypes.addressof(pointers), 0)
    values[2].value = 100.0
    assert harness.get(x, 8).tolist() == [2.0] * 8


def test_wrong_arguments() -> None:
    harness = Harness()
    scale, stream = harness.function("scale"), harness.stream()
    kinds = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float)
    one = config((1, 1, 1), (1, 1, 1), stream)
    for params in (None, 0, ((1, 2), kinds[:2]), ((1, 2, 3.0), (kinds[0], kinds[0], kinds[2]))):
        assert harness.status("cuLaunchKernelEx", one, scale, params, 0) == R.CUDA_ERROR_INVALID_VALUE, params
    assert harness.status("cuLaunchKernelEx", one, scale, ((1, 2, 3.0), kinds), 12345) == R.CUDA_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((0, 1, 1), (1, 1, 1), 0),
        ((1, 65536, 1), (1, 1, 1), 0),
        ((1, 1, 65536), (1, 1, 1), 0),
        ((2**31, 1, 1), (1, 1, 1), 0),
        ((1, 1, 1), (0, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (1, 1, 65), 0),
        ((1, 1, 1), (32, 33, 1), 0),
        ((1, 1, 1), (1, 1, 1), 48 * 1024 + 1),
    ],
)
def test_limits_of_a_launch(grid: Any, block: Any, shared: int) -> None:
    harness = Harness()
    function, stream = harness.function("k", entry_text(target="sm_80")), harness.stream()
    assert harness.status("cuLaunchKernelEx", config(grid, block, stream, shared=shared), function, None, 0) == (
        R.CUDA_ERROR_INVALID_VALUE
    )
    assert harness.driver.last_reason
    harness("cuLaunchKernelEx", config((1, 1, 1), (1024, 1, 1), stream, shared=48 * 1024), function, None, 0)
    harness("cuCtxSynchronize")


def test_dynamic_shared_memory_above_48_kb_needs_the_attribute() -> None:
    harness = Harness("sm_80")
    text = entry_text(target="sm_80", body=".shared .align 4 .b8 own[1024];")
    function, stream = harness.function("k", text), harness.stream()
    attribute = F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    at_most = config((1, 1, 1), (32, 1, 1), stream, shared=47 * 1024)  # and 1 KB of its own
    harness("cuLaunchKernelEx", at_most, function, None, 0)
    launch = ("cuLaunchKernelEx", config((1, 1, 1), (32, 1, 1), stream, shared=100 * 1024), function, None, 0)
    assert harness.status(*launch) == R.CUDA_ERROR_INVALID_VALUE
    assert harness.status("cuFuncSetAttribute", function, attribute, 163 * 1024) == R.CUDA_ERROR_INVALID_VALUE
    harness("cuFuncSetAttribute", function, attribute, 162 * 1024)
    harness(*launch)
    harness("cuFuncSetAttribute", function, attribute, 0)  # what was found valid is looked at again
    assert harness.status(*launch) == R.CUDA_ERROR_INVALID_VALUE
    harness("cuCtxSynchronize")


def test_limits_that_a_text_sets() -> None:
    harness = Harness("sm_90a")
    function = harness.function("k", entry_text(directives=".maxntid 128, 2, 1\n.minnctapersm 2"))
    assert harness.status("cuFuncSetAttribute", function, F.CU_FUNC_ATTRIBUTE_NUM_REGS, 1) == R.CUDA_ERROR_INVALID_VALUE
    large = config((1, 1, 1), (257, 1, 1))
    assert harness.status("cuLaunchKernelEx", large, function, None, 0) == R.CUDA_ERROR_INVALID_VALUE
    harness("cuLaunchKernelEx", config((1, 1, 1), (256, 1, 1)), function, None, 0)


def test_a_required_block_is_required() -> None:
    harness = Harness()
    function = harness.function("k", entry_text(target="sm_80", directives=".reqntid 64, 2, 1"))
    wrong = config((1, 1, 1), (128, 1, 1))
    assert harness.status("cuLaunchKernelEx", wrong, function, None, 0) == R.CUDA_ERROR_INVALID_VALUE
    harness("cuLaunchKernelEx", config((1, 1, 1), (64, 2, 1)), function, None, 0)


def test_clusters() -> None:
    harness = Harness("sm_90a")
    function, stream = harness.function("k", entry_text()), harness.stream()

    def launch(grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> Any:
        return harness.status("cuLaunchKernelEx", config(grid, (32, 1, 1), stream, cluster=cluster), function, None, 0)

    assert launch((8, 2, 1), (4, 2, 1)) == R.CUDA_SUCCESS
    assert launch((9, 1, 1), (2, 1, 1)) == R.CUDA_ERROR_INVALID_VALUE
    assert launch((16, 1, 1), (16, 1, 1)) == R.CUDA_ERROR_INVALID_CLUSTER_SIZE
    required = harness.function("k", entry_text(directives=".reqnctapercluster 2, 1, 1"))
    harness("cuLaunchKernelEx", config((4, 1, 1), (32, 1, 1), stream), required, None, 0)
    odd = config((3, 1, 1), (32, 1, 1), stream)
    assert harness.status("cuLaunchKernelEx", odd, required, None, 0) == R.CUDA_ERROR_INVALID_VALUE
    harness("cuCtxSynchronize")
    older = Harness("sm_80")
    function, stream = older.function("k", entry_text(target="sm_80")), older.stream()
    made = config((2, 1, 1), (32, 1, 1), stream, cluster=(2, 1, 1))
    assert older.status("cuLaunchKernelEx", made, function, None, 0) == R.CUDA_ERROR_INVALID_VALUE


def test_an_unknown_attribute_of_a_launch_is_refused() -> None:
    harness = Harness("sm_90a")
    function = harness.function("k", entry_text())
    unknown = config((1, 1, 1), (32, 1, 1), ACCESS_POLICY_WINDOW=None)
    assert harness.status("cuLaunchKernelEx", unknown, function, None, 0) == R.CUDA_ERROR_NOT_SUPPORTED


def test_clusters_lie_in_one_group_of_multiprocessors() -> None:
    """An H200's 132 are six groups of 16 and two of 18."""
    harness = Harness("sm_90a")
    function = harness.function("k", entry_text(directives=".maxnreg 64"))
    harness("cuFuncSetAttribute", function, F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 227 * 1024)

    def clusters(size: int, shared: int) -> int:
        asked = config((size, 1, 1), (128, 1, 1), None, shared=shared, cluster=(size, 1, 1))
        found: int = harness("cuOccupancyMaxActiveClusters", function, asked)
        return found

    assert [clusters(size, 227 * 1024) for size in (2, 4, 8)] == [66, 32, 16]
    assert clusters(8, 110 * 1024) == 32  # two blocks a multiprocessor
    on_ampere = Harness("sm_80")
    other = on_ampere.function("k", entry_text().replace("sm_90", "sm_80"))
    asked = config((2, 1, 1), (128, 1, 1), None, cluster=(2, 1, 1))
    assert on_ampere.status("cuOccupancyMaxActiveClusters", other, asked) == R.CUDA_ERROR_INVALID_VALUE


def test_handles_that_do_not_exist() -> None:
    harness = Harness(num_devices=2)
    function, stream = harness.function("k", entry_text(target="sm_80")), harness.stream()
    for kernel, on in ((7, stream), (function, 7)):
        one = config((1, 1, 1), (1, 1, 1), on)
        assert harness.status("cuLaunchKernelEx", one, kernel, None, 0) == R.CUDA_ERROR_INVALID_HANDLE
    harness.use(1)
    other = config((1, 1, 1), (1, 1, 1), harness.stream())
    assert harness.status("cuLaunchKernelEx", other, function, None, 0) == R.CUDA_ERROR_INVALID_HANDLE


def test_a_fault_sticks() -> None:
    harness = Harness(num_devices=2)
    scale, stream, other = harness.function("scale"), harness.stream(), harness.stream()
    x, y = harness.put(np.ones(64, np.float32)), harness.put(np.ones(64, np.float32))
    harness.scale(scale, x, 65, 2.0, stream)  # one too many
    harness.scale(scale, y, 64, 2.0, stream)  # never runs
    assert harness.driver.last_fault is None
    assert harness.status("cuStreamSynchronize", stream) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    fault = harness.driver.last_fault
    assert isinstance(fault, EmulatorFault)
    assert (fault.kind, fault.kernel, fault.address) == (FaultKind.OUT_OF_BOUNDS, "scale", x + 256)
    for call in (
        ("cuMemAlloc", 16), ("cuMemFree", x), ("cuStreamSynchronize", other), ("cuStreamQuery", stream),
        ("cuEventCreate", 0), ("cuCtxSynchronize",), ("cuMemcpyHtoDAsync", x, np.ones(1), 8, stream), ("cuMemGetInfo",),
    ):  # fmt: skip
        assert harness.status(*call) == R.CUDA_ERROR_ILLEGAL_ADDRESS, call
    harness.use(1)  # the other device is not concerned
    harness("cuMemAlloc", 16)
    harness("cuCtxSetCurrent", harness.context)
    assert harness.status("cuMemAlloc", 16) == R.CUDA_ERROR_ILLEGAL_ADDRESS


def test_faults_have_the_drivers_codes() -> None:
    cases = {
        "ld.global.u32 %a, [%x+2];": R.CUDA_ERROR_MISALIGNED_ADDRESS,
        "ld.global.u32 %a, [%x+4096];": R.CUDA_ERROR_ILLEGAL_ADDRESS,
        "trap;": R.CUDA_ERROR_LAUNCH_FAILED,
        "ld.global.u32 %a, [%x];": R.CUDA_ERROR_LAUNCH_FAILED,  # nothing was written there
    }
    for statement, status in cases.items():
        harness = Harness()
        text = HEAD.format("sm_80") + ".visible .entry k(.param .u64 p) {\n.reg .b64 %x; .reg .b32 %a;\n"
        text += "ld.param.u64 %x, [p];\n" + statement + "\nret; }\n"
        function, x = harness.function("k", text), int(harness("cuMemAlloc", 64))
        harness("cuLaunchKernelEx", config((1, 1, 1), (32, 1, 1)), function, ((x,), (ctypes.c_uint64,)), 0)
        assert harness.status("cuCtxSynchronize") == status, statement
        assert statement.rstrip(";") in str(harness.driver.last_fault)


def test_an_unknown_instruction_is_named() -> None:
    harness = Harness()
    function = harness.function("k", entry_text(target="sm_80", body=".reg .b32 %a; frobnicate.b32 %a, 1;"))
    harness("cuLaunchKernelEx", config((1, 1, 1), (32, 1, 1)), function, None, 0)
    assert harness.status("cuCtxSynchronize") == R.CUDA_ERROR_LAUNCH_FAILED
    assert isinstance(harness.driver.last_fault, UnsupportedInstruction)
    assert "frobnicate" in str(harness.driver.last_fault)


def dependent_case(*bodies: str) -> tuple[Any, Exception | None]:
    """Launches that each may begin before the one in front ends: the status of the synchronisation, and the fault.

    The first is an ordinary one; {x} in a body stands for an address.
    """
    harness = Harness("sm_90a")
    x, stream, _ = harness.put(np.ones(64, np.float32)), harness.stream(), harness.stream()
    for number, body in enumerate(bodies):
        text = HEAD.format("sm_90") + f".visible .entry k{number}(.param .u64 p) {{ .reg .b64 %x; .reg .b32 %a;\n"
        text += f"ld.param.u64 %x, [p]; {body}\nret; }}\n"
        made = config((1, 1, 1), (1, 1, 1), stream, dependent=int(number > 0))
        harness("cuLaunchKernelEx", made, harness.function(f"k{number}", text), ((x,), (ctypes.c_uint64,)), 0)
    return harness.status("cuCtxSynchronize"), harness.driver.last_fault


WRITE, WAIT = "st.global.b32 [%x], 5;", "griddepcontrol.wait;"


def test_dependent_launches_that_wait_are_ordered() -> None:
    assert dependent_case(WRITE, WAIT + WRITE, WAIT + WRITE) == (R.CUDA_SUCCESS, None)


def test_a_dependent_launch_that_touches_memory_before_it_waits() -> None:
    for body in (WRITE, WRITE + WAIT):
        status, fault = dependent_case(WRITE, body)
        assert status == R.CUDA_ERROR_LAUNCH_FAILED
        assert isinstance(fault, EmulatorFault)
        assert fault.kind == FaultKind.BEFORE_DEPENDENCY


def test_a_dependent_launch_may_read_early_what_works_that_had_ended_wrote() -> None:
    """The second's blocks let the third begin when the second has waited for the first."""
    read, next_one = "ld.relaxed.gpu.global.b32 %a, [%x];", "griddepcontrol.launch_dependents;"
    assert dependent_case(WRITE, WAIT + next_one, read + WAIT) == (R.CUDA_SUCCESS, None)
    assert dependent_case(WRITE, WAIT, read + WAIT) == (R.CUDA_SUCCESS, None)
    copy = ".shared .align 16 .b8 row[16];\ncp.async.{}.shared.global [row], [%x], 16;\ncp.async.wait_all;\n"
    assert dependent_case(WRITE, WAIT + next_one, copy.format("cg") + WAIT) == (R.CUDA_SUCCESS, None)
    for second, third in (
        (next_one + WAIT, read + WAIT),  # the first may still run
        (WAIT + next_one + WRITE, read + WAIT),
        (WAIT + next_one, "ld.global.b32 %a, [%x];" + WAIT),  # the first-level cache may have an older number
        (WAIT + next_one, copy.format("ca") + WAIT),
    ):
        status, fault = dependent_case(WRITE, second, third)
        assert status == R.CUDA_ERROR_LAUNCH_FAILED
        assert isinstance(fault, EmulatorFault)
        assert fault.kind == FaultKind.BEFORE_DEPENDENCY


def test_in_a_chain_of_dependent_launches_each_must_wait() -> None:
    """The second touches nothing and never waits; the third waits for the second alone."""
    status, fault = dependent_case(WRITE, "", WAIT + WRITE)
    assert status == R.CUDA_ERROR_LAUNCH_FAILED
    assert isinstance(fault, EmulatorFault)
    assert fault.kind == FaultKind.MISSING_EVENT
    assert "kernel k2 in stream 1" in str(fault)
    assert "kernel k0 in stream 1" in str(fault)


def test_counters_are_kept_on_demand() -> None:
    harness = Harness()
    scale, stream = harness.function("scale"), harness.stream()
    x = harness.put(np.ones(64, np.float32))
    harness.scale(scale, x, 64, 2.0, stream)
    harness("cuStreamSynchronize", stream)
    assert harness.driver.counters == {}
    harness.driver.is_counting = True
    for _ in range(2):
        harness.scale(scale, x, 64, 2.0, stream)
    harness("cuStreamSynchronize", stream)
    assert harness.driver.counters["scale"].by_opcode["mul.f32"] == 4
    assert harness.driver.num_launches == 3


def test_tensor_maps() -> None:
    harness = Harness("sm_90a")
    x = int(harness("cuMemAlloc", 64 * 64 * 2))
    memory = (ctypes.c_char * 256)()
    aligned = -(-ctypes.addressof(memory) // 64) * 64

    def status(address: int, box: int) -> Any:
        sizes, strides, steps = (ctypes.c_uint64 * 2)(64, 64), (ctypes.c_uint64 * 1)(128), (ctypes.c_uint32 * 2)(1, 1)
        boxes = (ctypes.c_uint32 * 2)(box, 8)
        return harness.driver.cuTensorMapEncodeTiled(address, 9, 2, x, sizes, strides, boxes, steps, 0, 3, 2, 0)

    assert status(aligned, 64) == 0
    assert ctypes.string_at(aligned, 128) == encode(9, x, [64, 64], [128], [64, 8], [1, 1], swizzle=3)
    assert status(aligned, 128) == R.CUDA_ERROR_INVALID_VALUE
    assert "box" in harness.driver.last_reason
    assert status(aligned + 16, 64) == R.CUDA_ERROR_INVALID_VALUE
    assert "64" in harness.driver.last_reason
