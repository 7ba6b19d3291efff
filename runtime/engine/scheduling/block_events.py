"""Reports the contents of an engine's KV blocks to a router over several engines.

A content's digest covers its tokens and all before them, its cache group and its salt, so that one number stands for a
whole prefix. It is keyed by a secret of the router: engines and router compute the same numbers, clients cannot.
Digests of two contents may collide; routing then errs, but no page is ever shared by digest alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.engine.scheduling.prefix_cache import CachedBlock

SECRET_BYTES = 16


class BlockChanges(NamedTuple):
    """Digests, ``[count]`` uint64, of contents that are newly cached on the device or in the host pool, and of those
    that no longer are."""

    stored: NDArray[np.uint64]
    removed: NDArray[np.uint64]


class SharedDigest:
    """A ``prefix_cache.Digest`` that every process with the same secret computes alike.

    picture_of  the digest of the image that a key stands for, since each process numbers images as they come; None if
                no prompt has any
    """

    def __init__(self, secret: bytes, picture_of: Callable[[int], bytes] | None = None) -> None:
        self._start = hashlib.blake2b(digest_size=8, salt=secret)
        self.picture_of = picture_of

    def __call__(self, parent: int, tokens: bytes) -> int:
        if parent and self.picture_of is not None:
            tokens = with_pictures(tokens, self.picture_of)
        state = self._start.copy()
        state.update(parent.to_bytes(8, "little") + tokens)
        return int.from_bytes(state.digest(), "little")


def with_pictures(tokens: bytes, picture_of: Callable[[int], bytes]) -> bytes:
    """A page's tokens with each image key replaced by its number on the page, and the images' digests."""
    keys = np.frombuffer(tokens, np.int32)
    if keys.min(initial=0) >= 0:
        return tokens
    found = dict.fromkeys(keys[keys < 0].tolist())
    numbered = keys.copy()
    for number, key in enumerate(found, start=2):
        numbered[keys == key] = -number
    return numbered.tobytes() + b"".join(map(picture_of, found))


class BlockEvents:
    """Collects the net changes between two calls of ``take``."""

    def __init__(self) -> None:
        self._touched: dict[int, CachedBlock] = {}
        self._told: set[int] = set()  # digests of contents that were reported as cached

    def touch(self, node: CachedBlock) -> None:
        """The content of a full block may have been cached or evicted."""
        self._touched[node.digest] = node

    def take(self) -> BlockChanges | None:
        """The changes, or None if there are none."""
        if not self._touched:
            return None
        stored: list[int] = []
        removed: list[int] = []
        for digest, node in self._touched.items():
            if node.lies_somewhere:
                if digest not in self._told:
                    stored.append(digest)
            elif digest in self._told:
                removed.append(digest)
        self._touched.clear()
        self._told.update(stored)
        self._told.difference_update(removed)
        if not (stored or removed):
            return None
        return BlockChanges(np.array(stored, np.uint64), np.array(removed, np.uint64))
