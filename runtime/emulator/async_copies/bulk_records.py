"""Layout of the record of a bulk copy in flight, in 64-bit words: see bulk_queue.py."""

from __future__ import annotations

COPY, REDUCE, TENSOR_LOAD, TENSOR_STORE, TENSOR_REDUCE = range(1, 6)
"""COPY and REDUCE: plain bytes either way."""

(
    R_KIND, R_SITE, R_WARP, R_LANE, R_GROUP, R_TARGET, R_TARGET_BLOCK, R_SOURCE, R_SOURCE_BLOCK, R_BYTES, R_MBARRIER,
    R_OPERATION, R_TYPE, R_SNAPSHOT, R_OFFSET, R_MOVER, R_REDUCER,
) = range(17)  # fmt: skip
"""R_WARP: the warp's array; R_GROUP: of its lane's bulk groups, -1 with an mbarrier; a block of 0 means global memory;
R_TARGET, R_SOURCE, R_MBARRIER: host addresses; R_OFFSET: shared offset of a tensor's tile, whose bits swizzle it;
R_MOVER, R_REDUCER: addresses of the operations move_tile and reduce_run, where the record needs them."""
R_COORDINATES = 17  # five
R_MAP = 22  # the tensor map's 16 words as they were at the instruction
RECORD_WORDS = 38
