"""`bench allocator`: the caching allocator against the driver's own, on the same sequence of requests."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.bench.environment import describe_machine
from runtime.bench.metrics import BenchmarkError, check_finite
from runtime.device.allocator import DeviceBlock
from runtime.device.device import Device
from runtime.device.gpu import Gpu

SMALLEST_BYTES, LARGEST_BYTES = 256, 4 << 20

Request = tuple[int, int]
"""(slot, size in bytes); a size of 0 frees what the slot holds."""


def bench_allocator(
    device: str, *, num_operations: int, num_driver_operations: int, max_bytes: int, num_rounds: int, seed: int = 0
) -> dict[str, Any]:
    """Times `num_operations` random allocations and frees, with at most `max_bytes` in use, by both allocators.

    Sizes are spread evenly over their logarithm. The driver, which is far slower, gets the first
    `num_driver_operations` of them. Before anything is timed the sequence runs once with the allocator's integrity
    checked and the blocks' addresses compared, so that the timed rounds find the pool as a running engine does.

    Raises BenchmarkError for numbers that make no sense and for a device that is no GPU.
    """
    for name, value in (("num-operations", num_operations), ("num-rounds", num_rounds)):
        if value < 1:
            raise BenchmarkError(f"--{name} {value} must be at least 1")
    if max_bytes < LARGEST_BYTES:
        raise BenchmarkError(f"--max-bytes {max_bytes} must be at least the largest request's {LARGEST_BYTES}")
    if Device.parse(device).kind == "cpu":
        raise BenchmarkError("bench allocator measures a GPU's memory: --device cuda or --device emulated")
    gpu = Gpu.of(device)
    requests = random_requests(num_operations, max_bytes, seed)
    first = requests[: max(1, num_driver_operations)]
    verify(gpu, requests)
    before = gpu.allocator.statistics
    ours, raw = [], []
    for _ in range(num_rounds):  # in turns, so that a disturbance meets both
        ours.append(_time(requests, lambda size: gpu.allocator.allocate(size), DeviceBlock.release))
        gpu.synchronize()
        raw.append(
            _time(first, lambda size: gpu.context.call("cuMemAlloc", size), lambda a: gpu.context.call("cuMemFree", a))
        )
    after = gpu.allocator.statistics
    report = {
        "num_operations": num_operations,
        "num_driver_operations": len(first),
        "max_bytes": max_bytes,
        "num_rounds": num_rounds,
        "allocator_us": statistics.median(ours),
        "driver_us": statistics.median(raw),
        "allocator_us_rounds": ours,
        "driver_us_rounds": raw,
        "ratio": statistics.median(raw) / statistics.median(ours),
        "driver_calls_in_timed_rounds": after.num_driver_allocations - before.num_driver_allocations,
        "peak_allocated_bytes": after.peak_allocated_bytes,
        "reserved_bytes": after.reserved_bytes,
        "reserved_per_allocated": after.reserved_bytes / after.peak_allocated_bytes,
        "environment": {"device": str(gpu.device), "gpu": gpu.properties.name, **describe_machine()},
    }
    check_finite(report)
    return report


def random_requests(count: int, max_bytes: int, seed: int) -> list[Request]:
    """A sequence that ends with everything freed, with at most `max_bytes` asked for at any time."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(np.log(SMALLEST_BYTES), np.log(LARGEST_BYTES), count)).astype(np.int64).tolist()
    is_freeing, picks = (rng.random(count) < 0.45).tolist(), rng.random(count).tolist()
    requests: list[Request] = []
    live: list[Request] = []
    in_use = 0
    for slot, (size, frees, pick) in enumerate(zip(sizes, is_freeing, picks)):
        if live and (frees or in_use + size > max_bytes):
            position = int(pick * len(live))
            live[position], live[-1] = live[-1], live[position]
            freed, freed_bytes = live.pop()
            in_use -= freed_bytes
            requests.append((freed, 0))
        else:
            live.append((slot, size))
            in_use += size
            requests.append((slot, size))
    return requests + [(slot, 0) for slot, _ in live]


def verify(gpu: Gpu, requests: list[Request]) -> None:
    """Runs the sequence once. Raises BenchmarkError where two blocks in use overlap, or memory is lost."""
    allocated = gpu.allocator.statistics.allocated_bytes
    blocks: dict[int, DeviceBlock] = {}
    for number, (slot, size) in enumerate(requests):
        if size:
            blocks[slot] = gpu.allocate(size)
        else:
            del blocks[slot]
        if number % 997 == 0:
            spans = sorted((block.address, block.address + block.size_bytes) for block in blocks.values())
            if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
                raise BenchmarkError("two blocks in use overlap")
    try:
        gpu.allocator.check_integrity()
    except AssertionError as error:
        raise BenchmarkError(f"the allocator is not whole: {error}") from error
    if gpu.allocator.statistics.allocated_bytes != allocated:
        raise BenchmarkError("memory was lost")


def _time(requests: list[Request], allocate: Callable[[int], Any], release: Callable[[Any], Any]) -> float:
    """Microseconds a request. What the sequence leaves in use is freed after the clock has stopped."""
    held: dict[int, Any] = {}
    start = time.perf_counter()
    for slot, size in requests:
        if size:
            held[slot] = allocate(size)
        else:
            release(held.pop(slot))
    seconds = time.perf_counter() - start
    for block in held.values():
        release(block)
    return seconds * 1e6 / len(requests)
