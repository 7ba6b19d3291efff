"""Copies in pinned memory of what a GPU got from files: sleeping weights come back as fast as the bus takes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runtime.device.pinned import NUM_THREADS, FileMapping, PinnedBlock, PinnedPool, mapped_part


class _Part(NamedTuple):
    """Bytes of a file that were uploaded unchanged."""

    file: str
    offset: int
    size_bytes: int


class HostCopies:
    """Notes the parts of files that a model's loading uploads (`Gpu.uploading_from`), copies them into pinned memory
    when it is told to, and from then on gives the copies to uploads of the same parts."""

    def __init__(self, pinned: PinnedPool) -> None:
        self._pinned = pinned
        self._noted: dict[_Part, None] = {}
        self._blocks: dict[_Part, PinnedBlock] = {}

    @property
    def size_bytes(self) -> int:
        """The size of the copies."""
        return sum(part.size_bytes for part in self._blocks)

    def find(self, array: np.ndarray[Any, Any]) -> PinnedBlock | None:
        """The copy of an array, if it is a part of a file and was copied; notes such a part."""
        if (place := mapped_part(array)) is None:
            return None
        mapping, offset = place
        part = _Part(mapping.name, offset, array.nbytes)
        self._noted[part] = None
        return self._blocks.get(part)

    def make(self) -> None:
        """Copies what was noted and not copied yet. Raises OSError if a file cannot be read, and DeviceOutOfMemoryError
        if the system has no more memory to pin; then there are no copies."""
        missing = [part for part in self._noted if part not in self._blocks]
        if not missing:
            return
        mappings: dict[str, FileMapping] = {}
        try:
            for name in {part.file for part in missing}:
                with Path(name).open("rb") as file:
                    mappings[name] = FileMapping(file.fileno(), name)
            blocks = {part: self._pinned.allocate(part.size_bytes) for part in missing}
            with ThreadPoolExecutor(NUM_THREADS, "xserv-copy") as threads:
                for _ in threads.map(
                    lambda part: mappings[part.file].read_into(blocks[part].array, part.offset), missing
                ):
                    pass
        except BaseException:
            self.drop()
            raise
        self._blocks.update(blocks)

    def drop(self) -> None:
        """Returns the pinned memory. All uploads from it must have finished."""
        for block in self._blocks.values():
            block.release()
        self._blocks.clear()
