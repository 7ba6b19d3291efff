"""uint32 arithmetic that Numba would do in 64 bits or in float64."""

from __future__ import annotations

from numba_kernels.cuda.intrinsics.asm import instruction

divide_u32 = instruction("div.u32 $0, $1, $2;", "r", "r r", is_pure=True)
maximum_u32 = instruction("max.u32 $0, $1, $2;", "r", "r r", is_pure=True)
minimum_u32 = instruction("min.u32 $0, $1, $2;", "r", "r r", is_pure=True)
