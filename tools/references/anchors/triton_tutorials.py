"""Triton kernels that do the work of Triton's tutorials, to be counted beside ours (tools/comparing/compare_triton.py).

They are written here. The tutorials define the functions, and the configurations of their tuners
(tools/references/make_triton_peers.py).
"""

import triton
import triton.language as tl


@triton.jit
def matmul(
    x, weight, y, M, N, K, x_row, weight_row, y_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y[M, N] = x[M, K] weight[N, K]^T: tutorial 03 called with a transposed weight, any sizes.

    Row tiles go by in groups of GROUP for the second-level cache;
    rows beyond the last wrap around; the depth is masked.
    """
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    a_group = GROUP * tiles_n
    first = tl.program_id(0) // a_group * GROUP
    height = min(tiles_m - first, GROUP)
    inside = tl.program_id(0) % a_group
    row_tile, column_tile = first + inside % height, inside // height
    rows = (row_tile * BM + tl.arange(0, BM)) % M
    columns = (column_tile * BN + tl.arange(0, BN)) % N
    depth = tl.arange(0, BK)
    x_at = x + rows[:, None] * x_row + depth[None, :]
    weight_at = weight + depth[:, None] + columns[None, :] * weight_row
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BK)):
        left = K - step * BK
        a = tl.load(x_at, mask=depth[None, :] < left, other=0.0)
        b = tl.load(weight_at, mask=depth[:, None] < left, other=0.0)
        total = tl.dot(a, b, total)
        x_at += BK
        weight_at += BK
    rows = row_tile * BM + tl.arange(0, BM)
    columns = column_tile * BN + tl.arange(0, BN)
    place = y + rows[:, None] * y_row + columns[None, :]
    tl.store(place, total.to(y.dtype.element_ty), (rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def _walk(
    total, weight, highest, query, k, v, first, begin, end, rows, scale,
    BN: tl.constexpr, IS_ON_DIAGONAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The keys begin … end of one head, whose rows lie from `first` on; masked only on the diagonal."""
    for at in range(begin, end, BN):
        at = tl.multiple_of(at, BN)
        scores = tl.dot(query, k.load([first + at, 0]).T)
        if IS_ON_DIAGONAL:
            is_seen = rows[:, None] >= at + tl.arange(0, BN)[None, :]
            scores = scores * scale + tl.where(is_seen, 0, -1.0e6)
            new = tl.maximum(highest, tl.max(scores, 1))
            scores -= new[:, None]
        else:
            new = tl.maximum(highest, tl.max(scores, 1) * scale)
            scores = scores * scale - new[:, None]
        p = tl.math.exp2(scores)
        shrink = tl.math.exp2(highest - new)
        added = tl.sum(p, 1)
        total = tl.dot(p.to(DTYPE), v.load([first + at, 0]), total * shrink[:, None])
        weight = weight * shrink + added
        highest = new
    return total, weight, highest


@triton.jit
def attention(
    scale, logsumexp, q, k, v, out, heads, length,
    HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_MAPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Causal attention, tutorial 06 forward: q, k, v, out are [heads, length, HEAD], and so is the length a multiple
    of BM; logsumexp [heads, length] is what the tutorial keeps for its backward pass.

    q, k, v, out are tensor maps made by the host where HAS_MAPS, else addresses.
    """
    if not HAS_MAPS:
        q = tl.make_tensor_descriptor(q, [heads * length, HEAD], [HEAD, 1], [BM, HEAD])
        k = tl.make_tensor_descriptor(k, [heads * length, HEAD], [HEAD, 1], [BN, HEAD])
        v = tl.make_tensor_descriptor(v, [heads * length, HEAD], [HEAD, 1], [BN, HEAD])
        out = tl.make_tensor_descriptor(out, [heads * length, HEAD], [HEAD, 1], [BM, HEAD])
    tile, head = tl.program_id(0), tl.program_id(1)
    first = head * length
    rows = tile * BM + tl.arange(0, BM)
    highest = tl.zeros([BM], tl.float32) - float("inf")
    weight = tl.zeros([BM], tl.float32) + 1.0
    total = tl.zeros([BM, HEAD], tl.float32)
    scale *= 1.44269504
    query = q.load([first + tile * BM, 0])
    diagonal = tl.multiple_of(tile * BM, BM)
    total, weight, highest = _walk(
        total, weight, highest, query, k, v, first, 0, diagonal, rows, scale, BN, False, DTYPE
    )
    total, weight, highest = _walk(
        total, weight, highest, query, k, v, first, diagonal, diagonal + BM, rows, scale, BN, True, DTYPE
    )
    tl.store(logsumexp + head * length + rows, highest + tl.math.log2(weight))
    out.store([first + tile * BM, 0], (total / weight[:, None]).to(DTYPE))
