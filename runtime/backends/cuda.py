"""The operations of a model on a GPU, real or emulated, as `runtime.ops` describes them.

Activations, matrices and the KV cache are of one type, float32, float16 or bfloat16; norm weights and biases are
float32. Every operation is one launch, or a few, on the device's current stream; none waits. A `plan` of the kernel's
family chooses specialisation, grid and block; `Gpu.launch` compiles, packs and launches.
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cuda import activation as _activation
from numba_kernels.cuda import attention as _attention
from numba_kernels.cuda import embedding as _embedding
from numba_kernels.cuda import gemm as _gemm
from numba_kernels.cuda import norm as _norm
from numba_kernels.cuda import qkv as _qkv
from numba_kernels.cuda import scaling as _scaling
from numba_kernels.cuda.specialisation import Launch
from runtime.backends import cuda_cublas, cuda_segments
from runtime.backends.checks import check, fail
from runtime.backends.cuda_tensor import alignment, id_flag, upload
from runtime.batch import Batch
from runtime.device.gpu import Gpu
from runtime.dtype import DType, bfloat16, float16, float32
from runtime.linear.weight import RowWeight
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor

ACTIVATIONS = (float32, float16, bfloat16)
WEIGHT = TABLE = RowWeight
NORM_WEIGHTS = float32

# ------------------------------------------------------------------------------------------ linear, embedding


def linear(x: Tensor, weight: RowWeight, residual: Tensor | None, out: Tensor | None, dtype: DType) -> Tensor:
    """See `ops.linear`; `dtype` is that of the result."""
    gpu, rows, (width, depth) = Gpu.of(x.device), x.shape[0], weight.shape
    result = Tensor.empty((rows, width), dtype, x.device) if out is None else out
    if weight.tier == "cublas":
        cuda_cublas.product(gpu, x, weight, residual, result)
    elif weight.num_segments > 1:
        cuda_segments.product(gpu, x, weight, weight.bias_address, 0 if residual is None else residual.address, result)
    elif rows and width:
        matrix, bias, added = weight.address, weight.bias_address, 0 if residual is None else residual.address
        key = rows, dtype, added != 0, (x.address | matrix) & 15, (result.address | added | bias) & 15
        launch = weight.plans.get(key)
        if launch is None:
            epilogue = _gemm.Epilogue(has_residual=key[2], is_aligned=key[4] == 0)
            launch = _plan(gpu, weight, rows, width, dtype, epilogue, is_aligned=key[3] == 0)
            assert launch is not None
            weight.keep_plan(key, launch)
        gpu.launch(launch, x.address, matrix, bias, added, result.address, rows, width, depth, 1)
    return result


def linear_partial(x: Tensor, weight: RowWeight) -> Tensor:
    """See `ops.linear_partial`."""
    result = Tensor.empty((x.shape[0], weight.shape[0]), float32, x.device)
    cuda_segments.product(Gpu.of(x.device), x, weight, 0, 0, result)
    return result


def add_partials(partials: Tensor, weight: RowWeight, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """See `ops.add_partials`."""
    result = Tensor.empty(partials.shape[1:], weight.activations, partials.device) if out is None else out
    added = 0 if residual is None else residual.address
    cuda_segments.add(Gpu.of(partials.device), partials, weight.bias_address, added, result)
    return result


def linear_glu(x: Tensor, weight: RowWeight, activation: str) -> Tensor:
    """See `ops.linear_glu`."""
    gpu, rows, (both, depth) = Gpu.of(x.device), x.shape[0], weight.shape
    key = rows, activation, (x.address | weight.address) & 15
    if key not in weight.plans:
        launch = None
        if weight.bias is None and weight.tier != "cublas" and not weight.num_segments:
            epilogue = _gemm.Epilogue(has_residual=False, activation=activation)
            launch = _plan(gpu, weight, rows, both // 2, x.dtype, epilogue, is_aligned=key[2] == 0)
        weight.keep_plan(key, launch)
    launch = weight.plans[key]
    if launch is None:
        return glu(linear(x, weight, None, None, x.dtype), activation)
    result = Tensor.empty((rows, both // 2), x.dtype, x.device)
    gpu.launch(launch, x.address, weight.address, 0, 0, result.address, rows, both // 2, depth, 0)
    return result


def _plan(
    gpu: Gpu, weight: RowWeight, rows: int, width: int, dtype: DType, epilogue: _gemm.Epilogue, *, is_aligned: bool
) -> Launch | None:
    """Chooses the kernel of a product; see `gemm.plan`."""
    product = _gemm.Product(
        rows, width, weight.shape[1], weight.activations.ptx, weight.format.element.ptx, dtype.ptx, epilogue,
        is_aligned=is_aligned, exact=weight.exact, whole=weight.whole_shape,
    )  # fmt: skip
    return _gemm.plan(product, _gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters), weight.tier)


def scale_logits(logits: Tensor, scale: float, softcap: float | None) -> None:
    """Multiplies ``logits [T, V]`` in place, and caps them unless ``softcap`` is None."""
    launch, accesses = _scaling.plan_scale_logits(
        logits.size, is_capped=softcap is not None, alignment=alignment(logits.address)
    )
    cap = softcap or 1.0
    Gpu.of(logits.device).launch(launch, logits.address, accesses, scale, cap, -2.0 / cap)


def add_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """See `ops.add_scaled`."""
    result = Tensor.empty(x.shape, x.dtype, x.device)
    if x.size:
        addresses = x.address, y.address, result.address
        launch, accesses = _scaling.plan_add_scaled(x.size, x.dtype.ptx, alignment=alignment(*addresses))
        Gpu.of(x.device).launch(launch, *addresses, accesses, scale)
    return result


def _gather(
    op: str, ids: Tensor, table: Tensor | RowWeight, out: Tensor | None, multiplier: float = 1.0
) -> Tensor:
    rows_of = table.weight if isinstance(table, RowWeight) else table
    (table_rows, width), num_rows = rows_of.shape, ids.shape[0]
    if out is not None and out.dtype is not rows_of.dtype:
        raise fail(op, "table", f"is {rows_of.dtype.name}, must be {out.dtype.name}")
    result = Tensor.empty((num_rows, width), rows_of.dtype, ids.device) if out is None else out
    if num_rows and width:
        if not table_rows:
            raise fail(op, "table", "has no rows")
        source = rows_of.address
        launch, accesses = _embedding.plan_embedding(
            num_rows, width, rows_of.dtype.ptx, is_added=out is not None, alignment=alignment(source, result.address)
        )
        flag = id_flag(ids.device).address
        Gpu.of(ids.device).launch(
            launch, ids.address, source, result.address, flag, num_rows, table_rows, accesses, multiplier
        )
    return result


def embedding(token_ids: Tensor, table: Tensor | RowWeight, scale: float) -> Tensor:
    """See `ops.embedding`."""
    return _gather("embedding", token_ids, table, None, scale)


def add_embedding(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """See `ops.add_embedding`."""
    return _gather("add_embedding", positions, table, x)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """See `ops.gather_rows`."""
    return _gather("gather_rows", indices, x, None)


# ------------------------------------------------------------------------------------------ norms, activations


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """See `ops.rms_norm`."""
    rows, width = x.shape
    result = Tensor.empty(x.shape, x.dtype, x.device)
    if rows and width:
        addresses = x.address, 0 if residual is None else residual.address, weight.address, result.address
        launch = _norm.plan_rms_norm(
            rows, width, x.dtype.ptx, has_residual=residual is not None, alignment=alignment(*addresses)
        )
        Gpu.of(x.device).launch(launch, *addresses, width, 1.0 / width, eps)
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `ops.layer_norm`."""
    rows, width = x.shape
    if bias is None:
        bias = upload(np.zeros(width, np.float32), x.device)
    result = Tensor.empty(x.shape, x.dtype, x.device)
    if rows and width:
        addresses = x.address, weight.address, bias.address, result.address
        launch = _norm.plan_layer_norm(rows, width, x.dtype.ptx, alignment=alignment(*addresses))
        Gpu.of(x.device).launch(launch, *addresses, width, 1.0 / width, eps)
    return result


