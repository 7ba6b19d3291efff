"""Matrix product: ``y[M, N] = x[M, K] . w[N, K]^T + bias[N] + residual[M, N]``, and with a plain ``B[K, N]``.

x and w are f32, f16 or bf16, both of one dtype, or w is packed (`packing.py`): elements of 4 or 8 bits with scales,
which `quantised_gemv`, `skinny`, `hopper_few`, `mixed_input` and `hopper_packed` unpack in registers; y and the
residual are of that dtype or f32 (logits); the bias is f32 or of w's dtype. Sums are float32; bias and residual are
added in float32 and the result is rounded once. All arrays are C-contiguous; the residual may be y itself.

A ladder of tiers, each in its own file, which lists its changes against the one before:

    naive           one thread an element
    tiled           tiles in shared memory
    register        tiles in registers, 16-byte loads, two buffers
    tensor_core     mma.sync, ldmatrix, cp.async in several stages (f16, bf16)
    gemv            a row or two (f32: at most 8): the weight passes once
    skinny          at most 64 rows: the weight streams through tensor cores (f16, bf16)
    hopper_few      3 to 64 rows: the weight, packed too, is wgmma's first factor (f16, bf16; sm_90a)
    quantised_gemv  one to four rows times a packed weight, unpacked without a factor (bf16)
    mixed_input     many rows times a packed weight: tensor_core's tiles, unpacked after shared memory (f16, bf16)
    hopper          wgmma fed by the TMA, warps with roles, clusters (f16, bf16; sm_90a)
    hopper_packed   hopper's rows times a packed weight, which warps of their own unpack into its stages

Beside them `w8a8` and, on Hopper, `hopper_bytes` multiply rows that were rounded to bytes (`dynamic_quantisation.py`,
`rounded_norm.py`) by a weight of such.

Each launch takes the same arguments, addresses as integers (0 = no bias, no residual):

    x, weight, bias, residual, y, m, n, k, bias_is_f32, x_squares, x_parts, eps, squares

The last four normalise x, and prepare y to be normalised (`epilogue`); else `NO_SQUARES`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from numba_kernels.cuda import tables
from numba_kernels.cuda.gemm import (
    gemv,
    hopper,
    hopper_bytes,
    hopper_packed,
    mixed_input,
    naive,
    quantised_gemv,
    register,
    skinny,
    split_k,
    tensor_core,
    tiled,
    w8a8,
)
from numba_kernels.cuda.gemm.epilogue import NO_SQUARES
from numba_kernels.cuda.gemm.product import Epilogue, Machine, Product, machine_of
from numba_kernels.cuda.gemm.rings import hopper_few
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.specialisation import Launch, Specialisation

__all__ = [
    "INSTEAD", "NO_SQUARES", "TIERS", "Epilogue", "Machine", "Product", "can_read", "candidates", "choose",
    "hopper_bytes", "hopper_few", "machine_of", "modelled_s", "plan", "specialisations", "w8a8",
]  # fmt: skip

TIERS: dict[str, ModuleType] = {
    "naive": naive, "tiled": tiled, "gemv": gemv, "quantised_gemv": quantised_gemv, "hopper_few": hopper_few,
    "skinny": skinny, "hopper": hopper, "tensor_core": tensor_core, "hopper_packed": hopper_packed,
    "mixed_input": mixed_input, "register": register,
}  # fmt: skip
"""A tier is a module with the functions

    why_not(product, machine) -> str            why it cannot compute a product; "" if it can
    seconds(product, machine) -> float          how long it takes, by a model; infinite where it is not to be chosen
    plan(product, machine) -> Launch
    specialisations() -> Iterator               every kernel that `plan` can return

and perhaps

    tiles(product, machine) -> tuple[str, ...]  names worth measuring; then `plan` takes one, too
    modelled_s(product, machine) -> float       closer than `seconds`, for comparisons outside the tiers

