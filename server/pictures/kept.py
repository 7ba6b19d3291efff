"""`KeptPictures`: what clients sent under a name of their own (`uuid`), so that they need not send it again."""

from __future__ import annotations

import threading
from collections import OrderedDict

Owner = tuple[str | None, str | None]
"""A tenant and the `cache_salt` of its request: nobody else finds a picture by its name."""

MAX_UUID_LENGTH = 256
_ENTRY_BYTES = 1024
"""What a kept picture costs beside its file: its name, the keys, the objects around them."""


class KeptPictures:
    """The files of pictures, the latest used longest, within `max_bytes` in all. Its methods may be called by any
    thread.

    A name stands for a file and for nothing else: what the engine keeps of a picture, embeddings and pages, is found by
    the digest of its patches and grid, so that neither a name that is used twice, nor one that is guessed, leads to
    what other pictures left there."""

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
        """From now on the name stands for this file; for none where the file alone is larger than all may be."""
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
        """The file that was sent last under the name; None: none is kept."""
        key = (owner, uuid)
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def _drop(self, key: tuple[Owner, str]) -> None:
        if (file := self._files.pop(key, None)) is not None:
            self._num_bytes -= len(file) + _ENTRY_BYTES
