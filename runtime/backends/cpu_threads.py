"""How many threads share an operation on the cpu, and its new arrays."""

from __future__ import annotations

import numpy as np

from numba_kernels.cpu.running.launch import new_array
from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime.dtype import float32, int32
from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor

MAX_WORKERS = NUM_THREADS
SERIAL_ELEMENTS = 32 * 1024  # elementwise work below this is not worth waking a thread
_num_workers = MAX_WORKERS


def num_workers() -> int:
    """Threads that share an operation that is worth it."""
    return _num_workers


def set_num_workers(count: int) -> None:
    """Share operations among so many threads, 1 to `MAX_WORKERS`; results stay the same to the bit."""
    global _num_workers
    if not 1 <= count <= MAX_WORKERS:
        raise InvalidArgumentError(f"num_workers is {count}, must be 1 to {MAX_WORKERS}", param="num_workers")
    _num_workers = count


def new(shape: tuple[int, ...]) -> Tensor:
    """A float32 tensor, not filled."""
    return Tensor.over(new_array(shape, np.float32), float32)


def new_int32(shape: tuple[int, ...]) -> Tensor:
    """An int32 tensor, not filled."""
    return Tensor.over(new_array(shape, np.int32), int32)


def share_among(rows: int, elements_a_row: int) -> tuple[int, int, int]:
    """(work items, workers, rows a work item) for elementwise work."""
    if rows * elements_a_row < SERIAL_ELEMENTS or _num_workers == 1:
        return 1, 1, max(1, rows)
    rows_a_work_item = -(-rows // (4 * _num_workers))
    return -(-rows // rows_a_work_item), _num_workers, rows_a_work_item
