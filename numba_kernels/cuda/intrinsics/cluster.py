"""Clusters: blocks that run at the same time on neighbouring multiprocessors and reach each other's shared memory.

PTX ISA, "barrier.cluster", "mapa"; sm_90 on.
"""

from __future__ import annotations

from numba_kernels.cuda.intrinsics.asm import instruction

rank = instruction("mov.u32 $0, %cluster_ctarank;", "r", is_pure=True)
size = instruction("mov.u32 $0, %cluster_nctarank;", "r", is_pure=True)
arrive_relaxed = instruction("barrier.cluster.arrive.relaxed.aligned;")
"""Arrives at the barrier of all threads of the cluster. It publishes no writes: those for others need a fence of their
own first, `mbarrier.fence_init` or `release_shared`. (An arrival with a release is a fence of the whole device.)"""
wait = instruction("barrier.cluster.wait.acquire.aligned;")
release_shared = instruction("fence.release.sync_restrict::shared::cta.cluster;")
"""Before `arrive_relaxed`: publishes this thread's writes to its own block's shared memory."""
address_in = instruction("mapa.shared::cluster.u32 $0, $1, $2;", "r", "r r", is_pure=True)
"""``(shared address, rank) -> address`` of the same place in another block's shared memory."""
load_f32 = instruction("ld.shared::cluster.f32 $0, [$1];", "f", "r")
load_4xf32 = instruction("ld.shared::cluster.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "r")  # at what `address_in` gave
load_4xb32 = instruction("ld.shared::cluster.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "r")
load_2xb32 = instruction("ld.shared::cluster.v2.b32 {$0,$1}, [$2];", "rr", "r")
