"""The threads behind the kernels: every work item runs once, whoever sleeps, and no process hangs at its end."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from numba import carray, cfunc, types

from numba_kernels.cpu.running import pool

CODE = """
import os
import numpy as np
from tests.numba_kernels.cpu.test_pool import launch
assert launch(100, 2).tolist() == [1] * 100
child = os.fork() if {fork} else None
assert launch(100, 2).tolist() == [1] * 100
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@cfunc(types.void(types.CPointer(types.int64), types.intp))
def _count(counts, work_item):
    """Adds 1 to the work item's own cell, after a little work, lest one thread take them all."""
    total = 0
    for i in range(2000):
        total += i ^ work_item
    carray(counts, work_item + 1)[work_item] += 1 + (total & 0)


@cfunc(types.void(types.CPointer(types.int64), types.intp))
def _copy(counts, work_item):
    """Writes 1 more than the least of its launch's cells to the next launch's, and counts in the cell between."""
    cells = carray(counts, 18)
    least = cells[1]
    for i in range(1, 8):
        least = min(least, cells[i])
    cells[10 + work_item] = least + 1
    cells[8] += 1


def launch(num_work_items: int, num_threads: int) -> np.ndarray:
    """How often each work item ran."""
    counts = np.zeros(max(1, num_work_items), np.int64)
    pool.run(_count.address, counts.ctypes.data, num_work_items, num_threads)
    return counts[:num_work_items]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 64])
def test_every_work_item_runs_once(num_threads):
    for num_work_items in [0, 1, 2, 3, 7, 64, 1000, *[5] * 200]:
        assert launch(num_work_items, num_threads).tolist() == [1] * num_work_items


def test_a_program_runs_each_launch_after_the_one_before():
    """A launch sees all that the one before it has done, and its counter is 0 again in the next run."""
    length, num_work_items = 40, 7
    counts = np.zeros((length + 1, num_work_items + 2), np.int64)  # status, the counts, and the counter at the end
    counts[0, 1:-1] = 1
    rows = [
        (_copy.address, each.ctypes.data, num_work_items, pool.num_helpers(num_work_items, 2), each[-1:].ctypes.data)
        for each in counts[:-1]
    ]
    program = np.array(rows, np.int64)
    for _ in range(50):
        counts[1:] = 0
        assert pool.run_program(program.ctypes.data, length, pool.num_helpers(num_work_items, 2)) == (-1, 0)
        assert (counts[:, 1:-1] == np.arange(1, length + 2)[:, None]).all()
        assert not counts[:, -1].any()


def test_helpers_sleep_when_idle_and_are_roused():
    launch(64, 2)
    if pool.NUM_THREADS == 1:
        assert not pool._helpers.threads
        return
    for _ in range(3):
        deadline = time.monotonic() + 30
        while pool._words[pool.ASLEEP] < len(pool._helpers.threads):
            assert time.monotonic() < deadline, "a helper does not go to sleep"
            time.sleep(0.01)
        assert launch(64, 2).tolist() == [1] * 64
        assert pool._words[pool.DONE] == 0


@pytest.mark.parametrize("fork", [False, True])
def test_a_process_ends_and_may_fork(fork):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", CODE.format(fork=fork)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
