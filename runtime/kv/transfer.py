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

import contextlib
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.device.context import Event, Stream
from runtime.errors import DeviceError, InvalidArgumentError
from runtime.kv.cache import HostPages, KVCache
from runtime.later import later

_gpu = later("runtime.device.gpu")  # brings the driver, which the CPU does not need

Pairs = Sequence[tuple[int, int]]


class Run(NamedTuple):
    """`num_pages` pages that are adjacent in both places."""

    source: int
    target: int
    num_pages: int


Wave = list[Run]
"""Runs that are independent: none touches what another writes. Waves act one after another."""


class Moves(NamedTuple):
    """The moves of one pool, by numbers inside it."""

    swap_out: list[Wave]
    swap_in: list[Wave]
    copies: list[Wave]


class Places(NamedTuple):
    """Numbered places, those of the first pool first: their unit ("block"), and how many each pool has."""

    unit: str
    pool_sizes: tuple[int, ...]


def split(name: str, pairs: Pairs, sources: Places, targets: Places) -> list[list[tuple[int, int]]]:
    """The pairs of each pool, by numbers inside it. `name` is the list's.

    Raises InvalidArgumentError if a source or target does not exist, or they are of two pools.
    """
    bounds = [list(accumulate(each.pool_sizes, initial=0)) for each in (sources, targets)]
    found: list[list[tuple[int, int]]] = [[] for _ in sources.pool_sizes]
    for index, pair in enumerate(pairs):
        for what, limits, number in zip((sources, targets), bounds, pair):
            if not 0 <= number < limits[-1]:
                raise InvalidArgumentError(
                    f"{name}[{index}]: {what.unit} is {number}, must be 0 or more and below {limits[-1]}", param=name
                )
        pool, other = (bisect_right(limits, number) - 1 for limits, number in zip(bounds, pair))
        if pool != other:
            raise InvalidArgumentError(
                f"{name}[{index}]: {sources.unit} {pair[0]} is in pool {pool}, {targets.unit} {pair[1]} in {other}",
                param=name,
            )
        found[pool].append((pair[0] - bounds[0][pool], pair[1] - bounds[1][pool]))
    return found


def waves_of(pairs: Pairs, *, is_within: bool = False) -> list[Wave]:
    """The pairs as waves of runs; a pair sees the effect of earlier ones. ``is_within``: a pair's target may be
    another's source."""
    waves: list[Wave] = []
    wave: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if is_within and source == target:
            continue  # nothing to do
        if target in written or (is_within and (target in read or source in written)):
            waves.append(_runs(wave))
            wave = []
            read.clear()
            written.clear()
        wave.append((source, target))
        read.add(source)
        written.add(target)
    if wave:
        waves.append(_runs(wave))
    return waves


def _runs(pairs: list[tuple[int, int]]) -> Wave:
    """One or more independent pairs, as runs by source."""
    pairs.sort()
    runs: Wave = []
    source, target = first, to = pairs[0]
    for pair in pairs[1:]:
        source += 1
        target += 1
        if pair != (source, target):
            runs.append(Run(first, to, source - first))
            source, target = first, to = pair
    runs.append(Run(first, to, source - first + 1))
    return runs


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
        make = _CpuMover if kv_cache.device.kind == "cpu" else GpuMover
        self._mover: _CpuMover | GpuMover = make(kv_cache, host_pages)

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
    """Plain copies, done when `move` returns: of one call of `KVTransfer.run`, the moves of each pool, in which
    `swap_bytes` are swapped. It has its own share of `TransferCounters`."""

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


class GpuMover:
    """Queues batches of copies, a storage at a time; `move` returns at once. It owns its memory, which must live as
    long as it does.

    The stream waits for all work on the device's own stream. An event after each storage's copies goes to
    `KVCache.arrivals`: the device's stream waits for it when the forward pass uses the pages of its first layer, so
    that its kernels neither read pages too early nor write pages too early.
    """

    def __init__(self, kv_cache: KVCache, host_pages: HostPages | None) -> None:
        spec = kv_cache.spec
        self._kv_cache = kv_cache
        self._host_pages = host_pages
        self.swap_bytes = self.num_driver_calls = 0
        self.swap_s = 0.0
        self._page_bytes = [[plane.size_bytes for plane in planes] for planes in spec.planes]
        self._pages = [tensor.address for planes in kv_cache.storages for tensor in planes]
        self._host = [] if host_pages is None else [plane.ctypes.data for plane in host_pages.planes]
        self._gpu = _gpu.Gpu.of(kv_cache.device)
        self._stream: Stream | None = None  # made on first use: the emulator checks more with a second one
        self._arrivals = [self._gpu.new_event() for _ in spec.planes]
        self._pools = spec.pool_of_storage
        self._timed: deque[tuple[Event, Event, int]] = deque()  # start, end, bytes swapped between them

    def move(self, moves: Sequence[Moves], swap_bytes: int) -> None:
        if self._stream is None:
            self._stream = self._gpu.new_stream()
        stream = self._stream
        stream.wait(self._gpu.stream.record())
        start = stream.record(is_timed=True) if swap_bytes else None
        for storage, (arrival, pool) in enumerate(zip(self._arrivals, self._pools, strict=True)):
            swap_out, swap_in, copies = moves[pool]
            self._copy(storage, self._pages, self._host, swap_out, stream)
            self._copy(storage, self._host, self._pages, swap_in, stream)
            self._copy(storage, self._pages, self._pages, copies, stream)
            if swap_out or swap_in or copies:
                self._kv_cache.arrivals[storage] = arrival.record(stream)
        if start is not None:
            self._timed.append((start, stream.record(is_timed=True), swap_bytes))
        self.collect()

    def _copy(self, storage: int, sources: list[int], targets: list[int], waves: list[Wave], stream: Stream) -> None:
        first = sum(map(len, self._page_bytes[:storage]))
        for wave in waves:
            to: list[int] = []
            origin: list[int] = []
            sizes: list[int] = []
            for plane, size in enumerate(self._page_bytes[storage], first):
                source_base, target_base = sources[plane], targets[plane]
                for source, target, num_pages in wave:
                    origin.append(source_base + source * size)
                    to.append(target_base + target * size)
                    sizes.append(num_pages * size)
            self._gpu.copy_batch(to, origin, sizes, stream=stream)
            self.num_driver_calls += 1

    def collect(self) -> None:
        while self._timed and self._timed[0][1].is_done():
            start, end, size = self._timed.popleft()
            self.swap_s += end.elapsed_ms(start) / 1e3
            self.swap_bytes += size

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if (stream := getattr(self, "_stream", None)) and not is_over():
            with contextlib.suppress(DeviceError):  # of a device whose kernel failed, which is reported elsewhere
                stream.synchronize()
