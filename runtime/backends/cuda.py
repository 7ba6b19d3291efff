"""The operations of a model on a GPU, real or emulated, as `runtime.ops` describes them.

Activations, matrices and the KV cache are of one type, float32, float16 or bfloat16; matrices may be packed, and pages
may have a byte a number. Norm weights and biases are float32. Every operation is one launch, or a few, on the device's
current stream; none waits. A `plan` of the kernel's family chooses specialisation, grid and block; `Gpu.launch`
compiles, packs and launches.
"""

from __future__ import annotations

from collections.abc import Sequence

from numba_kernels.cuda import activation as _activation
from numba_kernels.cuda import attention as _attention
from numba_kernels.cuda import decode_inputs as _decode_inputs
from numba_kernels.cuda import embedding as _embedding
from numba_kernels.cuda import norm as _norm
from numba_kernels.cuda import qkv as _qkv
from numba_kernels.cuda.attention.prepared_heads import HeadForm
from numba_kernels.cuda.kv_cache import page_row
from numba_kernels.cuda.quantised_pages import PAGES as _QUANTISED
from runtime.backends.checks import check, fail
from runtime.backends.cuda_arithmetic import elementwise, matmul, reduce, write_elementwise
from runtime.backends.cuda_experts import adapted_experts, adapter_ids, experts, low_rank, normed_route, route
from runtime.backends.cuda_latent import (
    LATENT_ROW_MULTIPLE,
    latent_attention,
    latent_expanded,
    latent_prepare,
    latent_queries,
    latent_values,
)
from runtime.backends.cuda_linear import (
    add_partials,
    deferred_norm,
    gated,
    glu,
    linear,
    linear_glu,
    linear_partial,
    packed_embedding,
    rms_norm,
    takes_low_rank,
)
from runtime.backends.cuda_sampling import log_softmax_topk, process_logits_row, sample, sample_into
from runtime.backends.cuda_state import delta_rule, mamba, short_conv
from runtime.backends.cuda_tensor import alignment, id_flag, remembered, zero_bias, zeros
from runtime.batch import Batch
from runtime.device.gpu import Gpu
from runtime.dtype import DType, bfloat16, float16, float32
from runtime.linear.weight import GpuWeight, PackedWeight, RowWeight
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor

__all__ = [
    "ACTIVATIONS", "GATES", "GLU_ACTIVATIONS", "LATENT_ROW_MULTIPLE", "NORM_WEIGHTS", "TABLE", "WEIGHT", "activate",
    "adapted_experts", "adapter_ids", "add_embedding", "add_partials", "add_scaled", "attention", "deferred_norm",
    "delta_rule", "elementwise", "embedding", "experts", "forbid", "gather_rows", "gelu_gate", "glu", "join_columns",
    "keep_groups", "latent_attention", "latent_expanded", "latent_prepare", "latent_queries", "latent_values",
    "layer_norm", "linear", "linear_glu", "linear_partial", "log_softmax_topk", "low_rank", "mamba", "matmul",
    "normed_route", "page_shape", "process_logits_row", "qkv_attention", "qkv_prepare", "reduce", "rms_norm", "route",
    "sample", "sample_into", "scale_logits", "short_conv", "sigmoid_gate", "take_decode_inputs", "takes_low_rank",
    "write_elementwise",
]  # fmt: skip

ACTIVATIONS = (float32, float16, bfloat16)
GATES, GLU_ACTIVATIONS = _activation.GATES, _activation.GLU_ACTIVATIONS
WEIGHT = TABLE = GpuWeight
NORM_WEIGHTS = float32

_plan_elementwise = remembered(_activation.plan_elementwise)
_plan_embedding = remembered(_embedding.plan_embedding)
_plan_forbid = remembered(_activation.plan_forbid)
_plan_keep_groups = remembered(_activation.plan_keep_groups)
_plan_layer_norm = remembered(_norm.plan_layer_norm)
_plan_qkv_prepare = remembered(_qkv.plan_qkv_prepare)
_plan_row_scales = remembered(_qkv.plan_row_scales)

# ------------------------------------------------------------------------------------------ linear, embedding


def scale_logits(logits: Tensor, scale: float, softcap: float | None) -> None:
    """Multiplies ``logits [T, V]`` in place, and caps them unless ``softcap`` is None."""
    name, cap = ("scale_logits", 1.0) if softcap is None else ("scale_logits_capped", softcap)
    _elementwise(name, logits, None, logits, (scale, cap, -2.0 / cap))


def forbid(logits: Tensor, token_ids: Tensor) -> None:
    """See `ops.forbid`."""
    rows, count = logits.shape[0], token_ids.size
    launch = _plan_forbid(rows, count)
    Gpu.of(logits.device).launch(launch, logits.address, token_ids.address, logits.shape[1], count, rows * count)


