"""Adapters of the token table, the output head and routers: pairs of low rank, and rows that were trained.

As many trained rows as the slots' rank are a pair, which picks a row by its number. More of them take a whole table for
each slot. Memory is made for the first adapter that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from runtime import ops
from runtime.batch import AdaptedRows, Batch
from runtime.dtype import NDArray
from runtime.linear.adapter_pairs import Change, Pair, Rows
from runtime.linear.addends import Addend, LateAddend
from runtime.linear.gpu_slots import Slots, new_slots
from runtime.linear.low_rank_slots import DensePair, SlotShape
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor


class TableAddend(Protocol):
    """The addend of the token table."""

    def add_to(self, x: Tensor, batch: Batch, scale: float) -> Tensor:
        """``x [T, H]``, rows of the table times ``scale``, plus what adapters change of them."""


@runtime_checkable
class TableSource(Protocol):
    """A source (`AddendSource`) that also has addends of the token table, the head and routers."""

    @property
    def table(self) -> TableAddend | None:
        """That of the table, None in a stage without one."""

    def declare_table(self, name: str, rows: int, columns: int) -> None:
        """The model has a token table ``[rows, columns]``."""

    def addend_of_head(self, name: str, rows: int, columns: int, first: int, count: int) -> Addend:
        """The addend of the head ``[rows, columns]``, of which this rank computes ``count`` rows from ``first`` on."""

    def addend_of_router(self, name: str, rows: int, columns: int) -> LateAddend:
        """The addend of a router, or of the gate of shared experts, ``[rows, columns]``, which each rank computes."""


class _Slots:
    """Slots whose memory is made when it is first needed.

    Attributes:
        name, rows, columns: of the table, or the head.
    """

    def __init__(self, name: str, rows: int, columns: int, num_slots: int, rank: int) -> None:
        self.name, self.rows, self.columns = name, rows, columns
        self.num_slots, self.rank = num_slots, rank
        self._options: LoadOptions | None = None
        self._filled: set[int] = set()  # slots whose whole table is not zeros

    def allocate(self, options: LoadOptions) -> None:
        """Notes the type of pairs."""
        self._options = options

    def _slots(self, outputs: int, inputs: int, rank: int) -> Slots:
        assert self._options is not None, "slots are made before the first adapter"
        return new_slots(SlotShape((outputs,), inputs, rank, self.num_slots), self._options)

    def _is_low(self, change: Change) -> bool:
        """Whether it is written as a pair."""
        return isinstance(change, Pair) or len(change.ids) <= self.rank

    def _parts(self, changes: Mapping[str, Change]) -> tuple[Change | None, Rows | None]:
        """An adapter's pair, and its rows that are too many for one."""
        low, rows = changes.get(self.name), None
        if low is not None and not self._is_low(low):
            low, rows = None, low
        assert rows is None or isinstance(rows, Rows)
        return low, rows

    def _fills(self, slot: int, rows: Rows | None) -> bool:
        """Whether a slot's whole table has to be written, with these rows or with zeros over another adapter's."""
        had_rows = slot in self._filled
        (self._filled.discard if rows is None else self._filled.add)(slot)
        return had_rows or rows is not None


