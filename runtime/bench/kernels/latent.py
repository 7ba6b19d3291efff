"""Cases of latent attention: each sequence's last tokens over shuffled pages of one row a token, and a prompt over
expanded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from numba_kernels.cuda import attention, latent
from numba_kernels.cuda.attention.parts import MIN_PART_KEYS, record
from numba_kernels.latent_rows import GROUP, LatentBytes
from runtime.bench.kernels.case import TOLERANCE, Array, Case, Inputs, Prepared, numpy_dtype, sampled
from runtime.bench.kernels.operations import BLOCK_SIZE

SCALE, ROTARY = 0.07, 64


def latent_case(
    tier: str, dtype: str, seqs: int, context: int, queries: int, heads: int, width: int = 576, value_dim: int = 512, *,
    exact: bool = False, in_bytes: bool = False,
) -> Case:  # fmt: skip
    """`tier`: of `latent.planning.TIERS`, or "auto"; `exact`: no sequence is split; `in_bytes`: pages of fp8. Torch's
    call has the rows as one key head, and their last numbers as its values."""
    length, size = context + queries, numpy_dtype(dtype).itemsize
    tokens, blocks = seqs * queries, -(-length // BLOCK_SIZE)

    def prepare(inputs: Inputs) -> Prepared:
        q = inputs.normal((seqs, queries, heads, width), dtype)
        rows = inputs.normal((seqs, length, width), dtype)
        if in_bytes:
            stored, rows = _bytes_of(rows, value_dim, dtype)
        else:
            stored = rows
        table = inputs.rng.permutation(seqs * blocks).astype(np.int32)
        pages = np.zeros((seqs * blocks, BLOCK_SIZE, stored.shape[2]), stored.dtype)
        padded = np.zeros((seqs, blocks * BLOCK_SIZE, stored.shape[2]), stored.dtype)
        padded[:, :length] = stored
        pages[table] = padded.reshape(pages.shape)
        properties = inputs.gpu.properties
        plan = latent.plan_attention(
            num_tokens=tokens, num_seqs=seqs, max_query_len=queries, max_seq_len=length, num_heads=heads, width=width,
            value_dim=value_dim, table_width=blocks, dtype=dtype, block_size=BLOCK_SIZE, num_sms=properties.num_sms,
            most_shared=properties.shared_bytes_per_block, arch=inputs.gpu.arch, num_blocks=len(pages), exact=exact,
            tier=None if tier == "auto" else tier, pages="e4m3" * in_bytes,
        )  # fmt: skip
        out = inputs.result(tokens * heads * value_dim * size)
        arguments = plan.arguments(
            inputs.put(q), inputs.put(pages), out, inputs.empty(plan.workspace_bytes) if plan.workspace_bytes else 0,
            inputs.put(np.zeros(max(1, plan.num_arrivals), np.uint32)),
            inputs.put(np.arange(seqs + 1, dtype=np.int32) * np.int32(queries)),
            inputs.put(np.full(seqs, length, np.int32)), inputs.put(table), SCALE,
        )  # fmt: skip

        def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
            a, b = tensor(np.ascontiguousarray(q.transpose(0, 2, 1, 3))), tensor(rows[:, None])
            c = b[..., width - value_dim :]
            attend = module.nn.functional.scaled_dot_product_attention
            return lambda: attend(a, b, c, is_causal=queries > 1, scale=SCALE, enable_gqa=True).transpose(1, 2)

        chosen = sampled(tokens)
        expected = _expected(q.reshape(tokens, heads, width), rows, queries, value_dim, chosen)
        run, shape = inputs.bind((plan.launch, arguments)), (tokens, heads, value_dim)
        peer = torch if queries == 1 or context == 0 else None  # torch hides keys as if there were no context
        return Prepared(run, out, shape, dtype, chosen, expected, peer, notes={"tier": plan.tier})

    seen = seqs * sum(context + 1 + query for query in range(queries))
    inputs_bytes, out_bytes = (tokens * heads * each * size for each in (width, value_dim))
    row_bytes = LatentBytes(width, value_dim).row_bytes if in_bytes else width * size
    least_bytes = inputs_bytes + out_bytes + seqs * length * row_bytes
    tile_rows = 64 if tier == "hopper" else 16
    tiles, last = -(-queries * heads // tile_rows), queries * heads - 1
    keys = sum(context + 1 + min(tile_rows * (tile + 1) - 1, last) // heads for tile in range(tiles))
    parts = 1 if exact else max(1, length // MIN_PART_KEYS)  # each of which reads its queries
    records = tokens * heads * parts * (parts > 1)
    tiled_bytes = parts * inputs_bytes + out_bytes + seqs * keys * row_bytes + 2 * records * 4 * record(value_dim)
    return Case(
        f"latent {tier} {dtype}{' e4m3 pages' * in_bytes}{' unsplit' if exact else ''}",
        f"{seqs} x {queries} queries, {length} keys, {heads} heads, rows of {width}", least_bytes,
        2 * seen * heads * (width + value_dim), TOLERANCE[dtype], prepare, "latent",
        0 if tier == "plain" or in_bytes else tiled_bytes, dtype != "f32", tier in ("tensor_core", "hopper"),
    )  # fmt: skip


def _bytes_of(rows: Array, value_dim: int, dtype: str) -> tuple[Array, Array]:
    """Rows of fp8 pages, uint8, and the numbers that they hold."""
    layout, found = LatentBytes(rows.shape[2], value_dim), rows.astype(np.float32)
    stored = np.zeros((*rows.shape[:2], layout.row_bytes), np.uint8)
    rotated = found[..., : layout.rotary].astype(ml_dtypes.bfloat16)
    at = layout.rotated_at
    stored[..., at : at + 2 * layout.rotary] = rotated.view(np.uint8)
    found[..., : layout.rotary] = rotated
    for number, first in enumerate(range(0, value_dim, GROUP)):
        last = min(value_dim, first + GROUP)
        group = found[..., layout.rotary + first : layout.rotary + last]
        scale = (np.abs(group).max(2, keepdims=True) / 448).astype(np.float32)
        bits = (group / scale).astype(ml_dtypes.float8_e4m3fn)
        stored[..., first:last] = bits.view(np.uint8)
        at = layout.value_bytes + 4 * number
        stored[..., at : at + 4] = scale.view(np.uint8)
        group[...] = bits.astype(np.float32) * scale
    return stored, found.astype(numpy_dtype(dtype))


def expanded_case(
    tier: str, dtype: str, context: int, queries: int, heads: int, qk_dim: int = 192, v_dim: int = 128
) -> Case:
    """A long prompt's attention over expanded rows, in one segment. `tier` is a name: the device's is taken."""
    length, size = context + queries, numpy_dtype(dtype).itemsize
    num_rows = -(-length // 128) * 128

    def prepare(inputs: Inputs) -> Prepared:
        q = inputs.normal((queries, heads, qk_dim), dtype)
        pairs = inputs.normal((num_rows, heads, qk_dim + v_dim), dtype)
        plan = attention.plan_expanded(
            dtype, qk_dim, v_dim, num_tokens=queries, query_len=queries, num_heads=heads, num_rows=num_rows,
            num_sms=inputs.gpu.properties.num_sms, arch=inputs.gpu.arch,
        )  # fmt: skip
        out, keys = inputs.result(queries * heads * v_dim * size), inputs.put(pairs)
        arguments = plan.arguments(
            inputs.put(q), keys, keys + qk_dim * size, out, 0, inputs.put(np.array([0, queries], np.int32)),
            inputs.put(np.array([length], np.int32)), SCALE, first_key=0, most_keys=num_rows, is_last=True,
        )  # fmt: skip

        def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
            a, b = (tensor(np.ascontiguousarray(each.transpose(1, 0, 2)))[None] for each in (q, pairs[:length]))
            attend = module.nn.functional.scaled_dot_product_attention
            return lambda: attend(a, b[..., :qk_dim], b[..., qk_dim:], is_causal=True, scale=SCALE).transpose(1, 2)

        chosen, shape = sampled(queries), (queries, heads, v_dim)
        expected = np.empty((len(chosen), heads, v_dim), np.float32)
        for place, token in enumerate(chosen):
            seen = pairs[: context + int(token) + 1].astype(np.float32)
            scores = np.einsum("hd,lhd->hl", q[token].astype(np.float32), seen[..., :qk_dim]) * np.float32(SCALE)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            expected[place] = np.einsum("hl,lhd->hd", weights, seen[..., qk_dim:])
        run = inputs.bind((plan.launch, arguments))
        return Prepared(run, out, shape, dtype, chosen, expected, torch if context == 0 else None)

    pair_bytes, tile_rows = (qk_dim + v_dim) * size, 128 if tier == "flash_hopper" or max(qk_dim, v_dim) <= 128 else 64
    own_bytes, tiles = queries * heads * pair_bytes, -(-queries // tile_rows)
    keys = sum(context + min(tile_rows * (tile + 1), queries) for tile in range(tiles))
    return Case(
        f"latent expanded {tier} {dtype}", f"{queries} queries, {length} keys, {heads} heads of {qk_dim} and {v_dim}",
        own_bytes + length * heads * pair_bytes,
        2 * heads * (queries * context + queries * (queries + 1) // 2) * (qk_dim + v_dim), TOLERANCE[dtype], prepare,
        "latent", own_bytes + keys * heads * pair_bytes, dtype != "f32", dtype != "f32",
    )  # fmt: skip


def head_map_case(
    dtype: str, tokens: int, heads: int, key_dim: int = 128, value_dim: int = 128, width: int = 576, *,
    is_absorbing: bool = True,
) -> Case:  # fmt: skip
    """The maps of heads before attention, with rotation and latent rows (`is_absorbing`), or after it."""
    latent_dim, rotary, size = width - ROTARY, ROTARY, numpy_dtype(dtype).itemsize
    head_dim, row = key_dim + rotary, heads * (key_dim + rotary) + width
    depth, columns = (key_dim, latent_dim) if is_absorbing else (latent_dim, value_dim)
    chosen = sampled(tokens)

    def prepare(inputs: Inputs) -> Prepared:
        x = inputs.normal((tokens, row if is_absorbing else heads * latent_dim), dtype)
        maps = inputs.normal((heads, columns, depth), dtype)
        given, weight = inputs.put(x), inputs.put(maps)
        x, maps = x[chosen].astype(np.float32), maps.astype(np.float32)
        if not is_absorbing:
            plan = latent.plan_values(tokens, heads, latent_dim, value_dim, dtype, is_aligned=True)
            out = inputs.result(tokens * heads * value_dim * size)
            run = inputs.bind((plan, (given, weight, out, heads, tokens)))
            expected = np.einsum("thc,hvc->thv", x.reshape(len(chosen), heads, latent_dim), maps)
            return Prepared(run, out, (tokens, heads, value_dim), dtype, chosen, expected)
        plan = latent.plan_absorb(
            tokens, heads, width, dtype, rotary=rotary, interleaved=True, key_dim=key_dim, is_aligned=True
        )
        angles = np.outer(np.arange(tokens), 0.9 ** np.arange(rotary // 2)).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        out = inputs.result(tokens * heads * width * size)
        blocks = -(-tokens // BLOCK_SIZE)
        pages = inputs.put(np.zeros((blocks, BLOCK_SIZE, width), numpy_dtype(dtype)))
        arguments = (
            given, weight, out, given + heads * head_dim * size, inputs.put(np.arange(tokens, dtype=np.int32)),
            inputs.put(cos), inputs.put(sin), 0, inputs.put(np.ones(latent_dim, np.float32)),
            inputs.put(np.arange(tokens)), pages, row, row, heads, tokens, 1e-6,
        )  # fmt: skip
        q = x[:, : heads * head_dim].reshape(len(chosen), heads, head_dim)
        low, high = q[..., key_dim::2], q[..., key_dim + 1 :: 2]
        c, s = (each[chosen][:, None] for each in (cos, sin))
        turned = np.stack([low * c - high * s, high * c + low * s], -1).reshape(*low.shape[:2], rotary)
        expected = np.concatenate([turned, np.einsum("thk,hck->thc", q[..., :key_dim], maps)], -1)
        return Prepared(inputs.bind((plan, arguments)), out, (tokens, heads, width), dtype, chosen, expected)

    out_dim = width if is_absorbing else value_dim
    x_size, maps_size, out_size = tokens * heads * depth, heads * columns * depth, tokens * heads * out_dim
    rotated, tables, weights = 0, 0, 0
    if is_absorbing:  # with the latent rows, read and written
        rotated, tables, weights = tokens * (heads * rotary + 2 * width), tokens * rotary * 4, latent_dim * 4
    sizes = latent.HeadMap(dtype, depth, columns, depth, out_dim, 0, True)
    tiled = x_size * sizes.column_tiles + maps_size * -(-tokens // latent.rows_of(sizes, tokens)) + out_size + rotated
    return Case(
        f"latent {'absorb' if is_absorbing else 'values'} {dtype}", f"{tokens} x {heads} heads, {depth} to {columns}",
        (x_size + maps_size + out_size + rotated) * size + tables + weights, 2 * tokens * heads * depth * columns,
        TOLERANCE[dtype], prepare, "latent", tiled * size + (heads + 1) * tables + tokens * weights, dtype != "f32",
        dtype != "f32",
    )  # fmt: skip


def _expected(q: Array, rows: Array, queries: int, value_dim: int, chosen: Array) -> Array:
    """float32 [len(chosen), heads, value_dim] of those tokens."""
    out = np.empty((len(chosen), q.shape[1], value_dim), np.float32)
    for place, token in enumerate(chosen):
        seq, query = divmod(int(token), queries)
        seen = rows[seq, : rows.shape[1] - queries + query + 1].astype(np.float32)
        scores = q[token].astype(np.float32) @ seen.T * np.float32(SCALE)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[place] = weights @ seen[:, rows.shape[2] - value_dim :] / weights.sum(1, keepdims=True)
    return out
