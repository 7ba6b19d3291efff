"""Moving KV blocks: out to host memory, in from there, and from page to page (copy on write).

    transfer = KVTransfer(kv_cache, HostPages(kv_cache.spec, num_slots))
    transfer.run(step.swap_out, step.swap_in, step.copies)   # before the step's forward pass

The three lists act in that order, on all planes of all storages: swapped-out pages are read as the previous steps left
them, swapped-in pages may take their place, and a copy may read swapped-in pages. Blocks and slots that are adjacent on
both sides move as one run.

On the CPU `run` returns when all is done. On a GPU it only queues, on a separate stream: storage by storage, each after
all current work on the device's stream, and the forward pass waits for each layer's pages when it uses them
(`KVCache.layer`). So the pages of later layers are copied while a layer is computed, and no page is read before it has
arrived, or overwritten before it has left.

The scheduler decides which block belongs to which sequence.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidArgumentError
from runtime.kv.cache import HostPages, KVCache
from runtime.kv.runs import Pairs, Wave, waves_of


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

    def move(self, swap_out: list[Wave], swap_in: list[Wave], copies: list[Wave], swap_bytes: int) -> None:
        """Run one call of `KVTransfer.run`, in which `swap_bytes` are swapped."""
        ...

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
        self._num_blocks = kv_cache.num_blocks
        self._num_slots = 0 if host_pages is None else host_pages.num_slots
        self._block_bytes = kv_cache.spec.bytes_per_block
        self._out_bytes = self._in_bytes = self._copied_bytes = 0
        self._taken = (0, 0.0)
        self._mover: Mover
        if kv_cache.device.kind == "cpu":
            self._mover = _CpuMover(kv_cache, host_pages)
        else:
            from runtime.kv.transfer_gpu import GpuMover  # imports the driver, which the CPU does not need

            self._mover = GpuMover(kv_cache, host_pages)

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
        blocks, slots = ("block", self._num_blocks), ("host slot", self._num_slots)
        leaving = waves_of("swap_out", swap_out, blocks, slots)
        arriving = waves_of("swap_in", swap_in, slots, blocks)
        copied = waves_of("copies", copies, blocks, blocks)
        size = self._block_bytes
        self._out_bytes += size * len(swap_out)
        self._in_bytes += size * len(swap_in)
        self._copied_bytes += size * len(copies)
        self._mover.move(leaving, arriving, copied, size * (len(swap_out) + len(swap_in)))

    @property
    def counters(self) -> TransferCounters:
        """The counters so far."""
        mover = self._mover
        mover.collect()
        return TransferCounters(
            self._out_bytes, self._in_bytes, self._copied_bytes, mover.swap_bytes, mover.swap_s, mover.num_driver_calls
        )

    def take_timed(self) -> tuple[int, float]:
        """(blocks, seconds) of the swaps that were finished and timed since the last call; (0, 0.0) if there are none.
        The seconds include copies from page to page in the same calls of `run`."""
        mover, before = self._mover, self._taken
        mover.collect()
        self._taken = (mover.swap_bytes, mover.swap_s)
        return (mover.swap_bytes - before[0]) // self._block_bytes, mover.swap_s - before[1]

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second to and from host memory, over all that is done; None while nothing has been timed."""
        counters = self.counters
        return counters.swap_bytes / counters.swap_s if counters.swap_s > 0 else None


class _CpuMover:
    """Plain copies, done when `move` returns."""

    def __init__(self, kv_cache: KVCache, host_pages: HostPages | None) -> None:
        tensors = itertools.chain.from_iterable(kv_cache.storages)
        # uint8 [num_blocks, bytes of one page]: numpy copies bytes faster than it copies bfloat16
        self._pages = [tensor.array.reshape(kv_cache.num_blocks, -1).view(np.uint8) for tensor in tensors]
        self._host = [] if host_pages is None else host_pages.planes
        self.swap_bytes = self.num_driver_calls = 0
        self.swap_s = 0.0

    def move(self, swap_out: list[Wave], swap_in: list[Wave], copies: list[Wave], swap_bytes: int) -> None:
        start = time.perf_counter()
        _copy(self._pages, self._host, swap_out)
        _copy(self._host, self._pages, swap_in)
        _copy(self._pages, self._pages, copies)
        if swap_bytes:
            self.swap_bytes += swap_bytes
            self.swap_s += time.perf_counter() - start

    def collect(self) -> None:
        """Does nothing: copies are timed at once."""


def _copy(sources: list[NDArray[np.uint8]], targets: list[NDArray[np.uint8]], waves: list[Wave]) -> None:
    if waves:
        for source, target in zip(sources, targets, strict=True):
            for at, to, num_pages in itertools.chain.from_iterable(waves):
                target[to : to + num_pages] = source[at : at + num_pages]
