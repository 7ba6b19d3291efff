"""What a rank does in `test_shared_communicator`, run as `SCENARIO FD NUMBER RANKS STAGES`; it prints its error."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from numba_kernels.cpu.collectives import MOST_AHEAD
from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import record
from runtime import ops
from runtime.communicator import CommunicatorError
from runtime.dtype import bfloat16, float32
from runtime.shared_communicator import SharedCommunicator
from runtime.tensor.tensor import Tensor
from tests.waiting import wait_until


def _numbers(rank: int, *shape: int) -> Tensor:
    return Tensor.from_numpy(np.random.default_rng(rank).standard_normal(shape).astype(np.float32))


def sums_and_gathers(ranks: SharedCommunicator) -> None:
    """Sizes below, at and above what goes through at once, eager and recorded."""
    everyone = range(ranks.num_ranks)
    for size in (1, 1000, 131_072, 300_001):
        found = _numbers(ranks.rank, size)
        ranks.all_reduce(found)
        expected = _numbers(0, size).array
        for rank in everyone[1:]:
            expected = expected + _numbers(rank, size).array
        assert np.array_equal(found.array, expected), size
    found = ranks.all_gather(_numbers(ranks.rank, 300, 999))
    assert np.array_equal(found.array, np.stack([_numbers(rank, 300, 999).array for rank in everyone]))
    for rows, share, rest in ((7, 5, 5), (2, 140_000, 3), (1, 300_000, 290_000), (500, 400, 399)):
        widths = [share] * (ranks.num_ranks - 1) + [rest]
        parts = [_numbers(rank, rows, width) for rank, width in enumerate(widths)]
        found = ranks.all_gather_columns(parts[ranks.rank], share, sum(widths))
        assert np.array_equal(found.array, np.concatenate([part.array for part in parts], 1))
    assert ranks.agree(True)
    assert not ranks.agree(ranks.rank == 0)
    x = Tensor.from_numpy(np.ones((4, 256), np.float32))
    with record(Arena()) as recording:
        y = ops.add_scaled(x, x, 1.0)
        ranks.all_reduce(y)
        z = ranks.all_gather_columns(y, 256, 256 * ranks.num_ranks)
    for _ in range(3):
        recording.replay()
        assert np.array_equal(z.array, np.full((4, 256 * ranks.num_ranks), 2.0 * ranks.num_ranks, np.float32))
    ranks.end_step(1)


def other_collective(ranks: SharedCommunicator) -> None:
    x = _numbers(0, 16)
    if ranks.rank == 1:
        ranks.all_gather(x)
    else:
        ranks.all_reduce(x)


def other_count(ranks: SharedCommunicator) -> None:
    ranks.all_reduce(_numbers(0, 16 + ranks.rank))


def swapped(ranks: SharedCommunicator) -> None:
    x = _numbers(0, 16)
    for is_sum in (True, False) if ranks.rank else (False, True):
        if is_sum:
            ranks.all_reduce(x)
        else:
            ranks.all_gather_columns(_numbers(0, 4, 4), 4, 4 * ranks.num_ranks)


def one_fewer(ranks: SharedCommunicator) -> None:
    if ranks.rank != 1:
        ranks.all_reduce(_numbers(0, 16))
    ranks.end_step(7)
    ranks.agree(True)


def ahead(ranks: SharedCommunicator) -> None:
    """Rank 0 does not wait at the ends of steps until it is too far ahead of others, who come a second after it is."""
    is_ahead = Path(os.environ["XSERV_TEST_FOLDER"]) / "ahead"
    if ranks.rank:
        wait_until(is_ahead.exists)
        time.sleep(1.0)
    else:
        for number in range(MOST_AHEAD):
            ranks.end_step(number)  # were it to wait here, it would for ever
        begun = time.monotonic()
        is_ahead.touch()
    for number in range(ranks.rank and MOST_AHEAD, 0, -1):
        ranks.end_step(MOST_AHEAD - number)
    for number in range(MOST_AHEAD, 2 * MOST_AHEAD):
        ranks.end_step(number)
        if number > 40 and number % 3 == 0:
            x = _numbers(ranks.rank, 100)
            ranks.all_reduce(x)
            expected = sum(_numbers(rank, 100).array for rank in range(ranks.num_ranks))
            assert np.array_equal(x.array, expected), number
    if ranks.rank == 0:
        assert time.monotonic() - begun > 0.5, "it did not wait for who came late"


def other_end(ranks: SharedCommunicator) -> None:
    """Found several steps later."""
    for number in range(1, 5 * MOST_AHEAD):
        ranks.end_step(number + (ranks.rank == 1 and number > 3))


def wrong_type(ranks: SharedCommunicator) -> None:
    ranks.all_reduce(_numbers(0, 16).to(bfloat16))


def gives_up(ranks: SharedCommunicator) -> None:
    if ranks.rank == 1:
        time.sleep(0.1)
        ranks.abort("failed: no more paper")
    else:
        ranks.all_reduce(_numbers(0, 16))


def hands_over(stages: SharedCommunicator) -> None:
    """Messages of many sizes round all stages, eager and recorded; those that fill the pipe wait for who takes them."""
    sizes = (1, 1000, 524_288, 2_000_001, 9_000_000)
    for number, size in enumerate(sizes):
        stages.begin_step(number)
        if stages.stage == 0:
            stages.send(_numbers(number, size))
        found = stages.receive((size,), float32)
        assert np.array_equal(found.array, _numbers(number, size).array), size
        if stages.stage:
            stages.send(found)
    with record(Arena()) as recording:
        if stages.stage == 0:
            x = ops.add_scaled(_ONES, _ONES, 1.0)
            stages.send(x)
        y = stages.receive((4, 256), float32)
        if stages.stage:
            stages.send(ops.add_scaled(y, _ONES, 1.0))
    for number in range(5):
        stages.begin_step(100 + number)
        recording.replay()
        count = stages.stage + 1 if stages.stage else stages.num_stages + 1
        assert np.array_equal(y.array, np.full((4, 256), count, np.float32))
    assert stages.agree(True)
    assert not stages.agree(stages.stage == 0)
    assert stages.num_stages * stages.num_ranks == len(stages.tallies())


_ONES = Tensor.from_numpy(np.ones((4, 256), np.float32))


def other_size(stages: SharedCommunicator) -> None:
    stages.begin_step(3)
    if stages.stage == 0:
        stages.send(_numbers(0, 16))
    elif stages.stage == 1:
        stages.receive((17,), float32)


def other_step(stages: SharedCommunicator) -> None:
    stages.begin_step(7 + stages.stage)
    if stages.stage == 0:
        stages.send(_numbers(0, 16))
    elif stages.stage == 1:
        stages.receive((16,), float32)


def sender_gives_up(stages: SharedCommunicator) -> None:
    if stages.stage == 0:
        time.sleep(0.1)
        stages.abort("failed: no more paper")
    else:
        stages.receive((16,), float32)


if __name__ == "__main__":
    scenario, descriptor, rank, count, num_stages = sys.argv[1], *map(int, sys.argv[2:6])
    communicator = SharedCommunicator(descriptor, rank % count, count, rank // count, num_stages)
    try:
        globals()[scenario](communicator)
    except CommunicatorError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
