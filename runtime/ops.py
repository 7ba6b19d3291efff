"""The one door to every operation of a model: validate, then run the kernels of the tensor's device.

Activations on cpu are float32; weights are float32, float16 or bfloat16 as stored, widened in the kernel; so is the KV
cache. Every function checks dtype, shape, contiguity and device of each argument and raises InvalidArgumentError naming
the operation and the argument. Small inputs run on the calling thread, larger ones on numba's threads; any Python
thread may call. Results do not depend on the other rows of a batch, nor on the number of threads.

The generic arithmetic behind Tensor's operators is `runtime.tensor_ops`; its functions are reached through here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numba
import numpy as np

from numba_kernels.cpu import activation as _activation
from numba_kernels.cpu import attention as _attention
from numba_kernels.cpu import linear as _linear
from numba_kernels.cpu import logprobs as _logprobs
from numba_kernels.cpu import norm as _norm
from numba_kernels.cpu import qkv as _qkv
from numba_kernels.cpu import sampling as _sampling
from numba_kernels.cpu.launch import address_of
from numba_kernels.cpu.target import TILE_ROWS
from runtime import tensor_ops
from runtime.batch import Batch
from runtime.device.device import CPU
from runtime.dtype import DType, float32, int32, int64
from runtime.errors import InvalidArgumentError
from runtime.linear_weight import STORED, LinearWeight, prepare_linear
from runtime.sampling_arrays import Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.storage import NDArray
from runtime.tensor import Tensor

__all__ = [
    "LinearWeight", "RopeTable", "add_embedding", "attention", "embedding", "gather_rows", "gelu", "layer_norm",
    "linear", "log_softmax_topk", "prepare_linear", "qkv_prepare", "rms_norm", "sample", "silu", "swiglu",
]  # fmt: skip

_NUM_WORKERS = numba.get_num_threads()
_SERIAL_ELEMENTS = 32 * 1024  # elementwise work below this is not worth waking a thread
_SERIAL_LINEAR_MACS = 600_000
_SERIAL_ATTENTION_MACS = 64_000
_WEIGHT_DTYPES = tuple(STORED)


def __getattr__(name: str) -> Any:
    """The generic arithmetic: ``ops.add`` and the rest."""
    return getattr(tensor_ops, name)


# ------------------------------------------------------------------------------------------ validation


def _fail(op: str, argument: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{op}: {argument} {message}", param=argument)


def _check(
    op: str, argument: str, tensor: Tensor, dtype: DType | tuple[DType, ...], shape: tuple[int | None, ...]
) -> NDArray:
    """The tensor's array, if it is a C-contiguous cpu tensor of this type and shape (None = any size)."""
    if not isinstance(tensor, Tensor):
        raise _fail(op, argument, f"must be a Tensor, not {type(tensor).__name__}")
    if tensor.storage.device is not CPU and tensor.device != CPU:
        raise _fail(op, argument, f"is on {tensor.device}, only cpu has this operation so far")
    if tensor.dtype is not dtype:
        dtypes = (dtype,) if isinstance(dtype, DType) else dtype
        if tensor.dtype not in dtypes:
            raise _fail(op, argument, f"is {tensor.dtype.name}, must be {' or '.join(d.name for d in dtypes)}")
    actual = tensor.shape
    does_fit = len(actual) == len(shape)
    for want, got in zip(shape, actual):  # a plain loop: this function runs some three hundred times a step
        if want is not None and want != got:
            does_fit = False
    if not does_fit:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise _fail(op, argument, f"has shape {actual}, must be [{wanted}]")
    array = tensor.array
    if not array.flags.c_contiguous:
        raise _fail(op, argument, f"has strides {tensor.strides}, must be C-contiguous")
    return array


def _indices(op: str, argument: str, tensor: Tensor, size: int | None, limit: int) -> NDArray:
    """An int32 vector whose entries lie in [0, limit)."""
    array = _check(op, argument, tensor, int32, (size,))
    if array.size and (int(array.min()) < 0 or int(array.max()) >= limit):
        raise _fail(op, argument, f"holds {array.min()} to {array.max()}, must lie in 0 to {limit - 1}")
    return array


