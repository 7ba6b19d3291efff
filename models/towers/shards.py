"""A rank's share of a tower: heads of the attention, columns of the MLP, as of the language model's layers.

Widths that cannot be split are whole in each rank: published towers have widths that ranks and formats do not divide,
and are small beside their language models. In exact mode the choice must not depend on the number of ranks, since a
split map adds up its inputs in another order.
"""

from __future__ import annotations

import math
from typing import Literal

from models.makers.shards import UNIT, Shard, shard_of_width
from numba_kernels.split_k import SEGMENTS, STEP
from runtime.linear.options import LoadOptions


class TowerShard:
    """A width of which each rank has a part, or all of it.

    Attributes:
        share: this rank's part.
        outputs, inputs: the cuts of the maps that make it and that read it, or None if they are whole.
    """

    def __init__(self, shard: Shard, *, is_parted: bool) -> None:
        self.shard = shard
        self.outputs: Literal["outputs"] | None = "outputs" if is_parted else None
        self.inputs: Literal["inputs"] | None = "inputs" if is_parted else None


def share_of_tower(width: int, options: LoadOptions, *, head_dim: int = 1) -> TowerShard:
    """This rank's part of `width` columns, or of as many heads of so many columns."""
    whole = TowerShard(Shard(width * head_dim, 0, width * head_dim), is_parted=False)
    columns, ranks = width * head_dim, options.num_ranks
    unit = 1 if options.format is None else options.format.split
    if options.rounding:
        return whole  # rows are rounded together
    if options.exact:
        step = math.lcm(STEP, unit)
        if width % SEGMENTS or columns % (SEGMENTS * step):
            return whole
        shard = shard_of_width(columns, options.rank, ranks, exact=True)
    elif head_dim > 1:
        if width % ranks or columns // ranks % unit:
            return whole
        shard = shard_of_width(columns, options.rank, ranks, exact=True)
    else:
        unit = math.lcm(UNIT, unit)
        each, more = divmod(-(-columns // unit), ranks)
        if not each:
            return whole
        first = (options.rank * each + min(options.rank, more)) * unit
        end = min(columns, first + (each + (options.rank < more)) * unit)
        shard = Shard(columns, first, end - first)
    assert shard is not None, "the width is divided evenly"
    return TowerShard(shard, is_parted=True)
