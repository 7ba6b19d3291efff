"""Makers: a model's constructor asks one for its matrices, vectors and tables, and so says each of them once.

First it runs over a `DeclaringMaker`, which takes notes of names and shapes: a checkpoint is checked, and bytes are
known, before anything is read. Then it runs over a `LoadingMaker`, which reads a checkpoint or makes dummy weights and
holds the source of one map at a time, so that loading needs little more than one copy of the weights.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from models.checkpoint import TensorLayout
from models.errors import ModelLoadError, WeightsError
from models.rope import make_rope_table, num_table_rows
from models.rope_config import RopeConfig
from models.shares import Share, equal_share
from models.stacked import Order, Stack
from numba_kernels.cuda.packing import Packing, packing_of
from runtime import ops
from runtime.communicator import begins_here, ends_here
from runtime.dtype import DType, float16, float32
from runtime.linear.experts import ExpertsWeight, can_stay_packed
from runtime.linear.format import GGML_FORMATS, WeightFormat, packed_format
from runtime.linear.kept import kept_format
from runtime.linear.linear import Linear
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions, Split
from runtime.linear.packed_matrix import MatrixPart, packing_for, prepare_packed
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix
from runtime.linear.shared_table import SharedTable
from runtime.linear.weight import (
    BlockRows,
    KeptRows,
    LinearWeight,
    MatrixSource,
    PanelWeight,
    RowWeight,
    logits_share,
    packed_bytes,
)
from runtime.ops import RopeTable
from runtime.routing import MOST_HEAD_TOKENS, HeadRouting
from runtime.tensor.cast import cast_array
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]
Width = int | Share
T = TypeVar("T")

_FLOAT16_INFINITY = 0x7C00  # its bits; NaN's are greater


class TensorSource(Protocol):
    """Where tensors come from: a `Checkpoint` or a `DummyCheckpoint`."""

    def main_dtype(self) -> DType: ...

    def dtype(self, name: str) -> DType: ...

    def array(self, name: str) -> Array: ...

    def block_format(self, name: str) -> str | None: ...

    def blocks(self, name: str) -> Array: ...

    def quantized(self, name: str) -> QuantizedLayout | None: ...

    def order(self, name: str) -> Array | None: ...

    def matrix(self, name: str) -> QuantizedMatrix: ...

    def release(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class LinearDeclaration:
    """A linear map: stored as one tensor for each name, or as one for all outputs. Names lack `.weight` and `.bias`.

    `rows` and `columns` are this rank's shares of each of the outputs and of the inputs; tensors are stored whole.
    `is_segmented`: ranks add up K in the order of `numba_kernels.segments`. `norm` is that of its inputs. `kernel` is
    the shape that a convolution's inputs are stored in.
    """

    names: tuple[str, ...]
    rows: tuple[Share, ...]
    columns: Share
    has_bias: bool
    is_transposed: bool
    split: Split | None
    rank: int
    num_ranks: int
    is_segmented: bool
    norm: RmsNorm | None
    kernel: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.names) in (1, len(self.rows)), f"{self.names} cannot be stored as {self.rows}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """This rank's number of each."""
        return tuple(share.count for share in self.rows)

    @property
    def inputs(self) -> int:
        """This rank's number."""
        return self.columns.count

    @property
    def whole_shape(self) -> tuple[int, int]:
        """(N, K) of all ranks' map."""
        return sum(share.whole for share in self.rows), self.columns.whole

    @property
    def is_cut(self) -> bool:
        """Whether this rank has a part of the inputs."""
        return self.split == "inputs" and self.num_ranks > 1

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of this rank's map."""
        return sum(self.outputs), self.inputs

    @property
    def stored_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each tensor's name and shape in the checkpoint."""
        wholes = tuple(share.whole for share in self.rows)
        inputs = self.columns.whole
        for name, count in zip(self.names, wholes if len(self.names) > 1 else (sum(wholes),), strict=True):
            shape = (inputs, count) if self.is_transposed else (count, *(self.kernel or (inputs,)))
            yield f"{name}.weight", shape
            if self.has_bias:
                yield f"{name}.bias", (count,)

    @property
    def parts(self) -> Iterator[tuple[str, slice, slice]]:
        """For each of the outputs its tensor's name, and the rows and columns that this rank takes of it."""
        columns = slice(None)
        if self.split == "inputs":
            columns = slice(self.columns.first, self.columns.first + self.columns.count)
        names = self.names if len(self.names) > 1 else self.names * len(self.rows)
        first = 0
        for name, share in zip(names, self.rows, strict=True):
            start = first + share.first
            yield name, slice(start, start + share.count), columns
            first = 0 if len(self.names) > 1 else first + share.whole

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias. Where the ranks' results are added one does; each, to the segments' sum."""
        return self.has_bias and (self.split != "inputs" or self.rank == 0 or self.is_segmented)


class Maker(ABC):
    """Makes the pieces of a model, or of a stage of it.

    Attributes:
        options: where weights go, and as what. On a GPU, where the activations have the weights' type, all matrices are
            of one: `dtype` is never None there, but the checkpoint's main type.
        dtype: the type of the weights, or of most of them where each keeps its own.
        max_positions: tokens that a sequence may have, for position tables.
        layer_bytes: bytes of each layer that `layers` has made.
    """

    def __init__(self, options: LoadOptions, max_positions: int, main_dtype: DType) -> None:
        if options.dtype is None and options.device.kind != "cpu":
            options = replace(options, dtype=main_dtype)
        self.options = options
        self.dtype = options.dtype or main_dtype
        self.max_positions = max_positions
        self._prefix = ""
        self._source: TensorSource | None = None
        self._sizes: list[int] = []  # shared with the makers below, as is what follows
        self.layer_bytes: list[int] = []
        self.tables: set[str] = set()  # names of the token table and the output head
        self.heads: set[str] = set()  # of the head alone, or of what is both
        self._is_quantisable = True
        self._is_expert = False
        self._keeps_order = True
        self._copies: dict[str, str] = {}  # what may be stored besides, or instead of, the tensor that it must equal
        self._head_routings: dict[int, HeadRouting] = {}  # shared with the makers below
        self._stacks: dict[str, Stack] = {}  # what may be stored instead of the tensors that it holds

    def under(self, name: str) -> Self:
        """This maker for names that begin with `name.`."""
        inner = copy.copy(self)
        inner._prefix = f"{self._prefix}{name}."
        return inner

    @property
    def size_bytes(self) -> int:
        """Bytes of all that was made, as it is kept."""
        return sum(self._sizes)

    @property
    def is_first(self) -> bool:
        """Whether the model begins in this stage."""
        return begins_here(self.options.pipeline)

    @property
    def is_last(self) -> bool:
        """Whether the model ends in this stage."""
        return ends_here(self.options.pipeline)

    def own_layers(self, count: int) -> range:
        """The numbers of this stage's layers, of so many."""
        pipeline = self.options.pipeline
        return range(count) if pipeline is None else self.options.stages[pipeline.stage]

    def in_first(self, make: Callable[[], T]) -> T:
        """What is made, in the first stage; in others None, and nobody uses it there."""
        nothing: Any = None
        return make() if self.is_first else nothing

    def layers(self, name: str, count: int, make: Callable[[int, Maker], T]) -> list[T]:
        """This stage's layers, of the `count` that stand under `name.0`, `name.1` and so on; `make` is given a number
        and what makes the layer's pieces."""
        made = []
        for index in self.own_layers(count):
            before = self.size_bytes
            made.append(make(index, self.under(f"{name}.{index}")))
            self.layer_bytes.append(self.size_bytes - before)
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
    ) -> Linear:
        """The map `name.weight [outputs, inputs]` (`is_transposed`: stored as `[inputs, outputs]`) and, with
        `has_bias`, `name.bias [outputs]`.

        Several names become one map, their outputs one after another. One name with several outputs is stored so.
        `split` says which side is cut between ranks; sizes of that side are then this rank's shares, and numbers are
        shares of which each rank has as much. `norm` goes in front of it.
        """
        assert norm is None or split != "inputs", "a rank does not see the rows that it would normalise"
        names = (names,) if isinstance(names, str) else names
        declaration = LinearDeclaration(
            names=tuple(self._prefix + name for name in names),
            rows=tuple(self._share(each, is_cut=split == "outputs") for each in _several(outputs)),
            columns=self._share(inputs, is_cut=split == "inputs"),
            has_bias=has_bias,
            is_transposed=is_transposed,
            split=split,
            rank=self.options.rank,
            num_ranks=self.options.num_ranks,
            is_segmented=self.options.num_segments(split) > 0,
            norm=norm,
            kernel=kernel,
        )
        weight = self._linear(declaration)
        self._count(weight.size_bytes)
        is_added = declaration.is_cut
        unit = weight.format.segment_step if declaration.is_segmented else weight.format.split
        if is_added and not _is_at_borders(declaration.columns, unit):
            mode = " in exact mode" if declaration.is_segmented else ""
            raise ModelLoadError(
                f"{', '.join(declaration.names)}: a rank would have {declaration.inputs} inputs, but"
                f" {weight.format.name} is cut at multiples of {unit}{mode}"
            )
        return Linear(weight, self.options.communicator if is_added else None, norm)

    def _share(self, width: Width, *, is_cut: bool) -> Share:
        if isinstance(width, Share):
            return width if is_cut else Share(width.count, 0, width.count)
        return equal_share(width, self.options.rank, self.options.num_ranks) if is_cut else Share(width, 0, width)

    def experts(
        self, names: str | Sequence[str], *, count: int, outputs: Width | Sequence[Width], inputs: Width,
        has_bias: bool = False, stack: str = "", stack_order: Order = "in_runs", split: Split | None = None,
    ) -> ExpertsWeight:  # fmt: skip
        """The maps of so many experts, each as `linear` makes it of `experts.<number>.<name>`.

        With a `stack` they may all be stored in `experts.<stack> [count, inputs, outputs]`, columns of several names in
        that order, and their biases in `experts.<stack>_bias [count, outputs]`.

        With a `split` a rank has its share of every expert; who adds what ranks have made is the caller.

        On a GPU quantised experts become floats where no kernel multiplies them (`can_stay_packed`). Raises
        ModelLoadError where there are no kernels for such experts.
        """
        device, gemm = self.options.device, self.options.gemm
        if gemm != "auto":
            raise ModelLoadError(f"{self._prefix}experts: gemm is {gemm!r}, must be 'auto' for mixtures of experts")
        if stack:
            self._note_stack(stack, "weight", names, (count, _whole(inputs)), outputs, stack_order)
        if stack and has_bias:
            self._note_stack(f"{stack}_bias", "bias", names, (count,), outputs, stack_order)
        rows = [self._share(each, is_cut=split == "outputs").count for each in _several(outputs)]
        columns = self._share(inputs, is_cut=split == "inputs").count
        makers = [self.under(f"experts.{number}") for number in range(count)]
        for each in makers:
            each._is_expert, each._keeps_order = True, False
            if not each._keeps_format(rows, columns):
                each.options = replace(self.options, format=None)
        made = ExpertsWeight(
            [
                each.linear(names, outputs=outputs, inputs=inputs, has_bias=has_bias, split=split).weight
                for each in makers
            ]
        )
        if device.kind != "cpu":
            self._count(16 * count)  # of the table of where they lie
        return made

    def _note_stack(
        self, stack: str, part: str, names: str | Sequence[str], shape: tuple[int, ...],
        outputs: Width | Sequence[Width], order: Order,
    ) -> None:  # fmt: skip
        """`shape` is that of the stack without its outputs."""
        total = sum(_whole(each) for each in _several(outputs))
        parts = tuple(f"{name}.{part}" for name in ((names,) if isinstance(names, str) else names))
        under = f"{self._prefix}experts"
        self._stacks[f"{under}.{stack}"] = Stack((*shape, total), under, parts, order)

    def latent_maps(
        self, name: str, *, heads: Share, key_dim: int, value_dim: int, rotary_dim: int, latent_dim: int
    ) -> tuple[ExpertsWeight, ExpertsWeight]:
        """The map `name.weight [heads (key_dim + value_dim), latent_dim]` out of latent rows, absorbed into the maps
        beside it: for each of this rank's heads one for queries, `[rotary_dim + latent_dim, key_dim + rotary_dim]`, and
        one for results, `[value_dim, latent_dim]`.

        A query comes with the key's part first; it goes out with what is rotated first, unchanged, and then what the
        latent row is multiplied with. They are floats, whatever the options say.
        """
        if self.options.gemm != "auto":
            raise ModelLoadError(
                f"{self._prefix}{name}: gemm is {self.options.gemm!r}, must be 'auto' for latent attention"
            )
        inner = copy.copy(self)
        inner.options = replace(self.options, format=None, rounding="")

        def maps_of(stored: Array) -> Iterator[Array]:
            """Of queries for these heads, then of results."""
            parts = stored.reshape(heads.count, key_dim + value_dim, latent_dim)
            for part in parts:
                keys = np.zeros((rotary_dim + latent_dim, key_dim + rotary_dim), stored.dtype)
                keys[:rotary_dim, key_dim:] = np.eye(rotary_dim, dtype=np.float32)
                keys[rotary_dim:, :key_dim] = part[:key_dim].T
                yield keys
            for part in parts:
                yield np.ascontiguousarray(part[key_dim:])

        count = heads.count
        shapes = [(rotary_dim + latent_dim, key_dim + rotary_dim)] * count + [(value_dim, latent_dim)] * count
        made = inner._derived(
            f"{self._prefix}{name}.weight", heads.times(key_dim + value_dim), latent_dim, shapes, maps_of
        )
        for weight in made:
            self._count(weight.size_bytes)
        if self.options.device.kind != "cpu":
            self._count(2 * 16 * count)  # of the tables of where they lie
        return ExpertsWeight(made[:count]), ExpertsWeight(made[count:])

    def head_routing(self, heads: int) -> HeadRouting:
        """How rows of so many heads find the maps of theirs; one for all layers."""
        if heads not in self._head_routings:
            self._head_routings[heads] = self._new_head_routing(heads)
            self._count(2 * 4 * heads * MOST_HEAD_TOKENS)
        return self._head_routings[heads]

    def _new_head_routing(self, heads: int) -> HeadRouting:
        return HeadRouting(heads, self.options.device)

    def unrounded(self) -> Self:
        """This maker for maps that are not quantised, whatever the options say."""
        inner = copy.copy(self)
        inner.options = replace(self.options, format=None, rounding="")
        inner._is_quantisable = False
        return inner

    def router(self, name: str, *, outputs: int, inputs: int, has_bias: bool = False) -> Linear:
        """A small map whose numbers decide what else is computed: it is not quantised, whatever the options say."""
        return self.unrounded().linear(name, outputs=outputs, inputs=inputs, has_bias=has_bias)

    def convolution(self, name: str, *, outputs: int, kernel: tuple[int, ...], has_bias: bool) -> Linear:
        """A convolution whose stride is its size, `name.weight [outputs, *kernel]`, as a map of its windows, flat. It
        is not quantised, whatever the options say."""
        inner = self.unrounded()
        return inner.linear(name, outputs=outputs, inputs=math.prod(kernel), has_bias=has_bias, kernel=kernel)

    def embedding(
        self, name: str, *, head: str, rows: int, columns: int, is_tied: bool
    ) -> tuple[Tensor | LinearWeight | SharedTable, Linear]:
        """The table `name.weight [rows, columns]` and the output head `head.weight` of the same shape.

        With `is_tied` they are one matrix, kept once, and a checkpoint may store either or both. Ranks share out the
        columns of the one and the rows of the other, but one matrix lies whole in each. Of several stages the first
        has the table and the last the head; what a stage has not is None, and nobody uses it there.
        """
        nothing: Any = None
        self.tables |= {f"{self._prefix}{each}.weight" for each in (name, head)}
        self.heads.add(f"{self._prefix}{name if is_tied else head}.weight")
        inner = copy.copy(self)
        inner._keeps_order = False  # rows of a table are read as they are
        if not is_tied:
            table: Tensor | LinearWeight | SharedTable
            if not self.is_first:
                table = nothing
            elif inner._kept_format(f"{self._prefix}{name}.weight", Share(columns, 0, columns)):
                table = inner.linear(name, outputs=rows, inputs=columns).weight
            else:
                table = self._shared_table(f"{name}.weight", rows, columns)
            return table, self._shared_head(head, rows, columns) if self.is_last else nothing
        self._copies[f"{self._prefix}{head}.weight"] = f"{self._prefix}{name}.weight"
        if not (self.is_first or self.is_last):
            return nothing, nothing
        tied = inner.linear(name, outputs=rows, inputs=columns)
        return tied.weight, self._shared_out(tied) if self.is_last else nothing

    def _shared_out(self, head: Linear) -> Linear:
        """The output head, of which each rank multiplies its share where there are several."""
        communicator, weight = self.options.communicator, head.weight
        if communicator is None or not isinstance(weight, PanelWeight | RowWeight):
            return head
        width = weight.shape[0]
        share = logits_share(width, communicator.num_ranks)
        if not share:
            return head
        first = communicator.rank * share
        return Linear(weight.part(first, min(width, first + share)), communicator, head.norm, width)

    def _shared_table(self, name: str, rows: int, columns: int) -> Tensor | SharedTable:
        communicator = self.options.communicator
        share = 0 if communicator is None else logits_share(columns, communicator.num_ranks)
        if communicator is None or not share:
            return self.table(name, rows, columns)
        first = communicator.rank * share
        mine = Share(columns, first, min(share, columns - first))
        return SharedTable(self.table(name, rows, mine), communicator, share, columns)

    def _shared_head(self, name: str, rows: int, columns: int) -> Linear:
        """The output head that is no table, too: each rank has its share of it alone."""
        communicator = self.options.communicator
        share = 0 if communicator is None else logits_share(rows, communicator.num_ranks)
        if communicator is None or not share:
            return self.linear(name, outputs=rows, inputs=columns)
        first = communicator.rank * share
        mine = Share(rows, first, min(share, rows - first))
        head = self.linear(name, outputs=mine, inputs=columns, split="outputs")
        return Linear(head.weight, communicator, head.norm, rows)

    def vector(self, name: str, size: Width, *, add: float = 0.0) -> Tensor:
        """`name [size]` plus `add` as float32, after rounding to the weights' type; norms are computed in float32. Of a
        share it is that part."""
        made = self._vector(self._prefix + name, self._share(size, is_cut=isinstance(size, Share)), add)
        self._count(4 * made.size)
        return made

    def exact_vector(self, name: str, size: int) -> Tensor:
        """The same without rounding: small differences of its numbers decide what else is computed."""
        inner = copy.copy(self)
        inner.options = replace(self.options, dtype=None, format=None, rounding="")
        return inner.vector(name, size)

    def rms_norm(self, name: str, size: int, eps: float, *, add: float = 0.0) -> RmsNorm:
        """The norm in front of a linear map, whose weight is the `vector` of that name."""
        median = self._median(self._prefix + name, add)
        return RmsNorm(self.vector(name, size, add=add), eps, median)

    def table(self, name: str, rows: int, columns: Width) -> Tensor:
        """`name [rows, columns]` in the weights' type, for looking rows up; of a share those columns."""
        made = self._table(self._prefix + name, rows, self._share(columns, is_cut=isinstance(columns, Share)))
        self._count(made.size * made.dtype.itemsize)
        return made

    @abstractmethod
    def rope(self, rope: RopeConfig) -> RopeTable:
        """The table of rotary positions, up to `max_positions`."""

    def _count(self, size_bytes: int) -> None:
        """So many bytes of weights have been made."""
        self._sizes.append(size_bytes)

    def _kept_format(
        self, name: str, columns: Share, declaration: LinearDeclaration | None = None
    ) -> WeightFormat | None:
        """The format in which a quantised matrix is kept as it is stored: on the cpu, if nothing else is asked for,
        there is a kernel for it, and this rank's columns lie between its blocks."""
        options = self.options
        layout = None if self._source is None else self._source.quantized(name)
        is_cut = declaration is not None and declaration.is_cut
        unit = 1
        if layout is not None:
            if layout.has_order and (is_cut or not self._keeps_order):
                return None
            part = replace(layout, shape=(layout.shape[0], columns.count))
            format, unit = kept_format(part, options), layout.block[1] or 1
        elif self._source is None or options.dtype or options.format or options.device.kind != "cpu":
            return None
        else:
            format = GGML_FORMATS.get(self._source.block_format(name) or "")
            if format is not None and columns.whole % format.split:
                return None
        if format is None:
            return None
        if is_cut and declaration is not None:
            step = format.segment_step if declaration.is_segmented else format.split
            return format if all(_is_at_borders(columns, each) for each in (unit, step)) else None
        return format

    def _packing(self, declaration: LinearDeclaration) -> Packing | None:
        """How a GPU keeps a quantised map as it is stored; None: it becomes floats. Its parts must agree."""
        options = self.options
        if self._source is None or options.device.kind == "cpu":
            return None
        if options.format or options.gemm == "cublas":
            return None
        found = set()
        for name in declaration.names:
            layout = None if declaration.is_transposed else self._source.quantized(f"{name}.weight")
            packing = None if layout is None else packing_for(layout)
            if layout is not None and layout.has_order and not self._can_reorder(declaration):
                packing = None
            found.add((packing, layout is not None and layout.has_order))
        packing, has_order = found.pop() if len(found) == 1 else (None, False)
        if packing is not None and has_order and not self._has_one_order(declaration):
            packing = None
        if packing is not None and declaration.is_cut:
            blocks = (self._source.quantized(f"{name}.weight") for name in declaration.names)
            sizes = [max(1, packing.group), *(layout.block[1] for layout in blocks if layout is not None)]
            if not all(_is_at_borders(declaration.columns, size) for size in sizes if size):
                return None
        if packing is None or not self._is_expert:
            return packing
        return packing if self._can_stay(packing, declaration.outputs, declaration.inputs) else None

    def _has_one_order(self, declaration: LinearDeclaration) -> bool:
        """Whether the columns of all parts are stored in the same order, as those of maps of one input mostly are."""
        assert self._source is not None
        orders = [self._source.order(f"{name}.weight") for name in declaration.names]
        return all(each is not None and np.array_equal(each, orders[0]) for each in orders)  # type: ignore[arg-type]

    def _can_reorder(self, declaration: LinearDeclaration) -> bool:
        """Whether a GPU's map takes x's columns in another order. Ranks cannot, and exact mode has one's bits."""
        return self._keeps_order and not declaration.is_cut and not declaration.is_segmented

    def _keeps_format(self, outputs: int | Sequence[int], inputs: int) -> bool:
        """Whether experts are kept in the format that the user asked for."""
        packing = None if self.options.format is None else packing_of(self.options.format.packing)
        each = (outputs,) if isinstance(outputs, int) else outputs
        return self.options.device.kind == "cpu" or packing is None or self._can_stay(packing, each, inputs)

    def _can_stay(self, packing: Packing, outputs: Sequence[int], inputs: int) -> bool:
        """See `can_stay_packed`; `outputs` are this rank's. Raises ModelLoadError where exact mode's ranks would keep
        floats of what one rank keeps packed."""
        can_stay, num_ranks = can_stay_packed(packing, self.dtype, outputs, inputs), self.options.num_ranks
        whole = [each * num_ranks for each in outputs]
        is_shared = self.options.exact and num_ranks > 1
        if is_shared and not can_stay and can_stay_packed(packing, self.dtype, whole, inputs):
            raise ModelLoadError(
                f"{self._prefix}: {outputs[0]} columns of quantised experts are not multiplied as the {whole[0]} of one"
                f" rank are, so exact needs fewer ranks than {num_ranks}"
            )
        return can_stay

    def _dtype_of(self, stored: DType) -> DType:
        """The type of a tensor that is stored in this one."""
        return self.options.dtype or stored

    @abstractmethod
    def _linear(self, declaration: LinearDeclaration) -> LinearWeight: ...

    @abstractmethod
    def _derived(
        self, name: str, rows: Share, columns: int, shapes: Sequence[tuple[int, int]],
        make: Callable[[Array], Iterator[Array]],
    ) -> list[LinearWeight]:  # fmt: skip
        """Maps of these shapes, which `make` makes of these rows of a stored matrix' floats, in its type."""

    @abstractmethod
    def _vector(self, name: str, size: Share, add: float) -> Tensor: ...

    @abstractmethod
    def _median(self, name: str, add: float) -> float:
        """The median of a vector's magnitudes."""

    @abstractmethod
    def _table(self, name: str, rows: int, columns: Share) -> Tensor: ...


