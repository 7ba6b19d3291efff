"""A specialisation → PTX, by NVVM. No GPU is needed and nothing is kept: the cache on disk is the runtime's."""

from __future__ import annotations

import functools
import re
from typing import Any

from numba.cuda import compiler

from numba_kernels.cuda.specialisation import Specialisation

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


def parse_arch(arch: str) -> tuple[int, int, str]:
    """``"sm_90a"`` → ``(9, 0, "a")``. ValueError for anything else."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"{arch!r} is no architecture such as 'sm_80' or 'sm_90a'")
    return int(match[1]), int(match[2]), match[3]


@functools.lru_cache(maxsize=32)
def _front_end(specialisation: Specialisation) -> Any:
    """What Numba makes of a kernel before NVVM sees it, which takes most of the time and is the same for all
    architectures. `cuda.compile` is this and the next step together."""
    bounds = (
        (specialisation.max_threads, specialisation.min_blocks)
        if specialisation.min_blocks
        else specialisation.max_threads
    )
    library, _ = compiler._compile_pyfunc_with_fixup(
        specialisation.kernel.py_func,
        specialisation.argument_types,
        device=False,
        fastmath=specialisation.fastmath,
        cc=(8, 0),
        abi="numba",
        launch_bounds=bounds,
    )
    return library


def compile_ptx(specialisation: Specialisation, arch: str) -> str:
    """The PTX text of a kernel for an architecture (``"sm_80"``, ``"sm_90a"``); its one entry is the kernel."""
    major, minor, suffix = parse_arch(arch)
    (text,) = _front_end(specialisation).get_asm_strs(cc=(major, minor, suffix) if suffix else (major, minor))
    return str(text)
