"""What a drafter is that reads a model's hidden states: a small decoder over pairs of a token and what the model has
one token before. `eagle3` and `mtp` beside it say a token a step, `dflash` a block of them at once;
`runtime.engine.speculation.state_proposer` runs them.
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
        kind: what it is called in logs and counts.
        target: the model.
        layers: of the model, behind which it reads hidden states, counted from 1; 0: the embeddings.
        device, dtype: where its weights lie, and as what.
        max_positions: tokens that a sequence may have.
        rotary_switch: see `Model`; None.
        weight_bytes: of its own weights.
    """

    kind: str
    target: Decoder
    layers: tuple[int, ...]
    device: Device
    dtype: DType
    max_positions: int
    rotary_switch: int | None
    weight_bytes: int

    @property
    def token_ids(self) -> NDArray[np.int32] | None:
        """`[tokens of its head]` int32, the model's id of each; None: they are the same."""
        ...

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Its pages, all of one group."""
        ...

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """The model's hidden states of some tokens, behind each of `layers`, `[n, width of the model]` -> `[n, width]`:
        what it reads of the token before."""
        ...


class SteppingDrafter(HiddenStateDrafter, Protocol):
    """One that goes on with its own result, token by token."""

    def forward(self, batch: Batch, hidden: Tensor, pages: KVCache) -> tuple[Tensor, Tensor]:
        """`hidden [num_tokens, width]` is that of the token before each of the batch's. What `logits` reads, and what
        takes the place of `hidden` one token further."""
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """`[n, width]` -> `[n, vocab_size]` float32; -inf for tokens that the head does not know."""
        ...


@runtime_checkable
class BlockDrafter(HiddenStateDrafter, Protocol):
    """One whose proposals come out of one pass over a block of tokens: the last one that is known, and others behind
    it that are not, for which `mask_token_id` stands.

    Attributes:
        block_size: tokens of a block.
        mask_token_id: of the model's ids.
        first_proposal: the place in a block behind which the first proposal is said: 0, or 1 where each token but the
            first says itself.
        is_chained: whether `logits` of a place read the token before it, so that places come one after another.
    """

    block_size: int
    mask_token_id: int
    first_proposal: int
    is_chained: bool

    def absorb(self, batch: Batch, hidden: Tensor, pages: KVCache) -> None:
        """`hidden [num_tokens, width]` are `fuse`'s, of the batch's places: they go into the pages as keys and
        values. Token ids are not read."""
        ...

    def forward(self, batch: Batch, pages: KVCache) -> Tensor:
        """The blocks that the batch's chunks are, each behind what was absorbed: what `logits` reads, `[num_tokens,
        width]`. The batch's `sees_until` is each block's end; layers that are causal do not use it."""
        ...

    def logits(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        """`[n, width]` -> `[n, vocab_size]` float32; -inf for tokens that the head does not know. `token_ids [n]` int32
        are those before the ones that are said; read only where `is_chained`."""
        ...
