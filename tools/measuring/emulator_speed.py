"""Measures the emulated GPU's speed: lane-instructions a second of a tiled 256³ float32 matrix product.

    python -m tools.measuring.emulator_speed [--rounds N] [--json FILE]

The kernel is a minimal one with everything: loads, shared memory, barriers, a loop. Settings take turns, round by
round, and the median is reported; the product, of small integers, must be exact in every round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import struct
import time

import numpy as np
from numba import cuda, float32, int32, types

from runtime.emulator.execution.launch import Checks, launch, load
from runtime.emulator.memory.device_memory import Machine

SIZE, TILE = 256, 16
SETTINGS = {"none": Checks.NONE, "memory": Checks.MEMORY | Checks.UNINITIALIZED, "all": Checks.ALL}


@cuda.jit
def _tiled(a, b, c, n):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    x = cuda.blockIdx.x * TILE + tx
    y = cuda.blockIdx.y * TILE + ty
    total = float32(0)
    for k in range(0, n, TILE):
        tile_a[ty, tx] = a[y * n + k + tx]
        tile_b[ty, tx] = b[(k + ty) * n + x]
        cuda.syncthreads()
        for i in range(TILE):
            total += tile_a[ty, i] * tile_b[i, tx]
        cuda.syncthreads()
    c[y * n + x] = total


def measure(rounds: int, num_threads: int) -> dict[str, float]:
    """Median million lane-instructions a second, by enabled checks."""
    pointer = types.CPointer(float32)
    text, _ = cuda.compile(
        _tiled.py_func, (pointer, pointer, pointer, int32), cc=(8, 0), device=False, abi="numba", output="ptx",
        launch_bounds=TILE * TILE,
    )  # fmt: skip
    machine, kernel = Machine(1 << 26, "sm_80"), load(text).kernel()
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (2, SIZE, SIZE)).astype(np.float32)
    addresses = [machine.allocate(4 * SIZE * SIZE) for _ in range(3)]
    machine.write(addresses[0], a.tobytes())
    machine.write(addresses[1], b.tobytes())
    parameters = struct.pack("QQQi", *addresses, SIZE)
    grid, block = (SIZE // TILE, SIZE // TILE, 1), (TILE, TILE, 1)
    rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(rounds + 1):
        for name, checks in SETTINGS.items():
            start = time.perf_counter()
            counted = launch(kernel, machine, grid, block, 0, parameters, checks=checks, num_threads=num_threads)
            seconds = time.perf_counter() - start
            out = np.frombuffer(machine.read(addresses[2], 4 * SIZE * SIZE), np.float32).reshape(SIZE, SIZE)
            if not np.array_equal(out, a @ b):
                raise SystemExit(f"wrong product with checks {name}")
            rates[name].append(counted.lane_instructions / seconds / 1e6)
    return {name: statistics.median(found[1:]) for name, found in rates.items()}  # the first round compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args()
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "rounds": options.rounds,
        "million_lane_instructions_per_s": {
            f"{threads} thread{'s' if threads > 1 else ''}": measure(options.rounds, threads) for threads in (1, 2)
        },
    }
    for threads, rates in result["million_lane_instructions_per_s"].items():
        print(threads, " ".join(f"checks {name}: {rate:.0f} M/s" for name, rate in rates.items()))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
