"""Low-rank adapters of a layer's experts: a pair for each expert and adapter.

An adapter of few experts, or of none, leaves the others' pairs zeros. Memory is made when the first adapter of such a
map is written: it is as much as for as many maps as there are experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from runtime.dtype import float16, float32
from runtime.linear.adapter_pairs import MapPart, Pair, empty_weight, parts_of, write_weight
from runtime.linear.addends import DeclaredMap
from runtime.linear.experts import ExpertsWeight
from runtime.linear.options import LoadOptions


class LowRankExperts:
    """The pairs of one map of a layer's experts, such as all gates and ups (`ExpertsAddend`).

    Attributes:
        pairs: ``down [A E, R, K]`` and ``up [A E, N, R]``, an adapter's experts one after another; None while no
            adapter has one.
    """

    def __init__(self, declared: Sequence[DeclaredMap], num_slots: int, rank: int) -> None:
        self.shape = declared[0].shape
        self.num_slots, self.rank = num_slots, rank
        self.adds_bias = declared[0].adds_unsplit
        self.parts: list[list[MapPart]] = [parts_of(each) for each in declared]
        self.pairs: tuple[ExpertsWeight, ExpertsWeight] | None = None
        self._written: list[set[int]] = [set() for _ in range(num_slots)]  # experts that are not zeros
        self._options: LoadOptions | None = None

    def allocate(self, options: LoadOptions) -> None:
        """Notes the type of pairs: float32 for float16 on a GPU, since sums between may be beyond 65,504."""
        is_narrow = options.device.kind != "cpu" and options.dtype is float16
        self._options = replace(options, dtype=float32) if is_narrow else options

    @property
    def size_bytes(self) -> int:
        """The bytes of all pairs."""
        return sum(each.size_bytes for weight in self.pairs or () for each in weight.experts)

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> bool:
        """Writes an adapter's pairs, by module, to a slot; returns whether this map had no memory before."""
        wanted = {number for number, parts in enumerate(self.parts) if any(part.module in pairs for part in parts)}
        is_new = self.pairs is None and bool(wanted)
        if is_new:
            self._make()
        if self.pairs is None:
            return False
        down, up = self.pairs
        (outputs, inputs), rank, count = self.shape, self.rank, len(self.parts)
        for expert in wanted | self._written[slot]:
            parts = self.parts[expert]
            inner = np.zeros((rank * len(parts), inputs), np.float32)
            outer, bias = np.zeros((outputs, rank * len(parts)), np.float32), np.zeros(outputs, np.float32)
            for number, part in enumerate(parts):
                part.put(pairs.get(part.module), number * rank, inner, outer, bias if self.adds_bias else None)
            write_weight(down.experts[slot * count + expert], inner, None)
            write_weight(up.experts[slot * count + expert], outer, bias)
        self._written[slot] = wanted
        return is_new

    def _make(self) -> None:
        assert self._options is not None, "slots are made before the first adapter"
        (outputs, inputs), rank = self.shape, self.rank * len(self.parts[0])
        count = self.num_slots * len(self.parts)
        shapes = (((rank, inputs), False), ((outputs, rank), True))
        down, up = (
            ExpertsWeight([empty_weight(shape, self._options, has_bias=has_bias) for _ in range(count)])
            for shape, has_bias in shapes
        )
        self.pairs = down, up
