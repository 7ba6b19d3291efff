"""Which register tile fits the machine that numba compiles for.

Vectors are always ``<16 x float>`` in the IR; LLVM splits them where registers are narrower (two AVX2 or four NEON
registers each). So only the number of accumulators has to know the machine: with 32 registers of 16 lanes a product's
tile of 9 rows x 3 vectors keeps 27 of them busy and three hold weights; attention's has a power of two of rows. With 16
registers of 8 lanes, 4 rows x 1 vector (8 registers) leaves room for operands; NEON's 32 registers of 4 lanes hold 4
rows x 1 vector (16 registers) and operands.
"""

from __future__ import annotations

import llvmlite.binding as llvm
import numba

LANES = 16  # float32 elements of one IR vector


def compiled_for(feature: str) -> bool:
    """Whether the code that numba makes in this process may use ``feature`` (an LLVM name such as ``avx512f``)."""
    if numba.config.CPU_FEATURES is not None:
        return f"+{feature}" in numba.config.CPU_FEATURES.split(",")
    if numba.config.CPU_NAME not in (None, "", "host"):
        return False
    return bool(llvm.get_host_cpu_features().get(feature, False))


TILE_ROWS, TILE_VECTORS = (8, 3) if compiled_for("avx512f") else (4, 1)
GEMM_ROWS = 9 if compiled_for("avx512f") else 4
PANEL_COLUMNS = TILE_VECTORS * LANES  # columns of the weight that one panel holds
