"""An adapter's pair of matrices for a module, the outputs of a map that are modules, and the weights that pairs are
written to."""

from __future__ import annotations

from typing import NamedTuple

from numba_kernels.cpu.gemm.panels import pack
from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime.dtype import STORED, NDArray
from runtime.linear.addends import DeclaredMap
from runtime.linear.options import LoadOptions
from runtime.linear.weight import PanelWeight, RowWeight, prepare_linear
from runtime.tensor.tensor import Tensor


class Pair(NamedTuple):
    """A module's part of an adapter: ``down [r, K]``, and ``up [N, r]`` and maybe a ``bias [N]``, which are scaled;
    of the whole module, float32."""

    down: NDArray
    up: NDArray
    bias: NDArray | None = None


class Rows(NamedTuple):
    """Rows ``ids [n]`` int32 of a token table or a head that change by ``values [n, H]`` float32."""

    ids: NDArray
    values: NDArray


Change = Pair | Rows
"""A module's part of an adapter."""


class MapPart(NamedTuple):
    """One of a map's outputs: its module, the map's rows of it, and the module's rows and columns that they are."""

    module: str
    first: int
    rows: slice
    columns: slice

    def put(self, pair: Pair | None, place: int, down: NDArray, up: NDArray, bias: NDArray | None) -> None:
        """Writes a pair of the module to its place among the ranks of ``down [R, K]`` and ``up [N, R]``, zeros
        before."""
        if pair is None:
            return
        own = slice(place, place + len(pair.down))
        down[own] = pair.down[:, self.columns]
        rows = slice(self.first, self.first + self.rows.stop - self.rows.start)
        up[rows, own] = pair.up[self.rows]
        if pair.bias is not None and bias is not None:
            bias[rows] = pair.bias[self.rows]


def parts_of(declared: DeclaredMap) -> list[MapPart]:
    """The outputs of a map, one after another."""
    parts, first = [], 0
    for module, rows, columns in declared.parts:
        parts.append(MapPart(module, first, rows, columns))
        first += rows.stop - rows.start
    return parts


def empty_weight(shape: tuple[int, int], options: LoadOptions, *, has_bias: bool = False) -> PanelWeight | RowWeight:
    """A weight of zeros in the options' type."""
    assert options.dtype is not None
    bias = Tensor.zeros((shape[0],), options.dtype) if has_bias else None
    weight = prepare_linear(Tensor.zeros(shape, options.dtype), bias, options)
    assert isinstance(weight, PanelWeight | RowWeight)
    return weight


def write_weight(weight: object, rows: NDArray, bias: NDArray | None) -> None:
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
