"""A file mapped into memory that can also be read with `preadv`, which saves a page fault for each page of a copy."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class FileMapping(mmap.mmap):
    """A whole file, mapped for reading, until the last array over it is freed.

    Attributes:
        descriptor: an open one of the file, its own.
        name: for errors.
    """

    descriptor: int
    name: str

    def __new__(cls, descriptor: int, name: str) -> Self:
        """Raises OSError where it cannot be mapped, ValueError for an empty file."""
        mapping = super().__new__(cls, descriptor, 0, access=mmap.ACCESS_READ)
        mapping.descriptor, mapping.name = os.dup(descriptor), name
        weakref.finalize(mapping, os.close, mapping.descriptor)
        return mapping

    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        """Fills an array with the bytes from `offset` on. Raises OSError where the file has become shorter."""
        view = target.data
        while view.nbytes:
            count = os.preadv(self.descriptor, [view], offset)
            if not count:
                raise OSError(errno.EIO, f"the file ends at byte {offset}, shorter than it was", self.name)
            view, offset = view[count:], offset + count


def mapped_part(array: np.ndarray[Any, Any]) -> tuple[FileMapping, int] | None:
    """The mapping that a C-contiguous array lies in and the byte of the file at which it begins; None for any other."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, FileMapping) or not array.flags.c_contiguous or not array.size:
        return None
    return mapping, array.ctypes.data - np.frombuffer(mapping, np.uint8, 1).ctypes.data
