"""The maps of latent attention between its queries, rows and results, and whether a prompt's rows are expanded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from runtime.batch import NO_LONG_CHUNKS, Batch, LongChunk, LongChunks
from runtime.dtype import DType
from runtime.later import later
from runtime.linear.adapter_pairs import Pair
from runtime.linear.options import LoadOptions
from runtime.linear.weight import LinearWeight
from runtime.tensor.tensor import Tensor

_attention = later("numba_kernels.cuda.attention")
"""It brings Numba's compiler for GPUs, which the cpu does without."""

_SEGMENT_BYTES = 1 << 27  # of expanded rows, at most
_SEGMENT_ROWS, _LEAST_ROWS = 8192, 128
_FLOPS, _LAUNCH_S = 4e14, 4e-6  # of a GPU with tensor cores: estimates


def can_expand(dtype: DType, head_dim: int, value_dim: int, row_dim: int) -> bool:
    """Whether a GPU has kernels for expanded rows of these sizes."""
    return row_dim * dtype.itemsize % 16 == 0 and bool(_attention.can_expand(dtype.ptx, head_dim, value_dim))


class DeclaredHeads(NamedTuple):
    """The map ``name``, ``[num_heads (key_dim + value_dim), latent_dim]``, of which a rank has ``own_heads`` heads from
    head ``first`` on."""

    name: str
    num_heads: int
    first: int
    own_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    latent_dim: int

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rotary_dim

    @property
    def row_dim(self) -> int:
        """Numbers of a latent row."""
        return self.rotary_dim + self.latent_dim


class LatentAddend(Protocol):
    """The addend of both maps of each head."""

    @property
    def is_empty(self) -> bool:
        """Whether no adapter has changed these maps yet."""

    def add_queries(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """``residual [T, H, row_dim]``, the queries of ``x [T, H head_dim]`` times the keys' maps, plus this."""

    def add_values(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """``residual [T, H value_dim]``, the results of ``x [T, H latent_dim]``, plus this."""


class HeadSlots(LatentAddend, Protocol):
    """A `LatentAddend` of adapters, whose memory is made for the first adapter that changes the map."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""

    def allocate(self, options: LoadOptions) -> None:
        """Notes the type of pairs; slots that were made before are dropped."""

    def write(self, slot: int, pairs: Mapping[str, Pair]) -> bool:
        """Writes an adapter's pair to a slot, or zeros; returns whether memory was made."""


@runtime_checkable
class LatentSource(Protocol):
    """A source that also has addends of latent attention."""

    def addend_of_heads(self, declared: DeclaredHeads) -> LatentAddend:
        """The addend of a layer's heads."""


@dataclass(frozen=True, slots=True)
class LatentMaps:
    """Maps of this rank's heads.

    Few tokens of a sequence multiply their queries by the key's map (`keys`), attend to latent rows as they are, and
    multiply the results by the value's map (`values`). Long chunks make keys and values of each latent row of their
    sequence instead (`expansion`).

    Attributes:
        num_heads: of this rank.
        keys: each head's ``[latent_dim, key_dim]``: on a GPU one after another in a `RowWeight`, on the cpu an
            `ExpertsWeight`.
        values: each head's ``[value_dim, latent_dim]``, kept alike.
        expansion: ``[heads (key_dim + rotary_dim + value_dim), rotary_dim + latent_dim]``: each head's key, with its
            rotated part last, and its value, of a latent row; None where rows are not expanded.
        key_dim, rotary_dim, latent_dim, value_dim: numbers of a head's key without its rotated part, of that, of a
            row without it, and of a head's value.
        addend: what adapters add to `keys` and `values`; None if the model takes no adapters.
    """

    num_heads: int
    keys: Any
    values: Any
    expansion: LinearWeight | None
    key_dim: int
    rotary_dim: int
    latent_dim: int
    value_dim: int
    addend: LatentAddend | None = None

    @property
    def row_dim(self) -> int:
        """Numbers of a latent row."""
        return self.rotary_dim + self.latent_dim

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query, and key."""
        return self.key_dim + self.rotary_dim

    @property
    def pair_dim(self) -> int:
        """Numbers of a head's key and value."""
        return self.head_dim + self.value_dim

    def segment_rows(self, length: int, item_bytes: int) -> int:
        """Rows that are expanded at once, of a sequence of so many."""
        most = _SEGMENT_BYTES // (self.num_heads * self.pair_dim * item_bytes) // _LEAST_ROWS * _LEAST_ROWS
        return min(length, max(_LEAST_ROWS, min(_SEGMENT_ROWS, most)))

    def gain_s(self, context: int, count: int, item_bytes: int = 2) -> float:
        """Seconds that a chunk of `count` tokens after `context` saves a layer if its sequence's rows are expanded.

        With n tokens, L = context + n rows and P = n context + n (n + 1) / 2 pairs, products a head are

            absorbed    n (row_dim head_dim + latent_dim value_dim) + P (row_dim + latent_dim)
            expanded    L row_dim pair_dim                          + P (head_dim + value_dim)

        For DeepSeek's 576, 192, 512, 128 a pair saves 768 and a row costs 184,320: with a long context expanding pays
        from 240 tokens on, and from some 270 with its launches: three a segment and one to write the chunk's rows, a
        few microseconds each. So 16 heads without a context need some 700 tokens.
        """
        rows, pairs = context + count, count * context + count * (count + 1) // 2
        absorbed = count * (self.row_dim * self.head_dim + self.latent_dim * self.value_dim)
        absorbed += pairs * (self.row_dim + self.latent_dim)
        expanded = rows * self.row_dim * self.pair_dim + pairs * (self.head_dim + self.value_dim)
        num_launches = 3 * -(-rows // self.segment_rows(rows, item_bytes)) + 1
        return 2 * self.num_heads * (absorbed - expanded) / _FLOPS - num_launches * _LAUNCH_S

    def long_chunks(self, contexts: Sequence[int], counts: Sequence[int], *, least_gain_s: float = 0.0) -> LongChunks:
        """The chunks of a batch whose rows are to be expanded, if that saves more than so many seconds."""
        found: list[LongChunk] = []
        first, longest = 0, 0
        for seq, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            length = _rounded_up(context + count)
            if self.expansion is not None and self.gain_s(length - count, count) > least_gain_s:
                found.append(LongChunk(seq, first, count, length))
            else:
                longest = max(longest, count)
            first += count
        return LongChunks(tuple(found), longest) if found else NO_LONG_CHUNKS


def _rounded_up(length: int) -> int:
    """To an eighth of a power of two, so that few shapes of steps differ, and at least to `_LEAST_ROWS`."""
    unit = max(_LEAST_ROWS, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // unit) * unit
