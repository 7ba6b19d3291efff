"""Low-rank adapters of latent attention's map ``kv_b_proj``, which is absorbed into its neighbours (`LatentMaps`).

With the pair ``up down`` of the stored map, whose rows are a head's key and value, head h's maps are ``K_h + up_Kh
down`` and ``V_h + up_Vh down``. So ``down^T (up_Kh^T q)`` is added to the head's query, and ``up_Vh (down z)`` to its
result: two pairs for each head of each adapter, which has slot ``adapter * H + h``, over rows ``[T H, ...]``. The rows
in the pages stay as they are, since a sequence has one adapter. A bias of keys adds the same to all scores of a query,
so it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from runtime import ops
from runtime.batch import AdaptedRows, Batch
from runtime.dtype import NDArray
from runtime.linear.adapter_pairs import Pair
from runtime.linear.gpu_slots import Slots, new_slots
from runtime.linear.latent import DeclaredHeads, HeadSlots
from runtime.linear.low_rank_slots import DensePair, SlotShape
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor

_MOST_ROWS = 65_535
"""Tokens' heads of a launch: a GPU's grid has no more rows."""


class LowRankHeads(HeadSlots):
    """The pairs of one layer's heads. ``numbers`` are those of all layers: by the number of heads H, a tensor
    ``[tokens, H]`` with 0, 1 ... H - 1 in each row, once it is needed."""

    def __init__(self, declared: DeclaredHeads, num_slots: int, rank: int, numbers: dict[int, Tensor]) -> None:
        self.declared, self.num_slots, self.rank, self._numbers = declared, num_slots, rank, numbers
        self._slots: tuple[Slots, Slots] | None = None
        self._options: LoadOptions | None = None

    def allocate(self, options: LoadOptions) -> None:
        """See `HeadSlots`."""
        self._slots, self._options = None, options
        self._numbers.clear()

    @property
    def size_bytes(self) -> int:
        """See `HeadSlots`."""
        return sum(each.size_bytes for each in self._slots or ())

    @property
    def is_empty(self) -> bool:
        """See `LatentAddend`."""
        return self._slots is None

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> bool:
        """See `HeadSlots`."""
        pair, heads = pairs.get(self.declared.name), self.declared.own_heads
        is_new = self._slots is None and pair is not None
        if is_new:
            self._make()
        if self._slots is None:
            return False
        keys, values = self._slots
        for head in range(heads):
            of_key, of_value, bias = (None, None, None) if pair is None else self._of_head(head, pair)
            keys.write(slot * heads + head, [of_key], None)
            values.write(slot * heads + head, [of_value], bias)
        return is_new

    def _of_head(self, head: int, pair: Pair) -> tuple[DensePair | None, DensePair | None, NDArray | None]:
        """The stored map's pair as those of a head's query and result, None where they add nothing, and the result's
        bias."""
        heads = self.declared
        first = (heads.first + head) * (heads.key_dim + heads.value_dim)
        middle, end = first + heads.key_dim, first + heads.key_dim + heads.value_dim
        bias = None if pair.bias is None else pair.bias[middle:end]
        if not pair.up[first:end].any():
            return None, None, bias
        down = np.pad(pair.up[first:middle].T, ((0, 0), (0, heads.rotary_dim)))  # [r, key_dim + rotary_dim]
        up = np.pad(pair.down.T, ((heads.rotary_dim, 0), (0, 0)))  # [rotary_dim + latent_dim, r]
        return DensePair(down, up), DensePair(pair.down, pair.up[middle:end]), bias

    def _make(self) -> None:
        heads, options = self.declared, self._options
        assert options is not None, "slots are made before the first adapter"
        count = self.num_slots * heads.own_heads
        shapes = (heads.row_dim, heads.head_dim), (heads.value_dim, heads.latent_dim)
        keys, values = (new_slots(SlotShape((width,), depth, self.rank, count), options) for width, depth in shapes)
        self._slots = keys, values
        if heads.own_heads not in self._numbers:
            numbers = np.tile(np.arange(heads.own_heads, dtype=np.int32), (max(1, _MOST_ROWS // heads.own_heads), 1))
            self._numbers[heads.own_heads] = Tensor.from_numpy(numbers).to(options.device)

    def add_queries(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """See `LatentAddend`."""
        return self._added(0, x, residual, batch)

    def add_values(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """See `LatentAddend`."""
        return self._added(1, x, residual, batch)

    def _added(self, which: int, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """The residual plus the sums of x, by the keys' slots or the values'; both have each token's heads one after
        another."""
        assert self._slots is not None, "an empty addend adds nothing"
        slots, heads = self._slots[which], self.declared.own_heads
        flat, rest = x.view(-1, slots.shape.depth), residual.view(-1, slots.shape.heights[0])
        passes = list(self._passes(batch))
        parts = [
            ops.low_rank(flat[first * heads : end * heads], rows, slots, residual=rest[first * heads : end * heads])
            for first, end, rows in passes
        ]
        if len(parts) == 1:
            return parts[0].view(residual.shape)
        result = Tensor.new(rest.shape, residual.dtype, residual.device)
        for (first, end, _), part in zip(passes, parts, strict=True):
            result[first * heads : end * heads] = part
        return result.view(residual.shape)

    def _passes(self, batch: Batch) -> Iterator[tuple[int, int, AdaptedRows]]:
        """The batch's tokens in parts, each with its rows' pairs, once for all layers."""
        assert batch.adapters is not None, "a batch without adapters does not come here"
        numbers = self._numbers[self.declared.own_heads]
        most, heads = numbers.shape
        for first in range(0, batch.num_tokens, most):
            end, key = min(first + most, batch.num_tokens), ("heads", self.num_slots, heads, first)
            if key not in batch.computed:
                own = AdaptedRows(batch.adapters[first:end])
                ids = ops.adapter_ids(own, numbers[: end - first], heads, self.num_slots, -1)
                batch.computed[key] = AdaptedRows(ids.view(-1))
            yield first, end, batch.computed[key]