class LowRankTable(_Slots):
    """The addend of the token table (`TableAddend`)."""

    def __init__(self, name: str, rows: int, columns: int, num_slots: int, rank: int) -> None:
        super().__init__(name, rows, columns, num_slots, rank)
        self._inner: Tensor | None = None  # [A V + 1, R], the last row zeros
        self._outer: Slots | None = None
        self._whole: Tensor | None = None  # [A V + 1, H]

    @property
    def size_bytes(self) -> int:
        """The bytes of all that is made."""
        tables = sum(each.size_bytes for each in (self._inner, self._whole) if each is not None)
        return tables + (0 if self._outer is None else self._outer.size_bytes)

    def add_to(self, x: Tensor, batch: Batch, scale: float) -> Tensor:
        """See `TableAddend`."""
        if self._inner is None and self._whole is None:
            return x
        ids = ops.adapter_ids(batch, batch.token_ids, self.rows, self.num_slots, self.num_slots * self.rows)
        if self._inner is not None:
            assert self._outer is not None
            inner = ops.embedding(ids, self._inner, scale=scale)
            x = ops.low_rank(inner, batch, self._outer, residual=x)
        if self._whole is not None:
            x = ops.add_scaled(x, ops.embedding(ids, self._whole, scale=scale), 1.0)
        return x

    def write(self, slot: int, changes: Mapping[str, Change]) -> bool:
        """Writes an adapter to a slot; returns whether memory was made."""
        low, rows = self._parts(changes)
        is_new = (low is not None and self._inner is None) or (rows is not None and self._whole is None)
        if low is not None and self._inner is None:
            self._inner = self._table(self.rank)
            self._outer = self._slots(self.columns, self.rank, self.rank)
        if rows is not None and self._whole is None:
            self._whole = self._table(self.columns)
        if self._inner is not None:
            assert self._outer is not None
            inner, outer = np.zeros((self.rows, self.rank), np.float32), np.zeros((self.columns, self.rank), np.float32)
            if isinstance(low, Rows):
                inner[low.ids, np.arange(len(low.ids))] = 1.0
                outer[:, : len(low.ids)] = low.values.T
            elif low is not None:
                inner[:, : len(low.down)], outer[:, : len(low.down)] = low.down.T, low.up
            self._put(self._inner, slot, inner)
            same = DensePair(np.eye(self.rank, dtype=np.float32), outer)
            self._outer.write(slot, [None if low is None else same], None)
        if self._whole is not None and self._fills(slot, rows):
            whole = np.zeros((self.rows, self.columns), np.float32)
            if rows is not None:
                whole[rows.ids] = rows.values
            self._put(self._whole, slot, whole)
        return is_new

    def _table(self, columns: int) -> Tensor:
        options = self._options
        assert options is not None, "slots are made before the first adapter"
        assert options.dtype is not None
        made = Tensor.zeros((self.num_slots * self.rows + 1, columns), options.dtype).to(options.device)
        made.storage.freeze()
        return made

    def _put(self, table: Tensor, slot: int, rows: NDArray) -> None:
        table.storage.thaw()
        table[slot * self.rows : (slot + 1) * self.rows] = Tensor.from_numpy(rows).to(table.dtype).to(table.device)
        table.storage.freeze()


class LowRankHead(_Slots):
    """The addend of the output head (`LateAddend`): of ``count`` of its rows, from ``first`` on; or of a router."""

    def __init__(self, name: str, rows: int, columns: int, num_slots: int, rank: int, first: int, count: int) -> None:
        super().__init__(name, rows, columns, num_slots, rank)
        self._own = slice(first, first + count)
        self._low: Slots | None = None
        self._whole: Slots | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of all that is made."""
        return sum(each.size_bytes for each in (self._low, self._whole) if each is not None)

    @property
    def is_empty(self) -> bool:
        """See `LateAddend`."""
        return self._low is None and self._whole is None

    def add_to(self, residual: Tensor | None, x: Tensor, batch: AdaptedRows) -> Tensor | None:
        """See `Addend`."""
        for slots in (self._low, self._whole):
            if slots is not None:
                residual = ops.low_rank(x, batch, slots, residual=residual)
        return residual

    def write(self, slot: int, changes: Mapping[str, Change]) -> bool:
        """Writes an adapter to a slot; returns whether memory was made."""
        low, rows = self._parts(changes)
        count = self._own.stop - self._own.start
        is_new = (low is not None and self._low is None) or (rows is not None and self._whole is None)
        if low is not None and self._low is None:
            self._low = self._slots(count, self.columns, self.rank)
        if rows is not None and self._whole is None:
            self._whole = self._slots(count, self.columns, self.columns)
        if self._low is not None:
            pair: DensePair | None = None
            bias: NDArray | None = None
            if isinstance(low, Rows):
                up = np.zeros((self.rows, len(low.ids)), np.float32)
                up[low.ids, np.arange(len(low.ids))] = 1.0
                pair = DensePair(low.values, up[self._own])
            elif low is not None:
                pair = DensePair(low.down, low.up[self._own])
                bias = None if low.bias is None else low.bias[self._own]
            self._low.write(slot, [pair], bias)
        if self._whole is not None and self._fills(slot, rows):
            pair = None
            if rows is not None:
                whole = np.zeros((self.rows, self.columns), np.float32)
                whole[rows.ids] = rows.values
                pair = DensePair(np.eye(self.columns, dtype=np.float32), whole[self._own])
            self._whole.write(slot, [pair], None)
        return is_new
