"""Graphs on an emulated device: what is recorded, its memory, other arguments, what cannot be recorded."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from runtime.device import graph as graph_module
from runtime.device.allocator import DeviceBlock
from runtime.device.errors import CaptureError
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph, GraphPool
from runtime.device.kernel import Bound
from tests.runtime.device.emulated import new_gpu
from tests.runtime.device.kernels import launch_of, scale, scale_dependent

N = 1000
SIZE = 4 * N
RAMP = np.arange(N, dtype=np.float32)


@pytest.fixture
def gpu() -> Gpu:
    return new_gpu()


@pytest.fixture
def x(gpu: Gpu) -> DeviceBlock:
    block = gpu.allocate(SIZE)
    gpu.write(block.address, RAMP)
    return block


def contents(gpu: Gpu, block: DeviceBlock) -> np.ndarray:
    found = np.empty(N, np.float32)
    gpu.read(block.address, found)
    return found


def scaled(gpu: Gpu, source: DeviceBlock, factor: float) -> DeviceBlock:
    """What a step does: memory for a result, and a kernel that fills it."""
    result = gpu.allocate(SIZE)
    gpu.launch(launch_of(scale(), N), source.address, result.address, N, factor)
    return result


def six_fold(gpu: Gpu, source: DeviceBlock) -> DeviceBlock:
    """Through an intermediate result, which is returned at once."""
    return scaled(gpu, scaled(gpu, source, 2.0), 3.0)


def counted(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the driver's functions that are called from now on."""
    calls: list[str] = []
    original = type(gpu.driver).call

    def call(driver: Any, function: str, *arguments: Any) -> Any:
        calls.append(function)
        return original(driver, function, *arguments)

    monkeypatch.setattr(type(gpu.driver), "call", call)
    return calls


def test_replay_equals_eager(gpu: Gpu, x: DeviceBlock) -> None:
    graph = Graph.capture(gpu, lambda: six_fold(gpu, x))
    assert [kernel.specialisation.name for kernel in graph.kernels] == ["scale", "scale"]
    assert graph.num_nodes == 2
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, graph.result), 6 * RAMP)
    gpu.write(x.address, RAMP + 1)  # new input at the old address
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, graph.result), 6 * (RAMP + 1))
    np.testing.assert_array_equal(contents(gpu, six_fold(gpu, x)), 6 * (RAMP + 1))
    gpu.allocator.check_integrity()


def test_a_replay_is_one_call_and_allocates_nothing(gpu: Gpu, x: DeviceBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph.capture(gpu, lambda: six_fold(gpu, x))
    launches: list[Any] = []
    original = graph._launch
    graph._launch = lambda *arguments: (launches.append(arguments), original(*arguments))[1]
    before = gpu.allocator.statistics
    calls = counted(gpu, monkeypatch)
    for _ in range(3):
        graph.replay()
    assert (calls, len(launches)) == ([], 3)
    assert gpu.allocator.statistics == before


def test_nothing_is_launched_while_recording(gpu: Gpu, x: DeviceBlock) -> None:
    target = gpu.allocate(SIZE)
    gpu.write(target.address, RAMP)
    double = launch_of(scale(), N)
    graph = Graph.capture(gpu, lambda: gpu.launch(double, target.address, target.address, N, 2.0))
    np.testing.assert_array_equal(contents(gpu, target), 2 * RAMP)  # once, for the warm-up
    graph.replay()
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, target), 8 * RAMP)


# Memory


def test_its_memory_stays_reserved(gpu: Gpu, x: DeviceBlock) -> None:
    graph = Graph.capture(gpu, lambda: six_fold(gpu, x))
    gpu.allocator.trim()
    others = [gpu.allocate(SIZE) for _ in range(20)]
    for block in others:
        gpu.fill(block.address, 0xFF, SIZE)
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, graph.result), 6 * RAMP)
    gpu.allocator.check_integrity()


def test_release_gives_it_back(gpu: Gpu, x: DeviceBlock) -> None:
    gpu.synchronize()
    before = gpu.allocator.statistics
    graph = Graph.capture(gpu, lambda: six_fold(gpu, x))
    during = gpu.allocator.statistics
    assert during.reserved_bytes > before.reserved_bytes
    assert during.requested_bytes == before.requested_bytes + SIZE  # the result
    graph.replay()
    del graph
    gc.collect()
    gpu.allocator.check_integrity()
    after = gpu.allocator.statistics
    assert (after.reserved_bytes, after.requested_bytes) == (before.reserved_bytes, before.requested_bytes)


def test_a_block_released_while_recording_stays_for_the_graph(gpu: Gpu, x: DeviceBlock) -> None:
    """An input that only the recorded work knew of: nobody else may get its memory while the graph lives."""
    held = {"input": gpu.allocate(SIZE)}
    address = held["input"].address
    gpu.write(address, RAMP)
    target = gpu.allocate(SIZE)

    def work() -> None:
        gpu.launch(launch_of(scale(), N), address, target.address, N, 2.0)
        if gpu.stream_is_captured:
            held.clear()

    graph = Graph.capture(gpu, work)
    assert held == {}
    assert address not in [gpu.allocate(SIZE).address for _ in range(5)]
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, target), 2 * RAMP)
    graph.release()
    graph.release()  # once is enough
    assert gpu.allocate(SIZE).address == address
    gpu.allocator.check_integrity()


