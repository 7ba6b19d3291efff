"""The blocks of a product of few rows (`skinny.py`): their number, shapes, a model of their time, and the order of
the factors in `mma.sync`.

A block has 16, 32 or 64 rows of x, and 8 warps. A packed weight leaves a choice of rows: blocks of fewer rows are more
blocks, which each unpack the weight again; and of clusters, whose blocks share K.

The time of a step, 32 of K for all warps of a block, is latency and issue more than bandwidth. It was measured on an
H200 (docs/measurements, 2026-11-26): 8192 x 8192, 4096 x 12288 and 6144 x 4096, INT4 and FP8. Other numbers are marked
as estimated. The GPU ran 31 or fewer clusters of 4 blocks at once, though it has 132 multiprocessors: 32 of them took
two rounds, and twice the weight's time. So clusters are only so large that all run in one round.

The first factor's four registers are neighbours, and so are the second's two. A 16-bit weight comes as it is
multiplied, 16 bytes of a row a lane: two pairs of neighbours, which are the second factor's. x is the first, and some
of its registers move. A packed weight's pairs are made one by one, in any register: it is the first factor, 16 rows of
it, x the second, and no register moves.

    first factor    a lane's sums of tile j: 16 rows of x, 32 of the weight    elements of `sums`
    x               rows g, g + 8; columns 8 r + 2 t, + 1, of r = 0 to 3       16 j + 4 r + 2 (row) + (column)
    the weight      rows 8 i + 2 t, + 1, of i = 0, 1; columns 16 h + g, + 8    16 j + 8 i + 4 h + 2 (column) + (row)

with g = lane // 4, t = lane % 4. Both take the same elements of K at once, and add them in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numba import types

from numba_kernels.cuda.gemm.product import LATENCY_S, Machine, Product, unpacking_s
from numba_kernels.cuda.gemm.weight_stream import STEP, settles, unit_of
from numba_kernels.cuda.intrinsics import convert, memory, mma
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.fragments import add_scaled, load_all, multiply_all
from numba_kernels.cuda.packing import packing_of

MAX_ROWS = 64
ROW_TILES = (1, 2, 4)  # of 16 rows of x, for which kernels exist
BLOCK_WARPS = 8
SPILLING = {("sm_100a", "u4_g128", 2), ("sm_100a", "u4_g128_zeros", 2)}
"""Weights and row tiles for which ptxas finds some registers short; 1 or 4 of these have enough."""
MANY_COLUMNS = 8449
"""From here on two teams of columns fill a large GPU, and x is read half as often. Below, blocks of a single team are
at most 264, two for each multiprocessor of a H200."""
MANY_PACKED_COLUMNS = 5120  # the same of packed weights, whose blocks of 32 or 64 rows have a multiprocessor each
SCALES_BYTES = 4 * MAX_ROWS  # at the beginning of shared memory: of x's rows
_UNPACKING = {"u4_g128": 624, "u4_g128_zeros": 663, "u4": 775, "e2m1": 856, "u8": 446, "e4m3": 474}
"""Machine instructions of a warp for 4 KB of a weight and 16 rows, by its name, or else its elements (`unpacking`)."""

_BYTES_UNDER_WAY = 64 << 10  # of the weight, that a block has in flight: 8 warps of 16 loads
_PACKED_EFFICIENCY = 0.7  # of the tensor cores' rate, where rows are many; estimated
_SUSTAINED = 0.9  # of the bandwidth: no read of x is spared below what the weight takes anyway
_MEETING_S = 0.4e-6  # of a cluster's blocks, and sums out of each other's shared memory; an estimate
_STEP_S = {1: 0.42e-6, 2: 0.45e-6, 4: 0.65e-6}
"""A step's time by row tiles, where a multiprocessor has one block: measured for 1 (0.35 to 0.45); those for 2 and 4
were estimates, within a tenth of what INT4 was then measured to take (FP8 takes up to an eighth longer). The
kernel of 4 that copied x only one step ahead took 0.93; without clusters it still does."""
_STEP_ONE_AHEAD_S = 0.93e-6
_STEP_OF_TWO_S = 0.54e-6  # of two blocks of 16 rows beside each other; estimated
_TEAMS_S = 0.03e-6
"""A step waits so much longer for each doubling of the teams that share x, and each 16 rows: measured for 64 rows, 0.12
between 2 teams and 8, a doubling."""
_ENDS_S = 4.5e-6  # a launch and its first loads, and its last sums: measured


def unpacking(weight: str) -> int:
    """Machine instructions of a warp for 4 KB of a packed weight and 16 rows."""
    packing = packing_of(weight)
    assert packing is not None
    return _UNPACKING.get(weight, _UNPACKING[packing.element])


@dataclass(frozen=True, slots=True)
class Shape:
    """The blocks of a launch.

    Attributes:
        row_tiles: of 16 rows, a block's.
        num_streams: that K is split into, of all blocks of a cluster.
        num_blocks: of a cluster. They change no bit.
    """

    row_tiles: int
    num_streams: int
    num_blocks: int = 1

    def row_blocks(self, product: Product) -> int:
        """Blocks above each other."""
        return -(-product.m // (16 * self.row_tiles))

    def columns(self, product: Product) -> int:
        """Clusters beside each other: each has the columns that its blocks would have without one."""
        return -(-product.weight_rows // (COLUMNS * BLOCK_WARPS * self.num_blocks // self.num_streams))

    def cache_reads(self, product: Product) -> int:
        """Bytes read from the second-level cache: by each block of rows the weight once, x by each cluster."""
        x_bytes = product.m * product.k * ITEM_BYTES[product.x]
        return self.row_blocks(product) * product.weight_bytes + self.columns(product) * x_bytes

    def steps(self, product: Product) -> int:
        """Steps of a warp: its stream's."""
        unit = unit_of(product.weight)
        num_units = -(-product.k // unit)
        return -(-num_units // self.num_streams) * unit // STEP

    def rounds(self, product: Product, machine: Machine) -> int:
        """Rounds in which clusters run one after another, with a block a multiprocessor."""
        clusters = self.row_blocks(product) * self.columns(product)
        at_once = machine.num_multiprocessors if self.num_blocks == 1 else machine.clusters_at_once(self.num_blocks)
        return -(-clusters // max(1, at_once))


def steps_together(weight: str, row_tiles: int) -> int:
    """Steps of x that a warp waits for at once, with a barrier of the warps that share them: two of 16 rows, where a
    turn has eight."""
    packing = packing_of(weight)
    return 2 if row_tiles == 1 and packing is not None and packing.steps == 4 else 1


def num_stages(weight: str, row_tiles: int, *, has_clusters: bool) -> int:
    """Steps of x in shared memory; a divisor of a stream's steps. Eight streams of 64 rows would be too many bytes for
    some GPUs; where there are clusters, no block has more than four of those."""
    if steps_together(weight, row_tiles) > 1:
        return 8
    return 4 if row_tiles <= 2 or has_clusters else 2


def shared_bytes(weight: str, row_tiles: int, num_streams: int, *, has_clusters: bool = False) -> int:
    """Bytes of a block's shared memory: scales of rows, and x on its way in, or all warps' sums on their way out."""
    staged_x = num_streams * num_stages(weight, row_tiles, has_clusters=has_clusters) * row_tiles * 16 * STEP * 2
    return SCALES_BYTES + max(staged_x, BLOCK_WARPS * row_tiles * 16 * COLUMNS * 4)


def most_streams(row_tiles: int, *, has_clusters: bool) -> int:
    """Most streams of a block: its shared memory holds their x on every GPU."""
    return BLOCK_WARPS // 2 if row_tiles == 4 and has_clusters else BLOCK_WARPS


def split(n: int, k: int, weight: str = "") -> int:
    """Streams that share a sum over K: a power of two, from the weight's shape and format alone."""
    many = MANY_COLUMNS if packing_of(weight) is None else MANY_PACKED_COLUMNS
    num_streams = BLOCK_WARPS if n < many else BLOCK_WARPS // 2
    while num_streams > 1 and num_streams * unit_of(weight) > k:
        num_streams //= 2
    return num_streams


def has_clusters(product: Product, machine: Machine) -> bool:
    """Whether blocks of its kernel meet in clusters: those of packed weights, where the GPU has clusters."""
    return packing_of(product.weight) is not None and can_cluster(machine)


def can_cluster(machine: Machine) -> bool:
    """Whether the GPU has clusters."""
    return int(machine.arch.rstrip("af")[3:]) >= 90


def shapes(product: Product, machine: Machine) -> list[Shape]:
    """Shapes worth a comparison: without clusters of as many row tiles as the rows fill, and each with as many blocks
    of a cluster as serve it best."""
    fitting = [tiles for tiles in ROW_TILES if (machine.arch, product.weight, tiles) not in SPILLING]
    packing = packing_of(product.weight)
    if product.exact and packing is not None:  # all blocks multiply by groups' scales at the same place
        fitting = [tiles for tiles in fitting if settles(packing, tiles) == settles(packing, 1)]
    most = next((tiles for tiles in fitting if 16 * tiles >= product.m), fitting[-1])
    if not has_clusters(product, machine):
        return [Shape(most, num_streams) for num_streams in _streams(product)]
    found = []
    for tiles in fitting:
        for num_streams in _streams(product) if tiles <= most else ():
            found.append(clustered(product, machine, Shape(tiles, num_streams)))
    return found


def clustered(product: Product, machine: Machine, shape: Shape) -> Shape:
    """The shape with as many blocks of a cluster as serve it best."""
    return replace(shape, num_blocks=_cluster_blocks(product, machine, shape.row_tiles, shape.num_streams))


@functools.lru_cache(maxsize=1 << 12)
def choose(product: Product, machine: Machine) -> Shape:
    """The one that takes the least time; of several, the one with the most rows."""

    def key(shape: Shape) -> float:
        least = _least_s(product, machine, shape)
        return least if packing_of(product.weight) is None else _walk_s(product, machine, shape, least)

    return min(reversed(shapes(product, machine)), key=key)


def _streams(product: Product) -> list[int]:
    """Streams of K: for exact products by the weight alone; up to 16 rows, of which two blocks fit on a multiprocessor,
    that and twice as many; of more than 64, that and all that are fewer."""
    n, k = (product.whole if product.exact else None) or (product.weight_rows, product.k)
    most = split(n, k, product.weight)
    if product.m <= 16 and not product.exact and packing_of(product.weight) is not None:
        return [*{most, split(min(n, MANY_PACKED_COLUMNS - 1), k, product.weight)}]
    if product.exact or product.m <= MAX_ROWS:
        return [most]
    return [1 << power for power in reversed(range(most.bit_length()))]


def _cluster_blocks(product: Product, machine: Machine, row_tiles: int, num_streams: int) -> int:
    """Blocks that share K: as many as the reads of x are worth meeting for, if they take no more rounds."""
    most = most_streams(row_tiles, has_clusters=True)
    able = [Shape(row_tiles, num_streams, count) for count in (1, 2, 4, 8) if count <= num_streams <= count * most]
    least = min(shape.rounds(product, machine) for shape in able)

    def time_s(shape: Shape) -> float:
        read = max(
            product.weight_bytes / (_SUSTAINED * machine.memory_bytes),
            shape.cache_reads(product) / machine.cache_bytes,
        )  # fmt: skip
        teams = BLOCK_WARPS * shape.num_blocks // num_streams
        waiting = shape.steps(product) * _TEAMS_S * row_tiles * (teams.bit_length() - 1)
        return read + waiting + (_MEETING_S if shape.num_blocks > 1 else 0.0)

    return min((shape for shape in able if shape.rounds(product, machine) == least), key=time_s).num_blocks


def seconds_of(product: Product, machine: Machine, shape: Shape) -> float:
    """Seconds by work, reads from the second-level cache, latency, and, for packed weights, steps."""
    least = _least_s(product, machine, shape)
    if packing_of(product.weight) is None:
        return least
    # One row is compared with `quantised_gemv`, whose model has no launch.
    return _walk_s(product, machine, shape, least) if product.m <= 16 else alone_s(product, machine, shape)


def alone_s(product: Product, machine: Machine, shape: Shape) -> float:
    """Seconds for a packed weight, with an idle GPU before and after the launch."""
    return _ENDS_S + _walk_s(product, machine, shape, _least_s(product, machine, shape))


def _least_s(product: Product, machine: Machine, shape: Shape) -> float:
    row_blocks, column_blocks = shape.row_blocks(product), shape.num_blocks * shape.columns(product)
    rows = -(-product.m // 16) * 16 if row_blocks == 1 else row_blocks * 16 * shape.row_tiles
    work = 2 * product.weight_rows * product.k * rows / machine.tensor_flops
    read = shape.cache_reads(product) / machine.cache_bytes
    packing = packing_of(product.weight)
    if packing is None:
        latency = LATENCY_S * product.weight_bytes * row_blocks / (column_blocks * _BYTES_UNDER_WAY)
        return (_MEETING_S if shape.num_blocks > 1 else 0.0) + max(work, read, latency)
    # Unpacking shares the instructions' issue with the products.
    work = work / _PACKED_EFFICIENCY if row_blocks > 1 else work
    issued = unpacking_s(product.weight_bytes * row_blocks, unpacking(product.weight), machine.num_multiprocessors)
    at_once = min(column_blocks * row_blocks, machine.num_multiprocessors)
    latency = LATENCY_S * product.weight_bytes * row_blocks / (at_once * _BYTES_UNDER_WAY // 2)
    return (_MEETING_S if shape.num_blocks > 1 else 0.0) + max(work, issued, read, latency)


def _walk_s(product: Product, machine: Machine, shape: Shape, least: float) -> float:
    """Seconds of all rounds, by a warp's consecutive steps; `least` at least."""
    step, rounds = _STEP_S[shape.row_tiles], shape.rounds(product, machine)
    if shape.row_tiles == 4 and not has_clusters(product, machine):
        step = _STEP_ONE_AHEAD_S
    if shape.row_tiles == 1:  # two blocks a multiprocessor
        walking = rounds // 2 * _STEP_OF_TWO_S + rounds % 2 * step
    else:
        walking = rounds * step
    return max(least, (_MEETING_S if shape.num_blocks > 1 else 0.0) + walking * shape.steps(product))


uint32 = types.uint32

COLUMNS = 32  # of the weight's rows, a warp
TILE_BYTES = 8 * 32 * 2  # of 8 rows of x and a step: 16 bytes for each lane


@dataclass(frozen=True, slots=True)
class Operands:
    """Device functions of an order of factors.

    Attributes:
        multiplier: ``(bytes from a stage, first word, tiles)`` -> a tuple's, ``(sums, x_words, x_stages, pairs)``: some
            tiles of 16 rows of x, from shared memory, times 16 words of the weight from there on.
        store_sums: ``(tile, sums, g, t)``: to shared memory, float32 [16 row tiles, COLUMNS] at `tile`.
        flip_of: ``row -> bits of the column that are exchanged`` there, so that there are no bank conflicts.
    """

    multiplier: Callable[[int, int, range], Any]
    store_sums: Any
    flip_of: Any


def _multiplier(dtype: str, at: int, tiles: range, plan: Any, *, is_x_first: bool) -> Any:
    """See `Operands`. So many tiles of x lie from `at` bytes after the stage on."""
    load_x = load_all("shared", tuple((4 * j, 0, at + j * TILE_BYTES) for j in range(2 * len(tiles))))
    multiply_tiles = multiply_all(dtype, tuple(plan))

    @device_function
    def multiply(state):
        sums, x_words, x_stages, pairs = state
        load_x(x_words, x_stages)
        if is_x_first:
            multiply_tiles(sums, x_words, pairs)
        else:
            multiply_tiles(sums, pairs, x_words)

    return multiply


@functools.cache
def x_first(dtype: str, row_tiles: int) -> Operands:
    """The operands of a 16-bit weight."""
    flip_of, store_pair = mma.accumulator_flip(COLUMNS), memory.shared_store_2xf32

    def multiplier(at: int, word: int, tiles: range) -> Any:
        plan = (
            (
                4 * (4 * tile + r), tuple(8 * j + 2 * h + e for e in (0, 4, 1, 5)),
                (word + 4 * r + 2 * h, word + 4 * r + 2 * h + 1),
            )
            for j, tile in enumerate(tiles) for h in range(2) for r in range(4)
        )  # fmt: skip
        return _multiplier(dtype, at, tiles, plan, is_x_first=True)

    @device_function
    def store_sums(tile, sums, g, t):
        row = uint32(tile + g * uint32(COLUMNS * 4))
        for r in range(4):
            at = uint32(row + ((uint32(8 * r) + t * uint32(2)) ^ flip_of(g)) * uint32(4))
            for j in range(row_tiles):
                for e in range(2):
                    pair = sums[4 * (4 * j + r) + 2 * e], sums[4 * (4 * j + r) + 2 * e + 1]
                    store_pair(uint32(at + uint32((16 * j + 8 * e) * COLUMNS * 4)), pair)

    return Operands(multiplier, store_sums, flip_of)


@functools.cache
def weight_first(dtype: str, row_tiles: int) -> Operands:
    """The operands of a packed weight."""
    store_sum = memory.shared_store_f32
    # Lanes t store rows 2 t, of 8 neighbouring columns each.
    flip_of = device_function(lambda row: (row & uint32(6)) << uint32(2))

    def multiplier(at: int, word: int, tiles: range) -> Any:
        plan = (
            (
                16 * tile + 8 * i + 4 * h, tuple(word + 8 * h + 2 * q + e for e in (0, 4, 1, 5)),
                (8 * j + 4 * i + 2 * q, 8 * j + 4 * i + 2 * q + 1),
            )
            for j, tile in enumerate(tiles) for q in range(2) for i in range(2) for h in range(2)
        )  # fmt: skip
        return _multiplier(dtype, at, tiles, plan, is_x_first=False)

    @device_function
    def store_sums(tile, sums, g, t):
        for e in range(2):
            row = uint32(tile + (t * uint32(2) + uint32(e)) * uint32(COLUMNS * 4))
            for column in range(4):
                at = uint32(row + ((uint32(8 * column) + g) ^ flip_of(t * uint32(2))) * uint32(4))
                for i in range(2 * row_tiles):
                    value = sums[8 * i + 4 * (column // 2) + 2 * (column % 2) + e]
                    store_sum(uint32(at + uint32(8 * i * COLUMNS * 4)), value)

    return Operands(multiplier, store_sums, flip_of)


@functools.cache
def settler(dtype: str, row_tiles: int, slot: int) -> Any:
    """A device function ``(sums, parts, scales, factors)``: a slot's sums, with the weight first, times their rows'
    scales, of which the lane has those of rows g and g + 8 of a tile in a word."""
    unpack = {"bf16": convert.unpack_bf16, "f16": convert.unpack_f16}[dtype]
    add = add_scaled(
        tuple(
            (8 * i + 4 * h + 2 * column + row, 2 * h + column)
            for i in range(2 * row_tiles) for h in range(2) for column in range(2) for row in range(2)
        )
    )  # fmt: skip

    @device_function
    def settle(sums, parts, scales, factors):
        factors[0], factors[1] = unpack(scales[2 * slot])
        factors[2], factors[3] = unpack(scales[2 * slot + 1])
        add(sums, parts, factors)

    return settle
