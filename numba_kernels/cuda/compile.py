"""A specialisation → LLVM IR, by Numba → PTX, by NVVM. No GPU is needed; the cache on disk is the runtime's.

The first step takes nine tenths of the time, and its result is the same for all architectures.
"""

from __future__ import annotations

import functools
import re
from typing import Any, cast

import numpy as np
from numba import types
from numba.cuda import compiler
from numba.cuda.cudadrv import nvvm

from numba_kernels.cuda.specialisation import TENSOR_MAP, Specialisation
from numba_kernels.numba_patches.cuda_passes import cuda_passes
from numba_kernels.numba_patches.patching import without_collection

if not hasattr(np, "row_stack"):  # gone since numpy 2.5; numba-cuda 0.30 still imports it at its first compilation
    np.row_stack = np.vstack

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


def parse_arch(arch: str) -> tuple[int, int, str]:
    """``"sm_90a"`` → ``(9, 0, "a")``. ValueError for anything else."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"{arch!r} is no architecture such as 'sm_80' or 'sm_90a'")
    return int(match[1]), int(match[2]), match[3]


@functools.lru_cache(maxsize=32)
def llvm_ir(specialisation: Specialisation) -> tuple[str, ...]:
    """A kernel as modules of LLVM IR: itself, and what it calls that is not inlined."""
    bounds = (
        (specialisation.max_threads, specialisation.min_blocks)
        if specialisation.min_blocks
        else specialisation.max_threads
    )
    with without_collection(), cuda_passes():
        library, _ = cast(Any, compiler)._compile_pyfunc_with_fixup(
            specialisation.kernel.py_func,
            tuple(types.uint64 if kind is TENSOR_MAP else kind for kind in specialisation.argument_types),
            device=False,
            fastmath=specialisation.fastmath,
            cc=(8, 0),
            abi="numba",
            launch_bounds=bounds,
        )
        return tuple(library.llvm_strs)


def ptx_of(specialisation: Specialisation, modules: tuple[str, ...], arch: str) -> str:
    """NVVM's PTX of a kernel's LLVM IR for an architecture (``"sm_80"``, ``"sm_90a"``)."""
    major, minor, suffix = parse_arch(arch)
    flags = {"arch": f"compute_{major}{minor}{suffix}", "opt": 3, "fastmath": specialisation.fastmath}
    text = str(nvvm.compile_ir(modules, **flags).decode().strip("\0").strip())
    for number, kind in enumerate(specialisation.argument_types):
        if kind is TENSOR_MAP:
            text = _pass_by_value(text, number)
    if (major, minor) < (9, 0):  # launches do not depend on each other there, and no kernel starts early
        text = re.sub(r"griddepcontrol\.\w+;", "", text)
    return text


def _pass_by_value(text: str, number: int) -> str:
    """Makes a 64-bit parameter one of 128 bytes, and every read of it its address: Numba has no such arguments."""
    text, count = re.subn(rf"\.param \.[ub]64 (\S+_param_{number})\b", r".param .align 64 .b8 \1[128]", text)
    if count != 1:
        raise ValueError(f"parameter {number} is declared {count} times, not once")
    read = rf"ld\.param\.[ub]64\s+(%\w+), \[(\S+_param_{number})\];"
    return re.sub(read, r"mov.b64 \1, \2;\n\tcvta.param.u64 \1, \1;", text)


def compile_ptx(specialisation: Specialisation, arch: str) -> str:
    """The PTX text of a kernel for an architecture; its one entry is the kernel."""
    return ptx_of(specialisation, llvm_ir(specialisation), arch)
