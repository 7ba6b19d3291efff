"""The threads that share a kernel's work items: helpers that spin for a moment between kernels, and then sleep.

A decode step is a hundred kernels of some ten microseconds, one right after the other; waking a sleeping thread for
each costs more than many of them take. So a helper that has found no work keeps looking for SPIN_ROUNDS rounds (about
half a millisecond) before it sleeps, and as long as a program runs. A launch never waits for one that sleeps: it wakes
it, and meanwhile draws the work items itself.

The protocol, over the words of `_words`, those that are written often on cache lines of their own:

- NEXT holds all that a thread needs to draw: how many work items of the open launch are left, which launch of the
  PROGRAM it is, and how many helpers it may have. A draw subtracts 1; who gets a number above 0 has that work item.
- A helper that draws no more adds what it has done to DONE. The launcher draws like the helpers, waits until all work
  items are done, and opens the next launch by one write. So no launch ends while a helper has a work item of it, and
  a helper reads the program's rows only then.

One launch at a time, or one program of launches: callers of `run` or `run_program` hold the lock. Helpers are
daemon threads, joined when the process ends.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba import njit, types

from numba_kernels.closure_cache import kept_njit
from numba_kernels.cpu import CODE_FOLDER
from numba_kernels.cpu.intrinsics.atomic import pause
from numba_kernels.cpu.intrinsics.emitted import emitted

_numba_config: Any = numba.config
NUM_THREADS: int = _numba_config.NUMBA_NUM_THREADS  # of this process; get_num_threads would start numba's own
SPIN_ROUNDS = 20_000  # a round is a pause instruction and two loads, 10 to 60 ns: around half a millisecond in all

_most_threads = NUM_THREADS

PROGRAM_COLUMNS = 5
"""A program, int64 ``[launches, 5]``: function, arguments, work items, helpers, and the address of a word that is 0
before a launch and after it, or 0."""

lock = threading.Lock()
_LEFT = (1 << 32) - 1  # NEXT's bits of the work items that are left
NONE_LEFT = 1 << 31  # is added to them, since threads go on to draw
_LAUNCH_AT, _HELPERS_AT = 32, 52  # the places in NEXT of the launch's number and of its helpers
MOST_LAUNCHES, MOST_HELPERS = 1 << _HELPERS_AT - _LAUNCH_AT, (1 << 63 - _HELPERS_AT) - 1

_LINE = 8  # words of 8 bytes a cache line
NEXT, DONE, PROGRAM, ASLEEP, STOP, BUSY = 0, 1, _LINE, 2 * _LINE, 3 * _LINE, 4 * _LINE

_memory = np.zeros(6 * _LINE, np.int64)
_words = _memory[-_memory.ctypes.data % 64 // 8 :]
_words[NEXT] = NONE_LEFT
_address = _words.ctypes.data
_alone = np.zeros(PROGRAM_COLUMNS, np.int64)  # the program of one launch
_ROW_BYTES = 8 * PROGRAM_COLUMNS
_I64 = ir.IntType(64)


def _word(builder, words, index):
    """A pointer to a word of those at the address ``words``."""
    return builder.gep(builder.inttoptr(words, _I64.as_pointer()), [index])


def _compiled(signature):
    """Compiles for these types now, or reads the code from disk."""

    def decorate(function):
        dispatcher = kept_njit(function, CODE_FOLDER, nogil=True)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return decorate


@emitted(types.int64, types.intp, types.intp)
def _load(builder, words, index):
    return builder.load_atomic(_word(builder, words, index), "seq_cst", 8)


@emitted(types.void, types.intp, types.intp, types.int64)
def _store(builder, words, index, value):
    builder.store_atomic(value, _word(builder, words, index), "seq_cst", 8)


@emitted(types.int64, types.intp, types.intp, types.int64)
def _add(builder, words, index, value):
    """Adds as one step among all threads; returns the value before."""
    return builder.atomic_rmw("add", _word(builder, words, index), value, "seq_cst")


@emitted(types.void, *[types.intp] * 3)
def _call(builder, function, arguments, work_item):
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.inttoptr(arguments, pointer), work_item])


@emitted(types.int64, types.intp)
def _status_at(builder, address):
    """The first word of an argument block."""
    return builder.load(builder.inttoptr(address, _I64.as_pointer()))


@emitted(types.void, types.intp)
def _clear_status(builder, address):
    builder.store(ir.Constant(_I64, 0), builder.inttoptr(address, _I64.as_pointer()))


@_compiled("void(int64, int64, int64)")
def run_alone(function, arguments, num_work_items):
    """Every work item, on this thread."""
    for work_item in range(num_work_items):
        _call(function, arguments, work_item)


@njit(nogil=True)
def _draw(words):
    """Draws and runs work items until none is left; how many it has run."""
    count = 0
    drawn = _add(words, NEXT, -1)
    while drawn & _LEFT > NONE_LEFT:
        row = _load(words, PROGRAM) + (drawn >> _LAUNCH_AT & MOST_LAUNCHES - 1) * _ROW_BYTES
        work_item = _load(row, 2) - (drawn & _LEFT) + NONE_LEFT
        _call(_load(row, 0), _load(row, 1), work_item)
        count += 1
        drawn = _add(words, NEXT, -1)
    return count


@njit(nogil=True)
def _launch(words, program, number):
    """The launch with this number, which may have helpers."""
    row = program + number * _ROW_BYTES
    num_work_items, num_helpers = _load(row, 2), _load(row, 3)
    if num_helpers == 0:
        for work_item in range(num_work_items):
            _call(_load(row, 0), _load(row, 1), work_item)
        return
    _store(words, NEXT, num_helpers << _HELPERS_AT | number << _LAUNCH_AT | NONE_LEFT + num_work_items)
    count = _draw(words)
    while _load(words, DONE) + count != num_work_items:
        pause()
    _store(words, DONE, 0)


@_compiled("void(int64, int64)")
def _launch_one(words, program):
    _store(words, PROGRAM, program)
    _launch(words, program, 0)


@_compiled("UniTuple(int64, 2)(int64, int64, int64)")
def _launch_all(words, program, length):
    """Launch after launch; (the one that set its status, and which) or (-1, 0)."""
    _store(words, PROGRAM, program)
    for i in range(length):
        _launch(words, program, i)
        arguments, counter = _load(program + i * _ROW_BYTES, 1), _load(program + i * _ROW_BYTES, 4)
        if counter != 0:
            _store(counter, 0, 0)
        status = _status_at(arguments)
        if status != 0:
            _clear_status(arguments)
            return i, status
    return -1, 0


@_compiled("void(int64, int64, int64)")
def _help(words, index, rounds):
    """Takes part in launches until ``rounds`` looks in a row found none, and no program has launches to come."""
    idle = 0
    while (idle < rounds or _load(words, BUSY) != 0) and _load(words, STOP) == 0:
        drawn = _load(words, NEXT)
        if drawn & _LEFT > NONE_LEFT and index < drawn >> _HELPERS_AT:
            count = _draw(words)
            if count:
                _add(words, DONE, count)
            idle = 0
        else:
            pause()
            idle += 1


class _Helpers:
    """The helper threads of this process, started by the first launch that needs them."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.wake = threading.Condition()

    def start(self) -> None:
        for index in range(NUM_THREADS - 1):
            name = f"xserv-kernel-{index + 1}"
            self.threads.append(threading.Thread(target=self._serve, args=(index,), name=name, daemon=True))
            self.threads[-1].start()

    def rouse(self) -> None:
        with self.wake:
            _words[ASLEEP] = 0
            self.wake.notify_all()

    def begin(self) -> None:
        """Wakes sleeping helpers; none goes to sleep until BUSY is 0 again, but for one that is about to."""
        _words[BUSY] = 1
        if _words[ASLEEP]:
            self.rouse()
        if not self.threads:
            self.start()

    def stop(self) -> None:
        """Ends the threads: one that is inside compiled code must not meet the end of the interpreter."""
        _words[STOP] = 1
        self.rouse()
        for thread in self.threads:
            thread.join()
        self.threads = []

    def _serve(self, index: int) -> None:
        while not _words[STOP]:
            _help(_address, index, SPIN_ROUNDS)
            with self.wake:
                # A launch may have been opened while this thread waited for the interpreter's lock.
                if not _words[STOP] and not _words[BUSY] and int(_words[NEXT]) & _LEFT <= NONE_LEFT:
                    _words[ASLEEP] += 1
                    self.wake.wait()


