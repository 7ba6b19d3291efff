"""Triton kernels whose compiled PTX anchors the emulator.

`tools/references/make_emulator_anchors.py` compiles them, test_anchors.py runs them.

Plain Triton, no inline assembly: Triton chooses the instructions. Matrices are row-major.
"""

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[M, N] = a[M, K] b[K, N], any sizes, accumulated in f32 (i32 for int8)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    kind: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((BM, BN), kind)
    for k in range(0, K, BK):
        inside = k + depth < K
        x = tl.load(a + rows[:, None] * K + (k + depth)[None, :], (rows[:, None] < M) & inside[None, :], 0.0)
        y = tl.load(b + (k + depth)[:, None] * N + columns[None, :], inside[:, None] & (columns[None, :] < N), 0.0)
        total = tl.dot(x, y, total, out_dtype=kind)
    place = c + rows[:, None] * N + columns[None, :]
    tl.store(place, total.to(c.dtype.element_ty), (rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def matmul_nt(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[M, N] = a[M, K] b[N, K]^T."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        inside = k + depth < K
        x = tl.load(a + rows[:, None] * K + (k + depth)[None, :], (rows[:, None] < M) & inside[None, :], 0.0)
        y = tl.load(b + columns[:, None] * K + (k + depth)[None, :], (columns[:, None] < N) & inside[None, :], 0.0)
        total = tl.dot(x, tl.trans(y), total)
    place = c + rows[:, None] * N + columns[None, :]
    tl.store(place, total.to(c.dtype.element_ty), (rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def matmul_tma(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The same product; every tile goes through a tensor descriptor, the result too."""
    da = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    db = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    dc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(da.load([row, k]), db.load([k, column]), total)
    dc.store([row, column], total.to(c.dtype.element_ty))


@triton.jit
def matmul_warp_specialised(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The product with specialised producer and consumer warps. The result goes through a descriptor: for a plain store
    split between two consumers, Triton 3.9 adds the second one's offset twice."""
    dc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    da = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    db = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=True):
        total = tl.dot(da.load([row, k]), db.load([column, k]).T, total)
    dc.store([row, column], total)


@triton.jit
def matmul_split_k(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c += a b, each block a part of K, added by TMA reductions."""
    da = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    db = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    dc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    row, column, k = tl.program_id(0) * BM, tl.program_id(1) * BN, tl.program_id(2) * BK
    dc.atomic_add([row, column], tl.dot(da.load([row, k]), db.load([k, column])))


@triton.jit
def attention(q, k, v, o, length, scale, HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Causal attention of one head a program_id(1): q, k, v, o are [heads, length, HEAD]; `scale` includes log2(e)."""
    start = tl.program_id(0) * BM
    rows, columns, depth = start + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, HEAD)
    base = tl.program_id(1) * length * HEAD
    query = tl.load(q + base + rows[:, None] * HEAD + depth[None, :], rows[:, None] < length, 0.0)
    highest = tl.full((BM,), float("-inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, HEAD), tl.float32)
    for at in range(0, min(start + BM, length), BN):
        keys = at + columns
        key = tl.load(k + base + keys[None, :] * HEAD + depth[:, None], keys[None, :] < length, 0.0)
        scores = tl.dot(query, key) * scale
        scores = tl.where((rows[:, None] >= keys[None, :]) & (keys[None, :] < length), scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(highest - new)
        weight = weight * shrink + tl.sum(p, 1)
        value = tl.load(v + base + keys[:, None] * HEAD + depth[None, :], keys[:, None] < length, 0.0)
        total = tl.dot(p.to(value.dtype), value, total * shrink[:, None])
        highest = new
    total = total / weight[:, None]
    tl.store(o + base + rows[:, None] * HEAD + depth[None, :], total.to(o.dtype.element_ty), rows[:, None] < length)


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, at < columns, float("-inf"))
    values = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * columns + at, values / tl.sum(values, 0), at < columns)


@triton.jit
def layer_norm(x, weight, bias, y, columns, epsilon, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, inside, 0.0).to(tl.float32)
    mean = tl.sum(values, 0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / columns + epsilon)
    result = centred * scale * tl.load(weight + at, inside, 0.0) + tl.load(bias + at, inside, 0.0)
    tl.store(y + row * columns + at, result.to(y.dtype.element_ty), inside)


@triton.jit
def atomics(x, counts, extremes, sums, lock, n, BLOCK: tl.constexpr):
    """A histogram of 64 bins; extremes = (max, min); sums f32 by add; a sum in sums[1] under a spin lock."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    values = tl.load(x + at, inside, 0)
    tl.atomic_add(counts + values % 64, 1, inside)
    tl.atomic_max(extremes, tl.max(tl.where(inside, values, -(2**31)), 0))
    tl.atomic_min(extremes + 1, tl.min(tl.where(inside, values, 2**31 - 1), 0))
    part = tl.sum(tl.where(inside, values, 0).to(tl.float32), 0)
    tl.atomic_add(sums, part)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    before = tl.load(sums + 1)
    tl.debug_barrier()  # all warps have read it
    tl.store(sums + 1, before + part)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def scan_sort(x, scanned, ordered, best, n, BLOCK: tl.constexpr):
    """For each row of n: cumulative sums, the row sorted, the index of its largest."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < n
    values = tl.load(x + row * n + at, inside, 2**31 - 1)
    tl.store(scanned + row * n + at, tl.cumsum(tl.where(inside, values, 0), 0), inside)
    tl.store(ordered + row * n + at, tl.sort(values), inside)
    tl.store(best + row, tl.argmax(tl.where(inside, values, -(2**31)), 0))


@triton.jit
def casts(x, e4m3, e5m2, half, brain, back, n, BLOCK: tl.constexpr):
    """f32 to each narrow type; `back` is e4m3 + e5m2 widened to f32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    values = tl.load(x + at, inside, 0.0)
    first, second = values.to(tl.float8e4nv), values.to(tl.float8e5)
    tl.store(e4m3 + at, first, inside)
    tl.store(e5m2 + at, second, inside)
    tl.store(half + at, values.to(tl.float16), inside)
    tl.store(brain + at, values.to(tl.bfloat16), inside)
    tl.store(back + at, first.to(tl.float16).to(tl.float32) + second.to(tl.float32), inside)
