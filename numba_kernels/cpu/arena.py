"""Memory that recordings share: what one of them needs lies where another's lies.

An array is cut from the first gap that holds it and leaves a gap when its last view is gone, so that a recording of
many layers needs little more than its widest moment. Addresses stay valid as long as the arena does.
"""

from __future__ import annotations

import math

import numpy as np

_ALIGNMENT = 64  # a cache line, the width of the widest vector
_SEGMENT_BYTES = 1 << 20


class _Piece:
    """Some bytes of a segment, given back when the last array over them is gone."""

    __slots__ = ("__array_interface__", "_range", "_segment")

    def __init__(self, segment: _Segment, start: int, end: int) -> None:
        self._segment = segment
        self._range = start, end
        data = segment.memory.__array_interface__["data"][0] + start, False
        self.__array_interface__ = {"shape": (end - start,), "typestr": "|u1", "data": data, "version": 3}

    def __del__(self) -> None:
        self._segment.give_back(*self._range)


class _Segment:
    """One run of memory, and its gaps in order: (start, end)."""

    def __init__(self, size: int) -> None:
        memory = np.zeros(size + _ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        self.memory = memory[first : first + size]
        self.gaps = [(0, size)]

    def take(self, size: int) -> _Piece | None:
        for index, (start, end) in enumerate(self.gaps):
            if end - start >= size:
                self.gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                return _Piece(self, start, start + size)
        return None

    def give_back(self, start: int, end: int) -> None:
        joined: list[tuple[int, int]] = []
        for gap in sorted([*self.gaps, (start, end)]):
            if joined and joined[-1][1] == gap[0]:
                joined[-1] = joined[-1][0], gap[1]
            else:
                joined.append(gap)
        self.gaps = joined


class Arena:
    """Grows as it has to, and gives its memory back with its last array. Not thread-safe.

    size_bytes  of all that it holds
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []

    @property
    def size_bytes(self) -> int:
        return sum(segment.memory.nbytes for segment in self._segments)

    def new_array(self, shape: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
        """An uninitialised array on a cache line of its own. Raises MemoryError where the system has none."""
        wanted = np.dtype(dtype)
        size_bytes = math.prod(shape) * wanted.itemsize
        size = max(1, -(-size_bytes // _ALIGNMENT)) * _ALIGNMENT
        piece = None
        for segment in self._segments:
            if (piece := segment.take(size)) is not None:
                break
        else:
            self._segments.append(_Segment(max(size, _SEGMENT_BYTES)))
            piece = self._segments[-1].take(size)
        return np.asarray(piece)[:size_bytes].view(wanted).reshape(shape)

    def holds(self, address: int) -> bool:
        """Whether the address lies in memory of this arena."""
        return self._find(address) is not None

    def borrowed(self, array: np.ndarray) -> np.ndarray:
        """Another view of an array that was cut here: it keeps the arena's memory, but not the array's place in it."""
        address = array.__array_interface__["data"][0]
        memory = self._find(address)
        assert memory is not None, "the array is not of this arena"
        first = address - memory.__array_interface__["data"][0]
        return memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)

    def _find(self, address: int) -> np.ndarray | None:
        """The memory in which the address lies."""
        for segment in self._segments:
            first = segment.memory.__array_interface__["data"][0]
            if first <= address < first + segment.memory.nbytes:
                return segment.memory
        return None
