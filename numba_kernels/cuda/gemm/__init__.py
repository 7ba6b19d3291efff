"""Matrix product: ``y[M, N] = x[M, K] . w[N, K]^T + bias[N] + residual[M, N]``, and with a plain ``B[K, N]``.

x and w are f32, f16 or bf16, both of one dtype; y and the residual are of that dtype or f32 (logits); the bias is f32
or of w's dtype. Sums are float32; bias and residual are added in float32 and the result is rounded once. All arrays are
C-contiguous; the residual may be y itself.

A ladder of tiers, each in its own file, which says what it changes against the one before:

    naive         one thread an element
    tiled         tiles in shared memory
    register      tiles in registers, 16-byte loads, two buffers
    tensor_core   mma.sync, ldmatrix, cp.async in several stages (f16, bf16)
    gemv          a row or two (f32: at most 8): the weight passes once
    few_rows      at most 64 rows: the weight streams through tensor cores (f16, bf16)
    hopper        wgmma fed by the TMA, warps with roles, clusters (f16, bf16; sm_90a)

Each launch takes the same arguments, addresses as integers (0 = no bias, no residual):

    x, weight, bias, residual, y, m, n, k, bias_is_f32
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numba_kernels.cuda import tables
from numba_kernels.cuda.gemm import choice, few_rows, gemv, hopper, naive, register, tensor_core, tiled
from numba_kernels.cuda.intrinsics.element import DTYPES, VECTOR_WIDTH
from numba_kernels.cuda.specialisation import Launch, Specialisation

TIERS = ("auto", "naive", "tiled", "register", "tensor_core", "gemv", "few_rows", "hopper")
MAX_SIZE = 2**31 - 1  # of m, n and k: kernels count in 32 bits


def plan(
    tier: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str | None = None,
    *,
    is_weight_layout: bool = True,
    is_aligned: bool = True,
    num_multiprocessors: int = 132,
    exact: bool = False,
    arch: str = "sm_80",
    has_residual: bool = True,
    is_out_aligned: bool = False,
    tile: str = "",
) -> Launch | None:
    """The launch for a product, or None where y is empty.

    Args:
        tier: one of `TIERS`. "auto" takes what was measured to be the fastest (`tables`), or what a model takes for it
            (`choice`): gemv and few_rows for few rows, hopper for many where the device has it, else tensor_core for
            f16 and bf16 and register for f32. "tensor_core" with f32 means register, as tensor cores would round its
            products; "hopper" means tensor_core where the TMA cannot walk over rows: for f32, the other layout, no
            depth, and rows that do not lie on 16-byte bounds.
        m, n, k: the shapes above, each from 0 on.
        dtype: of x and weight: "f32", "f16" or "bf16".
        out_dtype: of y and residual: `dtype`, which is the default, or "f32".
        is_weight_layout: whether the weight is [n, k]; else it is [k, n].
        is_aligned: whether x and weight begin on 16-byte bounds. (Rows that do not are seen from the sizes.)
        num_multiprocessors: of the device: small products take smaller tiles to fill it.
        exact: whether a row of y must have the same bits whatever m is. All tiers but gemv and few_rows hold that,
            each for itself, also between their tiles (those two hold it up to as many rows as they take): with it,
            "auto" leaves them out, and hopper, whose bits are its own.
        arch: of the device, "sm_90a".
        has_residual: whether a residual is given when it is launched. Where False, none may be.
        is_out_aligned: whether y, bias and residual begin on 16-byte bounds.
        tile: one of a tier's tiles by its name, for the aligned weight layout; "" for what the tier chooses.

    Raises:
        ValueError: for a tier, dtype or size that there is not; for gemv and few_rows with more rows than they take,
            without the weight layout, or with `exact`; for few_rows with f32 or rows on no 16-byte bounds; for
            hopper on another architecture; for a tile that the tier has not.
    """
    out_dtype = dtype if out_dtype is None else out_dtype
    if tier not in TIERS:
        raise ValueError(f"gemm: tier is {tier!r}, must be one of {', '.join(TIERS)}")
    if dtype not in DTYPES:
        raise ValueError(f"gemm: dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
    if out_dtype not in (dtype, "f32"):
        raise ValueError(f"gemm: out_dtype is {out_dtype!r}, must be {dtype!r} or 'f32'")
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not 0 <= size <= MAX_SIZE:
            raise ValueError(f"gemm: {name} is {size}, must be 0 to {MAX_SIZE}")
    row_lengths = (k,) if is_weight_layout else (k, n)
    is_aligned = is_aligned and all(length % VECTOR_WIDTH[dtype] == 0 for length in row_lengths)
    for name, most in (("gemv", gemv.MAX_ROWS[dtype]), ("few_rows", few_rows.MAX_ROWS)):
        is_able = name == "gemv" or (is_aligned and dtype != "f32")
        if tier == name and (exact or not is_weight_layout or m > most or not is_able):
            raise ValueError(
                f"gemm: tier {name} has {m} rows of {k} {dtype}, exact={exact}, is_weight_layout={is_weight_layout}, "
                f"is_aligned={is_aligned}; it takes at most {most} rows, the weight layout, and is not exact; few_rows "
                f"takes 16-bit factors, aligned"
            )
    if m == 0 or n == 0:
        return None
    if tier == "hopper" and arch != hopper.ARCH:
        raise ValueError(f"gemm: tier hopper needs {hopper.ARCH}, the device is {arch}")

    is_for_tma = dtype != "f32" and is_weight_layout and is_aligned and k > 0
    if tier == "auto" and is_weight_layout and is_aligned and not exact:
        measured = tables.choose(m, n, k, dtype, arch)
        if measured is not None:
            tier, tile = measured.tier, measured.tile
        else:
            tier = choice.choose(m, n, k, dtype, arch)
    if tier == "auto":
        is_row = m <= gemv.MAX_ROWS[dtype] and is_weight_layout and not exact
        tier = "gemv" if is_row else "tensor_core"
    if tier == "hopper" and not is_for_tma:
        tier = "tensor_core"
    if tier == "tensor_core" and dtype == "f32":
        tier = "register"
    if tile and (tier not in ("hopper", "tensor_core") or not (is_weight_layout and is_aligned)):
        raise ValueError(f"gemm: tile is {tile!r}: tier {tier} with these arrays has none to choose from")
    if tier == "hopper":
        return hopper.plan(
            m, n, k, dtype, out_dtype, num_multiprocessors, has_residual=has_residual, is_out_aligned=is_out_aligned,
            exact=exact, tile=_tile_named(hopper, tile),
        )  # fmt: skip
    if tier == "naive":
        return naive.plan(m, n, dtype, out_dtype, is_weight_layout)
    if tier == "tiled":
        return tiled.plan(m, n, dtype, out_dtype, is_weight_layout)
    if tier == "gemv":
        return gemv.plan(m, n, k, dtype, out_dtype, is_aligned)
    if tier == "few_rows":
        return few_rows.plan(m, n, k, dtype, out_dtype)
    if tier == "register":
        return register.plan(m, n, dtype, out_dtype, is_weight_layout, is_aligned, num_multiprocessors)
    chosen = _tile_named(tensor_core, tile)
    return tensor_core.plan(m, n, dtype, out_dtype, is_weight_layout, is_aligned, num_multiprocessors, chosen)


def plan_glu(
    activation: str,
    tier: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    *,
    is_aligned: bool = True,
    num_multiprocessors: int = 132,
    exact: bool = False,
    arch: str = "sm_80",
) -> Launch | None:
    """The launch for ``y[m, n] = f(gate) * up``, with gate and up the halves of ``x[m, k] . w[2 n, k]^T``.

    f is the `activation`, one of `hopper.GATES`.

    None where y is empty, or where two launches are better, the product's and `activation.plan_glu`'s: it is one
    where `plan` takes hopper's tile for many rows, unless `exact`. Launched with neither bias nor residual; y begins on
    a 16-byte bound. Arguments and errors as those of `plan`.
    """
    if arch != hopper.ARCH or exact or n % 8:
        return None
    product = plan(
        tier, m, 2 * n, k, dtype, is_aligned=is_aligned, num_multiprocessors=num_multiprocessors, arch=arch
    )  # fmt: skip
    if product is None or product.specialisation.constants.get("tile") != str(hopper.LARGE):
        return None
    return hopper.plan_glu(activation, m, n, k, dtype, num_multiprocessors)


def _tile_named(family: Any, name: str) -> Any:
    """A tier's tile, or None for "". Raises ValueError for another name."""
    if not name:
        return None
    known = {str(tile): tile for tile in family.TILES}
    if name not in known:
        raise ValueError(f"gemm: tile is {name!r}, must be one of {', '.join(known)}")
    return known[name]


def candidates(m: int, n: int, k: int, dtype: str, arch: str) -> list[tables.Choice]:
    """What may be the fastest for an aligned product with the weight layout: all that is worth measuring."""
    found = [tables.Choice("gemv", "")] if m <= gemv.MAX_ROWS[dtype] else []
    if dtype == "f32":
        return [*found, tables.Choice("register", "")]
    found += [tables.Choice("few_rows", "")] if m <= few_rows.MAX_ROWS else []
    tiles = [tile for tile in tensor_core.TILES if tile.block_m >= 64 or m <= 4 * tile.block_m]
    found += [tables.Choice("tensor_core", str(tile)) for tile in tiles]
    if arch == hopper.ARCH:
        found += [tables.Choice("hopper", tile) for tile in ("", *map(str, hopper.TILES))]  # "": perhaps split over K
    return found


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for family in (naive, tiled, register, tensor_core, gemv, few_rows, hopper):
        yield from family.specialisations()
