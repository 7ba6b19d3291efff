"""Moving KV blocks: out to host memory, in from there, and from page to page (copy on write).

    transfer = KVTransfer(kv_cache, HostPages(kv_cache.spec, num_slots))
    transfer.run(step.swap_out, step.swap_in, step.copies)   # before the step's forward pass

The three lists act in that order, on all planes of all storages: swapped-out pages are read as the previous steps left
them, swapped-in pages may take their place, and a copy may read swapped-in pages. Blocks and slots that are adjacent on
both sides move as one run. Blocks are numbered through all pools, and so are slots: a number says its pool, and both
sides of a pair have the same.

On the CPU `run` returns when all is done. On a GPU it only queues, on a separate stream: storage by storage, each after
all current work on the device's stream, and the forward pass waits for each layer's pages when it uses them
(`KVCache.layer`). So the pages of later layers are copied while a layer is computed, and no page is read before it has
arrived, or overwritten before it has left.

The scheduler decides which block belongs to which sequence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidArgumentError
from runtime.kv.cache import HostPages, KVCache
from runtime.kv.runs import Moves, Pairs, Places, Wave, split, waves_of
from runtime.later import later

_transfer_gpu = later("runtime.kv.transfer_gpu")  # brings the driver, which the CPU does not need


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """Counters of a KVTransfer.

    Attributes:
        out_bytes, in_bytes: to and from host memory; on a GPU they count when they are queued.
        copied_bytes: from page to page.
        swap_bytes, swap_s: bytes and seconds of the calls of `run` that swapped, as far as they are done and timed; the
            seconds include those calls' copies from page to page.
        num_driver_calls: copies requested from a GPU's driver.
    """

    out_bytes: int
    in_bytes: int
    copied_bytes: int
    swap_bytes: int
    swap_s: float
    num_driver_calls: int


class Mover(Protocol):
    """A device's way to move pages, with its own share of the counters: see `TransferCounters`."""

    swap_bytes: int
    swap_s: float
    num_driver_calls: int

    def move(self, moves: Sequence[Moves], swap_bytes: int) -> None:
        """Run one call of `KVTransfer.run`, the moves of each pool, in which `swap_bytes` are swapped."""

    def collect(self) -> None:
        """Counts the copies that have finished."""
        ...


class KVTransfer:
    """Moves blocks between a KV cache and host memory, and within the cache. Belongs to the engine's loop.

    Attributes:
        host_pages: for swapped blocks, or None without swapping.

    Raises InvalidArgumentError if the host pages were made for another cache.
    """

    def __init__(self, kv_cache: KVCache, host_pages: HostPages | None = None) -> None:
        if host_pages is not None and host_pages.spec != kv_cache.spec:
            raise InvalidArgumentError(
                f"KVTransfer: host_pages are for {host_pages.spec}, the cache is {kv_cache.spec}", param="host_pages"
            )
        self.host_pages = host_pages
        self._blocks = Places("block", kv_cache.pool_sizes)
        self._slots = Places("host slot", host_pages.pool_sizes if host_pages else (0,) * len(kv_cache.pool_sizes))
        self._block_bytes = kv_cache.spec.block_bytes
        self._out_bytes = self._in_bytes = self._copied_bytes = 0
        self._taken = (0, 0.0)
        self._mover: Mover
        if kv_cache.device.kind == "cpu":
            self._mover = _CpuMover(kv_cache, host_pages)
        else:
            self._mover = _transfer_gpu.GpuMover(kv_cache, host_pages)

    def run(self, swap_out: Pairs, swap_in: Pairs, copies: Pairs) -> None:
        """Moves blocks: first `swap_out` (block, slot), then `swap_in` (slot, block), then `copies` (source block,
        target block); within a list, too, a pair sees the effect of earlier ones.

        Raises InvalidArgumentError, before any move, if a block or slot does not exist.
        """
        if not (swap_out or swap_in or copies):
            return
        if self.host_pages is None and (swap_out or swap_in):
            name = "swap_out" if swap_out else "swap_in"
            raise InvalidArgumentError(f"{name}: there are no host pages to swap with", param=name)
        blocks, slots, sizes = self._blocks, self._slots, self._block_bytes
        parts = [
            split(name, pairs, sources, targets)
            for name, pairs, sources, targets in (
                ("swap_out", swap_out, blocks, slots), ("swap_in", swap_in, slots, blocks),
                ("copies", copies, blocks, blocks),
            )
        ]  # fmt: skip
        out_bytes, in_bytes, copied_bytes = (
            sum(len(pairs) * size for pairs, size in zip(part, sizes, strict=True)) for part in parts
        )
        self._out_bytes += out_bytes
        self._in_bytes += in_bytes
        self._copied_bytes += copied_bytes
        moves = [
            Moves(waves_of(leaving), waves_of(arriving), waves_of(copied, is_within=True))
            for leaving, arriving, copied in zip(*parts, strict=True)
        ]
        self._mover.move(moves, out_bytes + in_bytes)

    @property
    def counters(self) -> TransferCounters:
        """The counters so far."""
        mover = self._mover
        mover.collect()
        return TransferCounters(
            self._out_bytes, self._in_bytes, self._copied_bytes, mover.swap_bytes, mover.swap_s, mover.num_driver_calls
        )

    def take_timed(self) -> tuple[int, float]:
        """(bytes, seconds) of the swaps that were finished and timed since the last call; (0, 0.0) if there are none.
        The seconds include copies from page to page in the same calls of `run`."""
        mover, before = self._mover, self._taken
        mover.collect()
        self._taken = (mover.swap_bytes, mover.swap_s)
        return mover.swap_bytes - before[0], mover.swap_s - before[1]

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second to and from host memory, over all that is done; None while nothing has been timed."""
        counters = self.counters
        return counters.swap_bytes / counters.swap_s if counters.swap_s > 0 else None


class _CpuMover:
    """Plain copies, done when `move` returns."""

    def __init__(self, kv_cache: KVCache, host_pages: HostPages | None) -> None:
        # uint8 [num_blocks, bytes of one page]: numpy copies bytes faster than it copies bfloat16
        tensors = chain.from_iterable(kv_cache.storages)
        self._pages = [tensor.array.reshape(tensor.shape[0], -1).view(np.uint8) for tensor in tensors]
        self._host = [] if host_pages is None else host_pages.planes
        self._pools = kv_cache.spec.pool_of_plane
        self.swap_bytes = self.num_driver_calls = 0
        self.swap_s = 0.0

    def move(self, moves: Sequence[Moves], swap_bytes: int) -> None:
        start = time.perf_counter()
        for pool, (swap_out, swap_in, copies) in enumerate(moves):
            self._copy(self._pages, self._host, pool, swap_out)
            self._copy(self._host, self._pages, pool, swap_in)
            self._copy(self._pages, self._pages, pool, copies)
        if swap_bytes:
            self.swap_bytes += swap_bytes
            self.swap_s += time.perf_counter() - start

    def _copy(
        self, sources: list[NDArray[np.uint8]], targets: list[NDArray[np.uint8]], pool: int, waves: list[Wave]
    ) -> None:
        if waves:
            for source, target, own in zip(sources, targets, self._pools, strict=True):
                if own == pool:
                    for at, to, num_pages in chain.from_iterable(waves):
                        target[to : to + num_pages] = source[at : at + num_pages]

    def collect(self) -> None:
        """Does nothing: copies are timed at once."""
