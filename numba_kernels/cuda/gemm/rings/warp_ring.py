"""A warp's ring of stages in shared memory, which its lane 0 fills by bulk copies of immutable weights.

Lesson: loads that outlive registers. Loads into registers belong to the kernel that waits for them, so each block of a
product in flight takes a part of the register file that its successor would need. A ring takes shared memory alone: a
kernel of half a multiprocessor's registers and shared memory fills its ring before `wait_for_previous_grid`, while its
predecessor, in the other half, still computes.

Each warp reads and refills only its own stages, so no warp waits for another one. A stage's barrier counts the bytes
that have arrived; its phase changes each time the ring goes round.
"""

from __future__ import annotations

from numba import types

from numba_kernels.cuda.gemm.product import Machine
from numba_kernels.cuda.intrinsics import mbarrier
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.warp import sync_warp
from numba_kernels.cuda.specialisation import HALF_SHARED_BYTES

uint32 = types.uint32

MOST_STAGES, FEWEST_STAGES = 6, 2
STATIC_BYTES = {"sm_90a": 2048, "sm_100a": 2048, "sm_120a": 1024}  # of a block, beside `HALF_SHARED_BYTES`

dynamic_shared_bytes = instruction("mov.u32 $0, %dynamic_smem_size;", "r", is_pure=True)
copy_in = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];", "", "r l r r"
)
"""``(target, source, bytes, barrier)``, all multiples of 16 but the barrier's address, a multiple of 8."""


def stages_that_fit(machine: Machine, stage_bytes: int, x_bytes: int, static_bytes: int | None = None) -> int:
    """Stages of a block that fit into half of a multiprocessor beside x and so much static shared memory, by default
    `STATIC_BYTES`; 0 where too few fit, or the architecture has no bulk copies."""
    dynamic_bytes, more = HALF_SHARED_BYTES.get(machine.arch, 0), STATIC_BYTES.get(machine.arch, 0)
    count = (dynamic_bytes + (0 if static_bytes is None else more - static_bytes) - x_bytes) // stage_bytes
    return min(MOST_STAGES, count) if count >= FEWEST_STAGES else 0


@device_function
def start_ring(barriers, num_stages, lane):
    """Initialises the barriers of a warp's stages."""
    if lane < num_stages:
        mbarrier.init(uint32(barriers + lane * uint32(8)), uint32(1))
    mbarrier.fence_init()
    sync_warp()


@device_function
def next_stage(stage, phase, num_stages):
    """The stage after this one, and the phase that its barrier has then."""
    stage = uint32(stage + uint32(1))
    if stage == num_stages:
        stage = uint32(0)
        phase ^= uint32(1)
    return stage, phase
