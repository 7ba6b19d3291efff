"""The launches that the kernel report counts: each family at a shape small enough to emulate and large enough to
matter.

A case with uncoalesced accesses, or conflicts by design, gives the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import numpy as np

from numba_kernels.cuda import (
    activation,
    dynamic_quantisation,
    embedding,
    kv_cache,
    logprobs,
    qkv,
    rope,
    rounded_norm,
    sampling,
)
from numba_kernels.cuda.arithmetic import elementwise, reduce
from numba_kernels.cuda.attention.parts import MIN_PART_KEYS, record
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.storage import CODES
from numba_kernels.cuda.quantised_pages import PAGES
from runtime.bench.kernels.cases import attention_case as attention_operation
from runtime.bench.kernels.cases import layer_norm_case, rms_norm_case, softmax_case, swiglu_case
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from tools.kernel_costs.counts import Bench, Case, Work, counted
from tools.kernel_costs.expert_cases import expert_cases
from tools.kernel_costs.product_cases import product_cases


def cases() -> Iterator[Case]:
    """All cases."""
    yield from product_cases()
    for name, shape, work, run, tiled_bytes, is_on_tensor_cores in expert_cases():
        yield Case(name, "experts", shape, work, run, "", tiled_bytes, is_on_tensor_cores)
    yield from attention_cases()
    yield from _rows()
    yield from _tokens()
    yield from _glue()


# Attention: prompts and decodes of each tier, and pages of a byte

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16
_SIZES = (HEADS, KV_HEADS, HEAD_DIM)


def attention_cases() -> Iterator[Case]:
    for tier, dtype in (
        ("naive", "f32"), ("flash", "f32"), ("naive", "bf16"), ("flash", "bf16"), ("flash_hopper", "bf16"),
    ):  # fmt: skip
        yield attention_case(tier, dtype, [(0, 256)])
    for dtype in ("f32", "bf16"):
        yield attention_case("decode", dtype, [(511, 1)] * 4)
    yield attention_case("decode", "bf16", [(511, 1)] * 4, num_sms=1)
    for chunks, tier in (([(1023, 1)] * 2, "decode"), ([(0, 256)], "flash"), ([(0, 512)], "flash_hopper")):
        yield attention_case(tier, "bf16", chunks, sizes=(8, 2, 128))
    for pages in PAGES:
        yield attention_case("decode", "bf16", [(1023, 1)] * 2, sizes=(8, 2, 128), pages=pages)
    yield attention_case("flash", "bf16", [(0, 256)], sizes=(8, 2, 128), pages="e4m3")


_KEY_A_LANE = "the tier's point: a lane has a key of its own, a whole row away from its neighbour's"


def attention_case(
    tier: str, dtype: str, chunks: list[tuple[int, int]], *, num_sms: int = 108,
    sizes: tuple[int, int, int] = _SIZES, pages: str = "",
) -> Case:  # fmt: skip
    """`chunks`: equal (context, queries) of the sequences; `num_sms` 1 keeps decode from splitting them; `sizes`: query
    heads, KV heads, head dim; `pages`: their format if it has one byte per number."""
    num_heads, kv_heads, head_dim = sizes
    context, queries = chunks[0]
    length, seqs = context + queries, len(chunks)
    operation = attention_operation(tier, dtype, seqs, context, queries, *sizes, num_sms=num_sms, pages=pages)
    suffix = (" unsplit" if num_sms == 1 else "") + (f" d{head_dim}" if sizes != _SIZES else "")
    size = ITEM_BYTES[dtype]
    rows, key_bytes = seqs * queries * num_heads * head_dim * size, head_dim + 4 if pages else head_dim * size
    share = num_heads // kv_heads
    if tier == "naive":
        return counted(operation, "attention", scattered_because=_KEY_A_LANE, has_16_bits=dtype != "f32")
    if tier == "decode":  # parts of at least MIN_PART_KEYS write a record per row, which is read again
        records = 0 if num_sms == 1 else seqs * num_heads * (length // MIN_PART_KEYS)
        tiled_bytes = operation.least_bytes + 2 * records * 4 * record(head_dim)
    else:  # a tile of 128 rows (64 of float32) reads the keys that its last query sees
        queries_each = (128 if dtype != "f32" else 64) // share
        keys = sum(context + min(queries, first + queries_each) for first in range(0, queries, queries_each))
        tiled_bytes = 2 * rows + 2 * seqs * keys * kv_heads * key_bytes
    return counted(
        operation, "attention", suffix=suffix, tiled_bytes=tiled_bytes, has_16_bits=dtype != "f32",
        is_on_tensor_cores=dtype != "f32" and tier != "decode",
    )  # fmt: skip


# Row-wise kernels

_ROWS, _SIZE = 32, 1024
_WEIGHTS_IN_HALVES = (
    "a lane's 8 float32 weights are two loads of 16 bytes, each of which takes half of every sector; rows share them"
)


def _rows() -> Iterator[Case]:
    for operation in (rms_norm_case(_ROWS, _SIZE), layer_norm_case(_ROWS, _SIZE)):
        yield counted(operation, "norm")
    yield counted(rms_norm_case(_ROWS, _SIZE, has_residual=True), "norm")
    for is_log in (False, True):
        yield counted(softmax_case(_ROWS, _SIZE, is_log=is_log), "softmax")
    yield counted(swiglu_case(_ROWS, _SIZE), "activation")
    count = _ROWS * _SIZE
    codes, both = dynamic_quantisation.sections(_ROWS, _SIZE)

    def round_rows(bench: Bench) -> None:
        x, memory = bench.normal((_ROWS, _SIZE), "bf16"), bench.empty(both)
        bench.launch(dynamic_quantisation.plan(_ROWS, _SIZE, "bf16"), x, memory, memory + codes, _ROWS, _SIZE)

    shape = f"{_ROWS} x {_SIZE}"
    yield Case("dynamic_quantisation s8 bf16", "activation", shape, Work(2 * count + both, 3 * count), round_rows)
    scales, all_bytes = dynamic_quantisation.sections(_ROWS, _SIZE, is_grouped=True)

    def round_normed(bench: Bench) -> None:
        x, weight, memory = bench.normal((_ROWS, _SIZE), "bf16"), bench.normal(_SIZE, "f32"), bench.empty(all_bytes)
        launch = rounded_norm.plan(_ROWS, _SIZE, "bf16", "e4m3", is_grouped=True)
        bench.launch(
            launch, x, weight, memory, memory + scales, _ROWS, _SIZE, 1.0 / _SIZE, 1e-5, 0.0, 0.0
        )  # fmt: skip

    work = Work(2 * count + 4 * _SIZE + all_bytes, 8 * count)
    yield Case("rounded_norm e4m3_g128 bf16", "activation", shape, work, round_normed, _WEIGHTS_IN_HALVES)
    for name in ("silu", "gelu_tanh", "gelu_erf"):
        yield Case(
            f"{name} bf16", "activation", f"{count}", Work(2 * count + 2 * count, 4 * count),
            functools.partial(_activation, name, count),
        )  # fmt: skip


def _activation(name: str, count: int, bench: Bench) -> None:
    launch, accesses = activation.plan_activation(name, count, "bf16")
    bench.launch(launch, bench.normal(count, "bf16"), bench.empty(2 * count), accesses)


# Token kernels

_TOKENS, _VOCAB = 64, 4096
_VOCABULARY = 151_936  # Qwen3's: the blocks of a cluster share its row
_DRAWS: dict[str, dict[str, float]] = {
    "greedy": {}, "temperature": {"temperature": 0.8}, "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
}  # fmt: skip


def _tokens() -> Iterator[Case]:
    row = _TOKENS * _SIZE * 2
    yield Case(
        "embedding bf16", "embedding", f"{_TOKENS} of {_VOCAB} rows of {_SIZE}", Work(2 * row + 4 * _TOKENS, 0), _embed
    )
    heads = _TOKENS * HEADS * HEAD_DIM * 2
    angles = _TOKENS * HEAD_DIM * 4
    yield Case(
        "rope bf16", "rope", f"{_TOKENS} x {HEADS} heads of {HEAD_DIM}",
        Work(heads + angles + 4 * _TOKENS + heads, 3 * heads), _rope,
    )  # fmt: skip
    whole = _TOKENS * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 2
    yield Case(
        "qkv_prepare bf16", "qkv", f"{_TOKENS} x {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, norms, rope",
        Work(whole + angles + 12 * _TOKENS + 8 * HEAD_DIM + whole, 5 * whole), _qkv_prepare,
    )  # fmt: skip
    pages = 2 * _TOKENS * KV_HEADS * HEAD_DIM * 2
    yield Case(
        "write_kv bf16", "kv_cache", f"{_TOKENS} x {KV_HEADS} heads of {HEAD_DIM}",
        Work(pages + 8 * _TOKENS + pages, 0),
        _write_kv,
    )  # fmt: skip
    logits = 4 * 4 * _VOCAB
    of_row = Work(4 * _VOCABULARY + 12, 8 * _VOCABULARY)
    for kind, numbers in _DRAWS.items():
        run = functools.partial(_sample, numbers=numbers)
        yield Case(f"sampling {kind}", "sampling", f"1 x {_VOCABULARY}", of_row, run)
    yield Case("logprobs top 5", "logprobs", f"4 x {_VOCAB}", Work(logits + 192, 8 * logits // 4), _logprobs)


def _embed(bench: Bench) -> None:
    launch, accesses = embedding.plan_embedding(_TOKENS, _SIZE, "bf16")
    ids = bench.put(bench.rng.integers(0, _VOCAB, _TOKENS).astype(np.int32))
    table, flag = bench.normal((_VOCAB, _SIZE), "bf16"), bench.put(np.zeros(1, np.int32))
    bench.launch(launch, ids, table, bench.empty(_TOKENS * _SIZE * 2), flag, _TOKENS, _VOCAB, accesses, 1.0)


def _positions(bench: Bench) -> tuple[int, int, int]:
    """positions, cos and sin."""
    return (
        bench.put(np.arange(_TOKENS, dtype=np.int32)), bench.normal((_TOKENS, HEAD_DIM // 2), "f32"),
        bench.normal((_TOKENS, HEAD_DIM // 2), "f32"),
    )  # fmt: skip


def _rope(bench: Bench) -> None:
    launch = rope.plan_rope(_TOKENS, HEADS, HEAD_DIM, HEAD_DIM, "bf16", interleaved=False)
    x, stride = bench.normal((_TOKENS, HEADS, HEAD_DIM), "bf16"), HEADS * HEAD_DIM
    bench.launch(launch, x, *_positions(bench), x, _TOKENS, HEADS, stride, stride)


def _pages(bench: Bench) -> tuple[int, int, int]:
    """slot_mapping of consecutive slots, K and V pages."""
    size = _TOKENS * KV_HEADS * HEAD_DIM * 2
    return bench.put(np.arange(_TOKENS, dtype=np.int64)), bench.empty(size), bench.empty(size)


def _qkv_prepare(bench: Bench) -> None:
    launch = qkv.plan_qkv_prepare(
        _TOKENS, HEADS, KV_HEADS, HEAD_DIM, BLOCK, "bf16", rotary=HEAD_DIM, norm="head"
    )  # fmt: skip
    x = bench.normal((_TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM), "bf16")
    norms = [bench.normal(HEAD_DIM, "f32") for _ in range(2)]
    q = bench.empty(_TOKENS * HEADS * HEAD_DIM * 2)
    bench.launch(launch, x, *_positions(bench), 0, 0, *norms, *_pages(bench), 0, 0, q, _TOKENS, HEADS, KV_HEADS, 1e-6)


def _write_kv(bench: Bench) -> None:
    launch = kv_cache.plan_write_kv(_TOKENS, KV_HEADS, HEAD_DIM, BLOCK, "bf16")
    k, v = (bench.normal((_TOKENS, KV_HEADS, HEAD_DIM), "bf16") for _ in range(2))
    stride = KV_HEADS * HEAD_DIM
    bench.launch(launch, k, v, *_pages(bench), _TOKENS, KV_HEADS, stride, stride)


def _sample(bench: Bench, numbers: Mapping[str, float]) -> None:
    params = SamplingArrays.neutral(1)
    for name, value in numbers.items():
        getattr(params, name)[:] = value
    gpu = bench.gpu
    plan = sampling.plan(
        1, _VOCABULARY, max_clusters=gpu.max_clusters, num_sms=gpu.properties.num_sms,
        max_shared=gpu.properties.shared_bytes_per_block,
    )  # fmt: skip
    assert plan is not None
    logits = bench.put(3 * bench.rng.standard_normal(_VOCABULARY, dtype=np.float32))
    arrays = [bench.put(getattr(params, name)) for name, _, _ in SAMPLING_FIELDS]
    work = bench.empty(plan.work_bytes) if plan.work_bytes else 0
    results, flag = bench.empty(16), bench.put(np.zeros(1, np.int32))
    bench.launch(
        plan.launch, logits, *arrays, 0, work, 0, results, results + 4, flag, results + 8, _VOCABULARY,
        -(-_VOCABULARY // 32),
    )  # fmt: skip


def _logprobs(bench: Bench) -> None:
    logits, ids = bench.normal((4, _VOCAB), "f32"), bench.put(np.arange(4, dtype=np.int32))
    outputs = [bench.empty(size) for size in (16, 16, 80, 80)]
    bench.launch(logprobs.plan(4, _VOCAB, 5), logits, ids, *outputs, _VOCAB, 5)


# Glue

_COUNT = 1 << 15


def _glue() -> Iterator[Case]:
    yield Case("add f32", "elementwise", f"{_COUNT}", Work(8 * _COUNT + 4 * _COUNT, _COUNT), _add)
    yield Case("cast f32 to bf16", "elementwise", f"{_COUNT}", Work(4 * _COUNT + 2 * _COUNT, 0), _cast)
    for operation in ("sum", "argmax"):
        written = 32 * (4 if operation == "sum" else 8)
        yield Case(
            f"{operation} f32", "reduce", f"32 rows of {_COUNT // 32}", Work(4 * _COUNT + written, _COUNT),
            functools.partial(_reduce, operation),
        )  # fmt: skip


def _add(bench: Bench) -> None:
    a, b, code = bench.normal(_COUNT, "f32"), bench.normal(_COUNT, "f32"), CODES["f32"]
    out = bench.empty(4 * _COUNT)
    bench.launch(elementwise.plan("add", "f32", _COUNT), a, b, 0, out, 0, _COUNT, code, code, code, 4, 4, 0, 4)


def _cast(bench: Bench) -> None:
    a, out = bench.normal(_COUNT, "f32"), bench.empty(2 * _COUNT)
    launch = elementwise.plan("copy", "f32", _COUNT)
    bench.launch(launch, a, 0, 0, out, 0, _COUNT, CODES["f32"], 0, CODES["bf16"], 4, 0, 0, 2)


def _reduce(operation: str, bench: Bench) -> None:
    columns = _COUNT // 32
    kept, reduced = (bench.put(reduce.pack_axes((size,), (step,))) for size, step in ((32, 4 * columns), (columns, 4)))
    result = reduce.result_dtype(operation, "f32")
    bench.launch(
        reduce.plan(operation, "f32", 32, columns), bench.normal((32, columns), "f32"), bench.empty(32 * 8), kept,
        reduced, 32, columns, CODES["f32"], CODES[result], 4 if operation == "sum" else 8, float(columns),
    )  # fmt: skip
