"""Words of memory that several threads count in."""

from __future__ import annotations

import platform

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from numba_kernels.cpu.intrinsics.emitted import emitted

_I64 = ir.IntType(64)


def _word(builder, address):
    return builder.inttoptr(address, _I64.as_pointer())


@emitted(types.int64, types.intp)
def load(builder, address):
    """The int64 at ``address``, with all writes before it (acquire)."""
    return builder.load_atomic(_word(builder, address), "acquire", 8)


@emitted(types.void, types.intp, types.int64)
def store(builder, address, value):
    builder.store_atomic(value, _word(builder, address), "release", 8)


@emitted(types.int64, types.intp, types.int64)
def add(builder, address, value):
    """Adds to the int64 at ``address`` as one step among all threads; returns the value before."""
    return builder.atomic_rmw("add", _word(builder, address), value, "acq_rel")


@emitted(types.void)
def fence(builder):
    """Orders earlier stores, also those that bypass the caches, before later ones, for all threads."""
    builder.fence("seq_cst")


@emitted(types.void)
def pause(builder):
    """Hints to the core that this is a waiting loop, where LLVM has an instruction for it."""
    if platform.machine() in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
