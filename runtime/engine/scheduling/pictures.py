"""The pictures of a prompt, as the scheduler's records have them: counts, positions and keys, no pixels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.images.positions import token_positions

FIRST_KEY = -2
"""Keys of pictures go down from here: no token has such an id."""

MOST_KEYS = 1 << 16
"""Digests whose keys are remembered. One that is forgotten gets another key, so that its pages are not found."""


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
    """All pictures of a prompt.

    positions      [3, num_prompt_tokens] int32, rotary ones; None: their places
    rotary_offset  of the tokens behind the prompt: rotary position less place
    slots          where the executor has each picture's embeddings; filled in before the request may run
    patches, grids  of each picture, ``[rows * columns, patch_bytes]``, and its rows and columns of patches; empty as
                   soon as all are encoded
    """

    items: tuple[Picture, ...]
    positions: NDArray[np.int32] | None
    rotary_offset: int
    slots: list[int]
    patches: list[NDArray[np.uint8]]
    grids: list[tuple[int, int]]

    @classmethod
    def of(
        cls,
        items: Sequence[Picture],
        num_prompt_tokens: int,
        patches: list[NDArray[np.uint8]],
        grids: list[tuple[int, int]],
        has_axes: bool,
    ) -> Pictures:
        if not has_axes:
            return cls(tuple(items), None, 0, [], patches, grids)
        spans = [(item.first_token, item.rows, item.columns) for item in items]
        positions, offset = token_positions(num_prompt_tokens, spans)
        return cls(tuple(items), positions, offset, [], patches, grids)

    @property
    def end(self) -> int:
        """The token behind the last picture."""
        return self.items[-1].end


class PictureKeys:
    """One key for each digest: it stands for a picture's tokens where prefixes are compared.

    A picture's tokens all have its key: which of them one is, what comes before it tells, since a digest has one grid.
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

    def digest_of(self, key: int) -> bytes:
        """The picture that a key stands for; the key itself where it was forgotten."""
        return self._digests.get(key) or key.to_bytes(4, "little", signed=True)

    def prompt_keys(self, prompt_ids: NDArray[np.int32], items: Sequence[Picture]) -> NDArray[np.int32]:
        """The prompt's ids, with keys for the tokens of pictures."""
        keys = prompt_ids.copy()
        for item in items:
            keys[item.first_token : item.end] = self.key_of(item.digest)
        return keys
