"""Compiles, packs and runs kernels: one function ``body(arguments, work item)`` is called for each work item.

A kernel is a C function of two arguments: a pointer to a block of 8-byte fields (addresses, sizes, float64 parameters)
and the number of the piece of work to do. The threads of `pool` draw work items until none is left, so that a slow core
simply draws fewer. Numba compiles a loop body into every library that links it; with a function pointer each kernel,
and the machinery that runs them, is compiled once.

Kernels do not raise: they report errors of their input in the field ``status``.

A launch runs at once, or is noted down where the thread records (`recording`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba import carray, njit, types

from numba_kernels.closure_cache import CFunction
from numba_kernels.cpu import CODE_FOLDER
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.running import pool
from numba_kernels.cpu.running.recording import Explain, current, hold, new_array

__all__ = [
    "Explain", "Fields", "Kernel", "address", "address_of", "argument_block", "copy_bytes", "float32_at", "hold",
    "int32_at", "int64_at", "new_array", "uint32_at",
]  # fmt: skip

_MAX_BLOCK_BYTES = 1024
_NO_SIZE = 1 << 40  # what is larger is an address
_block: Any = np.zeros(_MAX_BLOCK_BYTES, np.uint8)  # the arguments of the one launch that holds the pool's lock
_block_address = _block.ctypes.data


def address_of(array: np.ndarray) -> int:
    """The address of the array's first element."""
    return array.__array_interface__["data"][0]


class Fields:
    """The layout of an argument block: ``status`` first, then integers and then float64 fields.

    names      of the integers
    addresses  places in ``names`` of addresses, which were given as ``*name``
    """

    def __init__(self, integers: str, floats: str = "") -> None:
        given = integers.split()
        self.names = names = [name.removeprefix("*") for name in given]
        self.addresses = {place for place, name in enumerate(given) if name.startswith("*")}
        self.record: np.dtype[Any] = np.dtype(
            [("status", np.int64)] + [(n, np.int64) for n in names] + [(n, np.float64) for n in floats.split()]
        )
        self.packer = struct.Struct(f"=q{len(names)}q{len(floats.split())}d")
        if self.packer.size > _MAX_BLOCK_BYTES:
            raise ValueError(f"{self.packer.size} bytes of arguments, limit {_MAX_BLOCK_BYTES}")

    def offset(self, name: str) -> int:
        """Bytes before a field."""
        assert self.record.fields is not None
        return self.record.fields[name][1]


def argument_block(fields: Fields, *values: float) -> np.ndarray:
    """A block of arguments in memory of its own, for kernels that are given its address. The thread's recording, if
    any, checks its addresses and keeps it."""
    made = np.frombuffer(bytearray(fields.packer.pack(0, *values)), np.uint8)
    recording = current()
    if recording is not None:
        for place in fields.addresses:
            recording.check(int(values[place]), fields.names[place])
        recording.hold(made)
    return made


class Kernel:
    """A compiled body. Calling it runs ``num_work_items`` pieces of work on up to ``num_workers`` threads.

    The body is compiled (or read from disk) when the Kernel is made. The field ``counter``, if any, is 0 before a
    launch; in a recording it is set to 0 after it.

    Attributes:
        name: of the body.
        address: of the machine code.
        packer: makes an argument block.
        fields: of that block.
    """

    def __init__(
        self, body: Callable[..., None], fields: Fields, fastmath: set[str] | bool = False, counter: str = ""
    ) -> None:  # fmt: skip
        signature = types.void(types.CPointer(numba.from_dtype(fields.record)), types.intp)
        self.address = CFunction(signature, body, CODE_FOLDER, error_model="numpy", fastmath=fastmath).address
        self.packer = fields.packer
        self.fields = fields
        self.name = body.__name__
        self._counter = fields.offset(counter) if counter else 0

    def __call__(self, num_work_items: int, num_workers: int, *values: float, explain: Explain | None = None) -> None:
        """``values`` are the fields in their order. Raises ``explain``'s error for a status that the kernel set; in a
        recording its replay does."""
        recording = current()
        if recording is not None:
            for place, (name, value) in enumerate(zip(self.fields.names, values)):
                what = f"{name} of {self.name}"
                if place in self.fields.addresses:
                    recording.check(int(value), what)
                else:
                    assert value < _NO_SIZE, f"{what} is an address: its name needs a star"
            packed = self.packer.pack(0, *values)
            recording.add(self.address, packed, num_work_items, num_workers, explain, self._counter, self.name)
            return
        with pool.lock:
            self.packer.pack_into(_block, 0, 0, *values)
            pool.run(self.address, _block_address, num_work_items, num_workers)
            status = int(_status[0])
        if status:
            assert explain is not None, f"the kernel has set status {status}"
            raise explain(status)


_status = _block[:8].view(np.int64)


class OwnLaunch:
    """A launch of one work item on this thread, with arguments of its own, of which a call sets one: less work than to
    call the kernel. Not to be recorded."""

    def __init__(self, kernel: Kernel, changing: str, *values: float) -> None:
        """`changing`: the integer field that calls set. `values`: the fields in their order."""
        block = np.zeros(kernel.packer.size, np.uint8)
        kernel.packer.pack_into(block.data, 0, 0, *values)
        self._words, self._arguments = block.view(np.int64).data, address_of(block)
        self._place = 1 + kernel.fields.names.index(changing)
        self._kernel = kernel

    def __call__(self, value: int) -> int:
        """The status that the kernel set, or 0."""
        words = self._words
        words[self._place] = value
        pool.run_alone(self._kernel.address, self._arguments, 1)
        status: int = words[0]
        words[0] = 0
        return status


@emitted(types.voidptr, types.intp)
def _pointer(builder, address):
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@njit
def float32_at(address, size):
    """The float32 array of ``size`` elements at ``address``."""
    return carray(_pointer(address), (size,), np.float32)


@njit
def int8_at(address, size):
    return carray(_pointer(address), (size,), np.int8)


@njit
def copy_bytes(target, source, size):
    """Copies ``size`` bytes to another address, without overlap. By words: numba assigns byte arrays bytewise."""
    num_words = size >> 3
    words, given = int64_at(target, num_words), int64_at(source, num_words)
    for i in range(num_words):
        words[i] = given[i]
    done = num_words << 3
    rest, given_rest = int8_at(target + done, size - done), int8_at(source + done, size - done)
    for i in range(size - done):
        rest[i] = given_rest[i]


@njit
def int32_at(address, size):
    return carray(_pointer(address), (size,), np.int32)


@njit
def uint32_at(address, size):
    return carray(_pointer(address), (size,), np.uint32)


@njit
def int64_at(address, size):
    return carray(_pointer(address), (size,), np.int64)


@njit
def address(array):
    """The address of a local array, as a signed integer (numba would make a float of unsigned plus signed)."""
    return np.int64(array.ctypes.data)


@njit
def new_lines(count):
    """``count`` new floats, undefined, that begin with a cache line: numba's own arrays may lie half a line off, and
    then each whole vector of AVX-512 crosses one."""
    memory = np.empty(count + 16, np.float32)
    start = -address(memory) % 64 // 4
    return memory[start : start + count]
