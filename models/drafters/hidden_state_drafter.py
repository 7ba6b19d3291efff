"""Interfaces of drafters that read a model's hidden states: small decoders over pairs of a token and the hidden states
one token before. `eagle3` and `mtp` propose one token a step, `dflash` a block at once;
`runtime.engine.speculation.state_proposer` runs them. `gemma4_assistant` has no pages: `page_proposer` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from models.decoder import Decoder
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import DType
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.tensor.tensor import Tensor


class HiddenStateDrafter(Protocol):
    """A drafter over the model that it was trained for, whose device it shares.

    Attributes:
        kind: its name in logs and metrics.
        target: the model.
        layers: of the model, after which it reads hidden states, counted from 1; 0 for the embeddings.
        device, dtype: of its weights.
        max_positions: tokens that a sequence may have.
        longrope_threshold: see `Model`; None.
        weight_bytes: of its own weights.
    """

    kind: str
    target: Decoder
    layers: tuple[int, ...]
    device: Device
    dtype: DType
    max_positions: int
    longrope_threshold: int | None
    weight_bytes: int

    @property
    def token_ids(self) -> NDArray[np.int32] | None:
        """`[tokens of its head]` int32, the model's id of each, or None if they are the same."""

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Fuses the model's hidden states after each of `layers`, `[n, width of the model]` -> `[n, width]`: its input
        from the token before."""


class SteppingDrafter(HiddenStateDrafter, Protocol):
    """A drafter that continues from its own result, token by token."""

    def forward(self, batch: Batch, hidden: Tensor, pages: KVCache) -> tuple[Tensor, Tensor]:
        """`hidden [num_tokens, width]` is that of the token before each of the batch's; `pages` are its own, or the
        model's. Returns the input of `logits`, and the `hidden` of the next step."""

    def logits(self, normed: Tensor) -> Tensor:
        """`[n, width]` -> `[n, vocab_size]` float32; -inf for tokens that the head does not know."""


class PageDrafter(SteppingDrafter):
    """One that reads the model's own pages. The engine tells it from others by this base class.

    Attributes:
        weight_bytes: the size of its weights.
    """

    weight_bytes: int


class PairDrafter(SteppingDrafter, Protocol):
    """One that keeps keys and values of its own."""

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Its pages, all of one group."""


@runtime_checkable
class BlockDrafter(HiddenStateDrafter, Protocol):
    """A drafter that proposes a block of tokens in one pass: the block is the last known token followed by
    `mask_token_id`s.

    Attributes:
        block_size: tokens of a block.
        mask_token_id: of the model's ids.
        first_proposal: the place in a block whose logits give the first proposal: 0, or 1 where each token but the
            first predicts itself.
        is_chained: whether `logits` of a place read the token before it, so that places come one after another.
    """

    block_size: int
    mask_token_id: int
    first_proposal: int
    is_chained: bool

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Its pages, all of one group."""

    def absorb(self, batch: Batch, hidden: Tensor, pages: KVCache) -> None:
        """`hidden [num_tokens, width]` are `fuse`'s, of the batch's places: their keys and values are written into the
        pages. Token ids are not read."""

    def forward(self, batch: Batch, pages: KVCache) -> Tensor:
        """Computes the batch's chunks, each a block after the absorbed tokens. Returns the input of `logits`,
        `[num_tokens, width]`. The batch's `bidirectional_until` is each block's end; causal layers do not use it."""

    def logits(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        """`[n, width]` -> `[n, vocab_size]` float32; -inf for tokens that the head does not know. `token_ids [n]` int32
        are the tokens before the proposed ones; read only where `is_chained`."""
