"""Hopper, packed weights: `wgmma` as in `hopper`, whose weight's tile is unpacked into its stages.

Against `mixed_input` and `skinny`, whose products are `mma.sync`'s, it changes

- the arithmetic: `wgmma`, which multiplies at twice their rate, while other warps unpack (`hopper_unpack.py`);
- how often a weight is unpacked: once for 64 or 128 rows, by warps of their own;
- the way in of x: the TMA's.

Against a weight that is dequantised first (`dequantize`) it reads a quarter of the bytes or half, once, and needs no
memory. All else, roles, ring and ways out, is `hopper`'s, and K is split among the blocks of a cluster as there
(`hopper_split`), by whole slots of the weight.

The order in which `wgmma` adds is its own: plans of exact products do not choose it; exact plans that name it never
split K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from numba_kernels.cuda.gemm import hopper, hopper_split
from numba_kernels.cuda.gemm.hopper_ring import BLOCK_K, Tile
from numba_kernels.cuda.gemm.product import Machine, Product
from numba_kernels.cuda.packing import PACKINGS, Packing, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

LOW = Tile(256, 1, 5, num_unpackers=8)
HIGH = Tile(256, 2, 4, num_unpackers=4)
TILES = (LOW, HIGH)

LEAST_ROWS, MOST_ROWS = 33, 512
"""Rows for which plans take it. `skinny` is as fast with 32; a weight that is dequantised takes 384 µs with 2,048 and
133 with 512, this 467 and 126 (INT4, 8192 x 8192)."""

# As `hopper`'s model, fitted to an H200's times of INT4 and MXFP4, 8192 x 8192, 16 to 2,048 rows (docs/measurements,
# 2026-11-26, the evening). A stage's cycles are those of unpacking: by its rate `wgmma` takes 490 and 980.
STEP_CYCLES = {LOW: 930, HIGH: 1530}
ENDS_CYCLES = {LOW: 10_000, HIGH: 8_000}
SPLIT_ENDS_CYCLES = {2: 13_500, 3: 13_000, 4: 13_000, 6: 13_000, 8: 13_000}  # by parts
_LAUNCH_S = 6e-6  # and the first bytes, for comparison with `skinny`, whose model has them


def can_unpack(packing: Packing, dtype: str) -> bool:
    """Whether a packing's scales come in whole words."""
    return dtype != "f32" and packing.chunk_bytes(dtype) % 4 == 0


def why_not(product: Product, machine: Machine) -> str:
    """Why it cannot compute a product; "" if it can."""
    packing = packing_of(product.weight)
    if packing is None:
        return "multiplies packed weights"
    if machine.arch != hopper.ARCH:
        return f"needs {hopper.ARCH}, the device is {machine.arch}"
    can_walk = product.is_weight_layout and product.is_aligned and product.k > 0 and not product.num_segments
    if not can_walk or not can_unpack(packing, product.x):
        return "reads packed weights for 16-bit rows on 16-byte bounds, with scales of 4 bytes or more a lane"
    if product.epilogue.activation and (product.exact or product.n % 16 or product.out != product.x):
        return "gates columns in sixteens, to x's type, and not exactly"
    return ""


def options(k: int, *, exact: bool = False) -> list[tuple[Tile, int]]:
    """The tiles, and in how many parts each may split K: exact products never do, so that the choice changes no bit."""
    most = 1 if exact else max(1, -(-k // BLOCK_K) // (2 * hopper_split.LEAST_STEPS))
    return [(tile, parts) for tile in TILES for parts in (1, *SPLIT_ENDS_CYCLES) if parts <= most]


def _cycles(tile: Tile, parts: int, m: int, n: int, k: int, machine: Machine) -> int:
    clusters = -(-m // tile.block_m) * -(-n // tile.block_n)
    num_steps, num_rounds = -(-k // BLOCK_K), -(-clusters // machine.clusters_at_once(parts))
    ends = ENDS_CYCLES[tile] if parts == 1 else SPLIT_ENDS_CYCLES[parts]
    return num_rounds * (-(-num_steps // parts) * STEP_CYCLES[tile] + ends)


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, machine: Machine, *, exact: bool = False) -> tuple[Tile, int]:
    """The tile and the parts with which ``out [m, n]`` takes the fewest cycles."""

    def key(option: tuple[Tile, int]) -> int:
        return _cycles(*option, m, n, k, machine)

    return min(options(k, exact=exact), key=key)


def tile_seconds(product: Product, machine: Machine, tile: Tile, parts: int) -> float:
    """Seconds by that model, or by the weight's load from memory."""
    cycles = _cycles(tile, parts, product.m, product.weight_rows, product.k, machine)
    from_memory = product.weight_bytes / (hopper.MEMORY_SHARE * machine.memory_bytes)
    return _LAUNCH_S + max(cycles / hopper.CLOCK_HZ, from_memory + hopper.FIRST_CYCLES / hopper.CLOCK_HZ)


def seconds(product: Product, machine: Machine) -> float:
    """Seconds by `tile_seconds` of the choice; never for exact products, nor for other numbers of rows than those."""
    if product.exact or not LEAST_ROWS <= product.m <= MOST_ROWS:
        return math.inf
    return tile_seconds(product, machine, *choose(product.m, product.weight_rows, product.k, machine))


def plan(product: Product, machine: Machine) -> Launch:
    """A launch for a product that it can compute and that is not empty."""
    tile, parts = choose(product.m, product.weight_rows, product.k, machine, exact=product.exact)
    return hopper.plan_tile(product, machine, tile, parts)


def specialisations() -> Iterator[Specialisation]:
    """Specialisations of bf16 that published models use; others are compiled at their first launch."""
    for weight in PACKINGS:
        for tile in TILES:
            for way_out in (*hopper.WAYS_OUT, "silu"):
                yield hopper.kernel("bf16", "bf16", tile, way_out, weight)
            for activation in ("", "silu"):
                yield hopper_split.kernel("bf16", "bf16", tile, activation, weight)
