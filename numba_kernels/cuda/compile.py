"""A specialisation → LLVM IR, by Numba → PTX, by NVVM. No GPU is needed and nothing is kept: the cache on disk is the
runtime's.

The first step takes nine tenths of the time, and its result is the same for all architectures.
"""

from __future__ import annotations

import functools
import gc
import re

from numba.cuda import compiler
from numba.cuda.cudadrv import nvvm

from numba_kernels.cuda.specialisation import Specialisation

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
    was_collecting = gc.isenabled()
    gc.disable()  # it would go over millions of objects that all live until the kernel is done
    try:
        library, _ = compiler._compile_pyfunc_with_fixup(
            specialisation.kernel.py_func,
            specialisation.argument_types,
            device=False,
            fastmath=specialisation.fastmath,
            cc=(8, 0),
            abi="numba",
            launch_bounds=bounds,
        )
        modules = tuple(library.llvm_strs)
    finally:
        if was_collecting:
            gc.enable()
    return modules


def ptx_of(modules: tuple[str, ...], arch: str, *, fastmath: bool) -> str:
    """What NVVM makes of a kernel's LLVM IR for an architecture (``"sm_80"``, ``"sm_90a"``)."""
    major, minor, suffix = parse_arch(arch)
    text = nvvm.compile_ir(modules, arch=f"compute_{major}{minor}{suffix}", opt=3, fastmath=fastmath)
    return str(text.decode().strip("\0").strip())


def compile_ptx(specialisation: Specialisation, arch: str) -> str:
    """The PTX text of a kernel for an architecture; its one entry is the kernel."""
    return ptx_of(llvm_ir(specialisation), arch, fastmath=specialisation.fastmath)
