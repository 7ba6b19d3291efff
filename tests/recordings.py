"""A check of every recording on a GPU: its work keeps no memory of the run before it. That memory lies in the graphs'
pool, where replays of other graphs write over it. What outlives a pass comes from `Gpu.upload_to_keep`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

from runtime.device.allocator import DeviceBlock
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph, GraphPool

_capture = Graph.capture


def capture(gpu: Gpu, work: Callable[[], Any], *, pool: GraphPool | None = None, is_chained: bool = False) -> Graph:
    """`Graph.capture`, checked."""
    allocator, made = gpu.allocator, list[ref[DeviceBlock]]()
    allocate = allocator.allocate

    def note(*given: Any, is_redirected: bool = True) -> DeviceBlock:
        block = allocate(*given, is_redirected=is_redirected)
        if is_redirected and not gpu.stream_is_captured:
            made.append(ref(block))
        return block

    def kept() -> list[int]:
        return [block.size_bytes for each in made if (block := each()) is not None and block._pool is not None]

    allocator.allocate = note  # type: ignore[method-assign]
    try:
        graph = _capture(gpu, work, pool=pool, is_chained=is_chained)
    finally:
        allocator.allocate = allocate  # type: ignore[method-assign]
    if kept():
        gc.collect()
    assert not kept(), f"blocks of {kept()} bytes outlive the pass that made them and lie in the graphs' pool"
    return graph
