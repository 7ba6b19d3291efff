"""What a drafter is that reads a model's hidden states: a small decoder over pairs of a token and what the model has
one token before. `eagle3` and `mtp` beside it are two; `runtime.engine.speculation.state_proposer` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
        token_ids: `[tokens of its head]` int32, the model's id of each; None: they are the same.
    """

    kind: str
    target: Decoder
    layers: tuple[int, ...]
    device: Device
    dtype: DType
    max_positions: int
    rotary_switch: int | None
    weight_bytes: int
    token_ids: NDArray[np.int32] | None

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Its pages, all of one group."""
        ...

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """The model's hidden states of some tokens, behind each of `layers`, `[n, width of the model]` -> `[n, width]`:
        what `forward` reads of the token before."""
        ...

    def forward(self, batch: Batch, hidden: Tensor, pages: KVCache) -> tuple[Tensor, Tensor]:
        """`hidden [num_tokens, width]` is that of the token before each of the batch's. What `logits` reads, and what
        takes the place of `hidden` one token further."""
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """`[n, width]` -> `[n, vocab_size]` float32; -inf for tokens that the head does not know."""
        ...
