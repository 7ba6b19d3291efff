"""How the thread treats subnormal numbers. Instructions that multiply pairs of bfloat16 take and give zeros for them;
vector code that is to give the same bits runs in that mode, too."""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types

from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.emitted import emitted
from numba_kernels.cpu.intrinsics.simd import I8, I32
from numba_kernels.cpu.target import IS_X86

_FLUSHES = 0x8040  # MXCSR: results to zero, and operands


def _register(builder, name, memory):
    simd.call(builder, f"llvm.x86.sse.{name}", ir.VoidType(), [builder.bitcast(memory, I8.as_pointer())])


@emitted(types.int32)
def flush_subnormals(builder):
    """Makes subnormal numbers zero from here on, where the processor is an x86-64; returns the mode before."""
    if not IS_X86:
        return ir.Constant(I32, 0)
    memory = cgutils.alloca_once(builder, I32)
    _register(builder, "stmxcsr", memory)
    before = builder.load(memory)
    builder.store(builder.or_(before, ir.Constant(I32, _FLUSHES)), memory)
    _register(builder, "ldmxcsr", memory)
    return before


@emitted(types.void, types.int32)
def restore_mode(builder, before):
    """Goes back to a mode that `flush_subnormals` has returned."""
    if IS_X86:
        memory = cgutils.alloca_once(builder, I32)
        builder.store(before, memory)
        _register(builder, "ldmxcsr", memory)
