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
from typing import NamedTuple

import numpy as np

from numba_kernels.cpu.gemm.panels import pack
from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime import ops
from runtime.batch import Batch
from runtime.dtype import STORED, NDArray
from runtime.errors import InvalidArgumentError
from runtime.linear.addends import DeclaredMap
from runtime.linear.experts import ExpertsWeight
from runtime.linear.options import LoadOptions
from runtime.linear.weight import PanelWeight, RowWeight, prepare_linear
from runtime.tensor.tensor import Tensor

_OF_TOWERS = re.compile(r"(?:^|\.)(?:visual|vision\w*|multi_modal_projector|embed_vision)\.")


class Pair(NamedTuple):
    """A module's part of an adapter: ``down [r, K]``, and ``up [N, r]`` and maybe a ``bias [N]``, which are scaled;
    of the whole module, float32."""

    down: NDArray
    up: NDArray
    bias: NDArray | None = None


class _Part(NamedTuple):
    """One of a map's outputs: its module, the map's rows of it, and the module's rows and columns that they are."""

    module: str
    first: int
    rows: slice
    columns: slice


class LowRankMap:
    """The addend of one map, `num_slots` pairs of `rank`."""

    def __init__(self, declared: DeclaredMap, num_slots: int, rank: int) -> None:
        self.shape = declared.shape
        self.num_slots, self.rank = num_slots, rank
        self.adds_bias = declared.adds_unsplit
        self.parts: list[_Part] = []
        first = 0
        for module, rows, columns in declared.parts:
            self.parts.append(_Part(module, first, rows, columns))
            first += rows.stop - rows.start
        self.down: ExpertsWeight | None = None
        self.ups: list[ExpertsWeight] = []

    def allocate(self, options: LoadOptions) -> None:
        """Makes the slots, all zeros, of the options' type."""
        (outputs, inputs), rank = self.shape, self.rank * len(self.parts)
        heights = [part.rows.stop - part.rows.start for part in self.parts]
        shapes = [(height, self.rank) for height in heights] if options.device.kind == "cpu" else [(outputs, rank)]
        self.down = ExpertsWeight([_zeros((rank, inputs), options) for _ in range(self.num_slots)])
        self.ups = [
            ExpertsWeight([_zeros(shape, options, has_bias=True) for _ in range(self.num_slots)]) for shape in shapes
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
            pair = pairs.get(part.module)
            if pair is not None:
                own = slice(number * rank, number * rank + len(pair.down))
                down[own] = pair.down[:, part.columns]
                rows = slice(part.first, part.first + part.rows.stop - part.rows.start)
                up[rows, own] = pair.up[part.rows]
                if pair.bias is not None and self.adds_bias:
                    bias[rows] = pair.bias[part.rows]
        _write(self.down.experts[slot], down, None)
        column = first = 0
        for weight in self.ups:
            _, height, width = weight.shape
            rows = slice(first, first + height)
            _write(weight.experts[slot], up[rows, column : column + width], bias[rows])
            first, column = first + height, column + width


class LowRankMaps:
    """The source of a model's adapters (`AddendSource`).

    Attributes:
        num_slots: adapters that are on the device at a time.
        rank: the largest.
        maps: the maps that take them, by the first of their modules.
        modules: (N, K) of each module, of all ranks together.
    """

    def __init__(self, num_slots: int, rank: int) -> None:
        self.num_slots, self.rank = num_slots, rank
        self.maps: dict[str, LowRankMap] = {}
        self.modules: dict[str, tuple[int, int]] = {}

    def addends_of(self, declared: DeclaredMap) -> Sequence[LowRankMap]:
        """See `AddendSource`; a map that is declared again replaces itself. Those of pictures' towers take none."""
        if _OF_TOWERS.search(declared.names[0]):
            return ()
        made = LowRankMap(declared, self.num_slots, self.rank)
        self.maps[declared.names[0]] = made
        self.modules.update(declared.whole_maps)
        return (made,)

    def allocate(self, options: LoadOptions) -> None:
        """Makes all slots, once the model is loaded."""
        for each in self.maps.values():
            each.allocate(options)

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return sum(each.size_bytes for each in self.maps.values())

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """Loads an adapter, checked by `check`, into a slot."""
        for each in self.maps.values():
            each.write(slot, pairs)

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


def _zeros(shape: tuple[int, int], options: LoadOptions, *, has_bias: bool = False) -> PanelWeight | RowWeight:
    assert options.dtype is not None
    bias = Tensor.zeros((shape[0],), options.dtype) if has_bias else None
    weight = prepare_linear(Tensor.zeros(shape, options.dtype), bias, options)
    assert isinstance(weight, PanelWeight | RowWeight)
    return weight


def _write(weight: object, rows: NDArray, bias: NDArray | None) -> None:
    """Writes all of a weight."""
    if isinstance(weight, PanelWeight):
        stored = Tensor.from_numpy(rows).to(weight.format.element)
        pack(weight.panels, weight.scales, stored.array.view(STORED[stored.dtype]), 0, NUM_THREADS)
        if bias is not None:
            weight.bias[: len(bias)] = bias
        return
    assert isinstance(weight, RowWeight)
    weight.weight.storage.thaw()
    weight.weight[:] = Tensor.from_numpy(rows).to(weight.weight.dtype).to(weight.device)
    weight.weight.storage.freeze()
    if bias is not None and weight.bias is not None:
        weight.bias[:] = Tensor.from_numpy(bias).to(weight.device)