Of tiers that take the same time, the first is chosen."""

INSTEAD = {"hopper": "tensor_core", "tensor_core": "register"}
"""Substitutes for a tier that a user names but that cannot compute the product: the TMA needs rows on 16-byte bounds,
and tensor cores would round the products of f32."""


def plan(product: Product, machine: Machine, tier: str = "auto", tile: str = "") -> Launch | None:
    """The launch for a product, or None where y is empty, or where no launch has its epilogue: a gated unit is then the
    product, and `activation.plan_glu`.

    Args:
        tier: one of `TIERS`, or "auto": the fastest measured (`tables`), or the fastest by the tiers' models
            (`choose`).
        tile: one of the tier's tiles by its name, for the aligned weight layout; "" for the tier's choice.

    Raises:
        ValueError: for an unknown tier, or one that can do this neither itself nor by `INSTEAD`; for a tile that the
            tier lacks.
    """
    if tier != "auto" and tier not in TIERS:
        raise ValueError(f"gemm: tier is {tier!r}, must be one of auto, {', '.join(TIERS)}")
    if product.m == 0 or product.n == 0:
        return None
    if product.epilogue.activation:
        return _plan_gated(product, machine, tier)
    name, tile = _choose(product, machine) if tier == "auto" else (_able(tier, product, machine), tile)
    chosen = TIERS[name]
    if not tile:
        return chosen.plan(product, machine)
    if not hasattr(chosen, "tiles"):
        raise ValueError(f"gemm: tile is {tile!r}: tier {name} with these arrays has none to choose from")
    return chosen.plan(product, machine, tile)


def can_read(product: Product, machine: Machine, tier: str = "auto") -> bool:
    """Whether the tier, or with "auto" any, reads the product's weight in its format."""
    both = replace(product, n=product.weight_rows, epilogue=replace(product.epilogue, activation=""))
    tiers = TIERS.values() if tier == "auto" else [TIERS[tier]]
    return any(not each.why_not(both, machine) for each in tiers)


def modelled_s(product: Product, machine: Machine) -> float:
    """Seconds of the fastest tier by the models, and the lower bound by bytes and work."""
    both = replace(product, n=product.weight_rows, epilogue=replace(product.epilogue, activation=""))
    least = (both.weight_bytes + ITEM_BYTES[both.x] * both.m * (both.k + both.n)) / machine.memory_bytes
    if both.x != "f32":
        least = max(least, 2 * both.m * both.n * both.k / machine.tensor_flops)
    able = [tier for tier in TIERS.values() if not tier.why_not(both, machine)]
    models = [getattr(tier, "modelled_s", tier.seconds) for tier in able]
    return max(least, min((model(both, machine) for model in models), default=math.inf))


def _plan_gated(product: Product, machine: Machine, tier: str) -> Launch | None:
    both = replace(product, n=2 * product.n, epilogue=Epilogue())
    name, tile = _choose(both, machine) if tier == "auto" else (_able(tier, both, machine), "")
    chosen = TIERS[name]
    if chosen.why_not(product, machine):
        return None
    return chosen.plan(product, machine, tile) if tile else chosen.plan(product, machine)


def square_columns(launch: Launch, n: int) -> int:
    """How many of its n columns a launch adds up in each sum of squares that it can leave, where y, bias and residual
    begin on 16-byte bounds; 0 if it can leave none."""
    columns: int = launch.specialisation.constants.get("square_columns", 0)
    return 0 if not columns or n % (4 * columns) else columns


def _able(tier: str, product: Product, machine: Machine) -> str:
    """The tier, or its substitute."""
    why = TIERS[tier].why_not(product, machine)
    while why:
        is_elsewhere = getattr(TIERS[tier], "ARCH", machine.arch) != machine.arch
        if is_elsewhere or tier not in INSTEAD:
            raise ValueError(f"gemm: tier {tier} {why}; not {product}")
        tier = INSTEAD[tier]
        why = TIERS[tier].why_not(product, machine)
    return tier


def _choose(product: Product, machine: Machine) -> tuple[str, str]:
    """The tier, and its tile or ""."""
    if product.exact:
        return choose(product.deciding, machine), ""
    if product.is_weight_layout and product.is_aligned and product.is_plain:
        measured = tables.choose(product.m, product.n, product.k, product.x, machine.arch)
        if measured is not None and not TIERS[measured.tier].why_not(product, machine):
            return measured.tier, measured.tile
    return choose(product, machine), ""


@functools.lru_cache(maxsize=1 << 12)
def choose(product: Product, machine: Machine) -> str:
    """The tier that is the fastest by the models: each takes at least as long as memory needs for all bytes."""
    numbers = product.m * product.k + product.m * product.n
    least = (product.weight_bytes + ITEM_BYTES[product.x] * numbers) / machine.memory_bytes
    able = [name for name, tier in TIERS.items() if not tier.why_not(product, machine)]
    if not able:
        raise ValueError(f"gemm: no tier computes {product}")
    return min(able, key=lambda name: max(TIERS[name].seconds(product, machine), least))


def candidates(product: Product, machine: Machine) -> list[tables.Choice]:
    """Candidates for the fastest (tier, tile) of an aligned product with the weight layout, to be measured."""
    found = []
    for name, tier in TIERS.items():
        if not tier.why_not(product, machine) and tier.seconds(product, machine) < math.inf:
            tiles = tier.tiles(product, machine) if hasattr(tier, "tiles") else ("",)
            found += [tables.Choice(name, tile) for tile in tiles]
    return found


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for tier in TIERS.values():
        yield from tier.specialisations()
    yield from w8a8.specialisations()
    yield from hopper_bytes.specialisations()
    yield from split_k.specialisations()