_helpers = _Helpers()


def limit_threads(count: int) -> None:
    """Lets launches, and recordings that are made from now on, have at most so many threads (1 … NUM_THREADS): other
    processes of this machine compute the same model."""
    global _most_threads
    _most_threads = count


def most_threads() -> int:
    """Threads that a launch may have."""
    return _most_threads


def num_helpers(num_work_items: int, num_threads: int) -> int:
    """Helpers that so many work items on at most ``num_threads`` threads may have."""
    return max(0, min(num_threads, num_work_items, _most_threads, MOST_HELPERS + 1) - 1)


def run(function: int, arguments: int, num_work_items: int, num_threads: int) -> None:
    """Runs ``function(arguments, work item)`` for every work item, on this thread and at most ``num_threads - 1``
    helpers."""
    helpers = num_helpers(num_work_items, num_threads)
    if helpers == 0:
        run_alone(function, arguments, num_work_items)
        return
    if _words[ASLEEP]:
        _helpers.rouse()
    elif not _helpers.threads:
        _helpers.start()
    _alone[:] = function, arguments, num_work_items, helpers, 0
    _launch_one(_address, _alone.ctypes.data)


def run_program(program: int, length: int, most_helpers: int) -> tuple[int, int]:
    """Runs so many launches of the program at this address, all threads from one to the next, until one has set the
    first word of its arguments: (its number, the status), which is then reset to 0; or (-1, 0). No launch has more than
    ``most_helpers``."""
    try:
        if most_helpers:
            _helpers.begin()
        return _launch_all(_address, program, length)
    finally:
        if most_helpers:
            _words[BUSY] = 0


def _after_fork() -> None:
    """A forked child has none of its parent's threads; the lock may have been held by one of them."""
    global _helpers, lock
    _helpers, lock = _Helpers(), threading.Lock()
    _words[:] = 0
    _words[NEXT] = NONE_LEFT


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _helpers.stop())
