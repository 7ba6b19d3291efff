"""The memory of one map's low-rank adapters on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.dtype import NDArray, int32
from runtime.later import later
from runtime.linear.adapter_pairs import empty_weight, write_weight
from runtime.linear.experts import ExpertsWeight
from runtime.linear.low_rank_slots import CpuSlots, DensePair, SlotShape
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor

_low_rank = later("numba_kernels.cuda.experts.low_rank")
"""It brings Numba's compiler for GPUs, which the cpu does without."""


class GpuSlots:
    """The slots as matrices of experts; ``up`` is one for all parts, zero outside a part's outputs.

    Attributes:
        shape: of all slots.
        down: ``[S, R, K]``; a part's ranks begin at a multiple of `low_rank.RANKS_MULTIPLE`.
        up: ``[S, N, R]``.
        ranges: the kernel's (`numba_kernels.cuda.experts.low_rank`), int32 ``[S, blocks + 1, 2]``; the last entry
            begins with 1 if the slot has a bias.
    """

    def __init__(self, shape: SlotShape, options: LoadOptions) -> None:
        self.shape = shape
        self._rank = _whole(shape.rank)
        ranks = self._rank * len(shape.heights)
        self._blocks = _low_rank.ranges_of(sum(shape.heights)) + 1
        self.ranges = Tensor.zeros((shape.num_slots, self._blocks, 2), int32, options.device)
        self.ranges.storage.freeze()
        self.down = _zero_experts(shape.num_slots, (ranks, shape.depth), options, has_bias=False)
        self.up = _zero_experts(shape.num_slots, (sum(shape.heights), ranks), options, has_bias=True)

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return sum(each.size_bytes for weight in (self.down, self.up) for each in weight.experts)

    def write(self, slot: int, pairs: Sequence[DensePair | None], bias: NDArray | None) -> None:
        """Writes a slot's pairs, one for each part, and zeros elsewhere."""
        rank, (_, outputs, ranks) = self._rank, self.up.shape
        ranges = np.zeros((self._blocks, 2), np.int32)
        down, up = np.zeros((ranks, self.shape.depth), np.float32), np.zeros((outputs, ranks), np.float32)
        first = 0
        for part, (height, pair) in enumerate(zip(self.shape.heights, pairs, strict=True)):
            if pair is not None:
                own = slice(part * rank, part * rank + len(pair.down))
                down[own], up[first : first + height, own] = pair.down, pair.up
                for block in ranges[first // _low_rank.COLUMNS : _low_rank.ranges_of(first + height)]:
                    block[:] = block[0] if block[1] else own.start, own.start + _whole(len(pair.down))
            first += height
        ranges[-1, 0] = bias is not None
        self.ranges.storage.thaw()
        self.ranges[slot] = Tensor.from_numpy(ranges).to(self.ranges.device)
        self.ranges.storage.freeze()
        write_weight(self.down.experts[slot], down, None)
        write_weight(self.up.experts[slot], up, np.zeros(outputs, np.float32) if bias is None else bias)


def _whole(rank: int) -> int:
    multiple = int(_low_rank.RANKS_MULTIPLE)
    return -(-rank // multiple) * multiple


Slots = CpuSlots | GpuSlots


def new_slots(shape: SlotShape, options: LoadOptions) -> Slots:
    """All zeros, of the options' type."""
    assert options.dtype is not None
    return CpuSlots(shape, options.dtype) if options.device.kind == "cpu" else GpuSlots(shape, options)


def _zero_experts(count: int, shape: tuple[int, int], options: LoadOptions, *, has_bias: bool) -> ExpertsWeight:
    return ExpertsWeight([empty_weight(shape, options, has_bias=has_bias) for _ in range(count)])
