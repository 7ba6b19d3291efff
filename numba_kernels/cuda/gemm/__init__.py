"""Matrix product: ``y[M, N] = x[M, K] . w[N, K]^T + bias[N] + residual[M, N]``, and with a plain ``B[K, N]``.

x and w are f32, f16 or bf16, both of one dtype; y and the residual are of that dtype or f32 (logits); the bias is f32
or of w's dtype. Sums are float32; bias and residual are added in float32 and the result is rounded once. All arrays are
C-contiguous; the residual may be y itself.

A ladder of tiers, each in its own file, which says what it changes against the one before:

    naive         one thread an element
    tiled         tiles in shared memory
    register      tiles in registers, 16-byte loads, two buffers
    tensor_core   mma.sync, ldmatrix, cp.async in several stages (f16, bf16)
    gemv          at most 8 rows: the weight passes once
    hopper        wgmma fed by the TMA, warps with roles, clusters (f16, bf16; sm_90a)

Each launch takes the same arguments, addresses as integers (0 = no bias, no residual):

    x, weight, bias, residual, y, m, n, k, bias_is_f32
"""

from __future__ import annotations

from collections.abc import Iterator

from numba_kernels.cuda.gemm import gemv, hopper, naive, register, tensor_core, tiled
from numba_kernels.cuda.intrinsics.element import DTYPES, VECTOR_WIDTH
from numba_kernels.cuda.specialisation import Launch, Specialisation

TIERS = ("auto", "naive", "tiled", "register", "tensor_core", "gemv", "hopper")
MAX_SIZE = 2**31 - 1  # of m, n and k: kernels count in 32 bits
GEMV_ROWS = {"f32": 8, "f16": 4, "bf16": 4}  # up to so many `auto` takes gemv; from there on tensor cores are faster
HOPPER_ROWS = 65  # from so many on `auto` takes hopper: a tile of fewer would be half empty


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
) -> Launch | None:
    """The launch for a product, or None where y is empty.

    Args:
        tier: one of `TIERS`. "auto" takes gemv for few rows, hopper for many where the device has it, else tensor_core
            for f16 and bf16 and register for f32. "tensor_core" with f32 means register, as tensor cores would round
            its products; "hopper" means tensor_core where the TMA cannot walk over rows: for f32, the other layout, no
            depth, and rows that do not lie on 16-byte bounds.
        m, n, k: the shapes above, each from 0 on.
        dtype: of x and weight: "f32", "f16" or "bf16".
        out_dtype: of y and residual: `dtype`, which is the default, or "f32".
        is_weight_layout: whether the weight is [n, k]; else it is [k, n].
        is_aligned: whether x and weight begin on 16-byte bounds. (Rows that do not are seen from the sizes.)
        num_multiprocessors: of the device: small products take smaller tiles to fill it.
        exact: whether a row of y must have the same bits whatever m is. All tiers but gemv hold that, each for itself,
            also between their tiles: with it, "auto" leaves out gemv, and hopper, whose bits are its own.
        arch: of the device, "sm_90a".
        has_residual: whether a residual is given when it is launched. Where False, none may be.
        is_out_aligned: whether y, bias and residual begin on 16-byte bounds.

    Raises:
        ValueError: for a tier, dtype or size that there is not; for gemv with more than 8 rows, without the weight
            layout, or with `exact`; for hopper on another architecture.
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
    if tier == "gemv" and (exact or not is_weight_layout or m > gemv.MAX_ROWS):
        raise ValueError(
            f"gemm: tier gemv has {m} rows, exact={exact}, is_weight_layout={is_weight_layout}; "
            f"it takes at most {gemv.MAX_ROWS} rows, the weight layout, and is not exact"
        )
    if m == 0 or n == 0:
        return None
    if tier == "hopper" and arch != hopper.ARCH:
        raise ValueError(f"gemm: tier hopper needs {hopper.ARCH}, the device is {arch}")

    row_lengths = (k,) if is_weight_layout else (k, n)
    is_aligned = is_aligned and all(length % VECTOR_WIDTH[dtype] == 0 for length in row_lengths)
    is_for_tma = dtype != "f32" and is_weight_layout and is_aligned and k > 0
    if tier == "auto":
        if m <= GEMV_ROWS[dtype] and is_weight_layout and not exact:
            tier = "gemv"
        else:
            tier = "hopper" if arch == hopper.ARCH and m >= HOPPER_ROWS and not exact else "tensor_core"
    if tier == "hopper" and not is_for_tma:
        tier = "tensor_core"
    if tier == "tensor_core" and dtype == "f32":
        tier = "register"
    if tier == "hopper":
        return hopper.plan(
            m, n, k, dtype, out_dtype, num_multiprocessors, has_residual=has_residual, is_out_aligned=is_out_aligned,
            exact=exact,
        )  # fmt: skip
    if tier == "naive":
        return naive.plan(m, n, dtype, out_dtype, is_weight_layout)
    if tier == "tiled":
        return tiled.plan(m, n, dtype, out_dtype, is_weight_layout)
    if tier == "gemv":
        return gemv.plan(m, n, k, dtype, out_dtype, is_aligned)
    family = register if tier == "register" else tensor_core
    return family.plan(m, n, dtype, out_dtype, is_weight_layout, is_aligned, num_multiprocessors)


def specialisations() -> Iterator[Specialisation]:
    """Every specialisation that `plan` can return."""
    for family in (naive, tiled, register, tensor_core, gemv, hopper):
        yield from family.specialisations()
