"""Hopper's copy engine (TMA): boxes of a tensor to shared memory and back, by one lane, while all others go on.

    load(2)(target, map, barrier, column, row)          # target, barrier: shared addresses; map: a TENSOR_MAP argument
    store(2)(source, map, column, row); store_commit(); store_wait_read(0)

Coordinates are in elements, innermost dimension first; elements outside the tensor are zero, and are not stored.
Targets are multiples of 128 bytes, of 1024 where the map swizzles over 128 bytes. The data are there when `barrier` has
counted their bytes. Threads' writes to shared memory are visible to the TMA, and to wgmma, after `fence_shared`. PTX
ISA, "cp.async.bulk.tensor", "Async proxy"; sm_90 on.
"""

from __future__ import annotations

import functools
from typing import Any

from numba_kernels.cuda.intrinsics.asm import instruction

fence_shared = instruction("fence.proxy.async.shared::cta;")
prefetch_map = instruction("prefetch.tensormap [$0];", "", "l")
prefetch_bytes = instruction("cp.async.bulk.prefetch.L2.global [$0], $1;", "", "l r")  # multiples of 16
store_commit = instruction("cp.async.bulk.commit_group;")


@functools.cache
def load(rank: int, *, is_multicast: bool = False) -> Any:
    """A function ``(target, map, barrier, [blocks,] *coordinates)``.

    `is_multicast`: to the same place of all blocks of the cluster whose bits are set in `blocks` (uint16), each of
    whose barriers counts.
    """
    at = ",".join(f"${3 + is_multicast + i}" for i in range(rank))
    mask = ", $3" if is_multicast else ""
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        f"{'.multicast::cluster' if is_multicast else ''} [$0], [$1, {{{at}}}], [$2]{mask};"
    )
    return instruction(text, "", " ".join(["r", "l", "r", *"h" * is_multicast, *"r" * rank]))


@functools.cache
def store(rank: int) -> Any:
    """A function ``(source, map, *coordinates)``; part of the bulk group that `store_commit` closes."""
    at = ",".join(f"${2 + i}" for i in range(rank))
    text = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [$1, {{{at}}}], [$0];"
    return instruction(text, "", " ".join(["r", "l", *"r" * rank]))


@functools.cache
def store_wait_read(num_pending: int) -> Any:
    """A function that waits until all but so many groups have read their shared memory."""
    return instruction(f"cp.async.bulk.wait_group.read {num_pending};")
