"""A specialisation → PTX, by NVVM. No GPU is needed and nothing is kept: the cache on disk is the runtime's."""

from __future__ import annotations

import re

from numba import cuda

from numba_kernels.cuda.specialisation import Specialisation

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


def parse_arch(arch: str) -> tuple[int, int, str]:
    """``"sm_90a"`` → ``(9, 0, "a")``. ValueError for anything else."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"{arch!r} is no architecture such as 'sm_80' or 'sm_90a'")
    return int(match[1]), int(match[2]), match[3]


def compile_ptx(specialisation: Specialisation, arch: str) -> str:
    """The PTX text of a kernel for an architecture (``"sm_80"``, ``"sm_90a"``); its one entry is the kernel."""
    major, minor, suffix = parse_arch(arch)
    bounds = (
        (specialisation.max_threads, specialisation.min_blocks)
        if specialisation.min_blocks
        else specialisation.max_threads
    )
    text, _ = cuda.compile(
        specialisation.kernel.py_func,
        specialisation.argument_types,
        cc=(major, minor, suffix) if suffix else (major, minor),
        device=False,
        abi="numba",
        output="ptx",
        fastmath=specialisation.fastmath,
        launch_bounds=bounds,
    )
    return str(text)
