"""What numba may compile for, and which register tiles fit it.

``TILES`` names the best kind of tile that the processor runs, or the one that ``XSERV_CPU_TILES`` forces; a forced kind
also limits LLVM, so that a machine with AVX-512 makes and runs true AVX2 code. Each kind includes those before it.

Vectors are always ``<16 x float>`` in the IR; LLVM splits them where registers are narrower (two AVX2 or four NEON
registers each). So only the number of accumulators has to know the machine: with 32 registers of 16 lanes a product's
tile of 8 rows x 3 vectors keeps 24 of them busy, and what is multiplied has the others (attention's has a power of two
of rows anyway). With 16 registers of 8 lanes, 6 rows x 1 vector (12 registers) leave room for two halves of a weight
and a broadcast; NEON's 32 registers of 4 lanes hold 4 rows x 1 vector (16 registers) and operands.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import llvmlite.binding as llvm
import numba

from runtime.errors import InvalidArgumentError

_IS_X86 = platform.machine() in ("x86_64", "AMD64")
VARIABLE = "XSERV_CPU_TILES"
LANES = 16  # float32 elements of one IR vector

_NEEDS = {
    "portable": (),
    "avx2": ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "popcnt"),
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "avx512_vnni": ("avx512vnni",),
    "avx512_bf16": ("avx512bf16",),
}
"""The features, by LLVM's names, that each kind of tile needs beyond the kind before it; better kinds stand later."""

_MODELS = {
    "portable": "x86-64",
    "avx2": "haswell",
    "avx512": "skylake-avx512",
    "avx512_vnni": "cascadelake",
    "avx512_bf16": "cooperlake",
}
"""The processor that a forced kind of tile compiles for."""

_numba_config: Any = numba.config

EMULATED_BF16 = "emulated_bf16"
"""Never chosen, only forced: the arithmetic of ``avx512_bf16`` on any processor, its instruction spelled out."""


def compiled_for(feature: str) -> bool:
    """Whether the code that numba makes in this process may use ``feature`` (an LLVM name such as ``avx512f``)."""
    if _numba_config.CPU_FEATURES is not None:
        return f"+{feature}" in _numba_config.CPU_FEATURES.split(",")
    if _numba_config.CPU_NAME not in (None, "", "host"):
        return False
    return bool(llvm.get_host_cpu_features().get(feature, False))


def _needs(tiles: str) -> list[str]:
    """All features of ``tiles`` and of the kinds before it."""
    kinds = list(_NEEDS)
    return [feature for kind in kinds[: kinds.index(tiles) + 1] for feature in _NEEDS[kind]]


_AVAILABLE = tuple(tiles for tiles in _NEEDS if all(compiled_for(feature) for feature in _needs(tiles)))


def available_tiles() -> tuple[str, ...]:
    """The kinds of tile that this process may run, as it was started; the best comes last."""
    return _AVAILABLE


def _choose() -> str:
    """The kind in force, of which LLVM has been told where it is forced.

    Raises:
        InvalidArgumentError: if the variable names none of the kinds, or one that the processor cannot run.
    """
    forced = os.environ.get(VARIABLE)
    if not forced:
        return _AVAILABLE[-1]
    if forced == EMULATED_BF16:
        return forced
    if forced not in _AVAILABLE:
        limit = f"this processor runs {', '.join(_AVAILABLE)}"
        if forced not in _NEEDS:
            limit = f"must be one of {', '.join(_NEEDS)}, {EMULATED_BF16}; {limit}"
        raise InvalidArgumentError(f"{VARIABLE} is {forced!r}: {limit}", param=VARIABLE)
    if _IS_X86:
        _numba_config.CPU_NAME = _MODELS[forced]
        _numba_config.CPU_FEATURES = ",".join(f"+{feature}" for feature in _needs(forced))
    return forced


TILES = _choose()

_HAS_AVX512 = compiled_for("avx512f")
HAS_BF16_DOT = TILES == "avx512_bf16"  # vdpbf16ps: sums of products of pairs of bfloat16
ROUNDS_TO_BF16 = HAS_BF16_DOT or TILES == EMULATED_BF16  # activations, before they meet a bfloat16 weight
DOT = "vnni" if compiled_for("avx512vnni") else "madd" if compiled_for("avx2") else "portable"  # of int8
HAS_HALF = compiled_for("f16c") or not _IS_X86  # an instruction that widens float16
TILE_ROWS, TILE_VECTORS = (8, 3) if _HAS_AVX512 else (4, 1)
GEMM_ROWS = 8 if _HAS_AVX512 else 6 if compiled_for("avx2") else 4  # 9 would leave none of 32 registers for bfloat16
PANEL_COLUMNS = TILE_VECTORS * LANES  # columns of the weight that one panel holds
