"""Mixtures of experts: routing, and products with the chosen experts.

    router         a decode step's norm, router and choice at once
    routing        logits of a router to experts and weights of each token
    order          the choices of all tokens grouped by expert, in tiles of rows
    tiled          products of such rows: 16 x 16, every type
    tensor_core    the same on tensor cores: 16-bit rows, by the tiles of dense products
    hopper         the same by `wgmma` (sm_90a): many rows of each expert
    packed         the same for experts that stay quantised
    packed_rows    the same for very few rows of each expert
    combine        the weighted sum of a token's experts
    gather         few tokens: straight over the chosen experts, without an order; the sum comes with the second product
    packed_gather  the same for experts that stay quantised
    low_rank       adapters of a linear map, of which each row has one

No launch depends on the routing, no data is copied to the host, and the host has no loop over experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from numba_kernels.cuda.experts import (
    combine,
    gather,
    hopper,
    low_rank,
    order,
    packed,
    packed_gather,
    packed_rows,
    router,
    routing,
    tensor_core,
    tiled,
)
from numba_kernels.cuda.specialisation import Specialisation

__all__ = [
    "combine", "gather", "hopper", "low_rank", "order", "packed", "packed_gather", "packed_rows", "router",
    "routing", "specialisations", "tensor_core", "tiled",
]  # fmt: skip

_PARTS = (
    routing, router, order, tiled, tensor_core, hopper, packed, packed_rows, combine, gather, packed_gather, low_rank
)  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Every kernel of this family."""
    for part in _PARTS:
        yield from part.specialisations()
