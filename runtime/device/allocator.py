"""The caching allocator of a device's memory: the driver gives large segments, and blocks are cut from them.

Each stream has a pool of its own: blocks freed there are reused there, in the stream's order, without waiting. Work
in another stream may use a block only until its owner releases it. Small blocks (up to 64 KiB) are cut from pieces of
1 MiB, which are large blocks themselves: so a long-lived small block pins one such piece and not a segment. Unused
pieces are merged again when a large block is missing.

Without a free block the allocator calls the driver; if that fails it returns unused segments to it and tries again,
then runs Python's collector, then raises DeviceOutOfMemoryError with a table of the memory.

A block is returned by `DeviceBlock.release`, or with the object, in any thread and at any moment: it goes to a queue,
which the next call empties. While a stream is captured into a graph, its blocks come from the graph's own pool, and
blocks returned to other pools are kept as long as the graph.

On an emulated device each block is followed by a gap, and the emulator knows where blocks begin and end
(`emulator.driver.pool_blocks`), so that it finds accesses beside a block or after its return, although they lie within
a segment.

After PyTorch's CUDACachingAllocator, with another arena (`runtime.device.arena`).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runtime.device.arena import Arena, Block, round_to_class
from runtime.device.context import Context, Stream
from runtime.device.errors import CaptureError, DeviceOutOfMemoryError, LaunchError, PoolTooSmallError
from runtime.errors import DeviceError, InvalidArgumentError

SMALL_BLOCK_BYTES = 64 << 10
SMALL_PIECE_BYTES = 1 << 20
SEGMENT_BYTES = 32 << 20
SEGMENT_GRANULE = 2 << 20  # the driver's own page
EMULATED_GAP_BYTES = 256


class DeviceBlock:
    """Memory on a device, returned to its pool by `release` or with the object.

    Attributes:
        address: of its first byte, aligned to 256; never 0.
        size_bytes: the size requested.
    """

    __slots__ = ("__weakref__", "_block", "_pool", "address", "size_bytes")

    def __init__(self, pool: Pool, block: Block, size_bytes: int) -> None:
        self._pool: Pool | None = pool
        self._block = block
        self.address = block.address
        self.size_bytes = size_bytes

    def declare_immutable(self, stream: Stream, *, is_immutable: bool = True) -> None:
        """Freezes the block once the work now in `stream` has run, or thaws it. An emulated device checks it, and
        lets a dependent launch read a frozen block before it waits for the previous kernel."""
        if (pool := self._pool) is not None and self.size_bytes:
            pool.allocator.declare_immutable(self, stream, is_immutable=is_immutable)

    def release(self) -> None:
        """Returns the memory; once is enough. Work in its own stream may still be using it."""
        pool = self._pool
        if pool is not None:
            self._pool = None
            pool.allocator.give_back(pool, self._block, self.size_bytes)

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_over():
            try:  # noqa: SIM105 - a context manager takes longer than all the rest
                self.release()
            except DeviceError:  # of a device that is gone: no caller can handle it
                pass


class Pool:
    """The memory of one stream, or of one graph. Only the allocator calls its methods."""

    def __init__(self, allocator: Allocator, stream: Stream) -> None:
        self.allocator = allocator
        self.stream = stream
        self.small = Arena()
        self.large = Arena()
        self.pieces: dict[int, Block] = {}  # of the large arena, lent to the small one, by address
        self.segments: dict[int, int] = {}  # address: size
        self.is_dropped = False  # of a graph that is gone: returned memory goes to the driver

    def take(self, size: int) -> Block | None:
        """A block of that size, which `round_to_class` gave; None where there is no room."""
        if size > SMALL_BLOCK_BYTES:
            return self.large.take(size) or (self.large.take(size) if self.join_pieces() else None)
        block = self.small.take(size)
        if block is None and (piece := self.take(SMALL_PIECE_BYTES)) is not None:
            self.pieces[piece.address] = piece
            self.small.add_segment(piece.address, piece.size)
            block = self.small.take(size)
        return block

    def join_pieces(self) -> bool:
        """Gives unused pieces back to the large arena; returns whether there were any."""
        empty = self.small.remove_free_segments()
        for address, _ in empty:
            self.large.give(self.pieces.pop(address))
        return bool(empty)

    @property
    def unused_bytes(self) -> int:
        """Bytes of all segments that are in no block."""
        return self.small.free_bytes + self.large.free_bytes

    def check_integrity(self) -> int:
        """Bytes in blocks that were taken. Raises AssertionError for inconsistent bookkeeping."""
        small_taken, small_free = self.small.check_integrity()
        large_taken, large_free = self.large.check_integrity()
        lent = sum(piece.size for piece in self.pieces.values())
        assert small_taken + small_free == lent, "the small arena has not what it was lent"
        assert large_taken + large_free == sum(self.segments.values()), "a segment is lost"
        assert self.large.num_segments == len(self.segments)
        return small_taken + large_taken - lent


@dataclass(frozen=True, slots=True)
class AllocatorStatistics:
    """Statistics of an allocator.

    Attributes:
        allocated_bytes: of blocks in use, as rounded; requested_bytes: before rounding.
        reserved_bytes: taken from the driver, in use or not.
        peak_allocated_bytes, peak_reserved_bytes: the most of each since the start.
        num_allocations: calls of `allocate`; num_hits: those without a call of the driver.
        num_driver_allocations, num_driver_frees: calls of cuMemAlloc (failed ones too) and cuMemFree.
        num_segments: pieces that `reserved_bytes` consists of.
    """

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_allocations: int
    num_hits: int
    num_driver_allocations: int
    num_driver_frees: int
    num_segments: int


class Allocator:
    """A device's memory. All methods may be called from any thread."""

    def __init__(self, context: Context, default_stream: Stream, *, name: str) -> None:
        """`name`: the device's, for messages."""
        self._context = context
        self._default_stream = default_stream
        self._name = name
        self._lock = threading.Lock()
        self._pools: dict[Stream, Pool] = {}
        self._private: list[Pool] = []  # of graphs
        self._redirected: dict[Stream, Pool] = {}  # streams that allocate from a graph's pool
        self._captured: Pool | None = None  # the pool of the graph that is captured now
        self._retained: dict[Block, Pool] = {}  # returned, but a graph that lives may use it
        self._new_retained: list[Block] = []  # of the capture under way
        self._returned: deque[tuple[Pool, Block, int]] = deque()
        self._is_marking = context.driver.is_emulated
        self._gap = EMULATED_GAP_BYTES if self._is_marking else 0
        self._allocated = self._requested = self._reserved = 0
        self._peak_allocated = self._peak_reserved = 0
        self._num_allocations = self._num_misses = 0
        self._num_driver_allocations = self._num_driver_frees = 0

    def allocate(self, size_bytes: int, stream: Stream | None = None, *, is_redirected: bool = True) -> DeviceBlock:
        """Memory for work on `stream`, or on the device's own for None; its contents are not defined. Without
        `redirect` it outlives a graph's pool.

        Raises:
            InvalidArgumentError: for a size below 0.
            DeviceOutOfMemoryError: with the sizes and a table of the memory.
            CaptureError: while the stream is captured and its private pool has no room.
        """
        if size_bytes < 0:
            raise InvalidArgumentError(f"size_bytes must be at least 0, got {size_bytes}", param="size_bytes")
        stream = stream or self._default_stream
        size = round_to_class(size_bytes + self._gap)
        with self._lock:
            if self._returned:
                self._collect_returned()
            redirected = self._redirected.get(stream) if is_redirected else None
            pool = redirected or self._pools.get(stream) or self._new_pool(stream)
            self._num_allocations += 1
            block = pool.take(size)
            if block is None:
                block = self._grow(pool, size, size_bytes)
            self._requested += size_bytes
            self._allocated += size
            if self._allocated > self._peak_allocated:
                self._peak_allocated = self._allocated
            if self._is_marking and size_bytes:
                self._mark(pool, block, size_bytes)
        return DeviceBlock(pool, block, size_bytes)

    def give_back(self, pool: Pool, block: Block, size_bytes: int) -> None:
        """Called by DeviceBlock, perhaps from a finaliser in the middle of another call of this allocator."""
        self._returned.append((pool, block, size_bytes))
        if self._lock.acquire(blocking=False):
            try:
                self._collect_returned()
            finally:
                self._lock.release()

    def declare_immutable(self, block: DeviceBlock, stream: Stream, *, is_immutable: bool) -> None:
        """Called by DeviceBlock."""
        if self._is_marking:
            self._context.call(
                "emuDeclareImmutableAsync", block.address, block.size_bytes, int(is_immutable), stream.handle
            )

    def trim(self) -> int:
        """Gives unused segments back to the driver; returns their bytes.

        Raises CaptureError while a stream is captured.
        """
        with self._lock:
            if self._captured is not None:
                raise CaptureError(f"{self._name}: memory cannot be freed while a stream is captured")
            self._collect_returned()
            return self._free_segments()

    @property
    def statistics(self) -> AllocatorStatistics:
        with self._lock:
            self._collect_returned()
            return AllocatorStatistics(
                self._allocated,
                self._requested,
                self._reserved,
                self._peak_allocated,
                self._peak_reserved,
                self._num_allocations,
                self._num_allocations - self._num_misses,
                self._num_driver_allocations,
                self._num_driver_frees,
                sum(len(pool.segments) for pool in self._all_pools()),
            )

    def table(self) -> str:
        """A table of the memory, as lines: the device's, and each pool's."""
        with self._lock:
            return self._table()

    def check_integrity(self) -> None:
        """Walks over all blocks. Raises AssertionError if blocks overlap, are lost, or do not add up."""
        with self._lock:
            self._collect_returned()
            in_use = 0
            owners: dict[int, int] = {}
            for pool in self._all_pools():
                retained = sum(block.size for block, owner in self._retained.items() if owner is pool)
                in_use += pool.check_integrity() - retained
                assert owners.keys().isdisjoint(pool.segments), "two pools hold one segment"
                owners.update(pool.segments)
            reserved = sum(owners.values())
            assert reserved == self._reserved, f"pools hold {reserved} bytes, {self._reserved} were reserved"
            assert in_use == self._allocated, f"blocks hold {in_use} bytes, {self._allocated} are allocated"
            end = 0
            for address in sorted(owners):
                assert address >= end, f"segment {address:#x} overlaps the one before it"
                end = address + owners[address]

    # Memory of graphs; for `runtime.device.graph` alone.

    def new_private_pool(self, stream: Stream) -> Pool:
        """A pool that `redirect` fills. It holds its memory until `drop`."""
        with self._lock:
            pool = Pool(self, stream)
            self._private.append(pool)
            return pool

    @contextlib.contextmanager
    def redirect(self, stream: Stream, pool: Pool) -> Iterator[None]:
        """Allocations for `stream` come from a private pool until the block ends."""
        with self._lock:
            if stream in self._redirected:
                raise CaptureError(f"{self._name}: the stream allocates from a graph's pool already")
            self._redirected[stream] = pool
        try:
            yield
        finally:
            with self._lock:
                del self._redirected[stream]

    def begin_capture(self, pool: Pool) -> None:
        """From now on `pool` takes no memory from the driver, and blocks returned to other pools are retained."""
        with self._lock:
            if self._captured is not None:
                raise CaptureError(f"{self._name}: another graph is being captured")
            self._collect_returned()
            self._captured = pool

    def end_capture(self) -> list[Block]:
        """The blocks retained meanwhile, for `forget`."""
        with self._lock:
            self._collect_returned()
            self._captured, retained, self._new_retained = None, self._new_retained, []
            return retained

    def forget(self, blocks: list[Block]) -> None:
        """Returns retained blocks, which are out of use, to their pools."""
        with self._lock:
            for block in blocks:
                self._give(self._retained.pop(block), block)

    def enlarge(self, pool: Pool, size: int) -> None:
        """Room for one more block of that size. Raises DeviceOutOfMemoryError."""
        with self._lock:
            block = self._grow(pool, size, size)
            block.arena.give(block)

    def drop(self, pool: Pool) -> None:
        """The pool's memory goes back to the driver; blocks still in use, as soon as they are returned."""
        with self._lock:
            self._collect_returned()
            pool.is_dropped = True
            self._free_segments_of(pool)

    # The methods below run with the lock held.

    def _new_pool(self, stream: Stream) -> Pool:
        pool = self._pools[stream] = Pool(self, stream)
        return pool

    def _all_pools(self) -> Iterator[Pool]:
        yield from self._pools.values()
        yield from self._private

    def _collect_returned(self) -> None:
        returned = self._returned
        while returned:
            pool, block, size_bytes = returned.popleft()
            self._requested -= size_bytes
            self._allocated -= block.size
            if self._captured is not None and pool is not self._captured:
                self._retained[block] = pool
                self._new_retained.append(block)
            else:
                self._give(pool, block)

    def _give(self, pool: Pool, block: Block) -> None:
        if self._is_marking:
            with contextlib.suppress(LaunchError):  # of an earlier kernel: the next wait reports it
                self._mark(pool, block, 0)
        block.arena.give(block)
        if pool.is_dropped:
            self._free_segments_of(pool)

    def _mark(self, pool: Pool, block: Block, size_bytes: int) -> None:
        """Reports a block's beginning to the emulator, or, with a size of 0, its end."""
        self._context.call("emuMarkAsync", block.address, size_bytes, block.size, pool.stream.handle)

    def _grow(self, pool: Pool, size: int, size_bytes: int) -> Block:
        """A block from a new segment."""
        if pool is self._captured:
            raise PoolTooSmallError(
                f"{self._name}: {size_bytes:,} bytes do not fit the graph's private pool, and a stream that is "
                "captured cannot allocate",
                missing_bytes=size,
            )
        self._num_misses += 1
        least = -(-size // SEGMENT_GRANULE) * SEGMENT_GRANULE
        if not self._reserve(pool, max(SEGMENT_BYTES, least)):
            self._reserve_after_collecting(pool, least)
        block = pool.take(size)
        if block is None:
            raise DeviceOutOfMemoryError(
                f"{self._name}: no memory for {size_bytes:,} bytes\n{self._table()}", requested_bytes=size_bytes
            )
        return block

    def _reserve(self, pool: Pool, size: int) -> bool:
        """Takes a segment from the driver, if it has one."""
        self._num_driver_allocations += 1
        try:
            address = int(self._context.call("cuMemAlloc", size))
        except DeviceOutOfMemoryError:
            return False
        pool.large.add_segment(address, size)
        pool.segments[address] = size
        self._reserved += size
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        if self._is_marking:
            self._context.call("emuDivide", address)
        return True

    def _reserve_after_collecting(self, pool: Pool, size: int) -> None:
        """The steps in the module's docstring. They may also free memory of `pool` itself."""
        if self._captured is None:
            self._free_segments()
        if self._reserve(pool, size):
            return
        gc.collect()
        self._collect_returned()
        if self._captured is None:
            self._free_segments()
        self._reserve(pool, size)

    def _free_segments(self) -> int:
        """Frees unused segments, except live graphs': their next capture needs their warm-up's memory."""
        return sum(self._free_segments_of(pool) for pool in [*self._pools.values()])

    def _free_segments_of(self, pool: Pool) -> int:
        freed = 0
        pool.join_pieces()
        for address, size in pool.large.remove_free_segments():
            self._num_driver_frees += 1
            self._context.call("cuMemFree", address)
            del pool.segments[address]
            freed += size
        self._reserved -= freed
        if pool.is_dropped and not pool.segments and pool in self._private:
            self._private.remove(pool)
        return freed

    def _table(self) -> str:
        free, total = self._context.call("cuMemGetInfo")
        rows = [
            ("device", total, total - free, free),
            ("reserved here", self._reserved, self._allocated, self._reserved - self._allocated),
        ]
        for pool in self._all_pools():
            kind = "graph" if pool in self._private else "stream"
            size, unused = sum(pool.segments.values()), pool.unused_bytes
            rows.append((f"{kind} {int(pool.stream.handle):#x}", size, size - unused, unused))
        lines = [f"{'':<24}{'bytes':>18}{'in use':>18}{'free':>18}"]
        lines += [f"{name:<24}{size:>18,}{used:>18,}{unused:>18,}" for name, size, used, unused in rows]
        largest = max((pool.large.largest_free_bytes for pool in self._all_pools()), default=0)
        return "\n".join([*lines, f"largest free block: {largest:,} bytes"])
