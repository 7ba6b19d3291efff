"""`KeptPictures`: clients' pictures by their own names (`uuid`), so that they need not be sent again."""

from __future__ import annotations

import threading
from collections import OrderedDict

Owner = tuple[str | None, str | None]
"""A tenant and the `cache_salt` of its request: other tenants do not find a picture by its name."""

MAX_UUID_LENGTH = 256
_ENTRY_BYTES = 1024
"""Bytes of a kept picture beside its file: its name, the keys, the objects around them."""


class KeptPictures:
    """An LRU cache of picture files, of at most `max_bytes`. Its methods may be called by any thread.

    A name stands only for a file: the engine finds embeddings and pages by the digest of a picture's patches and grid,
    so that a reused or guessed name does not lead to another picture's."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._files: OrderedDict[tuple[Owner, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """At most `max_bytes`."""
        return self._num_bytes

    def put(self, owner: Owner, uuid: str, file: bytes) -> None:
        """Stores the file under the name, or removes the name if the file exceeds `max_bytes`."""
        key = (owner, uuid)
        with self._lock:
            self._drop(key)
            if len(file) + _ENTRY_BYTES > self.max_bytes:
                return
            self._files[key] = file
            self._num_bytes += len(file) + _ENTRY_BYTES
            while self._num_bytes > self.max_bytes:
                self._drop(next(iter(self._files)))

    def get(self, owner: Owner, uuid: str) -> bytes | None:
        """The file last sent under the name, or None."""
        key = (owner, uuid)
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def _drop(self, key: tuple[Owner, str]) -> None:
        if (file := self._files.pop(key, None)) is not None:
            self._num_bytes -= len(file) + _ENTRY_BYTES