def keep_groups(logits: Tensor, scores: Tensor, columns: Tensor, num_best: int) -> None:
    """See `ops.keep_groups`."""
    rows, groups = scores.shape
    sizes = logits.shape[1], groups, columns.shape[1], num_best, rows * groups
    addresses = logits.address, scores.address, columns.address
    Gpu.of(logits.device).launch(_plan_keep_groups(rows, groups), *addresses, *sizes)


def _elementwise(name: str, x: Tensor, y: Tensor | None, out: Tensor | None, numbers: tuple[float, ...] = ()) -> Tensor:
    """One of `activation.ELEMENTWISE` in `out`, which may be x or y, or in a new tensor."""
    result = Tensor.new(x.shape, x.dtype, x.device) if out is None else out
    if x.size:
        addresses, size = (x.address, 0 if y is None else y.address, result.address), x.shape[-1]
        launch, accesses = _plan_elementwise(name, x.size // size, size, x.dtype.ptx, alignment=alignment(*addresses))
        Gpu.of(x.device).launch(launch, *addresses, accesses, *(*numbers, 0.0, 0.0, 0.0, 0.0)[:4])
    return result


def add_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """See `ops.add_scaled`."""
    return _elementwise("add_scaled", x, y, None, (scale,))


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `ops.sigmoid_gate`."""
    return _elementwise("sigmoid_gate", x, gate, None)


def gelu_gate(x: Tensor, up: Tensor, first: int) -> Tensor:
    """See `ops.gelu_gate`."""
    up_address = up.address + first * x.dtype.itemsize
    rows, width = x.shape
    return gated("gelu_tanh", x, (rows, width), up_address, (width, up.shape[1]))


def _gather(op: str, ids: Tensor, table: Tensor | RowWeight, out: Tensor | None, multiplier: float = 1.0) -> Tensor:
    rows_of = table.weight if isinstance(table, RowWeight) else table
    (table_rows, width), num_rows = rows_of.shape, ids.shape[0]
    if out is not None and out.dtype is not rows_of.dtype:
        raise fail(op, "table", f"is {rows_of.dtype.name}, must be {out.dtype.name}")
    result = Tensor.new((num_rows, width), rows_of.dtype, ids.device) if out is None else out
    if num_rows and width:
        if not table_rows:
            raise fail(op, "table", "has no rows")
        source = rows_of.address
        launch, accesses = _plan_embedding(
            num_rows, width, rows_of.dtype.ptx, is_added=out is not None, alignment=alignment(source, result.address)
        )
        flag = id_flag(ids.device).address
        Gpu.of(ids.device).launch(
            launch, ids.address, source, result.address, flag, num_rows, table_rows, accesses, multiplier
        )
    return result


def embedding(token_ids: Tensor, table: Tensor | GpuWeight, scale: float) -> Tensor:
    """See `ops.embedding`."""
    if isinstance(table, PackedWeight):
        return packed_embedding(token_ids, table, scale)
    assert isinstance(table, (Tensor, RowWeight))
    return _gather("embedding", token_ids, table, None, scale)


def add_embedding(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """See `ops.add_embedding`."""
    return _gather("add_embedding", positions, table, x)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """See `ops.gather_rows`."""
    return _gather("gather_rows", indices, x, None)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """See `ops.join_columns`."""
    total, first = sum(each.shape[1] for each in parts), 0
    result = Tensor.new((parts[0].shape[0], total), parts[0].dtype, parts[0].device)
    for each in parts:
        end = first + each.shape[1]
        result[:, first:end] = each
        first = end
    return result


# ------------------------------------------------------------------------------------------ norms, activations


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `ops.layer_norm`."""
    rows, width = x.shape
    gpu, result = Gpu.of(x.device), Tensor.new(x.shape, x.dtype, x.device)
    if rows and width:
        shift = zero_bias(gpu, gpu.stream, width) if bias is None else bias
        addresses = x.address, weight.address, shift.address, result.address
        launch = _plan_layer_norm(rows, width, x.dtype.ptx, alignment=alignment(*addresses))
        gpu.launch(launch, *addresses, width, 1.0 / width, eps)
    return result


def activate(function: str, x: Tensor, out: Tensor | None, factors: tuple[float, ...] = ()) -> Tensor:
    """One of `activation.ELEMENTWISE` of one operand, with up to four numbers; ``out`` may be ``x``."""
    return _elementwise(function, x, None, out, factors)


# ------------------------------------------------------------------------------------------ attention


def page_shape(op: str, k_cache: Tensor, v_cache: Tensor, x: Tensor, head_dim: int) -> tuple[int, int, int]:
    """(blocks, KV heads, block size) of both caches, ``[blocks, KV heads, block size, page_row]``, of x's type or one
    of a byte a number."""
    dtype = k_cache.dtype if k_cache.dtype.ptx in _QUANTISED else x.dtype
    check(op, "k_cache", k_cache, x.device, dtype, (None, None, None, page_row(head_dim, dtype.ptx)))
    blocks, heads, block_size, _ = k_cache.shape
    check(op, "v_cache", v_cache, x.device, dtype, k_cache.shape)
    return blocks, heads, block_size


def qkv_prepare(
    qkv: Tensor, positions: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int, rope: RopeTable | None,
    q_norm: Tensor | None, k_norm: Tensor | None, norm: str, norm_eps: float, values: str, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, page_scales: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    """See `ops.qkv_prepare`."""
    gpu, tokens = Gpu.of(qkv.device), qkv.shape[0]
    norms = [0 if weight is None else weight.address for weight in (q_norm, k_norm)]
    (cos, sin, q_scales, rotary), norm_scales = _rotation(rope), 0
    result = Tensor.new((tokens, num_q_heads, head_dim), qkv.dtype, qkv.device)
    if tokens == 0:
        return result
    if norm == "row":
        scales = Tensor.new((tokens, 2), float32, qkv.device)
        norm_scales, q_size, k_size = scales.address, num_q_heads * head_dim, num_kv_heads * head_dim
        gpu.launch(
            _plan_row_scales(tokens, q_size, k_size, qkv.dtype.ptx, alignment=alignment(qkv.address)),
            qkv.address, norm_scales, q_size, k_size, q_size + 2 * k_size, 1.0 / q_size, 1.0 / k_size, norm_eps,
        )  # fmt: skip
    launch = _plan_qkv_prepare(
        tokens, num_q_heads, num_kv_heads, head_dim, k_cache.shape[2], qkv.dtype.ptx, rotary=rotary,
        interleaved=rope is not None and rope.interleaved, has_q_scales=q_scales != 0,
        norm=norm,
        alignment=alignment(qkv.address, result.address, *norms), pages=k_cache.dtype.ptx if page_scales else "",
        is_spread=rope is not None and rope.is_spread, values=values,
    )  # fmt: skip
    k_scales, v_scales = (scales.address for scales in page_scales) if page_scales else (0, 0)
    gpu.launch(
        launch, qkv.address, positions.address, cos, sin, q_scales, norm_scales, *norms, slot_mapping.address,
        k_cache.address, v_cache.address, k_scales, v_scales, result.address, tokens, num_q_heads, num_kv_heads,
        norm_eps,
    )  # fmt: skip
    return result


def _rotation(rope: RopeTable | None) -> tuple[int, int, int, int]:
    """Addresses of cos, sin and q_scales, and the dimensions that are rotated; 0 where there is none."""
    if rope is None:
        return 0, 0, 0, 0
    q_scales = 0 if rope.q_scales is None else rope.q_scales.address
    return rope.cos.address, rope.sin.address, q_scales, 2 * rope.cos.shape[1]


def qkv_attention(
    qkv: Tensor, batch: Batch, group: int, num_q_heads: int, num_kv_heads: int, head_dim: int, rope: RopeTable | None,
    q_norm: Tensor | None, k_norm: Tensor | None, norm: str, norm_eps: float, values: str, k_cache: Tensor,
    v_cache: Tensor, pages: tuple[int, int, int], scale: float, window: int | None, sinks: Tensor | None,
    softcap: float | None, page_scales: tuple[Tensor, ...],
) -> Tensor | None:  # fmt: skip
    """See `ops.qkv_attention`. Attention of one token a sequence prepares the usual heads; else the result is None."""
    if batch.max_query_len != 1 or 0 in (qkv.shape[0], num_q_heads, num_kv_heads):
        return None
    norms = [0 if weight is None else weight.address for weight in (q_norm, k_norm)]
    cos, sin, q_scales, rotary = _rotation(rope)
    form = HeadForm(
        qkv.dtype.ptx, head_dim, rotary, rope is not None and rope.interleaved, norm, q_scales != 0,
        alignment(qkv.address, *norms) % 16 == 0, rope is not None and rope.is_spread, values,
    )  # fmt: skip
    sizes = qkv.shape[0], num_q_heads, head_dim
    plan = _attention_plan(batch, group, sizes, pages, window, sinks, softcap, qkv, k_cache, form)
    if not plan.prepares:
        return None
    slots = batch.slot_mappings[group].address
    of_heads = batch.positions.address, cos, sin, q_scales, 0, *norms, slots, norm_eps
    return _attend(plan, qkv, sizes, k_cache, v_cache, batch, group, scale, sinks, page_scales, of_heads)


def takes_texts(page_dtype: DType, head_dim: int) -> bool:
    """False: attention reads pages."""
    return False


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, group: int, pages: tuple[int, int, int], scale: float,
    window: int | None, sinks: Tensor | None, softcap: float | None, page_scales: tuple[Tensor, ...],
    position_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `ops.attention`. The batch's host numbers bound the launch; its arrays on the device are not read back."""
    if position_bias is not None:
        raise fail("attention", "position_bias", f"is not implemented on {q.device}, only on the cpu")
    tokens, q_heads, head_dim = sizes = q.shape
    if tokens == 0 or q_heads == 0:
        return Tensor.new((tokens, q_heads * head_dim), q.dtype, q.device)
    plan = _attention_plan(batch, group, sizes, pages, window, sinks, softcap, q, k_cache, None)
    return _attend(plan, q, sizes, k_cache, v_cache, batch, group, scale, sinks, page_scales, ())


def _attention_plan(
    batch: Batch, group: int, sizes: tuple[int, ...], pages: tuple[int, int, int], window: int | None,
    sinks: Tensor | None, softcap: float | None, q: Tensor, k_cache: Tensor, heads: HeadForm | None,
) -> _attention.AttentionPlan:  # fmt: skip
    """The batch's plan, made once for all layers of one kind; `sizes` are tokens, query heads and the head dim."""
    (tokens, q_heads, head_dim), (num_blocks, kv_heads, block_size) = sizes, pages
    key = (
        "attention", group, sizes, pages, window, sinks is None, softcap, q.dtype, k_cache.dtype, heads
    )  # fmt: skip
    plan = batch.plans.get(key)
    if plan is None:
        gpu, table_width = Gpu.of(q.device), batch.block_tables[group].shape[1]
        if batch.max_seq_len > table_width * block_size:
            limit = f"must be at most {table_width * block_size}, the tokens of a block table's row"
            raise fail("attention", "batch.max_seq_len", f"is {batch.max_seq_len}, {limit}")
        plan = batch.plans[key] = _attention.plan(
            num_tokens=tokens, num_seqs=batch.num_seqs, max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim,
            table_width=table_width, dtype=q.dtype.ptx, block_size=block_size, window=window,
            has_sinks=sinks is not None, softcap=softcap, num_sms=gpu.properties.num_sms, exact=batch.exact,
            arch=gpu.arch, num_blocks=num_blocks, pages=k_cache.dtype.ptx if k_cache.dtype.ptx in _QUANTISED else "",
            has_spans=batch.bidirectional_until is not None, heads=heads,
        )  # fmt: skip
    assert isinstance(plan, _attention.AttentionPlan)
    return plan


def _attend(
    plan: _attention.AttentionPlan, q: Tensor, sizes: tuple[int, ...], k_cache: Tensor, v_cache: Tensor, batch: Batch,
    group: int, scale: float, sinks: Tensor | None, page_scales: tuple[Tensor, ...], of_heads: tuple[int | float, ...],
) -> Tensor:  # fmt: skip
    """Launches a plan; `of_heads` are the arguments of one that prepares heads, of which q is qkv then."""
    gpu, (tokens, q_heads, head_dim) = Gpu.of(q.device), sizes
    query_start, seq_lens, table = batch.query_start, batch.seq_lens, batch.block_tables[group]
    result = Tensor.new((tokens, q_heads * head_dim), q.dtype, q.device)
    workspace = gpu.allocate(plan.workspace_bytes) if plan.workspace_bytes else None
    gpu.launch(
        plan.launch,
        *plan.arguments(
            q.address, k_cache.address, v_cache.address, result.address, 0 if workspace is None else workspace.address,
            zeros(gpu, plan.num_arrivals) if plan.num_arrivals else 0, query_start.address, seq_lens.address,
            table.address, scale, 0 if sinks is None else sinks.address, *(scales.address for scales in page_scales),
            bidirectional_until=0 if batch.bidirectional_until is None else batch.bidirectional_until.address,
        ),
        *of_heads,
    )  # fmt: skip
    return result


def take_decode_inputs(
    changes: Tensor, num_changes: Tensor, tables: Tensor, sources: Tensor, sampled: Tensor, token_ids: Tensor
) -> None:
    """See `ops.take_decode_inputs`."""
    tensors = changes, num_changes, tables, sources, sampled, token_ids
    addresses = (tensor.address for tensor in tensors)
    Gpu.of(changes.device).launch(_decode_inputs.plan(), *addresses, token_ids.size)