def activate(function: str, x: Tensor, out: Tensor | None) -> Tensor:
    """One of `activation.ACTIVATIONS`, elementwise; ``out`` may be ``x``."""
    result = Tensor.empty(x.shape, x.dtype, x.device) if out is None else out
    if x.size:
        addresses = x.address, result.address
        launch, accesses = _activation.plan_activation(
            function, x.size, x.dtype.ptx, alignment=alignment(*addresses)
        )
        Gpu.of(x.device).launch(launch, *addresses, accesses)
    return result


def glu(gate_up: Tensor, activation: str) -> Tensor:
    """See `ops.glu`."""
    rows, both = gate_up.shape
    width = both // 2
    result = Tensor.empty((rows, width), gate_up.dtype, gate_up.device)
    if rows and width:
        addresses = gate_up.address, result.address
        launch, accesses = _activation.plan_glu(
            activation, rows, width, gate_up.dtype.ptx, alignment=alignment(*addresses)
        )
        Gpu.of(gate_up.device).launch(launch, *addresses, rows, accesses)
    return result


# ------------------------------------------------------------------------------------------ attention


def page_shape(op: str, k_cache: Tensor, v_cache: Tensor, x: Tensor, head_dim: int) -> tuple[int, int, int]:
    """(blocks, KV heads, block size) of both caches, ``[blocks, KV heads, block size, head_dim rounded up to 8]``."""
    row = -(-head_dim // 8) * 8
    check(op, "k_cache", k_cache, x.device, x.dtype, (None, None, None, row))
    blocks, heads, block_size, _ = k_cache.shape
    check(op, "v_cache", v_cache, x.device, x.dtype, k_cache.shape)
    return blocks, heads, block_size


def qkv_prepare(
    qkv: Tensor, positions: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int, rope: RopeTable | None,
    q_norm: Tensor | None, k_norm: Tensor | None, norms_rows: bool, norm_eps: float, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """See `ops.qkv_prepare`."""
    gpu, tokens = Gpu.of(qkv.device), qkv.shape[0]
    norms = [0 if norm is None else norm.address for norm in (q_norm, k_norm)]
    cos = sin = rotary = q_scales = norm_scales = 0
    if rope is not None:
        cos, sin, rotary = rope.cos.address, rope.sin.address, 2 * rope.cos.shape[1]
        q_scales = 0 if rope.q_scales is None else rope.q_scales.address
    result = Tensor.empty((tokens, num_q_heads, head_dim), qkv.dtype, qkv.device)
    if tokens == 0:
        return result
    if norms_rows:
        scales = Tensor.empty((tokens, 2), float32, qkv.device)
        norm_scales, q_size, k_size = scales.address, num_q_heads * head_dim, num_kv_heads * head_dim
        gpu.launch(
            _qkv.plan_row_scales(tokens, q_size, k_size, qkv.dtype.ptx, alignment=alignment(qkv.address)),
            qkv.address, norm_scales, q_size, k_size, q_size + 2 * k_size, 1.0 / q_size, 1.0 / k_size, norm_eps,
        )  # fmt: skip
    launch = _qkv.plan_qkv_prepare(
        tokens, num_q_heads, num_kv_heads, head_dim, k_cache.shape[2], qkv.dtype.ptx, rotary=rotary,
        interleaved=rope is not None and rope.interleaved, has_q_scales=q_scales != 0,
        norm="" if q_norm is None else "row" if norms_rows else "head",
        alignment=alignment(qkv.address, result.address, *norms),
    )  # fmt: skip
    gpu.launch(
        launch, qkv.address, positions.address, cos, sin, q_scales, norm_scales, *norms, slot_mapping.address,
        k_cache.address, v_cache.address, result.address, tokens, num_q_heads, num_kv_heads, norm_eps,
    )  # fmt: skip
    return result


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, group: int, pages: tuple[int, int, int], scale: float,
    window: int | None, sinks: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """See `ops.attention`. The batch's host numbers bound the launch; its arrays on the device are not read back."""
    op, gpu = "attention", Gpu.of(q.device)
    (tokens, q_heads, head_dim), (num_blocks, kv_heads, block_size) = q.shape, pages
    sink_address = 0 if sinks is None else sinks.address
    seqs = batch.num_seqs
    tables = batch.query_start, batch.seq_lens, batch.block_tables[group]
    query_start, seq_lens, table = (tensor.address for tensor in tables)
    table_width = tables[2].shape[1]
    if batch.max_seq_len > table_width * block_size:
        limit = f"must be at most {table_width * block_size}, the tokens of a block table's row"
        raise fail(op, "batch.max_seq_len", f"is {batch.max_seq_len}, {limit}")
    result = Tensor.empty((tokens, q_heads * head_dim), q.dtype, q.device)
    if tokens == 0 or q_heads == 0:
        return result
    key = (
        "attention", group, tokens, q_heads, kv_heads, head_dim, num_blocks, block_size, window, sinks is None,
        softcap, q.dtype,
    )  # fmt: skip
    plan = batch.plans.get(key)
    if plan is None:
        plan = batch.plans[key] = _attention.plan(
            num_tokens=tokens, num_seqs=seqs, max_query_len=batch.max_query_len, max_seq_len=batch.max_seq_len,
            num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, table_width=table_width, dtype=q.dtype.ptx,
            block_size=block_size, window=window, has_sinks=sinks is not None, softcap=softcap,
            num_sms=gpu.properties.num_sms, exact=batch.exact, arch=gpu.arch, num_blocks=num_blocks,
        )  # fmt: skip
    workspace = gpu.allocate(plan.workspace_bytes) if plan.workspace_bytes else None
    work_address = 0 if workspace is None else workspace.address
    arguments = plan.attend_arguments(
        q.address, k_cache.address, v_cache.address, result.address, work_address, query_start, seq_lens, table, scale,
        sink_address,
    )  # fmt: skip
    gpu.launch(plan.attend, *arguments)
    if plan.combine is not None:
        gpu.launch(plan.combine, *plan.combine_arguments(work_address, result.address, sink_address))
    return result
