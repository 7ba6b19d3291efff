"""A fused mixture of experts in Triton, to be counted beside ours (tools/comparing/compare_triton.py).

It is written here, in the common form of engines with Triton kernels: the draws of all tokens are sorted by expert,
each expert's padded to whole tiles; a block takes a tile of them, looks its expert up, and multiplies gathered rows of
x with that expert's rows of the weight. Results are scattered to the draws' places; the sum over a token's experts, the
activation and the sorting are other launches.
"""

import triton
import triton.language as tl


@triton.jit
def experts(
    x, weight, y, draws, tile_experts, num_sorted, num_draws, N, K, x_row, expert_size, weight_row, y_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """y[draw, N] = x[draw // TOP_K, K] weight[expert of the draw, N, K]^T.

    draws [num_sorted]: sorted by expert, `num_draws` for padding; tile_experts: the expert of each BM of
    them; num_sorted [1], a multiple of BM. The grid has a block for every possible tile. N and K are any
    sizes; tiles go by in groups of GROUP for the second-level cache.
    """
    length = tl.load(num_sorted)
    tiles_m, tiles_n = tl.cdiv(length, BM), tl.cdiv(N, BN)
    a_group = GROUP * tiles_n
    first = tl.program_id(0) // a_group * GROUP
    height = min(tiles_m - first, GROUP)
    if first < tiles_m:
        inside = tl.program_id(0) % a_group
        row_tile, column_tile = first + inside % height, inside // height
        if column_tile < tiles_n:
            draw = tl.load(draws + row_tile * BM + tl.arange(0, BM))
            is_drawn = draw < num_draws
            expert = tl.load(tile_experts + row_tile).to(tl.int64)
            columns = (column_tile * BN + tl.arange(0, BN)) % N
            depth = tl.arange(0, BK)
            x_at = x + (draw // TOP_K)[:, None] * x_row + depth[None, :]
            weight_at = weight + expert * expert_size + depth[:, None] + columns[None, :] * weight_row
            total = tl.zeros((BM, BN), tl.float32)
            for step in range(tl.cdiv(K, BK)):
                left = K - step * BK
                a = tl.load(x_at, mask=is_drawn[:, None] & (depth[None, :] < left), other=0.0)
                b = tl.load(weight_at, mask=depth[:, None] < left, other=0.0)
                total = tl.dot(a, b, total)
                x_at += BK
                weight_at += BK
            columns = column_tile * BN + tl.arange(0, BN)
            place = y + draw[:, None] * y_row + columns[None, :]
            tl.store(place, total.to(y.dtype.element_ty), is_drawn[:, None] & (columns[None, :] < N))
