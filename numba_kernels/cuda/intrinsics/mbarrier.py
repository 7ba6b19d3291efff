"""Barriers in shared memory (`mbarrier`), which count arrivals and bytes that the TMA has delivered.

    init(full, uint32(1)); fence_init(); sync_block()
    arrive_expecting(full, num_bytes)       # the producer, before its copies
    wait(full, phase)                       # all readers; `phase` is 0, then 1, then 0 ...

Addresses are 32-bit shared addresses, multiples of 8. A wait for the phase before the first one (1) returns at once.
PTX ISA, "mbarrier"; sm_90 on.
"""

from __future__ import annotations

from numba_kernels.cuda.intrinsics.asm import instruction

init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "", "r r")
fence_init = instruction("fence.mbarrier_init.release.cluster;")  # other blocks of the cluster and the TMA see it then
arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "", "r")
arrive_expecting = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "", "r r")
arrive_read = instruction("mbarrier.arrive.shared::cluster.b64 _, [$0];", "", "r")
"""Arrives at an address from `cluster.address_in`: the barrier of any block of the cluster, for threads that have only
read (by `wgmma`, whose groups they have waited for). It publishes no writes, unlike a release to a cluster, which is a
fence of the whole device."""

arrive_relaxed = instruction("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [$0];", "", "r")
"""The same after `cluster.release_shared`, which publishes the thread's writes; readers call `wait_for_cluster`."""

_WAIT = (
    "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity%s.shared::cta.b64 done, [$0], $1; @done bra DONE; bra AGAIN; "
    "DONE: }"
)
wait = instruction(_WAIT % "", "", "r r")
wait_for_cluster = instruction(_WAIT % ".acquire.cluster", "", "r r")
"""For arrivals that publish writes of other blocks of the cluster."""
