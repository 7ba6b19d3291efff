"""Low-rank adapters (LoRA, arXiv 2106.09685) as addends of linear maps: ``up (down x)``, another pair for each adapter.

A map has memory for a fixed number of adapters of a fixed rank, its slots. Loading an adapter writes a slot of each
map; a recorded step reads whatever a slot holds, since a row's slot is data of the step (`Batch.adapters`).
On the cpu the map's own product adds them (`riding`); on a GPU they are added to its residual.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from runtime import ops
from runtime.batch import Batch
from runtime.dtype import NDArray
from runtime.errors import InvalidArgumentError
from runtime.linear.adapter_pairs import Pair, parts_of
from runtime.linear.addends import DeclaredMap
from runtime.linear.expert_adapters import LowRankExperts
from runtime.linear.gpu_slots import Slots, new_slots
from runtime.linear.low_rank_slots import CpuSlots, DensePair, LowRank, SlotShape
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor

_OF_TOWERS = re.compile(r"(?:^|\.)(?:visual|vision\w*|multi_modal_projector|embed_vision)\.")


class LowRankMap:
    """The addend of one map, `num_slots` pairs of `rank`."""

    def __init__(self, declared: DeclaredMap, num_slots: int, rank: int) -> None:
        self.shape = declared.shape
        self.num_slots, self.rank = num_slots, rank
        self.adds_bias = declared.adds_unsplit
        self.parts = parts_of(declared)
        self._slots: Slots | None = None

    def allocate(self, options: LoadOptions) -> None:
        """Makes the slots, all zeros, of the options' type."""
        heights = tuple(part.rows.stop - part.rows.start for part in self.parts)
        self._slots = new_slots(SlotShape(heights, self.shape[1], self.rank, self.num_slots), options)

    @property
    def slots(self) -> Slots:
        """They are made before the first step."""
        assert self._slots is not None
        return self._slots

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return 0 if self._slots is None else self._slots.size_bytes

    def riding(self, x: Tensor, batch: Batch) -> LowRank | None:
        """See `RidingAddend`."""
        if not isinstance(self.slots, CpuSlots):
            return None
        assert batch.adapters is not None, "a batch without adapters does not come here"
        return LowRank(self.slots, x, batch.adapters, batch.computed)

    def add_to(self, residual: Tensor | None, x: Tensor, batch: Batch) -> Tensor | None:
        """See `Addend`."""
        return ops.low_rank(x, batch, self.slots, residual=residual)

    def add_normed_to(self, residual: Tensor | None, x: Tensor, batch: Batch, norm: RmsNorm | None) -> Tensor | None:
        """See `RidingAddend`."""
        return ops.low_rank(x, batch, self.slots, residual=residual, norm=norm)

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """Writes an adapter's pairs, by module, to a slot; the others become zeros. No step may run that reads it."""
        found: list[DensePair | None] = []
        bias: NDArray | None = None
        for part in self.parts:
            pair = pairs.get(part.module)
            is_zero = pair is None or not pair.up.any() or not pair.down.any()
            found.append(None if pair is None or is_zero else DensePair(pair.down[:, part.columns], pair.up[part.rows]))
            if pair is not None and pair.bias is not None and self.adds_bias:
                bias = np.zeros(self.shape[0], np.float32) if bias is None else bias
                bias[part.first : part.first + part.rows.stop - part.rows.start] = pair.bias[part.rows]
        self.slots.write(slot, found, bias)


class LowRankMaps:
    """The source of a model's adapters (`AddendSource`).

    Attributes:
        num_slots: adapters that are on the device at a time.
        rank: the largest.
        maps: the maps that take them, by the first of their modules.
        experts: those of layers' experts, by the first of the first expert's modules.
        modules: (N, K) of each module, of all ranks together.
    """

    def __init__(self, num_slots: int, rank: int) -> None:
        self.num_slots, self.rank = num_slots, rank
        self.maps: dict[str, LowRankMap] = {}
        self.experts: dict[str, LowRankExperts] = {}
        self.modules: dict[str, tuple[int, int]] = {}

    def addends_of(self, declared: DeclaredMap) -> Sequence[LowRankMap]:
        """See `AddendSource`; a map that is declared again replaces itself. Those of pictures' towers take none."""
        if _OF_TOWERS.search(declared.names[0]):
            return ()
        made = LowRankMap(declared, self.num_slots, self.rank)
        self.maps[declared.names[0]] = made
        self.modules.update(declared.whole_maps)
        return (made,)

    def addend_of_experts(self, declared: Sequence[DeclaredMap]) -> LowRankExperts:
        """See `ExpertsSource`; experts that are declared again replace themselves."""
        made = LowRankExperts(declared, self.num_slots, self.rank)
        self.experts[declared[0].names[0]] = made
        for each in declared:
            self.modules.update(each.whole_maps)
        return made

    def allocate(self, options: LoadOptions) -> None:
        """Makes the slots, once the model is loaded; those of experts are made when an adapter has some."""
        for each in self._all:
            each.allocate(options)

    @property
    def _all(self) -> list[LowRankMap | LowRankExperts]:
        return [*self.maps.values(), *self.experts.values()]

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return sum(each.size_bytes for each in self._all)

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> bool:
        """Loads an adapter, checked by `check`, into a slot. True if maps take part from now on that did not before:
        what was recorded of the model lacks them."""
        for each in self.maps.values():
            each.write(slot, pairs)
        are_new = [each.write(slot, pairs) for each in self.experts.values()]
        return any(are_new)

    def check(self, pairs: Mapping[str, Pair]) -> None:
        """Raises InvalidArgumentError, naming the module, for one that the model lacks, other sizes or too high a
        rank."""
        for module, pair in pairs.items():
            if module not in self.modules:
                raise InvalidArgumentError(f"{module}: the model has no such map that takes adapters", param=module)
            outputs, inputs = self.modules[module]
            rank = len(pair.down)
            if pair.down.shape != (rank, inputs) or pair.up.shape != (outputs, rank):
                raise InvalidArgumentError(
                    f"{module}: lora_A is {list(pair.down.shape)} and lora_B {list(pair.up.shape)}, must be"
                    f" [{rank}, {inputs}] and [{outputs}, {rank}]: the adapter is for another model",
                    param=module,
                )
            if rank > self.rank:
                raise InvalidArgumentError(
                    f"{module}: rank {rank}, limit {self.rank}: set max_lora_rank to {rank}", param=module
                )
