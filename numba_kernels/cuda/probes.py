"""Kernels that measure a device: one that only reads memory, and empty ones.

A driver answers how many clusters of blocks it runs at once, given a kernel (`plan_cluster`): a cluster's blocks lie in
one GPC, and GPCs differ in how many multiprocessors they have; of 132 multiprocessors not all are in a cluster of 8.
That kernel takes so much shared memory that a multiprocessor holds one block, as the products' do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types, uint32, uint64

from numba_kernels.cuda.intrinsics.memory import store_b32, stream_4xb32
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = 512
CLUSTER_SIZES = (2, 4, 8)


@functools.cache
def read_kernel() -> Specialisation:
    """``sums[thread]`` = the sum, modulo 2^32, of every n-th 16 bytes; four loads in flight a thread.

    Arguments: data, sums, count of 16-byte pieces (a multiple of four times the number of threads).
    """

    @cuda.jit
    def kernel(data, sums, count):
        threads = uint64(cuda.gridDim.x) * uint64(THREADS)
        thread = uint64(cuda.blockIdx.x) * uint64(THREADS) + uint64(cuda.threadIdx.x)
        step = threads * uint64(16)
        address = data + thread * uint64(16)
        end = data + count * uint64(16)
        total = uint32(0)
        while address < end:
            a = stream_4xb32(address)
            b = stream_4xb32(address + step)
            c = stream_4xb32(address + step + step)
            d = stream_4xb32(address + step + step + step)
            total = uint32(total + a[0] + a[1] + a[2] + a[3] + b[0] + b[1] + b[2] + b[3])
            total = uint32(total + c[0] + c[1] + c[2] + c[3] + d[0] + d[1] + d[2] + d[3])
            address += uint64(4) * step
        store_b32(sums + thread * uint64(4), total)

    return Specialisation("read_sums", kernel, (types.uint64,) * 3, THREADS)


@functools.cache
def empty_kernel() -> Specialisation:
    """An empty kernel with eight arguments, four addresses and four integers: the cost of a launch alone."""

    @cuda.jit
    def kernel(a, b, c, d, e, f, g, h):
        return

    return Specialisation("empty", kernel, (types.uint64,) * 4 + (types.int32,) * 4, 32)


@functools.cache
def _cluster_probe() -> Specialisation:
    @cuda.jit
    def nothing():
        pass

    return Specialisation(name="occupancy_probe", kernel=nothing, argument_types=(), max_threads=128, min_capability=90)


def plan_cluster(cluster_size: int, shared_bytes: int) -> Launch:
    """One cluster of so many blocks, each with all of a multiprocessor's shared memory."""
    return Launch(_cluster_probe(), (cluster_size, 1, 1), (128, 1, 1), shared_bytes, cluster=(cluster_size, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """All three."""
    yield read_kernel()
    yield empty_kernel()
    yield _cluster_probe()
