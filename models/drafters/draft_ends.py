"""The ends of a drafter: token table and output head, its own or the model's.

The head may know fewer tokens than the model: `d2t` is what is added to each of its ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.base import Model
from models.checkpoints.checkpoint import Checkpoint
from models.decoder import Decoder
from models.errors import WeightsError
from models.makers.maker import Maker
from runtime import ops
from runtime.dtype import float32
from runtime.linear.linear import Linear
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True)
class StoredEnds:
    """The table and head of a drafter's checkpoint.

    Attributes:
        has_table, has_head: else the model's are used.
        hidden_size, draft_vocab_size: their sizes; the table has all of the model's tokens.
        token_ids: `[draft_vocab_size]` int32, the model's id of each token of the head, or None if they are the same.
    """

    has_table: bool
    has_head: bool
    hidden_size: int
    draft_vocab_size: int
    token_ids: NDArray[np.int32] | None


def read_ends(
    checkpoint: Checkpoint | None, folder: Path, target: Model, *, hidden_size: int, draft_vocab_size: int
) -> StoredEnds:
    """The ends in that folder's checkpoint; None if the weights are dummies. Raises `WeightsError` for a missing tensor
    that cannot be the model's, and for a wrong `d2t`."""
    names = [] if checkpoint is None else [name.removeprefix("model.") for name in checkpoint.tensors]
    has_table, has_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    vocab_size, width = target.config.vocab_size, target.config.hidden_size
    token_ids = _token_ids(checkpoint, draft_vocab_size, vocab_size)
    if not has_head and draft_vocab_size != vocab_size:
        if checkpoint is not None:
            raise WeightsError(
                f"{folder}: tensor 'lm_head.weight' is missing, and the model's head knows {vocab_size}"
                f" tokens, draft_vocab_size is {draft_vocab_size}"
            )
        has_head = True
    for name, has in (("embed_tokens.weight", has_table), ("lm_head.weight", has_head)):
        if not has and hidden_size != width:
            what = "table" if name.startswith("embed") else "head"
            raise WeightsError(
                f"{folder}: tensor {name!r} is missing, and the model's {what} is {width} wide, hidden_size is"
                f" {hidden_size}"
            )
    return StoredEnds(has_table, has_head, hidden_size, draft_vocab_size, token_ids)


class DraftEnds:
    """The table and the head that a drafter uses.

    Attributes:
        token_ids: see `StoredEnds`; None until `know`.
    """

    def __init__(self, maker: Maker, target: Decoder, stored: StoredEnds) -> None:
        self.token_ids: NDArray[np.int32] | None = None
        self._stored, self._target, self._device = stored, target, maker.options.device
        self._places: Tensor | None = None  # [vocab_size]: the head's id of each, or its number of ids
        self._table: Tensor | None = None
        if stored.has_table:
            self._table = maker.table("embed_tokens.weight", target.config.vocab_size, stored.hidden_size)
        self._head: Linear | None = None
        if stored.has_head:
            self._head = maker.linear("lm_head", outputs=stored.draft_vocab_size, inputs=stored.hidden_size)

    def know(self) -> None:
        """Copies the ids of the head's tokens to the device: once, before the first logits."""
        self.token_ids = self._stored.token_ids
        if self.token_ids is not None:
            count = len(self.token_ids)
            places = np.full(self._target.config.vocab_size, count, np.int32)
            places[self.token_ids] = np.arange(count, dtype=np.int32)
            self._places = Tensor.from_numpy(places).to(self._device)

    def embed(self, token_ids: Tensor, *, scale: float = 1.0) -> Tensor:
        """Rows of the table; ``scale`` is applied if the table is the model's."""
        if self._table is None:
            return ops.embedding(token_ids, self._target.embed_tokens, scale=scale)
        return ops.embedding(token_ids, self._table)

    def logits(self, normed: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[n, hidden_size]` -> `[n, vocab_size]` float32; -inf for tokens that the head does not know. ``bias [n,
        draft_vocab_size]`` is added."""
        logits = self._target.compute_logits(normed) if self._head is None else self._head.logits(normed)
        if bias is not None:
            logits = ops.add_scaled(logits, bias, 1.0)
        if self._places is None:
            return logits
        count, known = logits.shape
        columns = Tensor.full((known + 1, count), -np.inf, float32, self._device)  # last: unknown tokens
        columns[:known] = logits.transpose(0, 1)
        return ops.gather_rows(columns, self._places).transpose(0, 1).contiguous()


def _token_ids(checkpoint: Checkpoint | None, count: int, vocab_size: int) -> NDArray[np.int32] | None:
    """The model's id of each of the head's ``count`` tokens, by `d2t`, or the first ones without a checkpoint; None if
    they are the same."""
    if checkpoint is None:
        return None if count == vocab_size else np.arange(count, dtype=np.int32)
    stored = checkpoint.tensors.get("d2t", checkpoint.tensors.get("model.d2t"))
    if stored is None:
        if count == vocab_size:
            return None
        raise WeightsError(
            f"{checkpoint.place}: tensor 'd2t' [{count}] is missing: draft_vocab_size is {count} of {vocab_size} tokens"
        )
    where = f"{checkpoint.place}: tensor {stored.name!r}"
    if stored.shape != (count,) or stored.type_name not in ("I64", "I32"):
        shape = list(stored.shape)
        raise WeightsError(f"{where} is {stored.type_name} {shape}, must be I64 or I32 [{count}]")
    offsets: NDArray[Any] = stored.array().astype(np.int64)
    ids = np.arange(count) + offsets
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size) | (np.abs(offsets) > vocab_size))
    if wrong.size:
        place = int(wrong[0])
        raise WeightsError(f"{where}[{place}] is {offsets[place]}: there is no token {ids[place]} of {vocab_size}")
    if np.unique(ids).size < count:
        raise WeightsError(f"{where} names a token twice")
    return None if count == vocab_size and not offsets.any() else ids.astype(np.int32)
