"""Bookkeeping of memory that is cut from large segments: addresses alone, no driver.

Two-level segregated fit (Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", 2004): sizes
fall into classes, 16 to a power of two; each class has a bin of free blocks, and one integer has a bit for each bin
that is not empty. Taking a block finds the lowest such bit at or above the size's class; giving it back merges it with
its free neighbours. Both take constant time.

Requests are rounded up to their class, so at most 1/16 of a block is lost to rounding (above 8 KiB; below, at
most 511 bytes). A block taken from a larger one leaves its rest in the arena.
"""

from __future__ import annotations

from collections.abc import Iterator

GRANULE = 512
"""Every block's size is a multiple of this, and so is its distance from its segment's start."""


def size_class(num_granules: int) -> int:
    """The class that holds a free block of that size: no request of that class is larger than the block. Sizes below 16
    granules have a class each; above, 16 classes to a power of two."""
    exponent = num_granules.bit_length() - 5
    return num_granules if exponent <= 0 else (exponent << 4) + (num_granules >> exponent)


def round_to_class(size_bytes: int) -> int:
    """The size of the block that serves a request of `size_bytes`."""
    granules = (size_bytes + GRANULE - 1) // GRANULE or 1
    exponent = granules.bit_length() - 5
    if exponent > 0:
        granules = (granules + (1 << exponent) - 1) >> exponent << exponent
    return granules * GRANULE


class Block:
    """A run of bytes within a segment, free or taken, linked with its neighbours.

    Attributes:
        address, size: where it lies and how long it is.
        segment: the segment's first address.
        arena: which arena it belongs to.
        is_free: whether it lies in a bin.
    """

    __slots__ = ("address", "after", "arena", "before", "is_free", "segment", "size")

    def __init__(self, arena: Arena, address: int, size: int, segment: int) -> None:
        self.arena = arena
        self.address = address
        self.size = size
        self.segment = segment
        self.is_free = True
        self.before: Block | None = None
        self.after: Block | None = None


class Arena:
    """Segments of memory, cut into blocks."""

    def __init__(self) -> None:
        self._bins: dict[int, dict[Block, None]] = {}
        self._filled = 0  # bit c: bin c holds a block
        self._segments: dict[int, Block] = {}  # first address: first block

    def add_segment(self, address: int, size: int) -> None:
        """Takes memory over; its address is a multiple of 256, its size of GRANULE."""
        assert address % 256 == 0, address
        assert size % GRANULE == 0, size
        assert size > 0
        block = Block(self, address, size, address)
        self._segments[address] = block
        self._insert(block)

    def take(self, size: int) -> Block | None:
        """A block of `size` bytes, which `round_to_class` gave; None where no free block is long enough."""
        granules = size // GRANULE
        exponent = granules.bit_length() - 5
        index = granules if exponent <= 0 else (exponent << 4) + (granules >> exponent)
        candidates = self._filled >> index
        if not candidates:
            return None
        index += (candidates & -candidates).bit_length() - 1
        bin_ = self._bins[index]
        block, _ = bin_.popitem()
        if not bin_:
            self._filled ^= 1 << index
        block.is_free = False
        rest = block.size - size
        if rest:
            block.size = size
            tail = Block(self, block.address + size, rest, block.segment)
            tail.before = block
            after = block.after
            tail.after = after
            if after is not None:
                after.before = tail
            block.after = tail
            self._insert(tail)
        return block

    def give(self, block: Block) -> None:
        """Takes a block back and merges it with the free blocks beside it."""
        assert not block.is_free, f"the block at {block.address:#x} is given back twice"
        after = block.after
        if after is not None and after.is_free:
            self._remove(after)
            block.size += after.size
            beyond = block.after = after.after
            if beyond is not None:
                beyond.before = block
        before = block.before
        if before is not None and before.is_free:
            self._remove(before)
            before.size += block.size
            beyond = before.after = block.after
            if beyond is not None:
                beyond.before = before
            block = before
        block.is_free = True
        self._insert(block)

    def remove_free_segments(self) -> list[tuple[int, int]]:
        """(address, size) of each unused segment; the arena gives them up."""
        whole = [block for block in self._segments.values() if block.is_free and block.after is None]
        for block in whole:
            self._remove(block)
            del self._segments[block.segment]
        return [(block.address, block.size) for block in whole]

    def blocks(self) -> Iterator[Block]:
        """All blocks, in the order of their addresses within each segment."""
        for first in self._segments.values():
            block: Block | None = first
            while block is not None:
                yield block
                block = block.after

    @property
    def free_bytes(self) -> int:
        return sum(block.size for bin_ in self._bins.values() for block in bin_)

    @property
    def largest_free_bytes(self) -> int:
        if not self._filled:
            return 0
        return max(block.size for block in self._bins[self._filled.bit_length() - 1])

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def check_integrity(self) -> tuple[int, int]:
        """(bytes taken, bytes free) after a walk over everything.

        Raises AssertionError where blocks overlap, leave a gap, are not linked both ways, lie free beside each other
        without being merged, or where a bin holds a wrong block or misses one.
        """
        taken = free = 0
        in_bins: set[int] = set()
        for segment, first in self._segments.items():
            assert first.address == segment, f"segment {segment:#x} begins with a block at {first.address:#x}"
            assert first.before is None, f"something lies before the segment {segment:#x}"
            block: Block | None = first
            while block is not None:
                what = f"block {block.address:#x} of {block.size} bytes"
                assert block.size > 0, what
                assert block.size % GRANULE == 0, what
                assert block.segment == segment, what
                assert block.arena is self, what
                after = block.after
                if after is not None:
                    assert after.before is block, f"{what}: its neighbour does not know it"
                    assert after.address == block.address + block.size, f"{what}: gap or overlap behind it"
                    assert not (block.is_free and after.is_free), f"{what}: not merged with what is behind it"
                if block.is_free:
                    free += block.size
                    in_bins.add(block.address)
                    assert block in self._bins[size_class(block.size // GRANULE)], f"{what}: not in its bin"
                else:
                    taken += block.size
                block = after
        held = [block.address for bin_ in self._bins.values() for block in bin_]
        assert len(held) == len(in_bins), "a bin holds a block that is not free, or not of this arena"
        assert set(held) == in_bins
        filled = sum(1 << index for index, bin_ in self._bins.items() if bin_)
        assert filled == self._filled, "the index of bins is wrong"
        return taken, free

    def _insert(self, block: Block) -> None:
        granules = block.size // GRANULE
        exponent = granules.bit_length() - 5
        index = granules if exponent <= 0 else (exponent << 4) + (granules >> exponent)
        bin_ = self._bins.get(index)
        if bin_ is None:
            bin_ = self._bins[index] = {}
        bin_[block] = None
        self._filled |= 1 << index

    def _remove(self, block: Block) -> None:
        granules = block.size // GRANULE
        exponent = granules.bit_length() - 5
        index = granules if exponent <= 0 else (exponent << 4) + (granules >> exponent)
        bin_ = self._bins[index]
        del bin_[block]
        if not bin_:
            self._filled ^= 1 << index
