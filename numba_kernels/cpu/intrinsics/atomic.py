"""Words of memory that several threads count in."""

from __future__ import annotations

import platform

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64 = ir.IntType(64)


def _word(builder, address):
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def load(typingctx, address):
    """The int64 at ``address``, with all writes before it (acquire)."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def store(typingctx, address, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def add(typingctx, address, value):
    """Adds to the int64 at ``address`` as one step among all threads; returns the value before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "acq_rel")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def fence(typingctx):
    """Orders earlier stores, also those that bypass the caches, before later ones, for all threads."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def pause(typingctx):
    """Hints to the core that this is a waiting loop, where LLVM has an instruction for it."""

    def codegen(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen
