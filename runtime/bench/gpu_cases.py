"""The kernel table's cases: inputs, our launch, numpy's result and torch's call, all of the same arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_kernels.cuda import activation, attention, gemm, norm, softmax
from numba_kernels.cuda.specialisation import Launch
from runtime.device.allocator import DeviceBlock
from runtime.device.gpu import Gpu
from runtime.dtype import DType

BLOCK_SIZE = 16
EPS = 1e-6


class Inputs:
    """A case's arrays on the device, for as long as the case lasts."""

    def __init__(self, gpu: Gpu, seed: int) -> None:
        self.gpu = gpu
        self._rng = np.random.default_rng(seed)
        self._held: list[DeviceBlock] = []

    def normal(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
        values = self._rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(scale)
        return values.astype(numpy_dtype(dtype))

    def permutation(self, count: int) -> np.ndarray:
        return self._rng.permutation(count).astype(np.int32)

    def put(self, array: np.ndarray) -> int:
        address = self.empty(array.nbytes)
        self.gpu.write(address, array)
        return address

    def empty(self, size_bytes: int) -> int:
        self._held.append(self.gpu.allocate(size_bytes))
        return self._held[-1].address

    def bind(self, *launches: tuple[Launch | None, Sequence[int | float]]) -> Callable[[], None]:
        """Launches all of them, in order."""
        bound = [(self.gpu.bind(launch), arguments) for launch, arguments in launches if launch is not None]

        def run() -> None:
            for each, arguments in bound:
                each(*arguments)

        return run


@dataclass
class Prepared:
    """A case that is ready to run.

    Attributes:
        run: queues our kernels.
        out, shape, dtype: where and what the result is.
        expected: float32, computed by numpy from the same arrays.
        torch: queues torch's, given the module and a function that makes tensors of arrays; returns its callable.
    """

    run: Callable[[], None]
    out: int
    shape: tuple[int, ...]
    dtype: str
    expected: np.ndarray
    torch: Callable[[Any, Callable[[np.ndarray], Any]], Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        least_bytes, flops: what any kernel must move and compute.
        tolerance: of the largest difference, as a share of the largest value.
    """

    name: str
    shape: str
    least_bytes: int
    flops: int
    tolerance: float
    prepare: Callable[[Inputs], Prepared] = field(repr=False)


TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 2e-2}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return DType.parse(dtype).numpy


def cases(is_quick: bool) -> Iterator[Case]:
    """Ladders of tiers at one shape, then the shapes that serving has; `is_quick`: small enough to emulate."""
    if is_quick:
        for tier, dtype in (("naive", "f32"), ("tensor_core", "bf16")):
            yield _gemm(tier, 32, 48, 64, dtype)
        yield _gemm("auto", 1, 64, 128, "bf16")
        yield _attention("naive", "f32", 1, 0, 17, 4, 2, 32)
        yield _attention("flash", "bf16", 1, 0, 33, 4, 2, 64)
        yield _attention("decode", "bf16", 2, 40, 1, 4, 2, 64)
        yield _rms_norm(4, 128)
        yield _layer_norm(4, 128)
        yield _swiglu(4, 64)
        yield _softmax(2, 300)
        return
    for tier, dtype in (
        ("naive", "f32"), ("tiled", "f32"), ("register", "f32"),
        ("naive", "bf16"), ("tiled", "bf16"), ("register", "bf16"), ("tensor_core", "bf16"),
    ):  # fmt: skip
        yield _gemm(tier, 2048, 2048, 2048, dtype)
    yield _gemm("auto", 4096, 4096, 4096, "bf16")
    yield _gemm("auto", 2048, 6144, 4096, "bf16")
    for rows in (1, 4, 16, 64, 256):
        yield _gemm("auto", rows, 4096, 4096, "bf16")
    for rows in (1, 32):
        yield _gemm("auto", rows, 24576, 4096, "bf16")
        yield _gemm("auto", rows, 2304, 768, "bf16")
    yield _gemm("auto", 512, 3072, 768, "f32")
    yield _attention("naive", "bf16", 1, 0, 1024, 16, 8, 128)
    yield _attention("flash", "f32", 1, 0, 1024, 12, 12, 64)
    for seqs, queries, *heads in ((1, 2048, 32, 8, 128), (4, 1024, 16, 8, 128), (8, 512, 12, 12, 64)):
        yield _attention("flash", "bf16", seqs, 0, queries, *heads)
    for seqs, context in ((1, 4095), (1, 16383), (32, 2047)):
        yield _attention("decode", "bf16", seqs, context, 1, 32, 8, 128)
    for rows in (1, 32, 4096):
        yield _rms_norm(rows, 4096)
    yield _layer_norm(4096, 768)
    yield _swiglu(32, 12288)
    yield _swiglu(2048, 12288)
    yield _softmax(32, 151936)


def _gemm(tier: str, m: int, n: int, k: int, dtype: str) -> Case:
    def prepare(inputs: Inputs) -> Prepared:
        x, weight = inputs.normal((m, k), dtype), inputs.normal((n, k), dtype, 0.05)
        launch = gemm.plan(tier, m, n, k, dtype, num_multiprocessors=inputs.gpu.properties.num_sms)
        out = inputs.empty(m * n * size)
        run = inputs.bind((launch, (inputs.put(x), inputs.put(weight), 0, 0, out, m, n, k, 0)))
        expected = x.astype(np.float32) @ weight.astype(np.float32).T

        def torch(module: Any, tensor: Callable[[np.ndarray], Any]) -> Callable[[], Any]:
            left, right = tensor(x), tensor(weight)
            return lambda: module.nn.functional.linear(left, right)

        return Prepared(run, out, (m, n), dtype, expected, torch)

    size = numpy_dtype(dtype).itemsize
    least = (m * k + n * k + m * n) * size
    return Case(f"gemm {tier} {dtype}", f"{m} x {n} x {k}", least, 2 * m * n * k, TOLERANCE[dtype], prepare)


def _attention(
    tier: str, dtype: str, seqs: int, context: int, queries: int, heads: int, kv_heads: int, head_dim: int
) -> Case:
    """Ours reads shuffled pages; torch's has the same keys and values in rows."""
    length = context + queries
    tokens, scale, blocks = seqs * queries, head_dim**-0.5, -(-length // BLOCK_SIZE)

    def prepare(inputs: Inputs) -> Prepared:
        q = inputs.normal((tokens, heads, head_dim), dtype)
        k, v = (inputs.normal((seqs, kv_heads, length, head_dim), dtype) for _ in range(2))
        table = inputs.permutation(seqs * blocks)
        plan = attention.plan(
            num_tokens=tokens, num_seqs=seqs, max_query_len=queries, max_seq_len=length, num_q_heads=heads,
            num_kv_heads=kv_heads, head_dim=head_dim, table_width=blocks, dtype=dtype, block_size=BLOCK_SIZE,
            num_sms=inputs.gpu.properties.num_sms, tier=tier,
        )  # fmt: skip
        out = inputs.empty(tokens * heads * head_dim * size)
        workspace = inputs.empty(plan.workspace_bytes) if plan.workspace_bytes else 0
        run = inputs.bind(
            (
                plan.attend,
                plan.attend_arguments(
                    inputs.put(q), inputs.put(_paged(k, table)), inputs.put(_paged(v, table)), out, workspace,
                    inputs.put(np.arange(seqs + 1, dtype=np.int32) * np.int32(queries)),
                    inputs.put(np.full(seqs, length, np.int32)), inputs.put(table), scale,
                ),
            ),
            (plan.combine, plan.combine_arguments(workspace, out) if plan.combine is not None else ()),
        )  # fmt: skip

        def torch(module: Any, tensor: Callable[[np.ndarray], Any]) -> Callable[[], Any]:
            rows = np.ascontiguousarray(q.reshape(seqs, queries, heads, head_dim).transpose(0, 2, 1, 3))
            a, b, c = tensor(rows), tensor(k), tensor(v)
            is_causal, is_grouped = queries > 1, heads != kv_heads
            attend = module.nn.functional.scaled_dot_product_attention
            return lambda: attend(a, b, c, is_causal=is_causal, enable_gqa=is_grouped).transpose(1, 2)

        expected = _attention_expected(q.reshape(seqs, queries, heads, head_dim), k, v, scale)
        return Prepared(run, out, (tokens, heads, head_dim), dtype, expected, torch)

    size = numpy_dtype(dtype).itemsize
    seen = seqs * sum(context + 1 + query for query in range(queries))
    least = (2 * tokens * heads + 2 * seqs * length * kv_heads) * head_dim * size
    shape = f"{seqs} x {queries} queries, {length} keys, {heads}/{kv_heads} heads of {head_dim}"
    return Case(f"attention {tier} {dtype}", shape, least, 4 * seen * heads * head_dim, TOLERANCE[dtype], prepare)


def _paged(rows: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[seqs, kv_heads, length, head_dim] → pages [blocks, kv_heads, BLOCK_SIZE, head_dim] at the table's places."""
    seqs, kv_heads, length, head_dim = rows.shape
    blocks = -(-length // BLOCK_SIZE)
    padded = np.zeros((seqs, kv_heads, blocks * BLOCK_SIZE, head_dim), rows.dtype)
    padded[:, :, :length] = rows
    pages = np.empty((seqs * blocks, kv_heads, BLOCK_SIZE, head_dim), rows.dtype)
    cut = padded.reshape(seqs, kv_heads, blocks, BLOCK_SIZE, head_dim).transpose(0, 2, 1, 3, 4)
    pages[table] = cut.reshape(pages.shape)
    return pages


def _attention_expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """[tokens, heads, head_dim] float32, causal, one head at a time."""
    seqs, queries, heads, head_dim = q.shape
    length, share = k.shape[2], heads // k.shape[1]
    hidden = np.arange(length)[None, :] > np.arange(length - queries, length)[:, None]
    out = np.empty(q.shape, np.float32)
    for seq in range(seqs):
        for head in range(heads):
            keys, values = (x[seq, head // share].astype(np.float32) for x in (k, v))
            scores = q[seq, :, head].astype(np.float32) @ keys.T * np.float32(scale)
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(1, keepdims=True))
            out[seq, :, head] = scores @ values / scores.sum(1, keepdims=True)
    return out.reshape(seqs * queries, heads, head_dim)


def _rms_norm(rows: int, size: int) -> Case:
    return _norm("rms_norm", rows, size)


def _layer_norm(rows: int, size: int) -> Case:
    return _norm("layer_norm", rows, size)


def _norm(name: str, rows: int, size: int) -> Case:
    is_rms = name == "rms_norm"

    def prepare(inputs: Inputs) -> Prepared:
        x = inputs.normal((rows, size), "bf16")
        affine = [inputs.normal((size,), "bf16") for _ in range(1 if is_rms else 2)]
        plan = norm.plan_rms_norm if is_rms else norm.plan_layer_norm
        out = inputs.empty(rows * size * 2)
        addresses = [inputs.put(term.astype(np.float32)) for term in affine]
        launch = plan(rows, size, "bf16", has_residual=False)
        run = inputs.bind((launch, (inputs.put(x), 0, *addresses, out, size, 1 / size, EPS)))
        wide = x.astype(np.float32)
        centred = wide if is_rms else wide - wide.mean(1, keepdims=True)
        expected = centred / np.sqrt((centred * centred).mean(1, keepdims=True) + np.float32(EPS))
        expected *= affine[0].astype(np.float32)
        if not is_rms:
            expected += affine[1].astype(np.float32)

        def torch(module: Any, tensor: Callable[[np.ndarray], Any]) -> Callable[[], Any]:
            data, terms = tensor(x), [tensor(term) for term in affine]
            function = getattr(module.nn.functional, name)
            return lambda: function(data, (size,), *terms, eps=EPS)

        return Prepared(run, out, (rows, size), "bf16", expected, torch)

    least = 4 * rows * size + 4 * size * (1 if is_rms else 2)
    return Case(f"{name} bf16", f"{rows} x {size}", least, 4 * rows * size, TOLERANCE["bf16"], prepare)


def _swiglu(rows: int, size: int) -> Case:
    def prepare(inputs: Inputs) -> Prepared:
        x = inputs.normal((rows, 2 * size), "bf16")
        launch, accesses = activation.plan_swiglu(rows, size, "bf16")
        out = inputs.empty(rows * size * 2)
        run = inputs.bind((launch, (inputs.put(x), out, rows, accesses)))
        gate, up = (part.astype(np.float32) for part in np.split(x, 2, axis=1))
        expected = gate / (1 + np.exp(-gate)) * up

        def torch(module: Any, tensor: Callable[[np.ndarray], Any]) -> Callable[[], Any]:
            left, right = tensor(x).chunk(2, dim=1)
            return lambda: module.nn.functional.silu(left) * right

        return Prepared(run, out, (rows, size), "bf16", expected, torch)

    count = rows * size
    return Case("swiglu bf16", f"{rows} x {size}", 6 * count, 5 * count, TOLERANCE["bf16"], prepare)


def _softmax(rows: int, size: int) -> Case:
    def prepare(inputs: Inputs) -> Prepared:
        x = inputs.normal((rows, size), "f32", math.sqrt(2))
        out = inputs.empty(x.nbytes)
        run = inputs.bind((softmax.plan_softmax(rows, size, "f32", is_log=False), (inputs.put(x), out, size)))
        weights = np.exp(x - x.max(1, keepdims=True))
        expected = weights / weights.sum(1, keepdims=True, dtype=np.float64).astype(np.float32)

        def torch(module: Any, tensor: Callable[[np.ndarray], Any]) -> Callable[[], Any]:
            data = tensor(x)
            return lambda: module.softmax(data, dim=1)

        return Prepared(run, out, (rows, size), "f32", expected, torch)

    count = rows * size
    return Case("softmax f32", f"{rows} x {size}", 8 * count, 5 * count, TOLERANCE["f32"], prepare)