class DeclaringMaker(Maker):
    """Notes what a model consists of; what it makes has shapes and types but no numbers.

    Attributes:
        matrices, transposed: names of the tensors of linear maps that may be quantised, and of those among them that
            are stored inputs first.

    Types and `size_bytes` are those of a checkpoint that has been fitted to the layout; without one, as if all were
    float32.
    """

    def __init__(self, options: LoadOptions, max_positions: int, source: TensorSource | None = None) -> None:
        super().__init__(options, max_positions, float32 if source is None else source.main_dtype())
        self._source = source
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.matrices: set[str] = set()
        self.transposed: set[str] = set()

    def layout(self, prefix: str, harmless: Any, renames: Mapping[str, str] = MappingProxyType({})) -> TensorLayout:
        """What a checkpoint must store; `prefix`, `harmless` and `renames` as there."""
        return TensorLayout(self._shapes, prefix, harmless, self._copies, self._stacks, renames)

    def rope(self, rope: RopeConfig) -> RopeTable:
        """See `Maker.rope`."""
        table = _nothing((num_table_rows(rope, self.max_positions), rope.rotary_dim // 2), float32)
        return RopeTable(cos=table, sin=table, interleaved=rope.interleaved)

    def _stored(self, name: str, shape: tuple[int, ...]) -> DType:
        self._shapes[name] = shape
        return float32 if self._source is None else self._source.dtype(name)

    def _linear(self, declaration: LinearDeclaration) -> LinearWeight:
        stored = {name: self._stored(name, shape) for name, shape in declaration.stored_shapes}
        if self._is_quantisable:
            self.matrices |= {f"{name}.weight" for name in declaration.names}
        if declaration.is_transposed and self._is_quantisable:
            self.transposed |= {f"{name}.weight" for name in declaration.names}
        kept = []
        for (name, _, _), count in zip(declaration.parts, declaration.outputs, strict=True):
            format = self._kept_format(f"{name}.weight", declaration.columns, declaration)
            layout = None if self._source is None else self._source.quantized(f"{name}.weight")
            has_order = format is not None and layout is not None and layout.has_order
            kept.append(KeptRows(count, format or self.options.format_of(stored[f"{name}.weight"]), has_order))
        if (packing := self._packing(declaration)) is not None:
            layout = None if self._source is None else self._source.quantized(f"{declaration.names[0]}.weight")
            has_order = layout is not None and layout.has_order
            kept = [KeptRows(sum(declaration.outputs), packed_format(packing), has_order)]
        device = self.options.device
        size_bytes = packed_bytes(
            kept, declaration.inputs, device, has_bias=declaration.adds_bias, activations=self.dtype
        )
        return LinearWeight(declaration.shape, kept[0].format, device, size_bytes)

    def _derived(
        self, name: str, rows: Share, columns: int, shapes: Sequence[tuple[int, int]],
        make: Callable[[Array], Iterator[Array]],
    ) -> list[LinearWeight]:  # fmt: skip
        stored, device = self._stored(name, (rows.whole, columns)), self.options.device
        self.matrices.add(name)
        format = self.options.format_of(stored)
        sizes = [
            packed_bytes([KeptRows(each, format)], inputs, device, has_bias=False, activations=self.dtype)
            for each, inputs in shapes
        ]
        return [LinearWeight(each, format, device, size) for each, size in zip(shapes, sizes, strict=True)]

    def _vector(self, name: str, size: Share, add: float) -> Tensor:
        self._stored(name, (size.whole,))
        return _nothing((size.count,), float32)

    def _median(self, name: str, add: float) -> float:
        return 1.0

    def _table(self, name: str, rows: int, columns: Share) -> Tensor:
        return _nothing((rows, columns.count), self._dtype_of(self._stored(name, (rows, columns.whole))))


class LoadingMaker(Maker):
    """Makes the pieces from a source that fits the model's layout, and tells how many bytes it has made.

    Attributes:
        dequantised_bytes: bytes of quantised tensors, as they are stored, that became floats; by what they are.
    """

    _source: TensorSource

    def __init__(
        self,
        options: LoadOptions,
        max_positions: int,
        source: TensorSource,
        tell: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        super().__init__(options, max_positions, source.main_dtype())
        self._source = source
        self._tell = tell
        self.dequantised_bytes = Counter[str]()  # shared with the makers below

    def _count(self, size_bytes: int) -> None:
        super()._count(size_bytes)
        self._tell(self.size_bytes)

    def _new_head_routing(self, heads: int) -> HeadRouting:
        made = super()._new_head_routing(heads)
        made.reserve()
        return made

    def rope(self, rope: RopeConfig) -> RopeTable:
        """See `Maker.rope`."""
        return make_rope_table(rope, self.max_positions, self.options.device)

    def _linear(self, declaration: LinearDeclaration) -> LinearWeight:
        def part(name: str, rows: slice, columns: slice) -> MatrixSource:
            share, format = declaration.columns, None
            if not declaration.is_transposed:
                format = self._kept_format(f"{name}.weight", share, declaration)
            if format is None:
                return matrix(name, rows, columns)
            first, end = share.first, share.first + share.count
            if self._source.quantized(f"{name}.weight") is not None:
                return self._source.matrix(f"{name}.weight").cut(rows).cut_columns(first, end)
            blocks = BlockRows(self._source.blocks(f"{name}.weight")[rows], format, share.whole)
            return blocks.cut_columns(first, end)

        def matrix(name: str, rows: slice, columns: slice) -> Tensor:
            if declaration.is_transposed:
                if (layout := self._source.quantized(f"{name}.weight")) is not None:
                    raise ModelLoadError(
                        f"tensor '{name}.weight' is quantised ({layout.name}), which is not read for this architecture:"
                        " its maps are stored inputs first"
                    )
                return Tensor.from_numpy(self._array(f"{name}.weight", (columns, rows)).T)
            array = self._array(f"{name}.weight", (rows, columns))
            return Tensor.from_numpy(array.reshape(len(array), -1) if declaration.kernel else array)

        biases = []
        if self._packing(declaration) is not None:
            parts = [
                MatrixPart(self._source.matrix(f"{name}.weight"), rows, columns)
                for name, rows, columns in declaration.parts
            ]
            if not any(part.has_nan for part in parts):
                if declaration.adds_bias:
                    biases = [
                        Tensor.from_numpy(self._rounded(f"{name}.bias", (rows,)))
                        for name, rows, _ in declaration.parts
                    ]
                kept = prepare_packed(parts, biases, self.options, declaration.split, declaration.whole_shape)
                self._release(declaration)
                return kept
        weights: list[MatrixSource] = []
        whole_rows = []
        is_part = declaration.is_cut
        for name, rows, columns in declaration.parts:
            weights.append(part(name, rows, columns))
            if is_part and self.options.format_of(self._source.dtype(f"{name}.weight")).has_row_scales:
                whole_rows.append(matrix(name, rows, slice(None)))
            if declaration.adds_bias:
                biases.append(Tensor.from_numpy(self._rounded(f"{name}.bias", (rows,))))
        packed = ops.prepare_linear(
            weights, biases or None, self.options, split=declaration.split, whole_rows=whole_rows or None,
            norm=declaration.norm, whole_shape=declaration.whole_shape,
        )  # fmt: skip
        del weights, whole_rows
        self._release(declaration)
        return packed

    def _derived(
        self, name: str, rows: Share, columns: int, shapes: Sequence[tuple[int, int]],
        make: Callable[[Array], Iterator[Array]],
    ) -> list[LinearWeight]:  # fmt: skip
        maps = make(self._array(name, (slice(rows.first, rows.first + rows.count), slice(0, columns))))
        made = [ops.prepare_linear([Tensor.from_numpy(each)], None, self.options) for each in maps]
        self._source.release(name)
        return made

    def _release(self, declaration: LinearDeclaration) -> None:
        for name, _ in declaration.stored_shapes:
            self._source.release(name)

    def _vector(self, name: str, size: Share, add: float) -> Tensor:
        return self._keep(self._rounded(name, (slice(size.first, size.first + size.count),)) + np.float32(add), name)

    def _median(self, name: str, add: float) -> float:
        return float(np.median(np.abs(self._rounded(name) + np.float32(add))))

    def _table(self, name: str, rows: int, columns: Share) -> Tensor:
        places = (slice(None), slice(columns.first, columns.first + columns.count)) if columns.is_part else ()
        array = self._array(name, places)
        is_own = array.flags.owndata or self.options.device.kind != "cpu"  # what goes to a GPU is copied there
        return self._keep(array if is_own else array.copy(), name)

    def _keep(self, array: Array, name: str) -> Tensor:
        tensor = Tensor.from_numpy(array).to(self.options.device)
        tensor.storage.freeze()
        self._source.release(name)
        return tensor

    def _rounded(self, name: str, places: tuple[slice, ...] = ()) -> Array:
        return np.array(self._array(name, places), np.float32)

    def _array(self, name: str, places: tuple[slice, ...] = ()) -> Array:
        dtype = self._dtype_of(self._source.dtype(name))
        if (kind := self._source.block_format(name)) is not None:
            self.dequantised_bytes[kind] += self._source.blocks(name).nbytes
        if self._source.quantized(name) is not None:
            rows, columns = (*places, slice(None), slice(None))[:2]
            matrix = self._source.matrix(name)
            self.dequantised_bytes[matrix.layout.name] += matrix.size_bytes
            converted: Array = matrix.dequantise(dtype, rows)[:, columns]
        elif self._source.dtype(name) is dtype:
            return self._source.array(name)[places]
        else:
            converted = cast_array(self._source.array(name)[places], dtype)
        if dtype is float16 and _has_infinity(converted):
            largest = np.abs(cast_array(self._source.array(name)[places], float32)).max()
            raise WeightsError(f"tensor {name!r}: {largest:g} is more than float16 holds, which is 65504")
        return converted


def _several(widths: Width | Sequence[Width]) -> Sequence[Width]:
    return (widths,) if isinstance(widths, int | Share) else widths


def _whole(width: Width) -> int:
    return width.whole if isinstance(width, Share) else width


def _is_at_borders(share: Share, unit: int) -> bool:
    """Whether a share begins and ends between units of the whole."""
    end = share.first + share.count
    return share.first % unit == 0 and (end % unit == 0 or end == share.whole)


def _has_infinity(array: Array) -> bool:
    """Whether float16 held not all of what was converted to it."""
    return array.size > 0 and int((array.view(np.uint16) & 0x7FFF).max()) >= _FLOAT16_INFINITY


def _nothing(shape: tuple[int, ...], dtype: DType) -> Tensor:
    """A tensor of this shape over one element of memory."""
    return Tensor.from_numpy(np.broadcast_to(np.zeros((), dtype.numpy), shape))
