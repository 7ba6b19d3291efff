"""Barriers and dependent launches. PTX ISA, "bar", "griddepcontrol"."""

from __future__ import annotations

from numba_kernels.cuda.intrinsics.asm import instruction

sync_block = instruction("bar.sync 0;")
sync_named = instruction("bar.sync $0, $1;", "", "r r")  # barrier 1 to 15, threads in whole warps
wait_for_previous_grid = instruction("griddepcontrol.wait;")  # sm_90 on: before the first access to memory
launch_dependents = instruction("griddepcontrol.launch_dependents;")
