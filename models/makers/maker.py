"""Makers: a model's constructor asks one for its matrices, vectors and tables; each is declared once.

First it runs over a `DeclaringMaker`, which records names and shapes: a checkpoint is checked against them, and
bytes are known by its headers, before anything is read. Then it runs over a `LoadingMaker`, which reads a checkpoint or
makes dummy weights and holds the source of one map at a time, so that loading needs little more than one copy of the
weights.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.stacked import Order, RowStack, Stack
from models.configuration.rope_config import RopeConfig
from models.errors import ModelLoadError
from models.makers.declaration import Array, HeadPart, LinearDeclaration, Width, several, whole_width
from models.makers.kept_formats import KeptFormats
from models.makers.shards import Shard, equal_shard, whole_shard
from runtime.communicator import begins_here, ends_here
from runtime.dtype import DType
from runtime.linear.addends import Addend
from runtime.linear.experts import ExpertsSource, ExpertsWeight
from runtime.linear.latent import DeclaredHeads, LatentMaps, LatentSource, can_expand
from runtime.linear.linear import Linear
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions, Split
from runtime.linear.shared_table import SharedTable
from runtime.linear.stored_table import StoredTable
from runtime.linear.table_adapters import TableSource
from runtime.linear.weight import (
    LinearWeight,
    PanelWeight,
    RowWeight,
    logits_share,
)
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

T = TypeVar("T")


class Maker(ABC):
    """Makes the pieces of a model, or of a stage of it.

    Attributes:
        options: the device and types of weights. On a GPU, where the activations have the weights' type, all matrices
            are of one: `dtype` is never None there, but the checkpoint's main type.
        dtype: the type of the weights, or of most of them where each keeps its own.
        max_positions: tokens that a sequence may have, for position tables.
    """

    def __init__(self, options: LoadOptions, max_positions: int, main_dtype: DType) -> None:
        if options.dtype is None and options.device.kind != "cpu":
            options = replace(options, dtype=main_dtype)
        self.options = options
        self.dtype = options.dtype or main_dtype
        self.max_positions = max_positions
        self._prefix = ""
        self._source: Checkpoint | None = None
        self._sizes: list[int] = []  # shared with the makers below, as are the next ones
        self._layer_spans: list[slice] = []  # of the sizes
        self._mapped: list[int] = []  # sizes of tables that stay in their files
        self.tables: set[str] = set()  # names of the token table and the output head
        self.heads: set[str] = set()  # of the head alone, or of a tied table
        self._is_quantisable = self._takes_addends = True
        self._is_expert = False
        self._of_experts: list[LinearDeclaration] = []  # of one map of a layer's experts
        self._keeps_order = True
        self._copies: dict[str, str] = {}  # may be stored besides, or instead of, the tensor that they must equal
        self._stacks: dict[str, Stack | RowStack] = {}  # may be stored instead of the tensors that they hold

    def under(self, name: str) -> Self:
        """This maker for names that begin with `name.`."""
        return self._with(_prefix=f"{self._prefix}{name}.")

    def _with(self, **changed: Any) -> Self:
        """This maker with other attributes."""
        inner = copy.copy(self)
        vars(inner).update(changed)
        return inner

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces, as they are kept."""
        return sum(self._sizes)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of tables that are not among the weights, as they are stored."""
        return sum(self._mapped)

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer that `layers` has made."""
        return [sum(self._sizes[span]) for span in self._layer_spans]

    @property
    def is_first(self) -> bool:
        """Whether the model begins in this stage."""
        return begins_here(self.options.pipeline)

    @property
    def is_last(self) -> bool:
        """Whether the model ends in this stage."""
        return ends_here(self.options.pipeline)

    def own_layers(self, count: int) -> range:
        """The numbers of this stage's layers, out of `count`."""
        pipeline = self.options.pipeline
        return range(count) if pipeline is None else self.options.stages[pipeline.stage]

    def in_first(self, make: Callable[[], T]) -> T:
        """The result of `make` in the first stage; None in others, which do not use it."""
        nothing: Any = None
        return make() if self.is_first else nothing

    def layers(self, name: str, count: int, make: Callable[[int, Maker], T]) -> list[T]:
        """This stage's layers, of the `count` that stand under `name.0`, `name.1` and so on; `make` gets a number and
        the maker of the layer's pieces."""
        made = []
        for index in self.own_layers(count):
            first = len(self._sizes)
            made.append(make(index, self.under(f"{name}.{index}")))
            self._layer_spans.append(slice(first, len(self._sizes)))
        return made

    def linear(
        self,
        names: str | Sequence[str],
        *,
        outputs: Width | Sequence[Width],
        inputs: Width,
        has_bias: bool = False,
        is_transposed: bool = False,
        split: Split | None = None,
        norm: RmsNorm | None = None,
        kernel: tuple[int, ...] = (),
        floats: Collection[str] = (),
        bias_of: str = "",
    ) -> Linear:
        """The map `name.weight [outputs, inputs]` (`is_transposed`: stored as `[inputs, outputs]`) and, with
        `has_bias`, `name.bias [outputs]`.

        Several names become one map, their outputs one after another. One name with several outputs is stored so.
        `split` says which side is cut between ranks; sizes of that side are then this rank's shares, and numbers are
        split equally. `norm` is applied first. Those of the names in `floats` are not quantised. `bias_of` names the
        map whose bias it has, if that is stored as another map's.
        """
        assert norm is None or split != "inputs", "a rank does not see the rows that it would normalise"
        names = (names,) if isinstance(names, str) else names
        declaration = LinearDeclaration(
            names=tuple(self._prefix + name for name in names),
            rows=tuple(self._share(each, is_cut=split == "outputs") for each in several(outputs)),
            columns=self._share(inputs, is_cut=split == "inputs"),
            has_bias=has_bias,
            is_transposed=is_transposed,
            split=split,
            rank=self.options.rank,
            num_ranks=self.options.num_ranks,
            is_segmented=self.options.num_segments(split) > 0,
            norm=norm,
            kernel=kernel,
            floats=frozenset(self._prefix + name for name in floats),
            bias_of=bias_of and self._prefix + bias_of,
        )
        weight = self._linear(declaration)
        self._count(weight.size_bytes)
        communicator = self.options.communicator if declaration.is_cut else None
        declaration = replace(declaration, rounds_x=all(map(self.options.rounds_x, weight.formats)))
        return Linear(weight, communicator, norm, addends=self._addends(declaration))

    def _addends(self, declaration: LinearDeclaration) -> Sequence[Addend]:
        source, is_table = self.options.addends, f"{declaration.names[0]}.weight" in self.tables
        if self._is_expert:
            self._of_experts.append(declaration)
        if source is None or is_table or self._is_expert or not self._takes_addends:
            return ()
        return source.addends_of(declaration)

    @property
    def _formats(self) -> KeptFormats:
        return KeptFormats(self.options, self._source, self.dtype, self._prefix, self._is_expert, self._keeps_order)

    def _share(self, width: Width, *, is_cut: bool) -> Shard:
        if isinstance(width, Shard):
            return width if is_cut else whole_shard(width.count)
        return equal_shard(width, self.options.rank, self.options.num_ranks) if is_cut else whole_shard(width)

    def experts(
        self, names: str | Sequence[str], *, count: int, outputs: Width | Sequence[Width], inputs: Width,
        has_bias: bool = False, stack: str = "", stack_order: Order = "in_runs", split: Split | None = None,
    ) -> ExpertsWeight:  # fmt: skip
        """The maps of so many experts, each as `linear` makes it of `experts.<number>.<name>`.

        With a `stack` they may all be stored in `<stack> [count, inputs, outputs]`, columns of several names in that
        order, and their biases in `<stack>_bias [count, outputs]`.

        With a `split` a rank has its share of every expert; the caller adds the ranks' results.

        On a GPU quantised experts become floats if no kernel multiplies them (`can_stay_packed`). Raises ModelLoadError
        if there are no kernels for such experts.
        """
        device, gemm = self.options.device, self.options.gemm
        if gemm != "auto":
            raise ModelLoadError(f"{self._prefix}experts: gemm is {gemm!r}, must be 'auto' for mixtures of experts")
        if stack:
            self._note_stack(stack, "weight", names, (count, whole_width(inputs)), outputs, stack_order)
        if stack and has_bias:
            self._note_stack(f"{stack}_bias", "bias", names, (count,), outputs, stack_order)
        rows = [self._share(each, is_cut=split == "outputs").count for each in several(outputs)]
        columns = self._share(inputs, is_cut=split == "inputs").count
        inner = self._with(_is_expert=True, _keeps_order=False, _of_experts=[])
        if not isinstance(names, str) and len(names) > 1:
            sizes = tuple(whole_width(each) for each in several(outputs))
            for number in range(count):
                inner.under(f"experts.{number}").note_row_stack(
                    "gate_up_proj", names, sizes, whole_width(inputs), has_bias=has_bias, is_usual=False
                )
        if not inner._formats.keeps_asked(rows, columns):
            inner.options = replace(self.options, format=None)
        made = ExpertsWeight([
            inner.under(f"experts.{number}")
            .linear(names, outputs=outputs, inputs=inputs, has_bias=has_bias, split=split)
            .weight
            for number in range(count)
        ])  # fmt: skip
        if device.kind != "cpu":
            self._count(16 * count)  # of the table of their addresses
        if isinstance(self.options.addends, ExpertsSource):
            made.addend = self.options.addends.addend_of_experts(inner._of_experts)
        return made

    def _note_stack(
        self, stack: str, part: str, names: str | Sequence[str], shape: tuple[int, ...],
        outputs: Width | Sequence[Width], order: Order,
    ) -> None:  # fmt: skip
        """`shape` is that of the stack without its outputs."""
        total = sum(whole_width(each) for each in several(outputs))
        parts = tuple(f"{name}.{part}" for name in ((names,) if isinstance(names, str) else names))
        whole = (shape[0], total, *shape[1:]) if order == "outputs_first" else (*shape, total)
        self._stacks[f"{self._prefix}{stack}"] = Stack(whole, f"{self._prefix}experts", parts, order)

    def note_head_stack(
        self, stack: str, parts: Sequence[str], q_heads: Shard, kv_heads: Shard, head_dim: int, inputs: int, *,
        has_bias: bool,
    ) -> None:  # fmt: skip
        """Records that the maps `parts` of queries, keys and values may be stored in one, `stack`, by heads of keys."""
        sizes = (q_heads.whole // kv_heads.whole * head_dim, head_dim, head_dim)
        self.note_row_stack(stack, parts, sizes, inputs, groups=kv_heads.whole, has_bias=has_bias)

    def note_row_stack(
        self, stack: str, parts: Sequence[str], sizes: tuple[int, ...], inputs: int, *, groups: int = 1,
        has_bias: bool = False, is_usual: bool = True,
    ) -> None:  # fmt: skip
        """Records that the maps `parts` may be stored in one, `stack`, with `sizes` rows of each per group; `is_usual`
        if most files of the family have it so."""
        for part, rest in (("weight", (inputs,)), ("bias", ())) if has_bias else (("weight", (inputs,)),):
            names = tuple(f"{self._prefix}{name}.{part}" for name in parts)
            self._stacks[f"{self._prefix}{stack}.{part}"] = RowStack(
                (groups * sum(sizes), *rest), names, sizes, is_usual
            )

    def latent_maps(
        self, name: str, *, heads: Shard, key_dim: int, value_dim: int, rotary_dim: int, latent_dim: int
    ) -> LatentMaps:
        """The map `name.weight [heads (key_dim + value_dim), latent_dim]` out of latent rows, absorbed into the maps
        beside it: for each of this rank's heads one for queries, and one for results (`LatentMaps`).

        A query comes with the key's part first; it leaves with the rotated part first, followed by the part that is
        multiplied with the latent row. On the cpu the maps stay in blocks where a file has them by head, and values
        where it has both in one. Else they are floats. A GPU also gets the map that expands rows, if it has kernels for
        heads of these sizes, and unless a token's bits may not depend on its chunk.
        """
        if self.options.gemm != "auto":
            raise ModelLoadError(
                f"{self._prefix}{name}: gemm is {self.options.gemm!r}, must be 'auto' for latent attention"
            )
        inner = self._with(options=replace(self.options, format=None, rounding=""))

        count, row_dim, head_dim = heads.count, rotary_dim + latent_dim, key_dim + rotary_dim
        is_cpu, full_name = self.options.device.kind == "cpu", f"{self._prefix}{name}.weight"
        expands = not is_cpu and not self.options.exact and can_expand(inner.dtype, head_dim, value_dim, row_dim)

        def maps_of(stored: Array) -> Iterator[Array]:
            """The maps of queries for these heads, then those of results."""
            parts = stored.reshape(count, key_dim + value_dim, latent_dim)
            keys, values = np.ascontiguousarray(parts[:, :key_dim].swapaxes(1, 2)), parts[:, key_dim:]
            if is_cpu:
                yield from keys
                yield from values
                return
            yield keys.reshape(-1, key_dim)
            yield np.ascontiguousarray(values).reshape(-1, latent_dim)
            if expands:
                pairs = np.zeros((count, head_dim + value_dim, row_dim), stored.dtype)
                pairs[:, :key_dim, rotary_dim:] = parts[:, :key_dim]
                pairs[:, key_dim:head_dim, :rotary_dim] = np.eye(rotary_dim, dtype=np.float32)
                pairs[:, head_dim:, rotary_dim:] = values
                yield pairs.reshape(-1, row_dim)

        rows = heads.times(key_dim + value_dim)
        if is_cpu:
            shapes = [(latent_dim, key_dim)] * count + [(value_dim, latent_dim)] * count
            size, every = key_dim + value_dim, range(heads.first, heads.first + count)
            places = [("keys", head, slice(head * size, head * size + key_dim)) for head in every]
            places += [("values", head, slice(head * size + key_dim, (head + 1) * size)) for head in every]
        else:
            shapes = [(count * latent_dim, key_dim), (count * value_dim, latent_dim)]
            shapes, places = shapes + [(count * (head_dim + value_dim), row_dim)] * expands, []
        made = inner._derived(full_name, rows, latent_dim, shapes, maps_of, self._formats, places)
        for weight in made:
            self._count(weight.size_bytes)
        keys, values = (ExpertsWeight(made[:count]), ExpertsWeight(made[count:])) if is_cpu else made[:2]
        addend, source = None, self.options.addends
        if isinstance(source, LatentSource):
            addend = source.addend_of_heads(
                DeclaredHeads(
                    f"{self._prefix}{name}", heads.whole, heads.first, count, key_dim, value_dim, rotary_dim, latent_dim
                )
            )
        expansion = made[-1] if expands else None
        return LatentMaps(count, keys, values, expansion, key_dim, rotary_dim, latent_dim, value_dim, addend)

    def unrounded(self, *, takes_addends: bool = False) -> Self:
        """This maker for maps that are never quantised."""
        return self._with(
            options=replace(self.options, format=None, rounding=""), _is_quantisable=False,
            _takes_addends=takes_addends,
        )  # fmt: skip

    @property
    def stacks(self) -> Mapping[str, Stack | RowStack]:
        """Tensors that a checkpoint may store for several maps together, by name. It grows while the model is made."""
        return self._stacks

    def router(self, name: str, *, outputs: int, inputs: int, has_bias: bool = False) -> Linear:
        """A router's map, which decides which experts are computed: it is never quantised."""
        made = self.unrounded().linear(name, outputs=outputs, inputs=inputs, has_bias=has_bias)
        source = self.options.addends
        if isinstance(source, TableSource):
            made.addends = (source.addend_of_router(f"{self._prefix}{name}", outputs, inputs),)
        return made

    def convolution(self, name: str, *, outputs: int, kernel: tuple[int, ...], has_bias: bool) -> Linear:
        """A convolution whose stride is its size, `name.weight [outputs, *kernel]`, as a map of its windows, flat. It
        is never quantised."""
        return self.unrounded().linear(
            name, outputs=outputs, inputs=math.prod(kernel), has_bias=has_bias, kernel=kernel
        )

    def embedding(
        self, name: str, *, head: str, rows: int, columns: int, is_tied: bool, has_bias: bool = False
    ) -> tuple[Tensor | LinearWeight | SharedTable, Linear]:
        """The table `name.weight [rows, columns]` and the output head `head.weight` of the same shape, with
        `has_bias` and `head.bias [rows]`.

        With `is_tied` they are one matrix, kept once, and a checkpoint may store either or both. Ranks share out the
        columns of the one and the rows of the other, but one matrix lies whole in each. With several stages the first
        has the table and the last the head; the other is None.
        """
        nothing: Any = None
        self.tables |= {f"{self._prefix}{each}.weight" for each in (name, head)}
        self.heads.add(f"{self._prefix}{name if is_tied else head}.weight")
        source = self.options.addends if isinstance(self.options.addends, TableSource) else None
        if source is not None:
            source.declare_table(f"{self._prefix}{name}", rows, columns)
        inner = self._with(_keeps_order=False)  # a table's rows are read in stored order
        if not is_tied:
            table = inner._word_table(name, rows, columns) if self.is_first else nothing
            return table, self._adapted_head(
                head, self._shared_head(head, rows, columns, has_bias)
            ) if self.is_last else nothing
        self._copies[f"{self._prefix}{head}.weight"] = f"{self._prefix}{name}.weight"
        if not (self.is_first or self.is_last):
            return nothing, nothing
        tied = inner.linear(name, outputs=rows, inputs=columns, has_bias=has_bias, bias_of=head)
        return tied.weight, self._adapted_head(head, self._shared_out(tied)) if self.is_last else nothing

    def _adapted_head(self, name: str, head: Linear) -> Linear:
        """The output head with its addends."""
        source = self.options.addends
        if isinstance(source, TableSource):
            count, columns = head.shape
            mine = self._logits_shard(head.whole_width) if head.whole_width else whole_shard(count)
            assert mine is not None, "a share is one of several ranks'"
            head.addends = (
                source.addend_of_head(f"{self._prefix}{name}", mine.whole, columns, mine.first, mine.count),
            )
        return head

    def _shared_out(self, head: Linear) -> Linear:
        """The output head; with several ranks each multiplies its share."""
        weight, width = head.weight, head.weight.shape[0]
        mine = self._logits_shard(width)
        if mine is None or not isinstance(weight, PanelWeight | RowWeight):
            return head
        return Linear(weight.part(mine.first, mine.first + mine.count), self.options.communicator, head.norm, width)

    def _logits_shard(self, width: int) -> Shard | None:
        """This rank's columns of the token table, or rows of the head; None if it has all."""
        communicator = self.options.communicator
        each = 0 if communicator is None else logits_share(width, communicator.num_ranks)
        if communicator is None or not each:
            return None
        first = communicator.rank * each
        return Shard(width, first, min(each, width - first))

    def _word_table(self, name: str, rows: int, columns: int) -> Tensor | LinearWeight | SharedTable:
        """The token table `name.weight` of an untied model: quantised as it is stored, or its rows as floats."""
        if self._formats.kept(f"{self._prefix}{name}.weight", whole_shard(columns)):
            return self.linear(name, outputs=rows, inputs=columns).weight
        return self._shared_table(f"{name}.weight", rows, columns)

    def _shared_table(self, name: str, rows: int, columns: int) -> Tensor | SharedTable:
        communicator, mine = self.options.communicator, self._logits_shard(columns)
        if communicator is None or mine is None:
            return self.table(name, rows, columns)
        each = logits_share(columns, communicator.num_ranks)
        return SharedTable(self.table(name, rows, mine), communicator, each, columns)

    def _shared_head(self, name: str, rows: int, columns: int, has_bias: bool) -> Linear:
        """An untied output head: each rank holds only its share."""
        mine = self._logits_shard(rows)
        if mine is None:
            return self.linear(name, outputs=rows, inputs=columns, has_bias=has_bias)
        head = self.linear(name, outputs=mine, inputs=columns, has_bias=has_bias, split="outputs")
        return Linear(head.weight, self.options.communicator, head.norm, rows)

    def vector(self, name: str, size: Width, *, add: float = 0.0, stored: tuple[int, ...] | None = None) -> Tensor:
        """`name [size]` plus `add` as float32, after rounding to the weights' type; norms are computed in float32. With
        a share, only that part. `stored` is the checkpoint's shape if it differs, with as many elements."""
        shard = self._share(size, is_cut=isinstance(size, Shard))
        made = self._vector(self._prefix + name, shard, add, stored or (shard.whole,))
        self._count(4 * made.size)
        return made

    def exact_vector(self, name: str, size: Width, *, stored: tuple[int, ...] | None = None) -> Tensor:
        """The same without rounding, for vectors that decide which experts are computed, or how fast a state decays."""
        return self._unrounded_floats().vector(name, size, stored=stored)

    def decay(self, name: str, size: Width) -> Tensor:
        """``-exp(name)``, the factors of a recurrent state's decay, `[size]` float32 without rounding."""
        inner = self._unrounded_floats()
        shard = inner._share(size, is_cut=isinstance(size, Shard))
        made = inner._vector(inner._prefix + name, shard, 0.0, (shard.whole,), lambda x: -np.exp(x))
        self._count(4 * made.size)
        return made

    def _unrounded_floats(self) -> Self:
        return self._with(options=replace(self.options, dtype=None, format=None, rounding=""))

    def taps(self, name: str, channels: Width | Sequence[Width], count: int) -> Tensor:
        """A convolution over time, a channel by itself: `name.weight [channels, 1, count]` as float32 `[channels,
        count]`, rounded as `vector` is. This rank has its share of each of several widths. With a count of 0 it is the
        bias, `name.bias [channels]`."""
        widths = several(channels)
        shares = [self._share(each, is_cut=isinstance(each, Shard)) for each in widths]
        made = self._taps(f"{self._prefix}{name}.{'weight' if count else 'bias'}", shares, count)
        self._count(4 * made.size)
        return made

    def number(self, name: str, shape: tuple[int, ...] = ()) -> float:
        """The one number of `name`, which is stored in this shape, after rounding to the weights' type."""
        return self._number(self._prefix + name, shape)

    def ones(self, size: int) -> Tensor:
        """The weights of a norm that stores none: `[size]` float32."""
        made = self._ones(size)
        self._count(4 * size)
        return made

    def rms_norm(self, name: str, size: int, eps: float, *, add: float = 0.0) -> RmsNorm:
        """The norm before a linear map, whose weight is the `vector` of that name."""
        median = self._median(self._prefix + name, add)
        return RmsNorm(self.vector(name, size, add=add), eps, median)

    def table(self, name: str, rows: int, columns: Width) -> Tensor:
        """`name [rows, columns]` in the weights' type, for looking rows up; with a share, those columns."""
        made = self._table(self._prefix + name, rows, self._share(columns, is_cut=isinstance(columns, Shard)))
        self._count(made.size * made.dtype.itemsize)
        return made

    def mapped_table(self, name: str, rows: int, columns: int) -> Tensor | StoredTable:
        """`name [rows, columns]`, as large as a model, for looking a row a token up. On the cpu it stays in its file,
        whose pages are read as rows are; a GPU reads rows in pinned memory of the host."""
        return self._mapped_table(self._prefix + name, rows, columns)

    @abstractmethod
    def rope(self, rope: RopeConfig) -> RopeTable:
        """The table of rotary positions, up to `max_positions`."""

    def _count(self, size_bytes: int) -> None:
        """Counts so many bytes of weights."""
        self._sizes.append(size_bytes)

    def _dtype_of(self, stored: DType) -> DType:
        """The kept type of a tensor that is stored in this one."""
        return self.options.dtype or stored

    @abstractmethod
    def _linear(self, declaration: LinearDeclaration) -> LinearWeight: ...

    @abstractmethod
    def _derived(
        self, name: str, rows: Shard, columns: int, shapes: Sequence[tuple[int, int]],
        make: Callable[[Array], Iterator[Array]], formats: KeptFormats, places: Sequence[HeadPart] = (),
    ) -> list[LinearWeight]:  # fmt: skip
        """Maps of these shapes, made by `make` from these rows of a stored matrix in floats, in its type. With
        `places` of each, a map stays in blocks if the source has it so, and if `formats` allow that."""

    @abstractmethod
    def _vector(
        self,
        name: str,
        size: Shard,
        add: float,
        stored: tuple[int, ...],
        change: Callable[[Array], Array] | None = None,
    ) -> Tensor: ...

    @abstractmethod
    def _taps(self, name: str, shares: Sequence[Shard], count: int) -> Tensor: ...

    @abstractmethod
    def _number(self, name: str, shape: tuple[int, ...]) -> float: ...

    @abstractmethod
    def _ones(self, size: int) -> Tensor: ...

    @abstractmethod
    def _median(self, name: str, add: float) -> float:
        """The median of a vector's magnitudes."""

    @abstractmethod
    def _table(self, name: str, rows: int, columns: Shard) -> Tensor: ...

    @abstractmethod
    def _mapped_table(self, name: str, rows: int, columns: int) -> Tensor | StoredTable: ...
