"""TMA, mbarriers and wgmma as the kernels see them: one tile each, under all of the emulator's checkers."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, types

from numba_kernels.cuda.compile import compile_ptx
from numba_kernels.cuda.intrinsics import mbarrier, memory, tma, wgmma
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.specialisation import TENSOR_MAP, Launch, Specialisation, TensorMapLayout
from runtime.device.gpu import Gpu
from runtime.errors import DeviceError, InvalidArgumentError
from tests.numba_kernels.cuda.harness import assert_close, empty, get, put

uint32, uint64, float32 = types.uint32, types.uint64, types.float32
DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
pytestmark = pytest.mark.emulator


@functools.cache
def one_tile(dtype: str, columns: int, source: str) -> Specialisation:
    """out[64, columns] float32 = A[64, 64] . B: of B[columns, 64] ("shared"; "registers": A too), or of
    B[64, columns <= 64] ("transposed")."""
    count = columns // 2
    is_transposed, in_registers = source == "transposed", source == "registers"
    multiply = wgmma.group_multiply(
        dtype, columns, 4, 32, 2048 if is_transposed else 32, a_in_registers=in_registers, b_is_transposed=is_transposed
    )
    wait = wgmma.group_wait(0, count)
    describe = wgmma.descriptor(128, 1024, 8192)
    load, num_bytes = tma.load(2), (64 + columns) * 128
    load_pair, store = memory.load_b32, memory.store_2xf32

    def kernel(map_a, map_b, a, out):
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        thread = uint32(cuda.threadIdx.x)
        barrier = shared + uint32((64 + columns) * 128)
        if thread == uint32(0):
            mbarrier.init(barrier, uint32(1))
            mbarrier.fence_init()
        sync_block()
        if thread == uint32(0):
            mbarrier.arrive_expecting(barrier, uint32(num_bytes))
            load(shared, map_a, barrier, uint32(0), uint32(0))
            load(shared + uint32(8192), map_b, barrier, uint32(0), uint32(0))
        mbarrier.wait(barrier, uint32(0))
        sums = cuda.local.array(count, float32)
        for i in range(count):
            sums[i] = float32(1.0)
        row = (thread >> uint32(5)) * uint32(16) + ((thread & uint32(31)) >> uint32(2))
        pair = (thread & uint32(3)) * uint32(2)
        if in_registers:
            words = cuda.local.array(16, uint32)
            for step in range(4):
                for half in range(2):
                    for below in range(2):
                        at = (row + uint32(8 * below)) * uint32(64) + uint32(16 * step + 8 * half) + pair
                        words[4 * step + 2 * half + below] = load_pair(a + uint64(at * uint32(2)))
            multiply(sums, words, describe(shared + uint32(8192)), uint32(1))
        else:
            multiply(sums, describe(shared), describe(shared + uint32(8192)), uint32(1))
        wait(sums)
        for i in range(count // 4):
            for below in range(2):
                at = (row + uint32(8 * below)) * uint32(columns) + uint32(8 * i) + pair
                store(out + uint64(at * uint32(4)), (sums[4 * i + 2 * below], sums[4 * i + 2 * below + 1]))

    return Specialisation(
        f"one_tile_{dtype}_{columns}_{source}",
        cuda.jit(kernel),
        (TENSOR_MAP, TENSOR_MAP, uint64, uint64),
        128,
        min_capability=90,
        needs_arch_features=True,
    )


@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "columns", "source"),
    [("bf16", 256, "shared"), ("f16", 64, "shared"), ("bf16", 64, "transposed"), ("f16", 128, "registers")],
)
def test_a_tile_by_tma_and_wgmma(gpu: Gpu, dtype: str, columns: int, source: str) -> None:
    draws = np.random.default_rng(columns)
    shape = (64, columns) if source == "transposed" else (columns, 64)
    a, b = (draws.standard_normal(size).astype(DTYPES[dtype]) for size in ((64, 64), shape))
    blocks = put(gpu, a), put(gpu, b)
    out = empty(gpu, (64, columns), np.float32)
    sizes = [array.shape[::-1] for array in (a, b)]
    layouts = [TensorMapLayout(dtype, size, (size[0] * 2,), size, 128) for size in sizes]
    maps = [gpu.tensor_map(block.address, layout) for block, layout in zip(blocks, layouts)]
    launch = Launch(one_tile(dtype, columns, source), (1, 1, 1), (128, 1, 1), (64 + columns) * 128 + 8)
    gpu.launch(launch, *maps, blocks[0].address, out.address)
    wide = b.astype(np.float64)
    expected = a.astype(np.float64) @ (wide if source == "transposed" else wide.T) + 1
    assert_close(get(gpu, out, (64, columns), np.float32), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (TensorMapLayout("bf16", (64, 8), (130,), (64, 8)), "multiples of 16"),
        (TensorMapLayout("bf16", (64, 8), (128,), (64, 257)), "must be 1 to 256"),
        (TensorMapLayout("bf16", (64, 8), (), (64, 8)), "n - 1"),
        (TensorMapLayout("bf16", (64, 8), (128,), (128, 8), 128), "cuTensorMapEncodeTiled"),
    ],
)
def test_a_layout_that_no_map_has_is_refused(gpu: Gpu, layout: TensorMapLayout, message: str) -> None:
    with pytest.raises(DeviceError if message.startswith("cu") else InvalidArgumentError, match=message):
        gpu.tensor_map(1 << 20, layout)


def test_older_architectures_have_no_dependent_launches() -> None:
    def kernel(out):
        wait_for_previous_grid()
        launch_dependents()
        memory.store_f32(out, float32(1))

    specialisation = Specialisation("dependent", cuda.jit(kernel), (uint64,), 32)
    assert compile_ptx(specialisation, "sm_90").count("griddepcontrol") == 2
    assert "griddepcontrol" not in compile_ptx(specialisation, "sm_80")
