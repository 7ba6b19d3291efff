"""Memory's bandwidth (reads by a kernel, copies by the driver, both ways over the bus), and host costs on a GPU: a
launch, a graph's replay, and the upload of weights. Rows of `bench kernels`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from numba_kernels.cuda import gemm
from numba_kernels.cuda.probes import THREADS, empty_kernel, read_kernel
from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.case import Inputs
from runtime.bench.kernels.operations import QWEN3_8B
from runtime.bench.kernels.timing import Stopwatch, Times
from runtime.bench.metrics import interleaved, timed
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph

NUM_LAYERS = 36  # Qwen3-8B's
TINY_LAYER = ((96, 64), (64, 64))
WORD = 0x5A5A5A5A
_EMPTY_ARGUMENTS = (1, 1, 1, 1, 2, 2, 2, 2)


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


def launch_row(gpu: Gpu, stopwatch: Stopwatch, is_quick: bool) -> dict[str, Any]:
    """Microseconds that the host takes to launch a kernel of eight arguments, ours and by Numba's dispatcher; without
    the latter if Numba cannot compile here, with the reason in "numba_error"."""
    calls, rounds = (50, 3) if is_quick else (2000, 9)
    specialisation = empty_kernel()
    bound = gpu.bind(Launch(specialisation, (1, 1, 1), (32, 1, 1)))
    competitors: dict[str, Callable[[], Any]] = {"ours": lambda: bound(*_EMPTY_ARGUMENTS)}
    numba_error = ""
    if not stopwatch.is_emulated:
        configured = specialisation.kernel[1, 32]
        try:
            configured(*_EMPTY_ARGUMENTS)
            competitors["numba"] = lambda: configured(*_EMPTY_ARGUMENTS)
        except Exception as error:  # its compiler's libraries may be missing if our kernels are precompiled
            numba_error = f"{type(error).__name__}: {error}"

    def microseconds_of(call: Callable[[], Any]) -> float:
        call()
        gpu.synchronize()
        seconds = timed(call, repeats=calls)()
        gpu.synchronize()
        return 1e6 * seconds

    works = {name: partial(microseconds_of, call) for name, call in competitors.items()}
    found = interleaved(works, rounds, warm_ups=1)
    row: dict[str, Any] = {
        "goal": "launch", "case": "launch", "shape": "8 arguments, 1 block",
        "times": {name: Times.of(values).as_json() for name, values in found.items()},
    }  # fmt: skip
    if numba_error:
        row["numba_error"] = numba_error
    if "numba" in found:
        row["value"] = round(statistics.median(found["numba"]) / statistics.median(found["ours"]), 2)
    return row


def _walls_us(gpu: Gpu, work: Callable[[], Any], num_runs: int) -> list[float]:
    """Microseconds of runs from a device that is idle until it is idle again."""
    walls = []
    for _ in range(num_runs):
        gpu.synchronize()
        start = time.perf_counter()
        work()
        gpu.synchronize()
        walls.append(1e6 * (time.perf_counter() - start))
    return walls


def graph_row(gpu: Gpu, stopwatch: Stopwatch, is_quick: bool) -> dict[str, Any]:
    """A decode step's products, one row through all layers, as a replayed graph: wall time over the device's.

    Raises AssertionError if the replay's bits differ from the eager run's.
    """
    inputs, layer = Inputs(gpu, 7), TINY_LAYER if is_quick else QWEN3_8B
    num_layers = 2 if is_quick else NUM_LAYERS
    bound = []
    outs = []
    for n, k in layer:
        product = gemm.Product(1, n, k, "bf16", epilogue=gemm.Epilogue(has_residual=False, is_aligned=True))
        launch = gemm.plan(product, gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters))
        x, weight = inputs.put(inputs.normal((1, k), "bf16")), inputs.put(inputs.normal((n, k), "bf16", 0.05))
        outs.append((inputs.empty(2 * n), 2 * n))
        bound.append(inputs.bind((launch, (x, weight, 0, 0, outs[-1][0], 1, n, k, 0, *gemm.NO_SQUARES))))

    def step() -> None:
        for _ in range(num_layers):
            for run in bound:
                run()

    def results() -> list[bytes]:
        return [inputs.contents(*out) for out in outs]

    step()
    expected = results()
    graph = Graph.capture(gpu, step)
    for address, size in outs:
        gpu.fill(address, 0xFF, size)
    graph.replay()
    if results() != expected:
        raise AssertionError("the replayed graph gives other bits than the eager run")
    device = stopwatch.times({"ours": graph.replay})["ours"]
    walls = _walls_us(gpu, graph.replay, 2 if is_quick else 20)
    least = num_layers * sum(2 * n * k for n, k in layer)
    row: dict[str, Any] = {
        "goal": "graph", "case": "graph of a step", "shape": f"{graph.num_nodes} products, M = 1",
        "least_bytes": least, "times": {"ours": device.as_json(), "wall": Times.of(walls).as_json()},
    }  # fmt: skip
    if not stopwatch.is_emulated:
        row["gb_per_s"] = round(least / device.median_us / 1e3, 1)
        row["value"] = round(statistics.median(walls) / device.median_us, 3)
    graph.release()
    return row


def upload_row(gpu: Gpu, stopwatch: Stopwatch, is_quick: bool) -> dict[str, Any]:
    """Bytes a second from unpinned host memory, as in loading weights.

    Raises AssertionError if the device's copy differs.
    """
    size = (1 << 16) if is_quick else (1 << 30)
    source = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    block = gpu.allocate(size)
    gpu.write(block.address, source)
    found = np.empty_like(source)
    gpu.read(block.address, found)
    if not np.array_equal(found, source):
        raise AssertionError("the device does not have what was uploaded")
    times = Times.of(_walls_us(gpu, partial(gpu.write, block.address, source), 2 if is_quick else 5))
    row: dict[str, Any] = {
        "goal": "upload", "case": "upload", "shape": f"{size >> 20} MiB, not pinned", "least_bytes": size,
        "times": {"ours": times.as_json()},
    }  # fmt: skip
    if not stopwatch.is_emulated:
        row["gb_per_s"] = round(size / times.median_us / 1e3, 2)
    return row
