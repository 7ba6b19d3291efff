"""The operations that `bench kernels` times, as cases of any size: products, attention, norms, activations, softmax.

`gpu_check` and the kernel report use them at sizes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from numba_kernels.cuda import activation, attention, gemm, norm
from numba_kernels.cuda.arithmetic import softmax
from numba_kernels.cuda.attention.parts import MIN_PART_KEYS, record
from numba_kernels.cuda.attention.tiles import WIDE
from numba_kernels.cuda.gemm import hopper
from numba_kernels.cuda.gemm.hopper_ring import Tile
from numba_kernels.cuda.specialisation import Launch
from runtime.bench.kernels.case import TOLERANCE, Array, Case, Inputs, Prepared, numpy_dtype, sampled
from runtime.device.gpu import Gpu

BLOCK_SIZE = 16
EPS = 1e-6
PAGE_SCALE = 0.01
QWEN3_8B = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
"""N, K of a layer's matrices: q k v, o, gate and up, down."""
ON_TENSOR_CORES = ("tensor_core", "skinny", "hopper", "hopper_few", "flash", "flash_hopper")
"""Tiers whose products of 16-bit factors tensor cores do."""


def product_case(
    tier: str, m: int, n: int, k: int, dtype: str = "bf16", *, out_dtype: str = "", tile: Tile | None = None,
    parts: int = 1, num_sms: int = 0, has_bias: bool = False, has_residual: bool = False, activation: str = "",
    is_aligned: bool = True, exact: bool = False, block: tuple[int, int] = (0, 0),
) -> Case:  # fmt: skip
    """``y [m, n] = act(x [m, k] . w^T + bias) + residual``.

    Args:
        tier: of `gemm.TIERS`, or "auto".
        tile: of the Hopper tier, instead of its plan's; with `parts`, the split of K.
        num_sms: multiprocessors to plan for; 0 for the device's.
        activation: "silu" or "gelu_tanh", by the Hopper tier: the weight has 2 n rows, gate and then up, and y is
            ``act(gate) * up``.
        is_aligned: whether y and its terms are 16-byte aligned, an argument of the plan.
        block: rows and columns of y that share reads of x and of the weight, if the report checks these.
    """
    out_type = out_dtype or dtype
    columns = 2 * n if activation else n

    def planned(gpu: Gpu) -> Launch:
        epilogue = gemm.Epilogue(has_residual=has_residual, is_aligned=is_aligned, activation=activation)
        product = gemm.Product(m, n, k, dtype, out=out_type, epilogue=epilogue, exact=exact)
        machine = gemm.machine_of(gpu.arch, num_sms or gpu.properties.num_sms, gpu.max_clusters)
        launch = gemm.plan(product, machine, tier) if tile is None else hopper.plan_tile(product, machine, tile, parts)
        if launch is None:
            raise AssertionError(f"there is no launch of {tile or tier} for {m} x {n} x {k}")
        return launch

    def prepare(inputs: Inputs) -> Prepared:
        x, weight = inputs.normal((m, k), dtype), inputs.normal((columns, k), dtype, k**-0.5)
        bias = inputs.normal((n,), dtype) if has_bias else None
        residual = inputs.normal((m, n), out_type) if has_residual else None
        out = inputs.result(m * n * numpy_dtype(out_type).itemsize)
        operands = inputs.put(x), inputs.put(weight)
        terms = [0 if term is None else inputs.put(term) for term in (bias, residual)]
        run = inputs.bind((planned(inputs.gpu), (*operands, *terms, out, m, n, k, 0, *gemm.NO_SQUARES)))
        rows = sampled(m)
        expected = x[rows].astype(np.float32) @ weight.astype(np.float32).T
        if bias is not None:
            expected += bias.astype(np.float32)
        if activation:
            expected = _gated(activation, expected[:, :n], expected[:, n:])
        if residual is not None:
            expected += residual[rows].astype(np.float32)

        def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
            left, right = tensor(x), tensor(weight)
            return lambda: module.nn.functional.linear(left, right)

        peer = torch if terms == [0, 0] and not activation else None
        return Prepared(run, out, (m, n), out_type, rows, expected, peer, operands, (m, n, k))

    size = numpy_dtype(dtype).itemsize
    least = (m * k + columns * k + n * has_bias) * size + m * n * numpy_dtype(out_type).itemsize * (1 + has_residual)
    words = [f"gemm {tier if tile is None else f'hopper {tile}'} {dtype}"] + [f"to {out_dtype}"] * bool(out_dtype)
    words += [f"{parts} parts"] * (parts > 1) + ["bias"] * has_bias + ["residual"] * has_residual
    words += [activation] * bool(activation) + ["rows on any bounds"] * (not is_aligned) + ["exact"] * exact
    tiled_bytes = (-(-n // block[1]) * m + -(-m // block[0]) * n) * k * size + m * n * size if all(block) else 0
    return Case(
        ", ".join(words), f"{m} x {n} x {k}", least, 2 * m * columns * k, TOLERANCE[dtype], prepare, "gemm",
        tiled_bytes, dtype != "f32", tier in ON_TENSOR_CORES,
    )  # fmt: skip


def _gated(activation: str, gate: Array, up: Array) -> Array:
    if activation == "silu":
        return np.asarray(gate / (1 + np.exp(-gate)) * up)
    cubic = np.float32(0.7978845608) * (gate + np.float32(0.044715) * gate**3)
    return np.asarray(gate * (1 + np.tanh(cubic)) / 2 * up)


def attention_case(
    tier: str, dtype: str, seqs: int, context: int, queries: int, heads: int, kv_heads: int, head_dim: int, *,
    num_sms: int = 0, pages: str = "",
) -> Case:  # fmt: skip
    """Causal attention of each sequence's last `queries` tokens, with `context` tokens before them. `tier`: one of
    `attention.TIERS`, or "auto" for the planned one. `num_sms`: multiprocessors to plan for; 0 for the device's.
    `pages`: of `PAGES`, the format of pages of one byte per number, with a scale of `PAGE_SCALE`.

    Ours reads shuffled pages; torch's has the same keys and values in rows.
    """
    length = context + queries
    tokens, scale, blocks = seqs * queries, head_dim**-0.5, -(-length // BLOCK_SIZE)

    def prepare(inputs: Inputs) -> Prepared:
        q = inputs.normal((tokens, heads, head_dim), dtype)
        k, v = (inputs.keys((seqs, kv_heads, length, head_dim), dtype, pages) for _ in range(2))
        table = inputs.rng.permutation(seqs * blocks).astype(np.int32)
        plan = attention.plan(
            num_tokens=tokens, num_seqs=seqs, max_query_len=queries, max_seq_len=length, num_q_heads=heads,
            num_kv_heads=kv_heads, head_dim=head_dim, table_width=blocks, dtype=dtype, block_size=BLOCK_SIZE,
            num_sms=num_sms or inputs.gpu.properties.num_sms, arch=inputs.gpu.arch, num_blocks=seqs * blocks,
            tier=None if tier == "auto" else tier, pages=pages,
        )  # fmt: skip
        out = inputs.result(tokens * heads * head_dim * size)
        scales = [np.full((seqs * blocks, kv_heads, BLOCK_SIZE), PAGE_SCALE, np.float32)] * 2 if pages else []
        workspace = inputs.empty(plan.workspace_bytes) if plan.workspace_bytes else 0
        arguments = plan.arguments(
            inputs.put(q), inputs.put(_paged(k, table)), inputs.put(_paged(v, table)), out, workspace,
            inputs.put(np.zeros(max(1, plan.num_arrivals), np.uint32)),
            inputs.put(np.arange(seqs + 1, dtype=np.int32) * np.int32(queries)),
            inputs.put(np.full(seqs, length, np.int32)), inputs.put(table), scale, 0,
            *map(inputs.put, scales),
        )  # fmt: skip
        if pages:
            k, v = (each.astype(np.float32) * np.float32(PAGE_SCALE) for each in (k, v))
        run = inputs.bind((plan.launch, arguments))

        def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
            rows = np.ascontiguousarray(q.reshape(seqs, queries, heads, head_dim).transpose(0, 2, 1, 3))
            a, b, c = tensor(rows), tensor(k), tensor(v)
            is_causal, is_grouped = queries > 1, heads != kv_heads
            attend = module.nn.functional.scaled_dot_product_attention
            return lambda: attend(a, b, c, is_causal=is_causal, enable_gqa=is_grouped).transpose(1, 2)

        rows = sampled(tokens)
        expected = _attention_expected(q.reshape(seqs, queries, heads, head_dim), k, v, scale, rows)
        return Prepared(run, out, (tokens, heads, head_dim), dtype, rows, expected, torch)

    size = numpy_dtype(dtype).itemsize
    seen = seqs * sum(context + 1 + query for query in range(queries))
    key_bytes = head_dim + 4 if pages else head_dim * size  # of a key and head, with its scale
    least = 2 * tokens * heads * head_dim * size + 2 * seqs * length * kv_heads * key_bytes
    shape = f"{seqs} x {queries} queries, {length} keys, {heads}/{kv_heads} heads of {head_dim}"
    name = f"attention {tier} {dtype}{f' {pages} pages' if pages else ''}"
    tiled_bytes = 0
    # Parts of at least MIN_PART_KEYS keys read their rows, and write a record of each, which is read again. Tiles of
    # 128 rows (64 of float32 and of wide heads) read the keys that their last query sees.
    if tier == "decode":
        records = 0 if num_sms == 1 else seqs * heads * (length // MIN_PART_KEYS)
        rows_again = max(0, records - tokens * heads) * head_dim * size
        tiled_bytes = least + rows_again + 2 * records * 4 * record(head_dim)
    elif tier in ("flash", "flash_hopper"):
        queries_each = (128 if dtype != "f32" and head_dim <= WIDE else 64) // (heads // kv_heads)
        keys = sum(context + min(queries, first + queries_each) for first in range(0, queries, queries_each))
        tiled_bytes = 2 * tokens * heads * head_dim * size + 2 * seqs * keys * kv_heads * key_bytes
    return Case(
        name, shape, least, 4 * seen * heads * head_dim, TOLERANCE[dtype], prepare, "attention", tiled_bytes,
        dtype != "f32", dtype != "f32" and tier in ON_TENSOR_CORES,
    )  # fmt: skip


def _paged(rows: Array, table: Array) -> Array:
    """[seqs, kv_heads, length, head_dim] → pages [blocks, kv_heads, BLOCK_SIZE, head_dim] at the table's places."""
    seqs, kv_heads, length, head_dim = rows.shape
    blocks = -(-length // BLOCK_SIZE)
    padded = np.zeros((seqs, kv_heads, blocks * BLOCK_SIZE, head_dim), rows.dtype)
    padded[:, :, :length] = rows
    pages = np.empty((seqs * blocks, kv_heads, BLOCK_SIZE, head_dim), rows.dtype)
    cut = padded.reshape(seqs, kv_heads, blocks, BLOCK_SIZE, head_dim).transpose(0, 2, 1, 3, 4)
    pages[table] = cut.reshape(pages.shape)
    return pages


def _attention_expected(q: Array, k: Array, v: Array, scale: float, rows: Array) -> Array:
    """Causal attention [len(rows), heads, head_dim] float32 of those tokens, counted over all sequences."""
    _, queries, heads, head_dim = q.shape
    length, share = k.shape[2], heads // k.shape[1]
    out = np.empty((len(rows), heads, head_dim), np.float32)
    for seq in np.unique(rows // queries):
        chosen = np.flatnonzero(rows // queries == seq)
        query = rows[chosen] % queries
        hidden = np.arange(length)[None, :] > (length - queries + query)[:, None]
        for head in range(heads):
            keys, values = (x[seq, head // share].astype(np.float32) for x in (k, v))
            scores = q[seq, query, head].astype(np.float32) @ keys.T * np.float32(scale)
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(1, keepdims=True))
            out[chosen, head] = scores @ values / scores.sum(1, keepdims=True)
    return out


def norm_case(name: str, rows: int, size: int, *, has_residual: bool = False) -> Case:
    """``rms_norm`` or ``layer_norm`` of ``[rows, size]``; a residual is added after the first."""
    is_rms = name == "rms_norm"

    def prepare(inputs: Inputs) -> Prepared:
        x = inputs.normal((rows, size), "bf16")
        affine = [inputs.normal((size,), "bf16") for _ in range(1 if is_rms else 2)]
        out = inputs.result(rows * size * 2)
        addresses = [inputs.put(term.astype(np.float32)) for term in affine]
        residual = inputs.normal((rows, size), "bf16") if has_residual else None
        if is_rms:
            launch = norm.plan_rms_norm(rows, size, "bf16", has_residual=has_residual)
            addresses.insert(0, 0 if residual is None else inputs.put(residual))
        else:
            launch = norm.plan_layer_norm(rows, size, "bf16")
        factor = (1.0,) if is_rms else ()
        run = inputs.bind((launch, (inputs.put(x), *addresses, out, size, 1 / size, EPS, *factor)))
        wide = x.astype(np.float32)
        centred = wide if is_rms else wide - wide.mean(1, keepdims=True)
        expected = centred / np.sqrt((centred * centred).mean(1, keepdims=True) + np.float32(EPS))
        expected *= affine[0].astype(np.float32)
        if not is_rms:
            expected += affine[1].astype(np.float32)
        if residual is not None:
            expected += residual.astype(np.float32)
        chosen = sampled(rows)

        def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
            data, terms = tensor(x), [tensor(term) for term in affine]
            function = getattr(module.nn.functional, name)
            return lambda: function(data, (size,), *terms, eps=EPS)

        return Prepared(run, out, (rows, size), "bf16", chosen, expected[chosen], None if has_residual else torch)

    least = (6 if has_residual else 4) * rows * size + 4 * size * (1 if is_rms else 2)
    title = f"{name}{' + residual' * has_residual} bf16"
    return Case(title, f"{rows} x {size}", least, 4 * rows * size, TOLERANCE["bf16"], prepare, "norm")


def swiglu_case(rows: int, size: int) -> Case:
    """``silu(gate) * up`` of ``[rows, 2 size]``."""

    def prepare(inputs: Inputs) -> Prepared:
        x = inputs.normal((rows, 2 * size), "bf16")
        launch, sizes = activation.plan_glu("silu", rows, size, "bf16", (2 * size, 2 * size))
        out = inputs.result(rows * size * 2)
        source = inputs.put(x)
        run = inputs.bind((launch, (source, source + size * 2, out, rows, *sizes)))
        gate, up = (part.astype(np.float32) for part in np.split(x, 2, axis=1))
        expected = gate / (1 + np.exp(-gate)) * up
        chosen = sampled(rows)

        def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
            left, right = tensor(x).chunk(2, dim=1)
            return lambda: module.nn.functional.silu(left) * right

        return Prepared(run, out, (rows, size), "bf16", chosen, expected[chosen], torch)

    count = rows * size
    return Case("swiglu bf16", f"{rows} x {size}", 6 * count, 5 * count, TOLERANCE["bf16"], prepare, "activation")


def softmax_case(rows: int, size: int, *, is_log: bool = False) -> Case:
    """Softmax of ``[rows, size]``, or its logarithm."""

    def prepare(inputs: Inputs) -> Prepared:
        x = inputs.normal((rows, size), "f32", math.sqrt(2))
        out = inputs.result(x.nbytes)
        run = inputs.bind((softmax.plan_softmax(rows, size, "f32", is_log=is_log), (inputs.put(x), out, size)))
        weights = np.exp(x - x.max(1, keepdims=True))
        expected = weights / weights.sum(1, keepdims=True, dtype=np.float64).astype(np.float32)
        expected = np.log(expected) if is_log else expected
        chosen = sampled(rows)

        def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
            data = tensor(x)
            return lambda: (module.log_softmax if is_log else module.softmax)(data, dim=1)

        return Prepared(run, out, (rows, size), "f32", chosen, expected[chosen], torch)

    count = rows * size
    name = f"{'log_' * is_log}softmax f32"
    return Case(name, f"{rows} x {size}", 8 * count, 5 * count, TOLERANCE["f32"], prepare, "softmax")
