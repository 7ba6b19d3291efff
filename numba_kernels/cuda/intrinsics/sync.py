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
split_schedule = instruction("{ .reg .pred p; setp.lt.s32 p, $0, 0; @p exit; }", "", "r")
"""``(number)``: below 2 ** 31, unknown to ptxas, so that no thread exits here. ptxas moves no instruction across the
end of a basic block: code after this branch does not start before it, and takes no registers there. ptxas omits a
second branch on the same number."""


@functools.cache
def set_registers(count: int, *, is_more: bool) -> Any:
    """A function for all of a warp group: so many registers a thread from here on (sm_90a; a multiple of 8, 24 to 240).

    An increase waits until other warps have released theirs. The kernel must have `min_blocks`, or it is ignored.
    """
    return instruction(f"setmaxnreg.{'inc' if is_more else 'dec'}.sync.aligned.u32 {count};")
