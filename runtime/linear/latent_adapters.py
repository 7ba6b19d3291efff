"""Low-rank adapters of latent attention's map ``kv_b_proj``, which is absorbed into its neighbours (`LatentMaps`).

With the pair ``up down`` of the stored map, whose rows are a head's key and value, head h's maps are ``K_h + up_Kh
down`` and ``V_h + up_Vh down``. So a head's query gets ``down^T (up_Kh^T q)`` more, and its result ``up_Vh (down z)``:
pairs of its own of the rows ``[T H, ...]``, whose numbers are ``adapter * H + h``. All of a sequence's rows are of one
adapter. A bias adds the same to all scores of a query, so that of keys changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from runtime import ops
from runtime.batch import AdaptedRows, Batch
from runtime.linear.adapter_pairs import Pair
from runtime.linear.gpu_slots import Slots, new_slots
from runtime.linear.latent import DeclaredHeads
from runtime.linear.low_rank_slots import DensePair, SlotShape
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor

_MOST_ROWS = 65_535
"""Tokens' heads of a launch: a GPU's grid has no more rows."""


class LowRankHeads:
    """The pairs of one layer's heads (`LatentAddend`), whose memory is made for the first adapter that has some."""

    def __init__(self, declared: DeclaredHeads, num_slots: int, rank: int) -> None:
        self.declared, self.num_slots, self.rank = declared, num_slots, rank
        self._slots: tuple[Slots, Slots] | None = None
        self._numbers: Tensor | None = None  # [tokens, H], each head's number
        self._options: LoadOptions | None = None

    def allocate(self, options: LoadOptions) -> None:
        """Notes the type of pairs."""
        self._slots, self._numbers, self._options = None, None, options

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return sum(each.size_bytes for each in self._slots or ())

    @property
    def is_empty(self) -> bool:
        """See `LateAddend`."""
        return self._slots is None

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> bool:
        """Writes an adapter's pair to a slot, or zeros; returns whether memory was made."""
        pair, heads = pairs.get(self.declared.name), self.declared
        is_new = self._slots is None and pair is not None
        if is_new:
            self._make()
        if self._slots is None:
            return False
        keys, values = self._slots
        for head in range(heads.own_heads):
            place = slot * heads.own_heads + head
            if pair is None or not pair.up.any():
                keys.write(place, [None], None)
                values.write(place, [None], None if pair is None else self._value_bias(pair, head))
                continue
            of_key, of_value = self._rows_of(head)
            rank = len(pair.down)
            down, up = np.zeros((rank, heads.head_dim), np.float32), np.zeros((heads.row_dim, rank), np.float32)
            down[:, : heads.key_dim], up[heads.rotary_dim :] = pair.up[of_key].T, pair.down.T
            keys.write(place, [DensePair(down, up)], None)
            values.write(place, [DensePair(pair.down, pair.up[of_value])], self._value_bias(pair, head))
        return is_new

    def _rows_of(self, head: int) -> tuple[slice, slice]:
        """The stored map's rows of one of this rank's heads: of its key, and of its value."""
        heads = self.declared
        first = (heads.first + head) * (heads.key_dim + heads.value_dim)
        middle = first + heads.key_dim
        return slice(first, middle), slice(middle, middle + heads.value_dim)

    def _value_bias(self, pair: Pair, head: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
        return None if pair.bias is None else pair.bias[self._rows_of(head)[1]]

    def _make(self) -> None:
        heads, options = self.declared, self._options
        assert options is not None, "slots are made before the first adapter"
        count = self.num_slots * heads.own_heads
        shapes = (heads.row_dim, heads.head_dim), (heads.value_dim, heads.latent_dim)
        keys, values = (new_slots(SlotShape((width,), depth, self.rank, count), options) for width, depth in shapes)
        self._slots = keys, values
        numbers = np.tile(np.arange(heads.own_heads, dtype=np.int32), (max(1, _MOST_ROWS // heads.own_heads), 1))
        self._numbers = Tensor.from_numpy(numbers).to(options.device)

    def add_queries(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """See `LatentAddend`."""
        assert self._slots is not None, "an empty addend adds nothing"
        return self._added(self._slots[0], x, residual, batch)

    def add_values(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """See `LatentAddend`."""
        assert self._slots is not None, "an empty addend adds nothing"
        return self._added(self._slots[1], x, residual, batch)

    def _added(self, slots: Slots, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """The residual plus those of x; both have each token's heads one after another."""
        width, heads = sum(slots.shape.heights), self.declared.own_heads
        flat, rest = x.view(-1, slots.shape.depth), residual.view(-1, width)
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
        assert self._numbers is not None, "they are made with the slots"
        assert batch.adapters is not None, "a batch without adapters does not come here"
        most, heads = self._numbers.shape
        for first in range(0, batch.num_tokens, most):
            end, key = min(first + most, batch.num_tokens), ("heads", self.num_slots, heads, first)
            if key not in batch.computed:
                own = AdaptedRows(batch.adapters[first:end])
                numbers = ops.adapter_ids(own, self._numbers[: end - first], heads, self.num_slots, -1)
                batch.computed[key] = AdaptedRows(numbers.view(-1))
            yield first, end, batch.computed[key]
