"""Kernels that numba-cuda compiled, as it compiled them: a tiled matrix product, a reduction, a divergent loop."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int32, types, uint32

from runtime.emulator.execution.launch import Checks, launch, load
from runtime.emulator.memory.device_memory import Machine

FLOATS, INTEGERS, WORDS = (types.CPointer(kind) for kind in (float32, int32, uint32))


def matmul(a, b, c, n):
    tile_a = cuda.shared.array((16, 16), float32)
    tile_b = cuda.shared.array((16, 16), float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for k in range(n // 16):
        tile_a[ty, tx] = a[y * n + k * 16 + tx]
        tile_b[ty, tx] = b[(k * 16 + ty) * n + x]
        cuda.syncthreads()
        for j in range(16):
            total += tile_a[ty, j] * tile_b[j, tx]
        cuda.syncthreads()
    c[y * n + x] = total


def block_sums(values, sums, n):
    partial = cuda.shared.array(32, int32)
    index = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    value = values[index] if index < n else int32(0)
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    if lane == 0:
        partial[warp] = value
    cuda.syncthreads()
    if warp == 0:
        value = partial[lane] if lane < cuda.blockDim.x // 32 else int32(0)
        for step in (16, 8, 4, 2, 1):
            value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
        if lane == 0:
            sums[cuda.blockIdx.x] = value


def collatz(steps, n):
    """How many steps from each number to 1: another trip count in each lane, with branches inside."""
    index = cuda.grid(1)
    if index < n:
        value, count = uint32(index + 1), uint32(0)
        while value != 1:
            if value % uint32(2) == 0:
                value = value // uint32(2)
            else:
                value = uint32(3) * value + uint32(1)
            count += uint32(1)
        steps[index] = count


def ptx_of(function: object, arguments: tuple[object, ...]) -> str:
    text, _ = cuda.compile_ptx(function, arguments, cc=(9, 0), fastmath=True)
    return str(text)


@pytest.mark.parametrize(("n", "checks", "seed"), [(16, Checks.ALL, 0), (64, Checks.ALL, 3), (128, Checks.MEMORY, 0)])
def test_tiled_matrix_product(n: int, checks: Checks, seed: int) -> None:
    random = np.random.default_rng(n)
    a, b = (random.integers(-8, 8, (n, n)).astype(np.float32) for _ in range(2))
    machine = Machine(4 << 20)
    places = [machine.allocate(a.nbytes) for _ in range(3)]
    machine.write(places[0], a.tobytes())
    machine.write(places[1], b.tobytes())
    kernel = load(ptx_of(matmul, (FLOATS, FLOATS, FLOATS, int32))).kernel()
    parameters = np.array(places, np.uint64).tobytes() + np.int32(n).tobytes()
    launch(kernel, machine, (n // 16, n // 16, 1), (16, 16, 1), 0, parameters, checks=checks, seed=seed)
    found = np.frombuffer(machine.read(places[2], a.nbytes), np.float32).reshape(n, n)
    assert np.array_equal(found, a @ b)
    machine.close()


@pytest.mark.parametrize("n", [1, 500, 1024, 3001])
def test_reduction_with_shuffles(n: int) -> None:
    values = np.random.default_rng(n).integers(0, 1 << 32, n, dtype=np.uint32)
    machine = Machine(4 << 20)
    blocks = -(-n // 256)
    source, target = machine.allocate(4 * n), machine.allocate(4 * blocks)
    machine.write(source, values.tobytes())
    kernel = load(ptx_of(block_sums, (INTEGERS, INTEGERS, int32))).kernel()
    parameters = np.array([source, target], np.uint64).tobytes() + np.int32(n).tobytes()
    launch(kernel, machine, (blocks, 1, 1), (256, 1, 1), 0, parameters, checks=Checks.ALL)
    found = np.frombuffer(machine.read(target, 4 * blocks), np.uint32)
    padded = np.concatenate([values, np.zeros(blocks * 256 - n, np.uint32)]).reshape(blocks, 256)
    assert found.tolist() == padded.sum(axis=1, dtype=np.uint32).tolist()
    machine.close()


def test_divergent_loop() -> None:
    n = 300
    machine = Machine(4 << 20)
    target = machine.allocate(4 * n)
    kernel = load(ptx_of(collatz, (WORDS, int32))).kernel()
    parameters = np.uint64(target).tobytes() + np.int32(n).tobytes()
    launch(kernel, machine, (2, 1, 1), (160, 1, 1), 0, parameters, checks=Checks.ALL)
    expected = []
    for value in range(1, n + 1):
        count = 0
        while value != 1:
            value, count = (value // 2 if value % 2 == 0 else 3 * value + 1), count + 1
        expected.append(count)
    assert np.frombuffer(machine.read(target, 4 * n), np.uint32).tolist() == expected
    machine.close()
