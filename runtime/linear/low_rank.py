"""Low-rank adapters (LoRA, arXiv 2106.09685) as addends of linear maps: ``up (down x)``, another pair for each adapter.

A map has memory for a fixed number of adapters of a fixed rank, its slots. Loading an adapter writes a slot of each
map; a recorded step reads whatever a slot holds, since a row's slot is data of the step (`Batch.adapters`).
The map's own product adds them where it can (`riding`); otherwise, on a GPU, they are added to its residual.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from runtime import ops
from runtime.batch import AdaptedRows, Batch
from runtime.dtype import NDArray, bfloat16
from runtime.errors import InvalidArgumentError
from runtime.later import later
from runtime.linear.adapter_pairs import Change, Pair, Rows, parts_of
from runtime.linear.addends import DeclaredMap
from runtime.linear.expert_adapters import LowRankExperts
from runtime.linear.gpu_slots import Slots, new_slots
from runtime.linear.latent import DeclaredHeads, HeadSlots
from runtime.linear.low_rank_slots import DensePair, LowRank, SlotShape
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions
from runtime.linear.table_adapters import LowRankHead, LowRankTable
from runtime.tensor.tensor import Tensor

_latent_adapters = later("runtime.linear.latent_adapters")
_OF_TOWERS = re.compile(r"(?:^|\.)(?:visual|vision\w*|multi_modal_projector|embed_vision)\.")


class LowRankMap:
    """The addend of one map, `num_slots` pairs of `rank`. If it `is_late`, memory is made for the first adapter that
    changes the map."""

    def __init__(self, declared: DeclaredMap, num_slots: int, rank: int, *, is_late: bool = False) -> None:
        self.shape = declared.shape
        self.parts = parts_of(declared)
        if declared.is_segmented:  # it gets all ranks' columns
            self.shape = self.shape[0], next(inputs for _, (_, inputs) in declared.whole_maps)
            self.parts = [part._replace(columns=slice(None)) for part in self.parts]
        self.num_slots, self.rank, self.is_late = num_slots, rank, is_late
        self.adds_bias, self.rounds_x = declared.adds_unsplit, declared.rounds_x
        self._slots: Slots | None = None
        self._options: LoadOptions | None = None

    def allocate(self, options: LoadOptions) -> None:
        """Makes the slots, all zeros: in bfloat16 if the map's product rounds x to bytes, else of the options' type."""
        if self.rounds_x:
            options = replace(options, dtype=bfloat16)
        self._slots, self._options = None, options
        if not self.is_late:
            self._make()

    def _make(self) -> None:
        assert self._options is not None, "slots are made before the first adapter"
        heights = tuple(part.rows.stop - part.rows.start for part in self.parts)
        self._slots = new_slots(SlotShape(heights, self.shape[1], self.rank, self.num_slots), self._options)

    @property
    def slots(self) -> Slots:
        """They are made before the first step."""
        assert self._slots is not None
        return self._slots

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return 0 if self._slots is None else self._slots.size_bytes

    def riding(self, x: Tensor, batch: Batch | AdaptedRows, takes: Callable[[Slots], bool]) -> LowRank | None:
        """See `RidingAddend`."""
        if self.is_empty or not takes(self.slots):
            return None
        assert batch.adapters is not None, "a batch without adapters does not come here"
        return LowRank(self.slots, x, batch.adapters, batch.computed)

    @property
    def is_empty(self) -> bool:
        """See `LateAddend`."""
        return self._slots is None and self.is_late

    def add_to(
        self, residual: Tensor | None, x: Tensor, batch: Batch | AdaptedRows, norm: RmsNorm | None = None
    ) -> Tensor | None:
        """See `RidingAddend`."""
        if self.is_empty:
            return residual
        return ops.low_rank(x, batch, self.slots, residual=residual, norm=norm)

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> bool:
        """Writes an adapter's pairs, by module, to a slot; the others become zeros. No step may run that reads it.
        Returns whether memory was made."""
        is_new = self.is_empty
        if is_new:
            if not any(part.module in pairs for part in self.parts):
                return False
            self._make()
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
        return is_new


class LowRankMaps:
    """The source of a model's adapters (`AddendSource`).

    Attributes:
        num_slots: adapters that are on the device at a time.
        rank: the largest.
        maps: the maps that take them, by the first of their modules.
        experts: those of layers' experts, by the first of the first expert's modules.
        table, head: those of the token table and the output head; None in a stage without it.
        routers: those of routers, by name.
        heads: those of latent attention's heads, by their map's name.
        modules: (N, K) of each module, of all ranks together; a token table's are of one-hot rows.
        tables: names of the token table and the head.
        transposed: modules that checkpoints store inputs first.
        of_towers: modules of towers and projectors of pictures.
    """

    def __init__(self, num_slots: int, rank: int) -> None:
        self.num_slots, self.rank = num_slots, rank
        self.maps: dict[str, LowRankMap] = {}
        self.experts: dict[str, LowRankExperts] = {}
        self.table: LowRankTable | None = None
        self.head: LowRankHead | None = None
        self.routers: dict[str, LowRankHead] = {}
        self.heads: dict[str, HeadSlots] = {}
        self._head_numbers: dict[int, Tensor] = {}
        self.modules: dict[str, tuple[int, int]] = {}
        self.tables: set[str] = set()
        self.transposed: set[str] = set()
        self.of_towers: set[str] = set()

    def addends_of(self, declared: DeclaredMap) -> Sequence[LowRankMap]:
        """See `AddendSource`; a map that is declared again replaces itself."""
        is_of_tower = _OF_TOWERS.search(declared.names[0]) is not None
        made = LowRankMap(declared, self.num_slots, self.rank, is_late=is_of_tower)
        if is_of_tower:
            self.of_towers.update(declared.names)
        self.maps[declared.names[0]] = made
        self.modules.update(declared.whole_maps)
        if declared.is_transposed:
            self.transposed.update(declared.names)
        return (made,)

    def addend_of_experts(self, declared: Sequence[DeclaredMap]) -> LowRankExperts:
        """See `ExpertsSource`; experts that are declared again replace themselves."""
        made = LowRankExperts(declared, self.num_slots, self.rank)
        self.experts[declared[0].names[0]] = made
        for each in declared:
            self.modules.update(each.whole_maps)
        return made

    def declare_table(self, name: str, rows: int, columns: int) -> None:
        """See `TableSource`."""
        self.table = LowRankTable(name, rows, columns, self.num_slots, self.rank)
        self.modules[name] = columns, rows
        self.tables.add(name)

    def addend_of_head(self, name: str, rows: int, columns: int, first: int, count: int) -> LowRankHead:
        """See `TableSource`."""
        self.head = LowRankHead(name, rows, columns, self.num_slots, self.rank, first, count)
        self.modules[name] = rows, columns
        self.tables.add(name)
        return self.head

    def addend_of_router(self, name: str, rows: int, columns: int) -> LowRankHead:
        """See `TableSource`; a router that is declared again replaces itself."""
        self.routers[name] = LowRankHead(name, rows, columns, self.num_slots, self.rank, 0, rows)
        self.modules[name] = rows, columns
        return self.routers[name]

    def addend_of_heads(self, declared: DeclaredHeads) -> HeadSlots:
        """See `LatentSource`; heads that are declared again replace themselves."""
        made: HeadSlots = _latent_adapters.LowRankHeads(declared, self.num_slots, self.rank, self._head_numbers)
        self.heads[declared.name] = made
        self.modules[declared.name] = declared.num_heads * (declared.key_dim + declared.value_dim), declared.latent_dim
        return made

    @property
    def _all(self) -> Iterator[LowRankMap | LowRankExperts | HeadSlots | LowRankTable | LowRankHead]:
        yield from self.maps.values()
        yield from self.experts.values()
        yield from self.heads.values()
        yield from self.routers.values()
        yield from (each for each in (self.table, self.head) if each is not None)

    def allocate(self, options: LoadOptions) -> None:
        """Makes the slots, once the model is loaded; those of experts, latent attention's heads, routers, towers, table
        and head are made when an adapter has such changes."""
        for each in self._all:
            each.allocate(options)

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return sum(each.size_bytes for each in self._all)

    def write(self, slot: int, changes: Mapping[str, Change]) -> bool:
        """Loads an adapter, checked by `check`, into a slot. True if maps take part from now on that did not before:
        what was recorded of the model lacks them."""
        pairs = {module: change for module, change in changes.items() if isinstance(change, Pair)}
        are_new = [each.write(slot, pairs) for each in self.maps.values()]
        are_new += [experts.write(slot, pairs) for experts in self.experts.values()]
        are_new += [heads.write(slot, pairs) for heads in self.heads.values()]
        tables = (self.table, self.head, *self.routers.values())
        are_new += [table.write(slot, changes) for table in tables if table is not None]
        return any(are_new)

    def check(self, changes: Mapping[str, Change]) -> None:
        """Raises InvalidArgumentError, naming the module, for one that the model lacks, other sizes or too high a
        rank."""
        for module, pair in changes.items():
            if module not in self.modules:
                raise InvalidArgumentError(f"{module}: the model has no such map that takes adapters", param=module)
            outputs, inputs = self.modules[module]
            if isinstance(pair, Rows):
                self._check_rows(module, pair)
                continue
            if pair.bias is not None and self.table is not None and module == self.table.name:
                raise InvalidArgumentError(f"{module}: has a bias, which a token table has not", param=module)
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

    def _check_rows(self, module: str, change: Rows) -> None:
        outputs, inputs = self.modules[module]
        is_head = self.head is not None and module == self.head.name
        rows, columns = (outputs, inputs) if is_head else (inputs, outputs)
        if module not in self.tables:
            raise InvalidArgumentError(f"{module}: is no token table and no head, whose rows may change", param=module)
        if change.values.shape != (len(change.ids), columns):
            raise InvalidArgumentError(
                f"{module}: has trained rows {list(change.values.shape)}, must be [{len(change.ids)}, {columns}]: the"
                " adapter is for another model",
                param=module,
            )
        if len(change.ids) and not 0 <= change.ids.min() <= change.ids.max() < rows:
            raise InvalidArgumentError(
                f"{module}: row {change.ids.max()} is trained, the model has {rows}: adapters that add tokens are not"
                " served; merge it into a model with them",
                param=module,
            )
