"""Measures the device's memory bandwidth: reads by a kernel, copies by the driver, and both ways over the bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_kernels.cuda.probes import THREADS, read_kernel
from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.timing import Stopwatch
from runtime.device.gpu import Gpu

WORD = 0x5A5A5A5A


def bandwidth(gpu: Gpu, stopwatch: Stopwatch, is_quick: bool) -> dict[str, Any]:
    """Bytes a second by name, each verified first: {"read": {...}, "copy": {...}, ...}; copies count twice."""
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