def test_graphs_that_share_a_pool_take_turns(gpu: Gpu, x: DeviceBlock) -> None:
    """On two streams without anything said: each replay waits for the other, or the emulator would object."""
    pool, other = GraphPool(gpu), gpu.new_stream()
    gpu.synchronize()
    first = Graph.capture(gpu, lambda: six_fold(gpu, x), pool=pool)
    reserved = gpu.allocator.statistics.reserved_bytes
    second = Graph.capture(gpu, lambda: six_fold(gpu, scaled(gpu, x, 10.0)), pool=pool)
    assert gpu.allocator.statistics.reserved_bytes == reserved
    assert first.result.address != second.result.address
    for _ in range(3):
        first.replay()
        second.replay(other)
    gpu.synchronize()
    np.testing.assert_array_equal(contents(gpu, first.result), 6 * RAMP)
    np.testing.assert_array_equal(contents(gpu, second.result), 60 * RAMP)


def test_recording_begins_again_where_its_pool_was_too_small(gpu: Gpu, x: DeviceBlock) -> None:
    """Work that takes more the second time, as where the first run has found other gaps."""
    sizes = iter([1000, 50_000_000, 50_000_000, 50_000_000])
    runs = []

    def work() -> DeviceBlock:
        runs.append(1)
        extra = gpu.allocate(next(sizes))
        result = six_fold(gpu, x)
        extra.release()
        return result

    graph = Graph.capture(gpu, work)
    assert len(runs) == 3
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, graph.result), 6 * RAMP)
    gpu.allocator.check_integrity()


def test_work_that_always_wants_more_is_given_up(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "MOST_ATTEMPTS", 3)
    sizes = iter(range(40_000_000, 4_000_000_000, 40_000_000))
    with pytest.raises(CaptureError, match="3 recordings"):
        Graph.capture(gpu, lambda: gpu.allocate(next(sizes)))
    gc.collect()
    gpu.allocator.check_integrity()
    assert gpu.allocator.statistics.requested_bytes == 0


# What cannot be recorded


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("write", "write: a stream that is recorded"),
        ("read", "read: a stream that is recorded"),
        ("synchronize", "CAPTURE"),
        ("stream", "CAPTURE"),
        ("query", "CAPTURE"),
        ("trim", "cannot be freed while a stream is captured"),
    ],
)
def test_forbidden_while_recording(gpu: Gpu, x: DeviceBlock, what: str, words: str) -> None:
    array = np.zeros(4, np.float32)
    actions = {
        "write": lambda: gpu.write(x.address, array),
        "read": lambda: gpu.read(x.address, array),
        "synchronize": gpu.synchronize,
        "stream": gpu.stream.synchronize,
        "query": gpu.stream.is_done,
        "trim": gpu.allocator.trim,
    }

    def work() -> None:
        result = six_fold(gpu, x)
        if gpu.stream_is_captured:
            actions[what]()
        del result

    with pytest.raises(CaptureError, match=words):
        Graph.capture(gpu, work)
    assert not gpu.stream_is_captured
    gc.collect()
    gpu.allocator.check_integrity()
    np.testing.assert_array_equal(contents(gpu, six_fold(gpu, x)), 6 * RAMP)  # and life goes on


def test_an_error_of_the_work_comes_through(gpu: Gpu, x: DeviceBlock) -> None:
    def work() -> None:
        if gpu.stream_is_captured:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Graph.capture(gpu, work)
    np.testing.assert_array_equal(contents(gpu, scaled(gpu, x, 2.0)), 2 * RAMP)


def test_dependent_launches_must_wait_in_every_kernel(gpu: Gpu, x: DeviceBlock) -> None:
    """A chain in which each kernel waits is recorded and right; one that does not is refused before it is launched."""
    y = gpu.allocate(SIZE)

    def chain() -> None:
        for source, target in ((x, y), (y, y), (y, y)):
            launch = launch_of(scale_dependent(), N, is_dependent=True)
            gpu.launch(launch, source.address, target.address, N, 2.0)

    graph = Graph.capture(gpu, chain)
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, y), 8 * RAMP)
    with pytest.raises(Exception, match=r"griddepcontrol\.wait"):
        Graph.capture(gpu, lambda: gpu.launch(launch_of(scale(), N, is_dependent=True), x.address, y.address, N, 2.0))


def test_a_chain_is_of_kernels_that_wait_behind_kernels(gpu: Gpu, x: DeviceBlock) -> None:
    """Not the first, none behind a fill, and none that does not wait itself; only in what is recorded."""
    y, z = gpu.allocate(SIZE), gpu.allocate(SIZE)
    dependent: list[list[bool]] = []

    def work() -> None:
        dependent.append([])
        for each in (scale_dependent(), scale_dependent(), scale(), scale_dependent()):
            gpu.launch(launch_of(each, N), (x if not dependent[-1] else y).address, y.address, N, 2.0)
            dependent[-1].append(gpu._streams.last.launch.is_dependent)  # type: ignore[union-attr]
        gpu.fill(z.address, 0, SIZE)
        gpu.launch(launch_of(scale_dependent(), 0), y.address, y.address, 0, 2.0)  # launches nothing
        for _ in range(2):
            gpu.launch(launch_of(scale_dependent(), N), y.address, y.address, N, 2.0)
            dependent[-1].append(gpu._streams.last.launch.is_dependent)  # type: ignore[union-attr]

    graph = Graph.capture(gpu, work, is_chained=True)
    assert dependent == [[False] * 6, [False, True, False, True, False, True]]
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, y), 64 * RAMP)
    gpu.launch(launch_of(scale_dependent(), N), x.address, y.address, N, 1.0)
    assert not gpu._streams.last.launch.is_dependent  # type: ignore[union-attr]


def test_bound_launches_are_recorded_too(gpu: Gpu, x: DeviceBlock) -> None:
    y = gpu.allocate(SIZE)
    bound = gpu.bind(launch_of(scale(), N))
    assert isinstance(bound, Bound)
    graph = Graph.capture(gpu, lambda: bound(x.address, y.address, N, 4.0))
    graph.replay()
    np.testing.assert_array_equal(contents(gpu, y), 4 * RAMP)
