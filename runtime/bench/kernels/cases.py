"""Operations to verify, to count and to time: inputs, our launch, numpy's result for a sample of its rows, and torch's
call, all of the same arrays, with the minimum of bytes and operations and the tolerance.

`bench kernels`, `gpu_check` and the kernel report use these, at sizes of their own. Nothing here imports torch: callers
pass the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda import activation, attention, gemm, norm
from numba_kernels.cuda.arithmetic import softmax
from numba_kernels.cuda.gemm import hopper
from numba_kernels.cuda.gemm.hopper_ring import Tile
from numba_kernels.cuda.specialisation import Launch
from runtime.device.allocator import DeviceBlock
from runtime.device.gpu import Gpu
from runtime.dtype import DType

BLOCK_SIZE = 16
EPS = 1e-6
PAGE_SCALE = 0.01
GUARD_BYTES = 256
MOST_DRAWN = 4_194_301  # a prime
MOST_ROWS = 64
"""Rows of a result that are compared with numpy's, the first and the last among them."""

Array = NDArray[Any]


class Inputs:
    """A case's arrays on the device, kept for the case's lifetime."""

    def __init__(self, gpu: Gpu, seed: int) -> None:
        self.gpu = gpu
        self._rng = np.random.default_rng(seed)
        self._held: list[DeviceBlock] = []

    def normal(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Array:
        """Normal numbers; beyond `MOST_DRAWN` the first ones repeat, with a period that divides no shape."""
        count = math.prod(shape)
        values = self._rng.standard_normal(min(count, MOST_DRAWN), dtype=np.float32)
        values *= np.float32(scale)
        return np.resize(values.astype(numpy_dtype(dtype)), shape)

    def keys(self, shape: tuple[int, ...], dtype: str, pages: str) -> Array:
        """Normal numbers; for pages of one byte per number, positive ones of that type."""
        if not pages:
            return self.normal(shape, dtype)
        codes = self._rng.integers(0, 0x58, shape, np.uint8)
        return codes.view(np.int8 if pages == "s8" else ml_dtypes.float8_e4m3fn)

    def permutation(self, count: int) -> Array:
        return self._rng.permutation(count).astype(np.int32)

    def put(self, array: Array) -> int:
        address = self.empty(array.nbytes)
        self.gpu.write(address, array)
        return address

    def put_weight(self, array: Array) -> int:
        """As `put`, for read-only arrays: dependent launches may read them early."""
        address = self.put(array)
        self.gpu.declare_immutable(self._held[-1])
        return address

    def empty(self, size_bytes: int) -> int:
        self._held.append(self.gpu.allocate(size_bytes))
        return self._held[-1].address

    def result(self, size_bytes: int) -> int:
        """As `empty`, with guard memory after it, which `table.verify` checks."""
        return self.empty(size_bytes + GUARD_BYTES)

    def bind(self, *launches: tuple[Launch | None, Sequence[int | float]]) -> Callable[[], None]:
        """A function that runs all of them, in order."""
        known = [(launch, arguments) for launch, arguments in launches if launch is not None]

        def run() -> None:
            for launch, arguments in known:
                self.gpu.launch(launch, *arguments)

        return run


@dataclass
class Prepared:
    """A case that is ready to run.

    Attributes:
        run: queues our kernels.
        out, shape, dtype: the result's address (of `Inputs.result`), shape and type; its first dimension is rows.
        rows: those that `expected` has, ascending.
        expected: float32 [len(rows), ...], computed by numpy from the same arrays.
        torch: returns torch's call, given the module and a function that makes tensors of arrays; or None.
        operands, sizes: of a matrix product, the addresses of x and of the weight, and m, n, k, for a library; else ().
    """

    run: Callable[[], None]
    out: int
    shape: tuple[int, ...]
    dtype: str
    rows: Array
    expected: Array
    torch: Callable[[Any, Callable[[Array], Any]], Callable[[], Any]] | None
    operands: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        least_bytes, flops: the minimum of traffic and computation.
        tolerance: of the largest difference, as a share of the largest value.
    """

    name: str
    shape: str
    least_bytes: int
    flops: int
    tolerance: float
    prepare: Callable[[Inputs], Prepared] = field(repr=False)


def sampled(num_rows: int) -> Array:
    """At most `MOST_ROWS` of so many rows, spread from the first to the last."""
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, MOST_ROWS)).astype(np.int64))


TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 2e-2}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return DType.parse(dtype).numpy


def product_case(
    tier: str, m: int, n: int, k: int, dtype: str = "bf16", *, out_dtype: str = "", tile: Tile | None = None,
    parts: int = 1, num_sms: int = 0, has_bias: bool = False, has_residual: bool = False, activation: str = "",
    is_aligned: bool = True, exact: bool = False,
) -> Case:  # fmt: skip
    """``y [m, n] = act(x [m, k] . w^T + bias) + residual``.

    Args:
        tier: of `gemm.TIERS`, or "auto".
        tile: of the Hopper tier, instead of its plan's; with `parts`, the split of K.
        num_sms: multiprocessors to plan for; 0 for the device's.
        activation: "silu" or "gelu_tanh", by the Hopper tier: the weight has 2 n rows, gate and then up, and y is
            ``act(gate) * up``.
        is_aligned: whether y and its terms are 16-byte aligned, an argument of the plan.
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
    shape = f"{m} x {n} x {k}"
    return Case(", ".join(words), shape, least, 2 * m * columns * k, TOLERANCE[dtype], prepare)


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
        table = inputs.permutation(seqs * blocks)
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
    return Case(name, shape, least, 4 * seen * heads * head_dim, TOLERANCE[dtype], prepare)


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


def rms_norm_case(rows: int, size: int, *, has_residual: bool = False) -> Case:
    """RMSNorm of ``[rows, size]``; a residual is added after it."""
    return _norm("rms_norm", rows, size, has_residual=has_residual)


def layer_norm_case(rows: int, size: int) -> Case:
    """LayerNorm of ``[rows, size]``."""
    return _norm("layer_norm", rows, size)


def _norm(name: str, rows: int, size: int, *, has_residual: bool = False) -> Case:
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
        run = inputs.bind((launch, (inputs.put(x), *addresses, out, size, 1 / size, EPS)))
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
    return Case(title, f"{rows} x {size}", least, 4 * rows * size, TOLERANCE["bf16"], prepare)


def swiglu_case(rows: int, size: int) -> Case:
    """``silu(gate) * up`` of ``[rows, 2 size]``."""

    def prepare(inputs: Inputs) -> Prepared:
        x = inputs.normal((rows, 2 * size), "bf16")
        launch, accesses = activation.plan_glu("silu", rows, size, "bf16")
        out = inputs.result(rows * size * 2)
        run = inputs.bind((launch, (inputs.put(x), out, rows, accesses)))
        gate, up = (part.astype(np.float32) for part in np.split(x, 2, axis=1))
        expected = gate / (1 + np.exp(-gate)) * up
        chosen = sampled(rows)

        def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
            left, right = tensor(x).chunk(2, dim=1)
            return lambda: module.nn.functional.silu(left) * right

        return Prepared(run, out, (rows, size), "bf16", chosen, expected[chosen], torch)

    count = rows * size
    return Case("swiglu bf16", f"{rows} x {size}", 6 * count, 5 * count, TOLERANCE["bf16"], prepare)


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
    return Case(f"{'log_' * is_log}softmax f32", f"{rows} x {size}", 8 * count, 5 * count, TOLERANCE["f32"], prepare)
