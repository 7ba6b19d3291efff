"""The interface between makers and checkpoints: declarations of maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.makers.shards import Shard
from runtime.linear.norm import RmsNorm
from runtime.linear.options import Split

Array = np.ndarray[Any, Any]
Width = int | Shard
HeadPart = tuple[str, int, slice]
""""keys" or "values" of a head, and their rows in the map of all heads' both."""


@dataclass(frozen=True, slots=True)
class LinearDeclaration:
    """A linear map, stored as one tensor for each name or one for all outputs. Names lack `.weight` and `.bias`.

    `rows` and `columns` are this rank's shares of each of the outputs and of the inputs; tensors are stored whole.
    `is_segmented`: ranks add up K in the order of `numba_kernels.split_k`. `norm` is applied to its inputs. `kernel`
        is the stored shape of a convolution's inputs. `floats` are the names of those that are not quantised.
    `bias_of` is the name of the map whose bias it has, if that is stored as another map's. `rounds_x`: its product
        rounds x to bytes.
    """

    names: tuple[str, ...]
    rows: tuple[Shard, ...]
    columns: Shard
    has_bias: bool
    is_transposed: bool
    split: Split | None
    rank: int
    num_ranks: int
    is_segmented: bool
    norm: RmsNorm | None
    kernel: tuple[int, ...] = ()
    floats: frozenset[str] = frozenset()
    bias_of: str = ""
    rounds_x: bool = False

    def __post_init__(self) -> None:
        assert len(self.names) in (1, len(self.rows)), f"{self.names} cannot be stored as {self.rows}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """This rank's number of outputs, for each name."""
        return tuple(shard.count for shard in self.rows)

    @property
    def inputs(self) -> int:
        """This rank's number of inputs."""
        return self.columns.count

    @property
    def whole_shape(self) -> tuple[int, int]:
        """(N, K) of all ranks' map."""
        return sum(shard.whole for shard in self.rows), self.columns.whole

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
        wholes = tuple(shard.whole for shard in self.rows)
        inputs = self.columns.whole
        for name, count in zip(self.names, wholes if len(self.names) > 1 else (sum(wholes),), strict=True):
            shape = (inputs, count) if self.is_transposed else (count, *(self.kernel or (inputs,)))
            yield f"{name}.weight", shape
            if self.has_bias:
                yield self.bias_name(name), (count,)

    def bias_name(self, name: str) -> str:
        """The bias's tensor of the map of that name."""
        return f"{self.bias_of or name}.bias"

    @property
    def parts(self) -> Iterator[tuple[str, slice, slice]]:
        """For each of the outputs its tensor's name, and the rows and columns that this rank takes of it."""
        columns = slice(None)
        if self.split == "inputs":
            columns = slice(self.columns.first, self.columns.first + self.columns.count)
        names = self.names if len(self.names) > 1 else self.names * len(self.rows)
        first = 0
        for name, shard in zip(names, self.rows, strict=True):
            start = first + shard.first
            yield name, slice(start, start + shard.count), columns
            first = 0 if len(self.names) > 1 else first + shard.whole

    @property
    def whole_maps(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Each tensor's name, and (N, K) of all ranks' map."""
        wholes = tuple(shard.whole for shard in self.rows)
        for name, count in zip(self.names, wholes if len(self.names) > 1 else (sum(wholes),), strict=True):
            yield name, (count, self.columns.whole)

    @property
    def adds_unsplit(self) -> bool:
        """Whether this rank adds what ranks add once: one does if their results are added, each for a sum of
        segments."""
        return self.split != "inputs" or self.rank == 0 or self.is_segmented

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias."""
        return self.has_bias and self.adds_unsplit


def several(widths: Width | Sequence[Width]) -> Sequence[Width]:
    return (widths,) if isinstance(widths, int | Shard) else widths


def whole_width(width: Width) -> int:
    return width.whole if isinstance(width, Shard) else width
