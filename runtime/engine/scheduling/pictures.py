"""The images of a prompt, in the scheduler's records: counts, positions and keys, no pixels."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.images.positions import token_positions

FIRST_KEY = -2
"""Keys of images count down from here: token ids are never so low."""

MOST_KEYS = 1 << 16
"""Digests whose keys are remembered. A forgotten one gets a new key, so that its pages are not found."""


@dataclass(frozen=True, slots=True)
class Picture:
    """``num_tokens`` of the prompt from ``first_token`` on. ``rows`` and ``columns`` are of tokens."""

    digest: bytes
    first_token: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.first_token + self.num_tokens


@dataclass(frozen=True, slots=True)
class Pictures:
    """All images of a prompt.

    positions      [3, num_prompt_tokens] int32, rotary ones, or None for the token indices
    rotary_offset  of the tokens after the prompt: rotary position minus index
    slots          the executor's slot of each image's embeddings; filled in before the request may run
    patches, grids  of each image, ``[rows * columns, patch_bytes]``, and its rows and columns of patches; empty as
                   soon as all are encoded
    whole          [first, end) of tokens that attend to each other, which one step computes; adjacent images are one
    """

    items: tuple[Picture, ...]
    positions: NDArray[np.int32] | None
    rotary_offset: int
    slots: list[int]
    patches: list[NDArray[np.uint8]]
    grids: list[tuple[int, int]]
    whole: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        items: Sequence[Picture],
        num_prompt_tokens: int,
        patches: list[NDArray[np.uint8]],
        grids: list[tuple[int, int]],
        *,
        has_axes: bool,
        are_whole: bool,
    ) -> Pictures:
        if not has_axes:
            return cls(tuple(items), None, 0, [], patches, grids, runs_of(items) if are_whole else ())
        spans = [(item.first_token, item.rows, item.columns) for item in items]
        positions, offset = token_positions(num_prompt_tokens, spans)
        return cls(tuple(items), positions, offset, [], patches, grids)

    @property
    def end(self) -> int:
        """The index after the last image token."""
        return self.items[-1].end

    def cut(self, end: int) -> int:
        """The last index up to ``end`` where the prompt may be cut."""
        for first, behind in self.whole:
            if first < end < behind:
                return first
        return end

    def least_end(self, start: int) -> int:
        """The first index after ``start`` where the prompt may be cut."""
        for first, behind in self.whole:
            if first <= start < behind:
                return behind
        return start + 1

    def whole_chunk(self, start: int, count: int, most: int) -> int:
        """How many of ``count`` tokens from ``start`` on a step may compute; up to ``most`` of them, if fewer would cut
        an image."""
        end = self.cut(start + count)
        if end <= start:
            end = self.least_end(start)
        return end - start if end - start <= most else 0


def runs_of(items: Sequence[Picture]) -> tuple[tuple[int, int], ...]:
    """[first, end) of each image's tokens, or of several adjacent images."""
    runs: list[tuple[int, int]] = []
    for item in items:
        if runs and runs[-1][1] == item.first_token:
            runs[-1] = (runs[-1][0], item.end)
        else:
            runs.append((item.first_token, item.end))
    return tuple(runs)


class PictureKeys:
    """One key for each digest, which stands for an image's tokens when prefixes are compared.

    All tokens of an image have its key; their number before a token identifies it, since a digest has one grid. Images
    whose tokens attend to each other share a key.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._digests: dict[int, bytes] = {}
        self._next = FIRST_KEY

    def key_of(self, digest: bytes) -> int:
        key = self._keys.get(digest)
        if key is None:
            key = self._keys[digest] = self._next
            self._digests[key] = digest
            self._next = self._next - 1 if self._next > -(1 << 31) else FIRST_KEY
            if len(self._keys) > MOST_KEYS:
                _, forgotten = self._keys.popitem(last=False)
                self._digests.pop(forgotten, None)
        self._keys.move_to_end(digest)
        return key

    def known_digest(self, key: int) -> bytes | None:
        """The digest of the image that a key stands for; None if it was forgotten."""
        return self._digests.get(key)

    def digest_of(self, key: int) -> bytes:
        """The digest of the image that a key stands for; the key itself if it was forgotten."""
        return self._digests.get(key) or key.to_bytes(4, "little", signed=True)

    def prompt_keys(self, prompt_ids: NDArray[np.int32], pictures: Pictures) -> NDArray[np.int32]:
        """The prompt's ids, with keys for image tokens."""
        keys = prompt_ids.copy()
        for item in pictures.items:
            keys[item.first_token : item.end] = self.key_of(item.digest)
        for first, end in pictures.whole:
            inside = [item.digest for item in pictures.items if first <= item.first_token < end]
            if len(inside) > 1:
                together = hashlib.sha256(b"".join(b"%d:%s" % (len(each), each) for each in inside))
                keys[first:end] = self.key_of(together.digest())
        return keys
