"""What the device's memory gives: reads by a kernel, copies by the driver, and both ways over the bus."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types, uint32, uint64

from numba_kernels.cuda.intrinsics.memory import store_b32, stream_4xb32
from numba_kernels.cuda.specialisation import Launch, Specialisation
from runtime.device.gpu import Gpu
from tools.gpu_check_timing import Stopwatch

THREADS = 512
WORD = 0x5A5A5A5A


@functools.cache
def read_kernel() -> Specialisation:
    """``sums[thread]`` = the sum, modulo 2^32, of every n-th 16 bytes; four loads in flight a thread.

    Arguments: data, sums, count of 16-byte pieces (a multiple of four times the number of threads).
    """

    @cuda.jit
    def kernel(data: Any, sums: Any, count: Any) -> None:
        threads = uint64(cuda.gridDim.x) * uint64(THREADS)
        thread = uint64(cuda.blockIdx.x) * uint64(THREADS) + uint64(cuda.threadIdx.x)
        step = threads * uint64(16)
        address = data + thread * uint64(16)
        end = data + count * uint64(16)
        total = uint32(0)
        while address < end:
            a = stream_4xb32(address)
            b = stream_4xb32(address + step)
            c = stream_4xb32(address + step + step)
            d = stream_4xb32(address + step + step + step)
            total = uint32(total + a[0] + a[1] + a[2] + a[3] + b[0] + b[1] + b[2] + b[3])
            total = uint32(total + c[0] + c[1] + c[2] + c[3] + d[0] + d[1] + d[2] + d[3])
            address += uint64(4) * step
        store_b32(sums + thread * uint64(4), total)

    return Specialisation("gpu_check_read", kernel, (types.uint64,) * 3, THREADS)


def bandwidth(gpu: Gpu, stopwatch: Stopwatch, is_quick: bool) -> dict[str, Any]:
    """Bytes a second by name, each verified first: {"read": {...}, "copy": {...}, ...}; a copy counts both ways."""
    blocks = 2 if is_quick else 4 * gpu.properties.num_sms
    round_bytes = blocks * THREADS * 4 * 16
    size = max(1, ((256 << 10) if is_quick else (2 << 30)) // round_bytes) * round_bytes
    data, target, sums = gpu.allocate(size), gpu.allocate(size), gpu.allocate(4 * blocks * THREADS)
    gpu.fill(data.address, WORD & 0xFF, size)
    launch = Launch(read_kernel(), (blocks, 1, 1), (THREADS, 1, 1))
    bound = gpu.bind(launch)
    bus_bytes = (64 << 10) if is_quick else (256 << 20)
    pinned = gpu.pinned.allocate(bus_bytes)

    def read() -> None:
        bound(data.address, sums.address, size // 16)

    read()
    found = np.empty(blocks * THREADS, np.uint32)
    gpu.read(sums.address, found)
    expected = np.uint32(size // 4 // found.size * WORD % 2**32)
    if not (found == expected).all():
        raise AssertionError(f"the read kernel's sums are wrong: {found[found != expected][:4]}, not {expected}")
    gpu.copy(target.address, data.address, size)
    last = np.empty(4096, np.uint32)
    gpu.read(target.address + size - last.nbytes, last)
    if not (last == WORD).all():
        raise AssertionError("the copy's end is not what was copied")
    runs: dict[str, tuple[int, Callable[[], None]]] = {
        "read": (size, read),
        "copy": (2 * size, lambda: gpu.copy(target.address, data.address, size)),
        "host to device": (bus_bytes, lambda: gpu.upload(target.address, pinned, bus_bytes)),
        "device to host": (bus_bytes, lambda: gpu.download(pinned, data.address, bus_bytes)),
    }
    times = stopwatch.times({name: run for name, (_, run) in runs.items()})
    return {
        name: {"bytes": runs[name][0], "times": value.as_json()}
        | ({} if stopwatch.is_emulated else {"gb_per_s": round(runs[name][0] / value.median_us / 1e3, 1)})
        for name, value in times.items()
    }
