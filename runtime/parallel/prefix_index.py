"""Maps prefixes to the engines whose blocks hold them, from the engines' reports: digests of contents → engines.

Bounded by the engines' caches, since each digest stands for a block of theirs, and by ``most_digests``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.engine.messages import EngineInfo
from runtime.engine.scheduling.block_events import BlockChanges, SharedDigest
from runtime.engine.scheduling.pictures import PictureKeys
from runtime.engine.scheduling.prefix_cache import Salt, root_name
from runtime.engine.scheduling.sequence import Request
from runtime.kv.kinds import FULL, CacheKind, findable_pages

MOST_DIGESTS = 4 << 20
"""About 500 MB of them; more are ignored."""


class PrefixIndex:
    """Sets of engines by digest, as bits. Not thread-safe."""

    def __init__(self, most_digests: int = MOST_DIGESTS) -> None:
        self._most_digests = most_digests
        self._engines: dict[int, int] = {}
        self.num_untaken = 0
        """Digests that there was no room for."""

    def __len__(self) -> int:
        return len(self._engines)

    def engines_of(self, digest: int) -> int:
        """The engines that have this content, as bits."""
        return self._engines.get(digest, 0)

    def change(self, engine: int, changes: BlockChanges) -> None:
        """Apply an engine's report."""
        self.add(engine, changes.stored.tolist())
        self.discard(engine, changes.removed.tolist())

    def add(self, engine: int, digests: Iterable[int]) -> None:
        """Add contents to an engine."""
        engines, bit = self._engines, 1 << engine
        for digest in digests:
            before = engines.get(digest)
            if before is not None:
                engines[digest] = before | bit
            elif len(engines) < self._most_digests:
                engines[digest] = bit
            else:
                self.num_untaken += 1

    def discard(self, engine: int, digests: Iterable[int]) -> None:
        """Remove contents from an engine, if it has them."""
        engines, bit = self._engines, 1 << engine
        for digest in digests:
            left = engines.get(digest, 0) & ~bit
            if left:
                engines[digest] = left
            else:
                engines.pop(digest, None)

    def clear(self, engine: int) -> None:
        """Remove all contents from an engine. O(digests)."""
        self.discard(engine, [digest for digest, engines in self._engines.items() if engines >> engine & 1])


class PromptDigests:
    """Computes the digests of prompts' pages, as engines with this secret do. Thread-safe.

    kinds          of the cache groups
    longrope_threshold  see ``EngineInfo``
    """

    def __init__(
        self,
        secret: bytes,
        block_size: int,
        kinds: tuple[CacheKind, ...] = (FULL,),
        longrope_threshold: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.kinds = kinds
        self._longrope_threshold = longrope_threshold
        self._secret = secret
        self._digest = SharedDigest(secret)

    @classmethod
    def of_info(cls, info: EngineInfo, secret: bytes) -> PromptDigests:
        """For engines with these facts."""
        kinds = tuple(group.kind for group in info.cache_groups)
        return cls(secret, info.block_size, kinds, info.longrope_threshold)

    def of(self, request: Request) -> list[list[int]]:
        """By cache group: the digests of the full pages that could be cached, which exclude the last token."""
        prompt, digest = request.prompt_ids, self._digest
        if request.pictures is not None:
            keys = PictureKeys()
            prompt = keys.prompt_keys(prompt, request.pictures)
            digest = SharedDigest(self._secret, keys.digest_of)
        salt: Salt = request.prefix_salt()
        if self._longrope_threshold is not None and len(prompt) > self._longrope_threshold:
            salt = request.prefix_salt(self._longrope_threshold)
        num_pages = (len(prompt) - 1) // self.block_size
        data = np.ascontiguousarray(prompt[: num_pages * self.block_size], np.int32).tobytes()
        return [list(self._chain(digest, data, salt, group)) for group in range(len(self.kinds))]

    def _chain(self, digest: SharedDigest, data: bytes, salt: Salt, group: int) -> Iterator[int]:
        parent, width = digest(0, root_name(salt, group)), self.block_size * _TOKEN_BYTES
        for start in range(0, len(data), width):
            parent = digest(parent, data[start : start + width])
            yield parent


def found_tokens(
    digests: Sequence[Sequence[int]],
    kinds: Sequence[CacheKind],
    block_size: int,
    indices: Sequence[PrefixIndex],
    num_engines: int,
) -> NDArray[np.int64]:
    """The tokens of a prompt with these digests that each engine has by one of the indices, ``[num_engines]``."""
    found = np.zeros(num_engines, np.int64)
    masks = [[_engines_of(digest, indices) for digest in chain] for chain in _up_to_last(digests, kinds, indices)]
    everywhere = 0
    for mask in masks[0]:
        everywhere |= mask
    for engine in range(num_engines):
        if everywhere >> engine & 1:
            paths = [[bool(mask >> engine & 1) for mask in chain] for chain in masks]
            found[engine] = findable_pages(paths, kinds, block_size) * block_size
    return found


def _up_to_last(
    digests: Sequence[Sequence[int]], kinds: Sequence[CacheKind], indices: Sequence[PrefixIndex]
) -> Sequence[Sequence[int]]:
    """The digests up to the first page that no engine has, for groups that need all pages."""
    for chain, kind in zip(digests, kinds):
        if kind.is_whole:
            end = next((page for page, digest in enumerate(chain) if not _engines_of(digest, indices)), len(chain))
            return [each[:end] for each in digests]
    return digests


def _engines_of(digest: int, indices: Sequence[PrefixIndex]) -> int:
    engines = 0
    for index in indices:
        engines |= index.engines_of(digest)
    return engines


_TOKEN_BYTES = 4
