"""Memory shared by recordings; their arrays overlap.

An array is cut from the first gap that holds it and leaves a gap when its last view is gone, so that a recording of
many layers needs little more than its widest moment. Addresses stay valid as long as the arena does. It reserves far
more addresses than it needs, since the system takes memory only for touched pages: so gaps are never in two pieces of
memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

_ALIGNMENT = 64  # a cache line, the width of the widest vector
_SEGMENT_BYTES = 1 << 30


class _Piece:
    """Some bytes of a segment, given back when the last array over them is gone."""

    __slots__ = ("__array_interface__", "end", "segment", "start")

    def __init__(self, segment: _Segment, start: int, end: int) -> None:
        self.segment = segment
        self.start = start
        self.end = end

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        data = self.segment.first + self.start, False
        self.__array_interface__ = {"shape": shape, "typestr": dtype.str, "data": data, "version": 3}
        return np.asarray(self)

    def __del__(self) -> None:
        self.segment.give_back(self.start, self.end)


class _Segment:
    """One run of addresses, and its gaps in order: (start, end). ``used_bytes`` from its beginning have been given out
    at some time."""

    def __init__(self, size: int) -> None:
        memory = np.zeros(size + _ALIGNMENT, np.uint8)  # none of it is touched
        skipped = -memory.ctypes.data % _ALIGNMENT
        self.memory = memory[skipped : skipped + size]
        self.first = memory.ctypes.data + skipped
        self.end = self.first + size
        self.gaps = [(0, size)]
        self.used_bytes = 0

    def take(self, size: int) -> _Piece | None:
        for index, (start, end) in enumerate(self.gaps):
            if end - start >= size:
                self.gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                self.used_bytes = max(self.used_bytes, start + size)
                return _Piece(self, start, start + size)
        return None

    def give_back(self, start: int, end: int) -> None:
        gaps = self.gaps
        index = bisect_left(gaps, (start, end))
        if index < len(gaps) and gaps[index][0] == end:
            end = gaps.pop(index)[1]
        if index > 0 and gaps[index - 1][1] == start:
            gaps[index - 1] = gaps[index - 1][0], end
        else:
            gaps.insert(index, (start, end))


def _new_segment(size: int) -> _Segment:
    """At least ``size`` bytes, and as many more as the system has addresses to give, within reason."""
    wanted = max(size, _SEGMENT_BYTES)
    while True:
        try:
            return _Segment(wanted)
        except MemoryError:
            if wanted == size:
                raise
            wanted = max(size, wanted // 2)


class Arena:
    """Grows as it has to, and gives its memory back with its last array. Not thread-safe.

    size_bytes  of the memory that it may have taken
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []

    @property
    def size_bytes(self) -> int:
        return sum(segment.used_bytes for segment in self._segments)

    def new_array(self, shape: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
        """An uninitialised array on a cache line of its own. Raises MemoryError where the system has none."""
        wanted = np.dtype(dtype)
        size = max(1, -(-math.prod(shape) * wanted.itemsize // _ALIGNMENT)) * _ALIGNMENT
        piece = None
        for segment in self._segments:
            if (piece := segment.take(size)) is not None:
                break
        else:
            self._segments.append(_new_segment(size))
            piece = self._segments[-1].take(size)
        assert piece is not None
        return piece.array(shape, wanted)

    def holds(self, address: int) -> bool:
        """Whether the address lies in memory of this arena."""
        return any(segment.first <= address < segment.end for segment in self._segments)

    def borrowed(self, array: np.ndarray) -> np.ndarray:
        """Another view of an array that was cut here: it keeps the arena's memory, but not the array's place in it."""
        address = array.ctypes.data
        for segment in self._segments:
            if segment.first <= address < segment.end:
                at = address - segment.first
                return segment.memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        raise ValueError("the array is not of this arena")
