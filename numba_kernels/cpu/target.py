"""The processor that numba compiles for, and the kind of register tile in force.

A kind has a layout (`layout`) and an instruction set. In force is the fastest kind that the processor runs
(`usual_tiles`), or the one that ``XSERV_CPU_TILES`` names. A forced kind also limits LLVM, so that a machine with
AVX-512 makes and runs true AVX2 code. ``emulated_KIND`` has the layout and the arithmetic of a kind on any processor:
LLVM compiles for what is there, and the instructions that define the kind's products are spelled out
(`intrinsics.dots`).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
import numba

from runtime.errors import InvalidArgumentError

IS_X86 = platform.machine() in ("x86_64", "AMD64")
VARIABLE = "XSERV_CPU_TILES"
LANES = 16  # float32 elements of one IR vector

_NEEDS = {
    "portable": (),
    "avx2": ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "popcnt"),
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "avx512_vnni": ("avx512vnni",),
    "avx512_bf16": ("avx512bf16",),
    "amx": ("amx-tile", "amx-bf16", "amx-int8"),
}
"""The features, by LLVM's names, that each kind of tile needs beyond the kind before it; better kinds come later."""

_MODELS = {
    "portable": "x86-64",
    "avx2": "haswell",
    "avx512": "skylake-avx512",
    "avx512_vnni": "cascadelake",
    "avx512_bf16": "cooperlake",
    "amx": "sapphirerapids",
}
"""The processor that a forced kind of tile compiles for."""

_MEASURED = {"znver4": ("avx512_bf16",), "znver5": ("avx512_bf16",), "sapphirerapids": ("amx", "avx512_vnni")}
"""The kinds of processors with AVX512-BF16 that were measured, the fastest first, by LLVM's names; docs/cpu.md has the
rates. On two Sapphire Rapids cores AMX does 1,400 GFLOP/s in bfloat16, float32's multiply-add 335, ``vdpbf16ps`` 171;
on Zen 5 ``vdpbf16ps`` does twice as much as the multiply-add."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""The number of Linux's call on x86-64, its ARCH_REQ_XCOMP_PERM and the state it asks for (asm/prctl.h)."""

_numba_config: Any = numba.config
_HOST_FEATURES: Any = llvm.get_host_cpu_features()  # each call lists them anew, which takes a millisecond

PROCESSOR = llvm.get_host_cpu_name()
"""LLVM's name of it."""

_EMULATED = "emulated_"
EMULATED_BF16 = "emulated_bf16"
"""The layout of the best kind that the processor runs, with the rounding of ``avx512_bf16``."""
EMULATED_TILES = (*(_EMULATED + tiles for tiles in _NEEDS), EMULATED_BF16)
"""Kinds that are used only if they are forced, and run on every processor."""


def compiled_for(feature: str) -> bool:
    """Whether the code that numba makes in this process may use ``feature`` (an LLVM name such as ``avx512f``)."""
    if _numba_config.CPU_FEATURES is not None:
        return f"+{feature}" in _numba_config.CPU_FEATURES.split(",")
    if _numba_config.CPU_NAME not in (None, "", "host"):
        return False
    return bool(_HOST_FEATURES.get(feature, False))


def _needs(tiles: str) -> list[str]:
    """All features of ``tiles`` and of the kinds before it."""
    kinds = list(_NEEDS)
    return [feature for kind in kinds[: kinds.index(tiles) + 1] for feature in _NEEDS[kind]]


def _may_use_amx() -> bool:
    """Whether Linux gives this process AMX's registers. It has to be asked, once a process, before threads begin."""
    library = ctypes.CDLL(None)
    return library.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


_RUNS = tuple(tiles for tiles in _NEEDS if all(compiled_for(feature) for feature in _needs(tiles)))
IS_AMX_REFUSED = "amx" in _RUNS and not _may_use_amx()
"""Whether the processor has AMX and Linux keeps it from this process; the next kind is in force then."""
_AVAILABLE = tuple(tiles for tiles in _RUNS if tiles != "amx" or not IS_AMX_REFUSED)


def available_tiles() -> tuple[str, ...]:
    """The kinds of tile that this process may run as themselves, as it was started; the best comes last."""
    return _AVAILABLE


def usual_tiles(available: Sequence[str], processor: str, *, has_amx: bool) -> str:
    """The kind that is in force unless one is forced. It follows from the processor alone, so that machines of one kind
    give the same bits.

    available  the kinds that it runs, the best last
    processor  LLVM's name of it
    has_amx    of a processor that was not measured: cores with AMX have the slow ``vdpbf16ps`` of Sapphire Rapids.
               Linux may refuse AMX's registers all the same; then ``available`` lacks it.
    """
    by_features = ("amx", "avx512_vnni") if has_amx else ()
    chosen = [tiles for tiles in _MEASURED.get(processor, by_features) if tiles in available]
    return (*chosen, available[-1])[0]


def _choose() -> str:
    """The kind in force. Configures LLVM for it if its instructions are forced.

    Raises:
        InvalidArgumentError: if the variable names none of the kinds, or one that the processor cannot run.
    """
    forced = os.environ.get(VARIABLE)
    if not forced:
        return usual_tiles(_AVAILABLE, PROCESSOR, has_amx=compiled_for("amx-bf16"))
    if forced in EMULATED_TILES:
        return forced
    if forced not in _NEEDS:
        raise InvalidArgumentError(
            f"{VARIABLE} is {forced!r}: must be one of {', '.join((*_NEEDS, *EMULATED_TILES))}; this processor runs "
            f"{', '.join(_AVAILABLE)} as themselves, and all of {_EMULATED}*",
            param=VARIABLE,
        )
    if forced not in _AVAILABLE:
        raise InvalidArgumentError(
            f"{VARIABLE} is {forced!r}: this processor runs {', '.join(_AVAILABLE)}; {_EMULATED}{forced} has its "
            "layout and its arithmetic on any processor",
            param=VARIABLE,
        )
    if IS_X86:
        _numba_config.CPU_NAME = _MODELS[forced]
        _numba_config.CPU_FEATURES = ",".join(f"+{feature}" for feature in _needs(forced))
    return forced


TILES = _choose()

_IS_EMULATED = TILES in EMULATED_TILES
HAS_BYTE_DOT = not _IS_EMULATED and compiled_for("avx512vnni")  # vpdpbusd: sums of products of four bytes
HAS_BF16_DOT = TILES == "avx512_bf16"  # vdpbf16ps: sums of products of pairs of bfloat16
HAS_AMX = TILES == "amx"  # registers of 16 rows and their products, of pairs of bfloat16 and of bytes
HAS_HALF = compiled_for("f16c") or not IS_X86  # an instruction that widens float16


def layout_name() -> str:
    """The kind whose layout is in force; `EMULATED_BF16` for that derived one."""
    return TILES if TILES == EMULATED_BF16 else TILES.removeprefix(_EMULATED)
