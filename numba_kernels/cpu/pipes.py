"""Pipes between pipeline stages that are processes of one machine: kernels over memory that both map.

A pipe's memory, in cache lines of 64 bytes:

| lines | contents |
|---|---|
| 0 | how many pieces the sender has put there |
| 1 | how many the receiver has taken |
| 2 … 1 + SLOTS | of the piece in each slot: the step that it belongs to, and the bytes of its message |

and the slots. A sender goes on as soon as its piece lies in a slot, and waits only where all are full: the receiver may
still be busy with earlier pieces. As all kernels do these run in recordings; the step is read from memory of the
process's own, and the word after it counts the nanoseconds that a receiver has waited.
"""

from __future__ import annotations

import functools
import time

import llvmlite.ir as ir
from numba import carray, njit, types
from numba.core import cgutils

from numba_kernels.closure_cache import name_by_content
from numba_kernels.cpu.collectives import DIFFER, HAS_ABORTED, LINE_BYTES, wait_a_moment
from numba_kernels.cpu.intrinsics import atomic
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.running.launch import Fields, Kernel, copy_bytes, int64_at

SLOTS = 16
SLOT_BYTES = 1 << 21
"""Bytes of a piece; memory that is never written costs nothing."""
PIPE_BYTES = 4096 + SLOTS * SLOT_BYTES

HAND_OVER = Fields("*pipe *flag *step *numbers num_bytes message_bytes")


@emitted(types.int64)
def monotonic_ns(builder):
    """Nanoseconds of `CLOCK_MONOTONIC`."""
    int32, int64 = ir.IntType(32), ir.IntType(64)
    moment = cgutils.alloca_once(builder, ir.LiteralStructType((int64, int64)))
    kind = ir.FunctionType(int32, [int32, moment.type])
    function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
    builder.call(function, [int32(time.CLOCK_MONOTONIC), moment])
    seconds, rest = (builder.load(builder.gep(moment, [int32(0), int32(place)])) for place in (0, 1))
    return builder.add(builder.mul(seconds, int64(1_000_000_000)), rest)


@njit(nogil=True)
def _slot(pipe, number):
    """The address of a piece."""
    return pipe + 4096 + (number % SLOTS) * SLOT_BYTES


@functools.cache
def _wait_above():
    @njit(nogil=True)
    @name_by_content
    def wait_above(flag, address, count):
        """Whether a counter has risen above `count`; False if a rank has given up."""
        looks = 0
        while atomic.load(address) <= count:
            if atomic.load(flag) != 0:
                return False
            wait_a_moment(looks)
            looks += 1
        return True

    return wait_above


@functools.cache
def send_kernel() -> Kernel:
    """Puts a piece of a message into the pipe; one work item."""
    wait_above = _wait_above()

    def send(arguments, work_item):
        a = carray(arguments, 1)[0]
        number = atomic.load(a.pipe)
        if not wait_above(a.flag, a.pipe + LINE_BYTES, number - SLOTS):
            a.status = HAS_ABORTED
            return
        said = int64_at(a.pipe + (2 + number % SLOTS) * LINE_BYTES, 2)
        said[0], said[1] = int64_at(a.step, 1)[0], a.message_bytes
        copy_bytes(_slot(a.pipe, number), a.numbers, a.num_bytes)
        atomic.store(a.pipe, number + 1)

    return Kernel(send, HAND_OVER)


@functools.cache
def receive_kernel() -> Kernel:
    """Takes a message's piece out of the pipe, which must be of this step and message size; one work item."""
    wait_above = _wait_above()

    def receive(arguments, work_item):
        a = carray(arguments, 1)[0]
        taken = a.pipe + LINE_BYTES
        number = atomic.load(taken)
        if atomic.load(a.pipe) <= number:
            begun = monotonic_ns()
            if not wait_above(a.flag, a.pipe, number):
                a.status = HAS_ABORTED
                return
            int64_at(a.step, 2)[1] += monotonic_ns() - begun
        said = int64_at(a.pipe + (2 + number % SLOTS) * LINE_BYTES, 2)
        if said[0] != int64_at(a.step, 1)[0] or said[1] != a.message_bytes:
            a.status = DIFFER
            return
        copy_bytes(a.numbers, _slot(a.pipe, number), a.num_bytes)
        atomic.store(taken, number + 1)

    return Kernel(receive, HAND_OVER)
