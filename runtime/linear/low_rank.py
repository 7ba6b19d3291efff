"""Low-rank adapters (LoRA, arXiv 2106.09685) as addends of linear maps: ``up (down x)``, another pair for each adapter.

A map has memory for a fixed number of adapters of a fixed rank, its slots. Loading an adapter writes a slot of each
map; a recorded step reads whatever a slot holds, since a row's slot is data of the step (`Batch.adapters`). Slots are
zeros where an adapter has a lower rank, or does not change the map.

The maps that a checkpoint keeps apart and a model joins (queries, keys and values) have a pair each: their ranks lie
one after another. On a GPU they share one ``up``, which is zero outside its map's outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from runtime import ops
from runtime.batch import Batch
from runtime.errors import InvalidArgumentError
from runtime.linear.adapter_pairs import Pair, empty_weight, parts_of, write_weight
from runtime.linear.addends import DeclaredMap
from runtime.linear.expert_adapters import LowRankExperts
from runtime.linear.experts import ExpertsWeight
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
        self.down: ExpertsWeight | None = None
        self.ups: list[ExpertsWeight] = []

    def allocate(self, options: LoadOptions) -> None:
        """Makes the slots, all zeros, of the options' type."""
        (outputs, inputs), rank = self.shape, self.rank * len(self.parts)
        heights = [part.rows.stop - part.rows.start for part in self.parts]
        shapes = [(height, self.rank) for height in heights] if options.device.kind == "cpu" else [(outputs, rank)]
        self.down = ExpertsWeight([empty_weight((rank, inputs), options) for _ in range(self.num_slots)])
        self.ups = [
            ExpertsWeight([empty_weight(shape, options, has_bias=True) for _ in range(self.num_slots)])
            for shape in shapes
        ]

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        weights = [] if self.down is None else [self.down, *self.ups]
        return sum(each.size_bytes for weight in weights for each in weight.experts)

    def add_to(self, residual: Tensor | None, x: Tensor, batch: Batch) -> Tensor | None:
        """See `Addend`."""
        assert self.down is not None, "slots are made before the first step"
        return ops.low_rank(x, batch, self.down, self.ups, residual=residual)

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """Writes an adapter's pairs, by module, to a slot; the others become zeros. No step may run that reads it."""
        assert self.down is not None
        (outputs, inputs), rank = self.shape, self.rank
        down = np.zeros((rank * len(self.parts), inputs), np.float32)
        up = np.zeros((outputs, rank * len(self.parts)), np.float32)
        bias = np.zeros(outputs, np.float32)
        for number, part in enumerate(self.parts):
            part.put(pairs.get(part.module), number * rank, down, up, bias if self.adds_bias else None)
        write_weight(self.down.experts[slot], down, None)
        column = first = 0
        for weight in self.ups:
            _, height, width = weight.shape
            rows = slice(first, first + height)
            write_weight(weight.experts[slot], up[rows, column : column + width], bias[rows])
            first, column = first + height, column + width


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
        for each in (*self.maps.values(), *self.experts.values()):
            each.allocate(options)

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return sum(each.size_bytes for each in (*self.maps.values(), *self.experts.values()))

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