def _address(
    op: str, argument: str, tensor: Tensor, dtype: DType | tuple[DType, ...], shape: tuple[int | None, ...]
) -> int:
    """The address of the tensor's first element, after the same checks."""
    _check(op, argument, tensor, dtype, shape)
    return tensor.address


def _output(op: str, out: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """``out``, if it may be written and has this shape, else a new float32 tensor."""
    if out is None:
        return Tensor.over(np.empty(shape, np.float32), float32)
    if not _check(op, "out", out, float32, shape).flags.writeable:
        raise _fail(op, "out", "is read-only")
    return out


def _share(rows: int, elements_a_row: int) -> tuple[int, int, int]:
    """(tickets, workers, rows a ticket) for elementwise work."""
    if rows * elements_a_row < _SERIAL_ELEMENTS or _NUM_WORKERS == 1:
        return 1, 1, max(1, rows)
    rows_a_ticket = -(-rows // (4 * _NUM_WORKERS))
    return -(-rows // rows_a_ticket), _NUM_WORKERS, rows_a_ticket


# ------------------------------------------------------------------------------------------ linear, embedding


def linear(
    x: Tensor, weight: LinearWeight, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``x [T, K] . weight^T + bias + residual [T, N]`` -> ``[T, N]``. ``out`` may be ``residual``, but not ``x``."""
    if not isinstance(weight, LinearWeight):
        raise _fail("linear", "weight", f"must be a LinearWeight from prepare_linear, not {type(weight).__name__}")
    width, depth = weight.shape
    x_array = _check("linear", "x", x, float32, (None, depth))
    rows = x_array.shape[0]
    added = 0 if residual is None else _address("linear", "residual", residual, float32, (rows, width))
    result = _output("linear", out, (rows, width))
    if out is not None and np.may_share_memory(x_array, out.array):
        raise _fail("linear", "out", "shares memory with x")
    if rows == 0 or width == 0:
        return result
    panels = weight.panels.shape[0]
    if rows * width * depth < _SERIAL_LINEAR_MACS or _NUM_WORKERS == 1:
        tickets, workers, panels_a_ticket, rows_a_ticket = 1, 1, panels, rows
    else:
        workers = _NUM_WORKERS
        row_tickets = -(-rows // 128)
        rows_a_ticket = -(-rows // row_tickets // TILE_ROWS) * TILE_ROWS
        row_tickets = -(-rows // rows_a_ticket)
        panels_a_ticket = max(1, panels * row_tickets // (4 * workers * row_tickets))
        tickets = row_tickets * -(-panels // panels_a_ticket)
    _linear.linear_kernel(weight.stored)(
        tickets, workers, x.address, weight.panels_address, weight.bias_address, added, result.address,
        rows, depth, width, panels_a_ticket, rows_a_ticket,
    )  # fmt: skip
    return result


def _widened(rows: NDArray, dtype: DType) -> NDArray:
    """Stored bits or elements as float32."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    if rows.dtype == np.int16:
        return rows.view(np.float16).astype(np.float32)
    return rows.astype(np.float32, copy=False)


def _table_rows(op: str, indices_name: str, indices: Tensor, size: int | None, table: Tensor | LinearWeight) -> NDArray:
    if isinstance(table, LinearWeight):
        array = _indices(op, indices_name, indices, size, table.shape[0])
        return _widened(np.ascontiguousarray(table.rows(array)), table.dtype)
    values = _check(op, "table", table, _WEIGHT_DTYPES, (None, None))
    array = _indices(op, indices_name, indices, size, values.shape[0])
    return _widened(values[array].view(STORED[table.dtype]), table.dtype)


def embedding(token_ids: Tensor, table: Tensor | LinearWeight) -> Tensor:
    """Rows of ``table [V, H]`` for ``token_ids [T]`` int32 -> ``[T, H]`` float32.

    A LinearWeight serves as the table too, so that a weight tied to the output layer is stored once.
    """
    return Tensor.over(np.ascontiguousarray(_table_rows("embedding", "token_ids", token_ids, None, table)), float32)


def add_embedding(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Adds rows of ``table [P, H]`` for ``positions [T]`` to ``x [T, H]`` in place; returns ``x``."""
    array = _check("add_embedding", "x", x, float32, (None, None))
    rows = _table_rows("add_embedding", "positions", positions, array.shape[0], table)
    if rows.shape[1] != array.shape[1]:
        raise _fail("add_embedding", "table", f"has rows of {rows.shape[1]}, x has rows of {array.shape[1]}")
    array += rows
    return x


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices [n]`` int32 of ``x [T, H]`` float32 -> ``[n, H]``."""
    array = _check("gather_rows", "x", x, float32, (None, None))
    return Tensor.over(array[_indices("gather_rows", "indices", indices, None, array.shape[0])], float32)


# ------------------------------------------------------------------------------------------ norms, activations


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over rows ``[T, H]``; weight ``[H]`` of any weight dtype."""
    rows, width = _check("rms_norm", "x", x, float32, (None, None)).shape
    scale = _address("rms_norm", "weight", weight, _WEIGHT_DTYPES, (width,))
    result = _output("rms_norm", None, x.shape)
    tickets, workers, rows_a_ticket = _share(rows, width)
    _norm.rms_norm_kernel(STORED[weight.dtype])(
        tickets, workers, x.address, scale, 0, result.address, rows, width, rows_a_ticket, eps
    )
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over rows ``[T, H]``; weight and bias ``[H]`` of one dtype."""
    rows, width = _check("layer_norm", "x", x, float32, (None, None)).shape
    scale = _address("layer_norm", "weight", weight, _WEIGHT_DTYPES, (width,))
    shift = 0 if bias is None else _address("layer_norm", "bias", bias, weight.dtype, (width,))
    result = _output("layer_norm", None, x.shape)
    tickets, workers, rows_a_ticket = _share(rows, width)
    _norm.layer_norm_kernel(STORED[weight.dtype])(
        tickets, workers, x.address, scale, shift, result.address, rows, width, rows_a_ticket, eps
    )
    return result


def _activate(op: str, name: str, x: Tensor, out: Tensor | None) -> Tensor:
    array = _check(op, "x", x, float32, x.shape)
    result = _output(op, out, x.shape)
    width = array.shape[-1] if array.ndim else 1
    rows = array.size // width if width else 0
    tickets, workers, rows_a_ticket = _share(rows, width * 8)
    _activation.activation_kernel(name)(
        tickets, workers, x.address, 0, result.address, rows, width, width, width, rows_a_ticket
    )
    return result


def gelu(x: Tensor, kind: Literal["erf", "tanh", "sigmoid"], *, out: Tensor | None = None) -> Tensor:
    """GELU by its erf, its tanh approximation, or ``x sigmoid(1.702 x)``; ``out`` may be ``x``."""
    if kind not in ("erf", "tanh", "sigmoid"):
        raise _fail("gelu", "kind", f"is {kind!r}, must be 'erf', 'tanh' or 'sigmoid'")
    return _activate("gelu", f"gelu_{kind}", x, out)


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x sigmoid(x)``; ``out`` may be ``x``."""
    return _activate("silu", "silu", x, out)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 I]``, gate first -> ``[T, I]``."""
    rows, both = _check("swiglu", "gate_up", gate_up, float32, (None, None)).shape
    if both % 2:
        raise _fail("swiglu", "gate_up", f"has {both} columns, must be an even number")
    width = both // 2
    result = _output("swiglu", None, (rows, width))
    tickets, workers, rows_a_ticket = _share(rows, width * 8)
    gate = gate_up.address
    _activation.activation_kernel("silu")(
        tickets, workers, gate, gate + width * 4, result.address, rows, width, both, both, rows_a_ticket
    )
    return result


# ------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotations for each position: ``cos`` and ``sin`` ``[max_position, rotary_dim / 2]`` float32.

    ``interleaved`` pairs dimensions (2 i, 2 i + 1), otherwise (i, i + rotary_dim / 2). Dimensions from ``rotary_dim``
    on are left as they are.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


def _pages(op: str, k_cache: Tensor, v_cache: Tensor, head_dim: int) -> tuple[NDArray, NDArray]:
    """Both caches' arrays: K ``[blocks, kv heads, head_dim, block size]``, V ``[..., block size, width]``."""
    k_pages = _check(op, "k_cache", k_cache, _WEIGHT_DTYPES, (None, None, head_dim, None))
    blocks, heads, _, block_size = k_pages.shape
    if block_size % 8 or blocks == 0:
        raise _fail(op, "k_cache", f"has {blocks} blocks of {block_size} tokens, must be some, of a multiple of 8")
    v_pages = _check(op, "v_cache", v_cache, k_cache.dtype, (blocks, heads, block_size, None))
    if v_pages.shape[3] != -(-head_dim // 16) * 16:
        raise _fail(op, "v_cache", f"has rows of {v_pages.shape[3]}, must be head_dim {head_dim} rounded up to 16")
    return k_pages, v_pages


def qkv_prepare(
    qkv: Tensor,
    positions: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: RopeTable | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Splits ``qkv [T, (Hq + 2 Hkv) D]``, normalises (weights ``[D]``) and rotates q and k -> q ``[T, Hq, D]``.

    K and V of token t are written to slot ``slot_mapping[t]`` (int64: block * block_size + offset; negative: nowhere).
    """
    op = "qkv_prepare"
    heads = num_q_heads + 2 * num_kv_heads
    array = _check(op, "qkv", qkv, float32, (None, heads * head_dim))
    tokens = array.shape[0]
    position_array = _check(op, "positions", positions, int32, (tokens,))
    slots = _check(op, "slot_mapping", slot_mapping, int64, (tokens,))
    k_pages, v_pages = _pages(op, k_cache, v_cache, head_dim)
    if k_pages.shape[1] != num_kv_heads:
        raise _fail(op, "k_cache", f"has {k_pages.shape[1]} heads, must have num_kv_heads = {num_kv_heads}")
    norms = [
        None if norm is None else np.ascontiguousarray(_check(op, name, norm, _WEIGHT_DTYPES, (head_dim,)), np.float32)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm))
    ]
    cos = sin = rotary = num_positions = interleaved = 0
    if rope is not None:
        cos_array = _check(op, "rope.cos", rope.cos, float32, (None, None))
        _check(op, "rope.sin", rope.sin, float32, cos_array.shape)
        num_positions, rotary = cos_array.shape[0], 2 * cos_array.shape[1]
        if rotary > head_dim:
            raise _fail(op, "rope.cos", f"rotates {rotary} dimensions, limit head_dim {head_dim}")
        cos, sin, interleaved = rope.cos.address, rope.sin.address, int(rope.interleaved)
    result = _output(op, None, (tokens, num_q_heads, head_dim))
    tickets, workers, tokens_a_ticket = _share(tokens, heads * head_dim * 2)
    status = _qkv.qkv_kernel(STORED[k_cache.dtype])(
        tickets, workers, qkv.address, positions.address, cos, sin,
        *(0 if norm is None else address_of(norm) for norm in norms),
        k_cache.address, v_cache.address, slot_mapping.address, result.address,
        tokens, num_q_heads, num_kv_heads, head_dim, rotary, interleaved, num_positions,
        k_pages.shape[0], k_pages.shape[3], v_pages.shape[3], tokens_a_ticket, norm_eps,
    )  # fmt: skip
    if status == _qkv.BAD_POSITION:
        low, high = position_array.min(), position_array.max()
        raise _fail(op, "positions", f"hold {low} to {high}, limit {num_positions - 1}")
    if status == _qkv.BAD_SLOT:
        raise _fail(op, "slot_mapping", f"holds {slots.max()}, limit {k_pages.shape[0] * k_pages.shape[3] - 1}")
    return result


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """How a batch is cut into row groups, worked out and checked once for all layers."""

    group_tokens: int  # most tokens of a row group
    group_starts: NDArray  # [num_seqs + 1] int32: row groups before each sequence
    num_keys: int  # query tokens times the keys of their sequence, at most what is attended to
    longest: int  # tokens of the longest sequence
    table_width: int
    addresses: tuple[int, ...]  # query_start, seq_lens, block table, group_starts


def _attention_plan(batch: Batch, group: int, tokens: int, share: int, block_size: int) -> _AttentionPlan | None:
    """None for a batch without sequences. ``share`` query heads share a KV head."""
    key = ("attention", group, tokens, share, block_size)
    if key in batch.plans:
        plan: _AttentionPlan | None = batch.plans[key]
        return plan
    op = "attention"
    seqs = batch.num_seqs
    starts = _check(op, "batch.query_start", batch.query_start, int32, (seqs + 1,))
    seq_lens = _check(op, "batch.seq_lens", batch.seq_lens, int32, (seqs,))
    table = _check(op, "batch.block_tables", batch.block_tables[group], int32, (seqs, None))
    query_lens = np.diff(starts)
    if starts[0] != 0 or starts[-1] != tokens or (query_lens < 0).any():
        raise _fail(op, "batch.query_start", f"must rise from 0 to {tokens}, the tokens of q")
    limit = table.shape[1] * block_size
    if (seq_lens < query_lens).any() or (seq_lens > limit).any():
        raise _fail(
            op, "batch.seq_lens", f"must lie between the chunk's length and {limit}, the tokens of a block table's row"
        )
    plan = None
    if seqs:
        group_tokens = max(1, _attention.GROUP_ROWS // share)
        group_starts = np.zeros(seqs + 1, np.int32)
        np.cumsum(-(-query_lens // group_tokens), out=group_starts[1:])
        tensors = batch.query_start, batch.seq_lens, batch.block_tables[group]
        plan = _AttentionPlan(
            group_tokens,
            group_starts,
            num_keys=int(np.dot(query_lens.astype(np.int64), seq_lens)),
            longest=int(seq_lens.max()),
            table_width=table.shape[1],
            addresses=(*(tensor.address for tensor in tensors), address_of(group_starts)),
        )
    batch.plans[key] = plan
    return plan


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    group: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Paged causal attention of ``q [T, Hq, D]`` -> ``[T, Hq * D]``.

    ``group`` picks the batch's block tables. ``window`` counts the keys that a query sees, its own included. A sequence
    longer than its block table, or a table entry outside the pages, is an error.
    """
    op = "attention"
    tokens, q_heads, head_dim = _check(op, "q", q, float32, (None, None, None)).shape
    k_pages, v_pages = _pages(op, k_cache, v_cache, head_dim)
    blocks, kv_heads, _, block_size = k_pages.shape
    if q_heads % kv_heads:
        raise _fail(op, "q", f"has {q_heads} heads, must be a multiple of the cache's {kv_heads}")
    if window is not None and window < 1:
        raise _fail(op, "window", f"is {window}, must be at least 1")
    share = q_heads // kv_heads
    plan = _attention_plan(batch, group, tokens, share, block_size)
    result = _output(op, None, (tokens, q_heads * head_dim))
    if plan is None:
        return result
    groups = int(plan.group_starts[-1]) * kv_heads
    workers = 1 if plan.num_keys * q_heads * head_dim < _SERIAL_ATTENTION_MACS else _NUM_WORKERS
    segments = -(-plan.longest // _attention.SEGMENT_TOKENS)
    if workers == 1 or groups >= 2 * workers:
        segments = 1
    width = v_pages.shape[3]
    partial = np.empty(groups * segments * plan.group_tokens * share * (width + 2) if segments > 1 else 0, np.float32)
    query_start, seq_lens, table, group_starts = plan.addresses
    arguments = (
        q.address, k_cache.address, v_cache.address, query_start, seq_lens, table, group_starts, address_of(partial),
        result.address, batch.num_seqs, q_heads, kv_heads, head_dim, width, blocks, block_size, plan.table_width,
        window or 0, plan.group_tokens, segments, scale,
    )  # fmt: skip
    status = _attention.attention_kernel(STORED[k_cache.dtype])(groups * segments, workers, *arguments)
    if status == _attention.BAD_BLOCK:
        raise _fail(op, "batch.block_tables", f"names a block outside the cache's {blocks}")
    if segments > 1:
        _attention.merge_kernel()(groups, workers, *arguments)
    return result


# ------------------------------------------------------------------------------------------ sampling


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """Draws one token for each row of ``logits [n, V]`` float32, which stay unchanged.

    The draw of a row depends on its logits and parameters alone, its seed, choice and position among them.
    """
    op = "sample"
    array = _check(op, "logits", logits, float32, (None, None))
    rows, vocab = array.shape
    mask_words = -(-vocab // 32)
    for name, dtype, shape in _SAMPLING_FIELDS:
        value = getattr(params, name)
        wanted = {"n": (rows,), "n+1": (rows + 1,), "any": value.shape[:1]}[shape]
        if value.dtype != dtype or value.shape != wanted or not value.flags.c_contiguous:
            raise _fail(op, f"params.{name}", f"is {value.dtype} {value.shape}, must be contiguous {dtype} {wanted}")
    for start, ids in (("prompt_start", "prompt_ids"), ("output_start", "output_ids"), ("bias_start", "bias_ids")):
        offsets = getattr(params, start)
        if offsets[0] != 0 or offsets[-1] > getattr(params, ids).size or (rows and np.diff(offsets).min() < 0):
            raise _fail(op, f"params.{start}", f"must rise from 0 to at most the number of {ids}")
    if params.bias_values.size != params.bias_ids.size:
        raise _fail(op, "params.bias_values", f"has {params.bias_values.size} entries, bias_ids {params.bias_ids.size}")
    mask = params.allowed_mask
    fits = mask is None or (mask.dtype == np.uint32 and mask.shape == (rows, mask_words) and mask.flags.c_contiguous)
    if mask is not None and not fits:
        raise _fail(op, "params.allowed_mask", f"is {mask.dtype} {mask.shape}, must be uint32 {(rows, mask_words)}")
    if rows and vocab == 0:
        raise _fail(op, "logits", "has no columns")
    token_ids = np.full(rows, -1, np.int32)
    workers = 1 if rows * vocab < _SERIAL_ELEMENTS else _NUM_WORKERS
    status = _sampling.sampling_kernel()(
        rows, workers, address_of(array), *(address_of(getattr(params, name)) for name, _, _ in _SAMPLING_FIELDS),
        0 if mask is None else address_of(mask), address_of(token_ids), rows, vocab, mask_words,
    )  # fmt: skip
    if status == _sampling.BAD_ID:
        raise _fail(op, "params", f"name a token id outside the vocabulary of {vocab}")
    return SampledTokens(token_ids, token_ids >= 0)


_SAMPLING_FIELDS = (
    ("temperature", np.dtype(np.float32), "n"),
    ("top_k", np.dtype(np.int32), "n"),
    ("top_p", np.dtype(np.float32), "n"),
    ("min_p", np.dtype(np.float32), "n"),
    ("repetition_penalty", np.dtype(np.float32), "n"),
    ("presence_penalty", np.dtype(np.float32), "n"),
    ("frequency_penalty", np.dtype(np.float32), "n"),
    ("seed", np.dtype(np.uint64), "n"),
    ("choice_index", np.dtype(np.int32), "n"),
    ("position", np.dtype(np.int32), "n"),
    ("prompt_ids", np.dtype(np.int32), "any"),
    ("prompt_start", np.dtype(np.int32), "n+1"),
    ("output_ids", np.dtype(np.int32), "any"),
    ("output_start", np.dtype(np.int32), "n+1"),
    ("bias_ids", np.dtype(np.int32), "any"),
    ("bias_values", np.dtype(np.float32), "any"),
    ("bias_start", np.dtype(np.int32), "n+1"),
)  # in the order of the kernel's fields


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """Log-probability and rank of ``chosen [n]`` int32, and the ``top_n`` best, of each row of ``logits [n, V]``.

    A row with NaN or +inf gives NaN.
    """
    op = "log_softmax_topk"
    array = _check(op, "logits", logits, float32, (None, None))
    rows, vocab = array.shape
    if chosen.dtype != np.int32 or chosen.shape != (rows,) or not chosen.flags.c_contiguous:
        raise _fail(op, "chosen", f"is {chosen.dtype} {chosen.shape}, must be contiguous int32 ({rows},)")
    if rows and (chosen.min() < 0 or chosen.max() >= vocab):
        raise _fail(op, "chosen", f"holds {chosen.min()} to {chosen.max()}, must lie in 0 to {vocab - 1}")
    if not 0 <= top_n <= vocab:
        raise _fail(op, "top_n", f"is {top_n}, must lie in 0 to {vocab}")
    result = TopLogprobs(
        np.empty(rows, np.float32), np.empty(rows, np.int32), np.empty((rows, top_n), np.int32),
        np.empty((rows, top_n), np.float32),
    )  # fmt: skip
    workers = 1 if rows * vocab < _SERIAL_ELEMENTS else _NUM_WORKERS
    _logprobs.logprobs_kernel()(
        rows, workers, address_of(array), address_of(chosen), *(address_of(part) for part in result), rows, vocab, top_n
    )
    return result
