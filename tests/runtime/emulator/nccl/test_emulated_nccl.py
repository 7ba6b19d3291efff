"""The emulated NCCL with several devices of one driver: numbers, graphs, windows, and each mistake found and named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime.device.driver import Driver
from runtime.device.errors import LaunchError
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from runtime.device.nccl import Nccl, NcclComm, NcclError, open_nccl
from runtime.dtype import DType, bfloat16, float16, float32, int32
from runtime.emulator.nccl.board import RING
from runtime.errors import InvalidArgumentError
from tests.runtime.device.emulated import new_gpu

pytestmark = pytest.mark.emulator


class Ranks:
    """Ranks that are devices of one driver, called by one thread."""

    def __init__(self, count: int) -> None:
        first = new_gpu(num_devices=count, memory_bytes=1 << 28)
        self.gpus: list[Gpu] = [first, *(new_gpu(index=i, driver=first.driver) for i in range(1, count))]
        self.driver: Driver = first.driver
        self.nccl: Nccl = open_nccl(first.driver)
        unique_id = self.nccl.unique_id()
        with self.nccl.group():
            self.comms = [NcclComm(gpu, self.nccl, unique_id, rank, count) for rank, gpu in enumerate(self.gpus)]
        self._kept: list[Any] = []

    def put(self, arrays: list[np.ndarray[Any, Any]]) -> list[int]:
        """One array a rank, on its device."""
        found = []
        for gpu, array in zip(self.gpus, arrays):
            block = gpu.allocate(max(1, array.nbytes))
            self._kept.append(block)
            gpu.write(block.address, array)
            found.append(block.address)
        return found

    def space(self, size: int) -> list[int]:
        blocks = [gpu.allocate(size) for gpu in self.gpus]
        self._kept += blocks
        return [block.address for block in blocks]

    def get(self, addresses: list[int], shape: tuple[int, ...], dtype: DType) -> list[np.ndarray[Any, Any]]:
        found = []
        for gpu, address in zip(self.gpus, addresses):
            array = np.empty(shape, dtype.numpy)
            gpu.read(address, array)
            found.append(array)
        return found

    def synchronize(self) -> None:
        for gpu in self.gpus:
            gpu.synchronize()


@pytest.fixture
def two() -> Ranks:
    return Ranks(2)


def numbers(count: int, size: int, dtype: DType) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(size)
    return [(generator.standard_normal(size) * 8).astype(dtype.numpy) for _ in range(count)]


@pytest.mark.parametrize("dtype", [float32, bfloat16, float16, int32], ids=lambda dtype: dtype.name)
def test_all_reduce_is_the_sum_in_the_order_of_ranks(dtype: DType) -> None:
    ranks = Ranks(3)
    for size in (1, 1000, 600_001):
        arrays = numbers(3, size, dtype)
        places = ranks.put(arrays)
        for comm, place in zip(ranks.comms, places):
            comm.all_reduce(place, place, size, dtype)
        wide = [array.astype(np.int32 if dtype is int32 else np.float32) for array in arrays]
        expected = (wide[0] + wide[1] + wide[2]).astype(dtype.numpy)
        for found in ranks.get(places, (size,), dtype):
            assert np.array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_gather_and_messages() -> None:
    ranks, size = Ranks(3), 300_000
    arrays = numbers(3, 3 * size, float32)
    places, gathered, received = ranks.put(arrays), ranks.space(12 * size * 3), ranks.space(4 * size)
    for rank, comm in enumerate(ranks.comms):
        comm.all_gather(places[rank], gathered[rank], 3 * size, float32)
        with ranks.nccl.group():  # round a ring, all at the same time
            comm.send(places[rank], size, float32, (rank + 1) % 3)
            comm.receive(received[rank], size, float32, (rank + 2) % 3)
    whole = np.stack(arrays)
    assert all(np.array_equal(found, whole) for found in ranks.get(gathered, (3, 3 * size), float32))
    for rank, found in enumerate(ranks.get(received, (size,), float32)):
        assert np.array_equal(found, whole[(rank + 2) % 3, :size])
    for comm in ranks.comms:
        comm.destroy()


def test_a_group_may_have_more_messages_than_a_ring_holds(two: Ranks) -> None:
    count = RING + 50
    sent, received = two.put([np.arange(count, dtype=np.float32), np.zeros(count, np.float32)])
    with two.nccl.group():
        for index in range(count):
            two.comms[0].send(sent + 4 * index, 1, float32, 1)
            two.comms[1].receive(received + 4 * index, 1, float32, 0)
    assert np.array_equal(two.get([sent, received], (count,), float32)[1], np.arange(count))


def test_graphs_hold_collectives_and_each_launch_is_compared(two: Ranks) -> None:
    places = two.put([np.full(8, 1 + rank, np.float32) for rank in range(2)])

    def work(rank: int) -> Callable[[], None]:
        def run() -> None:
            two.comms[rank].all_reduce(places[rank], places[rank], 8, float32)
            two.comms[rank].all_reduce(places[rank], places[rank], 8, float32)

        return run

    graphs: list[Graph | None] = [None, None]

    def capture(rank: int) -> None:
        graphs[rank] = Graph.capture(two.gpus[rank], work(rank))

    other = threading.Thread(target=capture, args=(1,))  # each waits for the other's first run
    other.start()
    capture(0)
    other.join()
    for _ in range(2):
        for graph in graphs:
            assert graph is not None
            graph.replay()
    found = two.get(places, (8,), float32)
    assert all(np.array_equal(each, np.full(8, 3.0 * 2 * 4 * 4, np.float32)) for each in found)
    first = graphs[0]
    assert first is not None
    first.replay()
    two.comms[1].all_reduce(places[1], places[1], 4, float32)
    with pytest.raises(LaunchError, match=r"rank 0 called ncclAllReduce of 8 .* rank 1 called ncclAllReduce of 4"):
        two.synchronize()


def swapped(ranks: Ranks, places: list[int], more: list[int]) -> None:
    first, second = ranks.comms
    first.all_reduce(places[0], places[0], 16, float32)
    first.all_gather(places[0], more[0], 16, float32)
    second.all_gather(places[1], more[1], 16, float32)
    second.all_reduce(places[1], places[1], 16, float32)


def wrong_count(ranks: Ranks, places: list[int], more: list[int]) -> None:
    for rank, comm in enumerate(ranks.comms):
        comm.all_reduce(places[rank], places[rank], 16 - rank, float32)


def wrong_type(ranks: Ranks, places: list[int], more: list[int]) -> None:
    for rank, comm in enumerate(ranks.comms):
        comm.all_reduce(places[rank], places[rank], 16, float32 if rank else int32)


def one_fewer(ranks: Ranks, places: list[int], more: list[int]) -> None:
    ranks.comms[0].all_reduce(places[0], places[0], 16, float32)
    for comm in ranks.comms:
        comm.end_step(7)


def has_left(ranks: Ranks, places: list[int], more: list[int]) -> None:
    ranks.comms[1].destroy()
    ranks.comms[0].all_reduce(places[0], places[0], 16, float32)


def never_comes(ranks: Ranks, places: list[int], more: list[int]) -> None:
    ranks.comms[0].all_reduce(places[0], places[0], 16, float32)


def unlike_message(ranks: Ranks, places: list[int], more: list[int]) -> None:
    ranks.comms[0].send(places[0], 16, float32, 1)
    ranks.comms[1].receive(places[1], 8, float32, 0)


def nobody_receives(ranks: Ranks, places: list[int], more: list[int]) -> None:
    ranks.comms[0].send(places[0], 16, float32, 1)
    ranks.comms[1].destroy()


def other_place(ranks: Ranks, places: list[int], more: list[int]) -> None:
    with ranks.nccl.group():
        windows = [comm.new_window(1 << 16) for comm in ranks.comms]
    for rank, comm in enumerate(ranks.comms):
        ranks.gpus[rank].fill(windows[rank].address, 0, 1 << 16)
        comm.all_reduce(windows[rank].address + 512 * rank, windows[rank].address + 512, 16, float32)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (swapped, ["rank 0 called ncclAllReduce of 16 float32 at", "rank 1 called ncclAllGather of 16 float32"]),
        (wrong_count, ["rank 0 called ncclAllReduce of 16 float32", "rank 1 called ncclAllReduce of 15 float32"]),
        (wrong_type, ["rank 0 called ncclAllReduce of 16 int32", "rank 1 called ncclAllReduce of 16 float32"]),
        (one_fewer, ["rank 0 called ncclAllReduce of 16 float32", "rank 1 called end of step 7"]),
        (has_left, ["rank 0 called ncclAllReduce", "rank 1 has left the communicator, without a call"]),
        (never_comes, ["rank 0 called ncclAllReduce", "rank 1 belongs to the thread that waits for it, without"]),
        (unlike_message, ["rank 0 called ncclSend of 16 float32 to rank 1", "rank 1 called ncclRecv of 8 float32"]),
        (nobody_receives, ["rank 0 called ncclSend of 16 float32 to rank 1", "rank 1 has left"]),
        (other_place, ["source at 0 of window 0 target at 512 of window 0", "source at 512 of window 0"]),
    ],
)  # fmt: skip
def test_a_mistake_names_every_ranks_call(two: Ranks, mistake: Callable[..., None], said: list[str]) -> None:
    places, more = two.put([np.ones(16, np.float32)] * 2), two.space(128)
    mistake(two, places, more)
    with pytest.raises(LaunchError, match="RANKS_DIFFER: ranks do not do the same") as caught:
        two.synchronize()
    assert all(words in str(caught.value) for words in said), caught.value
    assert "nccl/test_emulated_nccl.py:" in str(caught.value)
    with pytest.raises(NcclError, match="ranks do not do the same"):
        two.comms[0].check()
    with pytest.raises(NcclError, match="ncclRemoteError"):
        two.comms[0].all_reduce(places[0], places[0], 16, float32)


def test_memory_is_checked(two: Ranks) -> None:
    """What nothing wrote, what another stream writes, and what lies outside."""
    places, fresh = two.put([np.ones(16, np.float32)] * 2), two.space(128)
    for rank, comm in enumerate(two.comms):
        comm.all_reduce(fresh[rank], places[rank], 16, float32)
    with pytest.raises(LaunchError, match=r"ncclAllReduce at .* nothing has written"):
        two.synchronize()


def test_an_unordered_stream_in_front_of_a_collective_is_found(two: Ranks) -> None:
    places = two.put([np.ones(16, np.float32)] * 2)
    side = two.gpus[0].new_stream()
    two.synchronize()
    two.gpus[0].fill(places[0], 0, 64, stream=side)
    for rank, comm in enumerate(two.comms):
        comm.all_reduce(places[rank], places[rank], 16, float32)
    with pytest.raises(LaunchError, match="missing event between streams"):
        two.synchronize()


def test_a_collective_may_not_leave_its_block(two: Ranks) -> None:
    places = two.put([np.ones(16, np.float32)] * 2)
    for rank, comm in enumerate(two.comms):
        comm.all_reduce(places[rank], places[rank], 17, float32)
    with pytest.raises(LaunchError, match="past the end of a pool's block of 64 bytes"):
        two.synchronize()


def test_windows_are_aligned_and_collectives_in_them_have_one_place(two: Ranks) -> None:
    with two.nccl.group():
        windows = [comm.new_window(5000) for comm in two.comms]
    assert all(window.address % 4096 == 0 and window.size_bytes == 8192 for window in windows)
    for gpu, comm, window in zip(two.gpus, two.comms, windows):
        gpu.write(window.address, np.full(4, comm.rank + 1, np.float32))
        comm.all_reduce(window.address, window.address, 4, float32)
    found = two.get([window.address for window in windows], (4,), float32)
    assert all(np.array_equal(each, np.full(4, 3, np.float32)) for each in found)
    for comm in two.comms:
        comm.destroy()


def test_arguments_are_refused(two: Ranks) -> None:
    nccl, comm = two.nccl, two.comms[0]
    with pytest.raises(InvalidArgumentError, match="rank is 2, must be 0 to 1"):
        NcclComm(two.gpus[0], nccl, nccl.unique_id(), 2, 2)
    with pytest.raises(InvalidArgumentError, match="unique_id has 3 bytes, must be 128"):
        NcclComm(two.gpus[0], nccl, b"abc", 0, 2)
    with pytest.raises(NcclError, match="ncclInvalidArgument"):
        NcclComm(two.gpus[0], nccl, bytes(128), 0, 2)
    with pytest.raises(NcclError, match="peer 0 of rank 0 of 2"):
        comm.send(0, 1, float32, 0)
    comm.destroy()
    comm.destroy()
    with pytest.raises(NcclError, match="has left its communicator"):
        comm.all_reduce(0, 0, 1, float32)


def test_abort_ends_what_waits(two: Ranks) -> None:
    """On another thread, while this one waits."""
    places = two.put([np.ones(16, np.float32)] * 2)
    two.comms[0].all_reduce(places[0], places[0], 16, float32)
    timer = threading.Timer(0.02, two.comms[0].abort)
    timer.start()
    with pytest.raises(LaunchError, match=r"rank 0 has left the communicator|belongs to the thread"):
        two.gpus[0].synchronize()
    timer.join()


def test_bfloat16_rounds_once() -> None:
    ranks = Ranks(3)
    value = np.array([1.0], ml_dtypes.bfloat16)
    small = np.array([2.0**-8], ml_dtypes.bfloat16)
    places = ranks.put([value, small, small])
    for rank, comm in enumerate(ranks.comms):
        comm.all_reduce(places[rank], places[rank], 1, bfloat16)
    assert all(float(each[0]) == 1 + 2.0**-7 for each in ranks.get(places, (1,), bfloat16))
