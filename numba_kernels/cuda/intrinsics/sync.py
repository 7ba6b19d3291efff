"""Barriers and dependent launches. PTX ISA, "bar", "griddepcontrol"."""

from __future__ import annotations

import functools
from typing import Any

from numba_kernels.cuda.intrinsics.asm import instruction

sync_block = instruction("bar.sync 0;")
sync_named = instruction("bar.sync $0, $1;", "", "r r")  # barrier 1 to 15, threads in whole warps
arrive_named = instruction("bar.arrive $0, $1;", "", "r r")  # counts as there, and goes on
wait_for_previous_grid = instruction("griddepcontrol.wait;")  # sm_90 on: before all memory but weights (immutable)
launch_dependents = instruction("griddepcontrol.launch_dependents;")


@functools.cache
def set_registers(count: int, *, is_more: bool) -> Any:
    """A function for all of a warp group: so many registers a thread from here on (sm_90a; a multiple of 8, 24 to 240).

    More are waited for until others have given theirs up. The kernel must have `min_blocks`, or it is ignored.
    """
    return instruction(f"setmaxnreg.{'inc' if is_more else 'dec'}.sync.aligned.u32 {count};")
