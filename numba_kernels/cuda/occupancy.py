"""An empty kernel, for querying a driver how many clusters of blocks it runs at once.

A cluster's blocks lie in one GPC, and GPCs differ in how many multiprocessors they have: of 132 multiprocessors not all
are in a cluster of 8. The query needs a kernel; this one takes so much shared memory that a multiprocessor holds one
block, as the products' do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda

from numba_kernels.cuda.specialisation import Launch, Specialisation

CLUSTER_SIZES = (2, 4, 8)


@functools.cache
def _nothing() -> Specialisation:
    @cuda.jit
    def nothing():
        pass

    return Specialisation(name="occupancy_probe", kernel=nothing, argument_types=(), max_threads=128, min_capability=90)


def plan(cluster_size: int, shared_bytes: int) -> Launch:
    """One cluster of so many blocks, each with all of a multiprocessor's shared memory."""
    return Launch(_nothing(), (cluster_size, 1, 1), (128, 1, 1), shared_bytes, cluster=(cluster_size, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """The family's one kernel."""
    yield _nothing()
