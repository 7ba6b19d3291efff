"""The matrices of a layer's experts: one linear map each, all of one shape and kept alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from numba_kernels.cuda.packing import Packing
from runtime.device import tensor_map
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import DType, NDArray, dtype_of_array
from runtime.errors import InvalidArgumentError
from runtime.later import later
from runtime.linear.addends import DeclaredMap
from runtime.linear.weight import GpuWeight, JoinedWeight, LinearWeight, PackedWeight, PanelWeight, Plans, RowWeight
from runtime.tensor.tensor import Tensor

_packed, _hopper = later("numba_kernels.cuda.experts.packed"), later("numba_kernels.cuda.experts.hopper")
"""They bring Numba's compiler for GPUs, which the cpu does without."""


def can_stay_packed(packing: Packing, dtype: DType, outputs: Sequence[int], inputs: int) -> bool:
    """Whether a GPU multiplies rows of this type by quantised experts, of one map or of gate and up."""
    return bool(_packed.can_plan(packing, dtype.ptx, outputs[0], inputs, is_gated=len(outputs) > 1))


class ExpertsAddend(Protocol):
    """The addend of one map of a layer's experts."""

    @property
    def pairs(self) -> tuple[ExpertsWeight, ExpertsWeight] | None:
        """``down [A E, R, K]`` and ``up [A E, N, R]``, the experts of each adapter one after another; None if no
        adapter changes them."""


@runtime_checkable
class ExpertsSource(Protocol):
    """A source that also has addends of experts."""

    def addend_of_experts(self, declared: Sequence[DeclaredMap]) -> ExpertsAddend | None:
        """The addend of the experts' maps, given those of each expert."""


class ExpertsWeight:
    """Matrices ``[E, N, K]`` with their biases, read by `ops.experts`.

    Attributes:
        experts: the E weights.
        parts: each expert's weight in its parts, which are kept in formats of their own; one where it is one.
        tables: on the cpu, for each part, ``[3, E]`` int64: the addresses of each expert's panels, scales and bias.
            Empty for weights that are only declared.
        table: on a GPU, in its memory, ``[2, E]`` int64: the addresses of each expert's rows and bias, or 0; else None.
        table_address: of `table`, or 0.
        maps, maps_address: on Hopper, of 16-bit rows on 16-byte bounds, ``[E, 128]`` uint8: a tensor map of each
            expert's rows; else None, and 0.
        packing: on a GPU, the packing of all of them, or None for floats.
        exact: on a GPU, whether a row's bits may not depend on how many rows there are.
        plans: on a GPU, of the products with experts of their kind.
        addend: added to the products (`runtime.linear.addends`), or None.

    Raises InvalidArgumentError for no expert, and for experts of different shapes or formats.
    """

    __slots__ = (
        "_parts", "addend", "exact", "experts", "maps", "maps_address", "packing", "parts", "plans", "table",
        "table_address", "tables",
    )  # fmt: skip

    def __init__(self, experts: Sequence[LinearWeight]) -> None:
        if not experts:
            raise InvalidArgumentError("ExpertsWeight: experts is empty, must hold at least one", param="experts")
        self.experts = tuple(experts)
        self.parts: list[tuple[Any, ...]] = [
            each.parts if isinstance(each, JoinedWeight) else (each,) for each in experts
        ]
        self.check_alike()
        self.tables: list[NDArray] = []
        self.table: Tensor | None = None
        self.maps: Tensor | None = None
        self.table_address, self.maps_address, self.exact = 0, 0, False
        self.packing: Packing | None = None
        self.plans = Plans()
        self.addend: ExpertsAddend | None = None
        self._parts: dict[tuple[int, int], ExpertsWeight] = {}
        if isinstance(weight := self.experts[0], GpuWeight):
            places = [[each.address for each in experts], [each.bias_address for each in experts]]  # type: ignore[attr-defined]
            self.table = _kept(np.array(places, np.int64), weight.device)
            self.table_address, self.exact = self.table.address, weight.exact
            self.plans = weight.plans
            self.packing = weight.packing if isinstance(weight, PackedWeight) else None
            self.maps = _tensor_maps(self.experts)
            self.maps_address = 0 if self.maps is None else self.maps.address
        if isinstance(self.parts[0][0], PanelWeight):
            assert all(part.order is None for parts in self.parts for part in parts), "x is one for all experts"
            self.tables = [
                np.array(
                    [
                        [getattr(parts[place], f"{name}_address") for parts in self.parts]
                        for name in ("panels", "scales", "bias")
                    ],
                    np.int64,
                )
                for place in range(len(self.parts[0]))
            ]

    def check_alike(self) -> None:
        """Raises InvalidArgumentError for experts of different shapes or formats."""
        first = [(part.shape, part.format) for part in self.parts[0]]
        for number, parts in enumerate(self.parts):
            if (kind := [(part.shape, part.format) for part in parts]) != first:
                theirs, ours = (", ".join(f"{format.name} {shape}" for shape, format in each) for each in (kind, first))
                raise InvalidArgumentError(
                    f"ExpertsWeight: expert {number} is {theirs}, must be as expert 0: {ours}", param="experts"
                )

    def some(self, first: int, end: int) -> ExpertsWeight:
        """The experts ``first`` up to ``end``, in the same memory."""
        if (first, end) == (0, len(self.experts)):
            return self
        if (first, end) not in self._parts:
            self._parts[first, end] = ExpertsWeight(self.experts[first:end])
        return self._parts[first, end]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        return len(self.experts), *self.experts[0].shape


def _tensor_maps(experts: Sequence[LinearWeight]) -> Tensor | None:
    """Tensor maps of the experts' rows, in GPU memory, for the products that read them by the TMA."""
    weights = [each for each in experts if isinstance(each, RowWeight)]
    rows, depth = experts[0].shape
    gpu = Gpu.of(experts[0].device)
    can_map = len(weights) == len(experts) and all(each.address % 16 == 0 for each in weights)
    if not can_map or not _hopper.can_plan(gpu.arch, weights[0].activations.ptx, rows, depth):
        return None
    layout = _hopper.map_layout(weights[0].activations.ptx, rows, depth)
    maps = b"".join(tensor_map.encode(gpu.driver, each.address, layout) for each in weights)
    return _kept(np.frombuffer(maps, np.uint8).reshape(len(weights), _hopper.MAP_BYTES), gpu.device)


def _kept(array: NDArray, device: Device) -> Tensor:
    """The array in frozen memory of a GPU; `ExpertsWeight.some` may make it in a pass that is recorded."""
    block = Gpu.of(device).upload_to_keep(array)
    made = Tensor.over_device(device, block.address, dtype_of_array(array), array.shape, None, block)
    made.storage.freeze()
    return made
