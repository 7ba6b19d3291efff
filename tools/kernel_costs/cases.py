"""The launches that the kernel report counts: each family at a shape small enough to emulate, large enough to tell.

A case whose access cannot be coalesced, or whose conflicts are part of what its tier shows, says so and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda import (
    activation,
    attention,
    dequantize,
    elementwise,
    embedding,
    gemm,
    kv_cache,
    logprobs,
    norm,
    qkv,
    reduce,
    rope,
    rounded_norm,
    rounded_rows,
    sampling,
    softmax,
)
from numba_kernels.cuda.attention.parts import MIN_PART_KEYS, record
from numba_kernels.cuda.gemm import few_rows_shape, hopper, packed_row, packed_tiles
from numba_kernels.cuda.gemm.hopper_packed import HIGH, LOW
from numba_kernels.cuda.gemm.hopper_ring import Tile
from numba_kernels.cuda.gemm.packed_stream import ROWS as PACKED_ROWS
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.storage import CODES
from numba_kernels.cuda.packing import packing_of
from numba_kernels.cuda.quantised_pages import PAGES
from numba_kernels.segments import SEGMENTS
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from tools.kernel_costs.counts import Bench, Work
from tools.kernel_costs.expert_cases import expert_cases


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the report.

    Attributes:
        name, family, shape: what it is called, where it belongs, its sizes in words.
        work: the least that it has to do.
        run: uploads and launches.
        scattered_because: why its accesses cannot fill whole sectors; "" where they should.
        tiled_bytes: the least that its tiling moves, without tables and lengths; 0 where that is not held against it.
        is_on_tensor_cores: whether they should do its products.
        arch: whose emulated GPU it runs on; "": the report's.
    """

    name: str
    family: str
    shape: str
    work: Work
    run: Callable[[Bench], None]
    scattered_because: str = ""
    tiled_bytes: int = 0
    is_on_tensor_cores: bool = False
    arch: str = ""


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _gemms()
    for name, shape, work, run, tiled_bytes, is_on_tensor_cores in expert_cases():
        yield Case(name, "experts", shape, work, run, "", tiled_bytes, is_on_tensor_cores)
    yield from _attentions()
    yield from _rows()
    yield from _tokens()
    yield from _glue()


# Matrix products

_ONE_COLUMN_A_LANE = (
    "the tier's point: neighbouring lanes read different rows of the weight, and every element comes from memory"
)


def _gemms() -> Iterator[Case]:
    for tier, dtype in (("naive", "f32"), ("tiled", "f32"), ("naive", "bf16"), ("tiled", "bf16")):
        yield gemm_case(tier, (256, 256, 256), dtype, reason=_ONE_COLUMN_A_LANE if tier == "naive" else "")
    for tier, dtype in (("register", "f32"), ("register", "bf16"), ("tensor_core", "bf16")):
        yield gemm_case(tier, (256, 256, 256), dtype, (64, 64))
    for dtype in ("bf16", "f32"):
        yield gemm_case("gemv", (1, 1024, 1024), dtype, (1, 4))  # a warp reads x by itself
    for rows in (1, 16, 64):
        yield gemm_case("few_rows", (rows, 1024, 1024), "bf16", (64, 32))
    # The large tile, of two blocks, which two multiprocessors take in turns; small ones; narrow ones, four of which
    # share a sum.
    yield gemm_case("hopper", (512, 512, 256), "bf16", (256, 256), hopper_tile=hopper.LARGE, num_multiprocessors=2)
    yield gemm_case("hopper", (256, 256, 256), "bf16", (128, 128), hopper_tile=hopper.SMALL)
    yield gemm_case("hopper", (128, 256, 1024), "bf16", (64, 128), hopper_tile=hopper.NARROW, parts=4)
    for rows in (1, 128):
        yield _exact_gemm(rows, 1024, 1024)
    for packing in ("u8", "u4_g128", "e4m3_g128", "e2m1_g32_exponents", "e2m1_g16_e4m3"):
        for rows in (1, 16, 64) if packing in ("u8", "u4_g128") else (1,):
            yield _packed_gemm(packing, rows, 1024, 1024)
    for packing in ("u8", "u4_g128"):
        yield _packed_gemm(packing, 1, 1024, 1024, "packed_row")
    for packing in ("u8", "u4_g128", "e4m3_g128", "e2m1_g32_exponents"):
        yield _packed_gemm(packing, 256, 512, 512, "packed_tiles")
    for packing, tile in (("u4_g128", HIGH), ("u4_g128", LOW), ("u8", HIGH), ("e2m1_g32_exponents", HIGH)):
        yield _packed_gemm(packing, tile.block_m, 512, 512, "hopper_packed", tile)
    yield _bytes_gemm("u8", 256, 512, 512)
    for packing in gemm.hopper_bytes.WEIGHTS:
        yield _bytes_gemm(packing, 256, 512, 512, arch="sm_120a")
        yield _bytes_gemm(packing, 256, 512, 512)
    for packing in ("e4m3_g128", "u4_g128"):
        yield _dequantized(packing, 256, 1024)


def gemm_case(
    tier: str, sizes: tuple[int, int, int], dtype: str, tile: tuple[int, int] = (0, 0), *, reason: str = "",
    hopper_tile: Tile | None = None, parts: int = 1, num_multiprocessors: int = 132,
) -> Case:  # fmt: skip
    """`tile`: rows and columns of the result for which x and the weight are read together; `hopper_tile` and `parts`
    take the place of what the tier chooses."""
    m, n, k = sizes

    def run(bench: Bench) -> None:
        product = gemm.Product(m, n, k, dtype, epilogue=gemm.Epilogue(has_residual=False, is_aligned=True))
        machine = gemm.machine_of(bench.gpu.arch, num_multiprocessors)
        launch = gemm.plan(product, machine, tier)
        if hopper_tile is not None:
            launch = hopper.plan_tile(product, machine, hopper_tile, parts)
        x, weight = bench.normal((m, k), dtype), bench.normal((n, k), dtype)
        bench.launch(launch, x, weight, 0, 0, bench.empty(m * n * size), m, n, k, 0, *gemm.NO_SQUARES)

    size = ITEM_BYTES[dtype]
    work = Work((m + n) * k * size, m * n * size, 2 * m * n * k, dtype != "f32")
    tiled_bytes = 0
    if tile != (0, 0):
        tiled_bytes = (-(-n // tile[1]) * m + -(-m // tile[0]) * n) * k * size + m * n * size
    has_tensor_cores = tier in ("tensor_core", "few_rows", "hopper")
    name, shape = f"gemm {tier} {dtype} m={m}", f"{m} x {n} x {k}"
    return Case(name, "gemm", shape, work, run, reason, tiled_bytes, has_tensor_cores)


def _exact_gemm(m: int, n: int, k: int) -> Case:
    """A product whose K is cut into segments: their sums are written, and read again."""

    def run(bench: Bench) -> None:
        product = gemm.Product(
            m, n, k, "bf16", out="f32", epilogue=gemm.Epilogue(has_residual=False, is_aligned=True), exact=True,
            num_segments=SEGMENTS,
        )  # fmt: skip
        launch = gemm.plan(product, gemm.machine_of(bench.gpu.arch), "auto")
        x, weight = bench.normal((m, k), "bf16"), bench.normal((n, k), "bf16")
        sums, out = bench.empty(SEGMENTS * m * n * 4), bench.empty(m * n * 2)
        bench.launch(launch, x, weight, 0, 0, sums, m, n, k, 0, *gemm.NO_SQUARES)
        bench.launch(gemm.segments.plan_add(SEGMENTS, m, n, "bf16"), sums, 0, 0, out, m, n, 0)

    work = Work((m + n) * k * 2, m * n * 2, 2 * m * n * k, True)
    rows = 16 if m <= 16 else 64
    tiled_bytes = (-(-n // 64) * m + -(-m // rows) * n) * k * 2 + m * n * (2 + 2 * SEGMENTS * 4)
    return Case(f"gemm exact bf16 m={m}", "gemm", f"{m} x {n} x {k}", work, run, "", tiled_bytes, True)


def _packed_gemm(
    name: str, m: int, n: int, k: int, tier: str = "few_rows", hopper_tile: Tile | None = None
) -> Case:
    """A product with a packed weight, of any bits: every one means a number. `hopper_tile`: whole K, by that tile."""
    packing = packing_of(name)
    assert packing is not None
    weight_bytes = packing.size_bytes(n, k, "bf16")

    def run(bench: Bench) -> None:
        epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
        product = gemm.Product(m, n, k, "bf16", name, epilogue=epilogue)
        machine = gemm.machine_of(bench.gpu.arch)
        launch = gemm.plan(product, machine, tier)
        if hopper_tile is not None:
            launch = hopper.plan_tile(product, machine, hopper_tile)
        x, weight = bench.normal((m, k), "bf16"), bench.put(np.zeros(weight_bytes, np.uint8))
        bench.launch(launch, x, weight, 0, 0, bench.empty(m * n * 2), m, n, k, 0, *gemm.NO_SQUARES)

    work = Work(m * k * 2 + weight_bytes, m * n * 2, 2 * m * n * k, True)
    columns = few_rows_shape.COLUMNS * few_rows_shape.BLOCK_WARPS // few_rows_shape.split(n, k, name)  # of a block
    rows = m  # of a block
    if tier == "packed_tiles":
        columns, rows = packed_tiles.BLOCK_N, packed_tiles.BLOCK_M
    elif hopper_tile is not None:
        columns, rows = hopper_tile.block_n, hopper_tile.block_m
    elif tier == "packed_row":
        columns = PACKED_ROWS * packed_row.teams(n, is_gated=False)
    x_reads = 2 if tier == "packed_row" else 1  # for the largest number, and to be staged
    tiled_bytes = -(-m // rows) * weight_bytes + -(-n // columns) * x_reads * m * k * 2 + m * n * 2
    return Case(f"gemm {tier} {name} m={m}", "gemm", f"{m} x {n} x {k}", work, run, "", tiled_bytes, True)


def _bytes_gemm(name: str, m: int, n: int, k: int, arch: str = "") -> Case:
    """A product whose rows were rounded to bytes by the launch in front, which is not in it: by `byte_tiles` int8, and
    e4m3 on an architecture that is not the report's, else by `hopper_bytes`."""
    packing, is_by_tiles = packing_of(name), name == "u8" or arch != ""
    assert packing is not None
    weight_bytes = packing.size_bytes(n, k, "bf16")
    scales, x_bytes = rounded_rows.sections(m, k, is_grouped=packing.group > 0)

    def run(bench: Bench) -> None:
        epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
        product, machine = gemm.Product(m, n, k, "bf16", name, epilogue=epilogue), gemm.machine_of(bench.gpu.arch)
        launch = gemm.byte_tiles.plan(product) if is_by_tiles else gemm.hopper_bytes.plan(product, machine)
        weight, x = (bench.put(np.zeros(size, np.uint8)) for size in (weight_bytes, x_bytes))
        bench.launch(
            launch, x, weight, 0, 0, bench.empty(m * n * 2), m, n, k, 0, x + scales, 0, 0.0,
            0 if is_by_tiles else weight,
        )  # fmt: skip

    work = Work(x_bytes + weight_bytes, m * n * 2, 2 * m * n * k, True)
    rows, columns = -(-m // gemm.byte_tiles.BLOCK_M), -(-n // gemm.byte_tiles.BLOCK_N)
    tiled_bytes = rows * weight_bytes + columns * x_bytes + m * n * 2
    if packing.group:  # each of 8 warps reads the scales of its 16 rows and 128 columns by itself, or of 64 and 32
        warp_rows, warp_columns = (64, 32) if is_by_tiles else (16, 128)
        scales_bytes = 8 * (4 * warp_rows + 2 * warp_columns) * k // packing.group
        tiled_bytes = rows * (n * k + 4 * n) + columns * m * k + m * n * 2 + rows * columns * scales_bytes
    tier = "byte_tiles" if is_by_tiles else "hopper_bytes"
    title = f"gemm {tier} {name} m={m}{' ' if arch else ''}{arch}"
    return Case(title, "gemm", f"{m} x {n} x {k}", work, run, "", tiled_bytes, True, arch)


def _dequantized(name: str, n: int, k: int) -> Case:
    packing = packing_of(name)
    assert packing is not None
    size = packing.size_bytes(n, k, "bf16")

    def run(bench: Bench) -> None:
        packed, out = bench.put(np.zeros(size, np.uint8)), bench.empty(n * k * 2)
        bench.launch(dequantize.plan(packing, n, k, "bf16"), packed, 0, out, 0, n, n, k, 1.0)

    work = Work(size, n * k * 2, 2 * n * k)
    return Case(f"dequantize {name} bf16", "dequantize", f"{n} x {k}", work, run, "", size + n * k * 2)


# Attention

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 4, 2, 64, 16
_SIZES = (_HEADS, _KV_HEADS, _HEAD_DIM)


def _attentions() -> Iterator[Case]:
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
    tier: str | None, dtype: str, chunks: list[tuple[int, int]], *, num_sms: int = 108,
    sizes: tuple[int, int, int] = _SIZES, pages: str = "",
) -> Case:  # fmt: skip
    """`tier`: None: as planned. `chunks`: (context, queries) of each sequence, all alike; `num_sms` 1 keeps decode from
    splitting them; `sizes`: query heads, KV heads, head dim; `pages`: what they hold where that is a byte a number."""
    num_heads, kv_heads, head_dim = sizes
    context, queries = chunks[0]
    length, seqs = context + queries, len(chunks)
    tokens, size = seqs * queries, ITEM_BYTES[dtype]
    blocks_each = -(-length // _BLOCK)

    def run(bench: Bench) -> None:
        plan = attention.plan(
            num_tokens=tokens, num_seqs=seqs, max_query_len=queries, max_seq_len=length, num_q_heads=num_heads,
            num_kv_heads=kv_heads, head_dim=head_dim, table_width=blocks_each, dtype=dtype, block_size=_BLOCK,
            num_sms=num_sms, arch=bench.gpu.arch, num_blocks=seqs * blocks_each, tier=tier, pages=pages,
        )  # fmt: skip
        q = bench.normal((tokens, num_heads, head_dim), dtype)
        shape = seqs * blocks_each, kv_heads, _BLOCK, head_dim
        k, v = (bench.normal(shape, dtype) if not pages else bench.put(_bytes(bench, shape)) for _ in range(2))
        scales = [bench.put(np.full(shape[:3], 0.01, np.float32)) for _ in range(2)] if pages else []
        starts = bench.put(np.arange(seqs + 1, dtype=np.int32) * np.int32(queries))
        lengths = bench.put(np.full(seqs, length, np.int32))
        tables = bench.put(bench.rng.permutation(seqs * blocks_each).astype(np.int32))
        out = bench.empty(tokens * num_heads * head_dim * size)
        workspace = bench.empty(plan.workspace_bytes) if plan.workspace_bytes else 0
        scale = head_dim**-0.5
        arrivals = bench.put(np.zeros(max(1, plan.num_arrivals), np.uint32))
        arguments = q, k, v, out, workspace, arrivals, starts, lengths, tables, scale
        bench.launch(plan.launch, *plan.arguments(*arguments, 0, *scales))

    seen = seqs * sum(context + 1 + query for query in range(queries))  # keys that queries see
    rows = tokens * num_heads * head_dim * size
    key_bytes = head_dim + 4 if pages else head_dim * size  # of a key and head; with its scale
    work = Work(rows + 2 * seqs * length * kv_heads * key_bytes, rows, 4 * seen * num_heads * head_dim, dtype != "f32")
    unsplit = " unsplit" if num_sms == 1 else ""
    shape = f"{seqs} x {queries} queries, {length} keys, {num_heads}/{kv_heads} heads of {head_dim}"
    held = f" {pages} pages" if pages else ""
    name = f"attention {tier} {dtype}{held}{unsplit}{f' d{head_dim}' if sizes != _SIZES else ''}"
    share = num_heads // kv_heads
    if tier == "naive":
        return Case(name, "attention", shape, work, run, _KEY_A_LANE)
    if tier == "decode":  # parts of at least MIN_PART_KEYS leave a record for each row, which is read again
        records = 0 if num_sms == 1 else seqs * num_heads * (length // MIN_PART_KEYS)
        tiled_bytes = work.least_bytes + 2 * records * 4 * record(head_dim)
    else:  # a tile of 128 rows (64 of float32) reads the keys that its last query sees
        queries_each = (128 if dtype != "f32" else 64) // share
        keys = sum(context + min(queries, first + queries_each) for first in range(0, queries, queries_each))
        tiled_bytes = 2 * rows + 2 * seqs * keys * kv_heads * key_bytes
    return Case(name, "attention", shape, work, run, "", tiled_bytes, dtype != "f32" and tier != "decode")


def _bytes(bench: Bench, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Numbers of either type, none a NaN."""
    return bench.rng.integers(0, 127, shape, np.uint8)


# What works along rows

_ROWS, _SIZE = 32, 1024


def _rows() -> Iterator[Case]:
    for name in ("rms_norm", "layer_norm"):
        yield _norm(name, False)
    yield _norm("rms_norm", True)
    yield _softmax(False)
    yield _softmax(True)
    count = _ROWS * _SIZE

    def swiglu(bench: Bench) -> None:
        launch, accesses = activation.plan_glu("silu", _ROWS, _SIZE, "bf16")
        bench.launch(launch, bench.normal((_ROWS, 2 * _SIZE), "bf16"), bench.empty(2 * count), _ROWS, accesses)

    yield Case("swiglu bf16", "activation", f"{_ROWS} x {_SIZE}", Work(4 * count, 2 * count, 5 * count), swiglu)
    codes, both = rounded_rows.sections(_ROWS, _SIZE)

    def round_rows(bench: Bench) -> None:
        x, memory = bench.normal((_ROWS, _SIZE), "bf16"), bench.empty(both)
        bench.launch(rounded_rows.plan(_ROWS, _SIZE, "bf16"), x, memory, memory + codes, _ROWS, _SIZE)

    yield Case("rounded_rows s8 bf16", "activation", f"{_ROWS} x {_SIZE}", Work(2 * count, both, 3 * count), round_rows)
    scales, all_bytes = rounded_rows.sections(_ROWS, _SIZE, is_grouped=True)

    def round_normed(bench: Bench) -> None:
        x, weight, memory = bench.normal((_ROWS, _SIZE), "bf16"), bench.normal(_SIZE, "f32"), bench.empty(all_bytes)
        launch = rounded_norm.plan(_ROWS, _SIZE, "bf16", "e4m3", is_grouped=True)
        bench.launch(
            launch, x, weight, memory, memory + scales, _ROWS, _SIZE, 1.0 / _SIZE, 1e-5, 0.0, 0.0
        )  # fmt: skip

    work = Work(2 * count + 4 * _SIZE, all_bytes, 8 * count)
    yield Case("rounded_norm e4m3_g128 bf16", "activation", f"{_ROWS} x {_SIZE}", work, round_normed)
    for name in ("silu", "gelu_tanh", "gelu_erf"):
        yield Case(
            f"{name} bf16", "activation", f"{count}", Work(2 * count, 2 * count, 4 * count),
            functools.partial(_activation, name, count),
        )  # fmt: skip


def _activation(name: str, count: int, bench: Bench) -> None:
    launch, accesses = activation.plan_activation(name, count, "bf16")
    bench.launch(launch, bench.normal(count, "bf16"), bench.empty(2 * count), accesses)


def _norm(name: str, has_residual: bool) -> Case:
    def run(bench: Bench) -> None:
        x, weight = bench.normal((_ROWS, _SIZE), "bf16"), bench.normal(_SIZE, "f32")
        if name == "rms_norm":
            launch = norm.plan_rms_norm(_ROWS, _SIZE, "bf16", has_residual=has_residual)
            inputs = x, bench.normal((_ROWS, _SIZE), "bf16") if has_residual else 0, weight
        else:
            launch, inputs = norm.plan_layer_norm(_ROWS, _SIZE, "bf16"), (x, weight, bench.normal(_SIZE, "f32"))
        bench.launch(launch, *inputs, bench.empty(2 * count), _SIZE, 1 / _SIZE, 1e-6)

    count = _ROWS * _SIZE
    weights = 4 * _SIZE * (1 if name == "rms_norm" else 2)
    work = Work((4 if has_residual else 2) * count + weights, 2 * count, 4 * count)
    return Case(f"{name}{' + residual' if has_residual else ''} bf16", "norm", f"{_ROWS} x {_SIZE}", work, run)


def _softmax(is_log: bool) -> Case:
    def run(bench: Bench) -> None:
        launch = softmax.plan_softmax(_ROWS, _SIZE, "f32", is_log=is_log)
        bench.launch(launch, bench.normal((_ROWS, _SIZE), "f32"), bench.empty(4 * count), _SIZE)

    count = _ROWS * _SIZE
    work = Work(4 * count, 4 * count, 5 * count)
    return Case(f"{'log_' if is_log else ''}softmax f32", "softmax", f"{_ROWS} x {_SIZE}", work, run)


# What works on tokens

_TOKENS, _VOCAB = 64, 4096
_VOCABULARY = 151_936  # Qwen3's: the blocks of a cluster share its row
_DRAWS: dict[str, dict[str, float]] = {
    "greedy": {}, "temperature": {"temperature": 0.8}, "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
}  # fmt: skip


def _tokens() -> Iterator[Case]:
    row = _TOKENS * _SIZE * 2
    yield Case(
        "embedding bf16", "embedding", f"{_TOKENS} of {_VOCAB} rows of {_SIZE}", Work(row + 4 * _TOKENS, row, 0), _embed
    )
    heads = _TOKENS * _HEADS * _HEAD_DIM * 2
    angles = _TOKENS * _HEAD_DIM * 4
    yield Case(
        "rope bf16", "rope", f"{_TOKENS} x {_HEADS} heads of {_HEAD_DIM}",
        Work(heads + angles + 4 * _TOKENS, heads, 3 * heads), _rope,
    )  # fmt: skip
    whole = _TOKENS * (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM * 2
    yield Case(
        "qkv_prepare bf16", "qkv", f"{_TOKENS} x {_HEADS}/{_KV_HEADS} heads of {_HEAD_DIM}, norms, rope",
        Work(whole + angles + 12 * _TOKENS + 8 * _HEAD_DIM, whole, 5 * whole), _qkv_prepare,
    )  # fmt: skip
    pages = 2 * _TOKENS * _KV_HEADS * _HEAD_DIM * 2
    yield Case(
        "write_kv bf16", "kv_cache", f"{_TOKENS} x {_KV_HEADS} heads of {_HEAD_DIM}",
        Work(pages + 8 * _TOKENS, pages, 0),
        _write_kv,
    )  # fmt: skip
    logits = 4 * 4 * _VOCAB
    of_row = Work(4 * _VOCABULARY, 12, 8 * _VOCABULARY)
    for kind, numbers in _DRAWS.items():
        run = functools.partial(_sample, numbers=numbers)
        yield Case(f"sampling {kind}", "sampling", f"1 x {_VOCABULARY}", of_row, run)
    yield Case("logprobs top 5", "logprobs", f"4 x {_VOCAB}", Work(logits, 192, 8 * logits // 4), _logprobs)


def _embed(bench: Bench) -> None:
    launch, accesses = embedding.plan_embedding(_TOKENS, _SIZE, "bf16")
    ids = bench.put(bench.rng.integers(0, _VOCAB, _TOKENS).astype(np.int32))
    table, flag = bench.normal((_VOCAB, _SIZE), "bf16"), bench.put(np.zeros(1, np.int32))
    bench.launch(launch, ids, table, bench.empty(_TOKENS * _SIZE * 2), flag, _TOKENS, _VOCAB, accesses, 1.0)


def _positions(bench: Bench) -> tuple[int, int, int]:
    """positions, cos and sin."""
    return (
        bench.put(np.arange(_TOKENS, dtype=np.int32)), bench.normal((_TOKENS, _HEAD_DIM // 2), "f32"),
        bench.normal((_TOKENS, _HEAD_DIM // 2), "f32"),
    )  # fmt: skip


def _rope(bench: Bench) -> None:
    launch = rope.plan_rope(_TOKENS, _HEADS, _HEAD_DIM, _HEAD_DIM, "bf16", interleaved=False)
    x, stride = bench.normal((_TOKENS, _HEADS, _HEAD_DIM), "bf16"), _HEADS * _HEAD_DIM
    bench.launch(launch, x, *_positions(bench), x, _TOKENS, _HEADS, stride, stride)


def _pages(bench: Bench) -> tuple[int, int, int]:
    """slot_mapping of consecutive slots, K and V pages."""
    size = _TOKENS * _KV_HEADS * _HEAD_DIM * 2
    return bench.put(np.arange(_TOKENS, dtype=np.int64)), bench.empty(size), bench.empty(size)


def _qkv_prepare(bench: Bench) -> None:
    launch = qkv.plan_qkv_prepare(
        _TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK, "bf16", rotary=_HEAD_DIM, norm="head"
    )  # fmt: skip
    x = bench.normal((_TOKENS, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM), "bf16")
    norms = [bench.normal(_HEAD_DIM, "f32") for _ in range(2)]
    q = bench.empty(_TOKENS * _HEADS * _HEAD_DIM * 2)
    bench.launch(launch, x, *_positions(bench), 0, 0, *norms, *_pages(bench), 0, 0, q, _TOKENS, _HEADS, _KV_HEADS, 1e-6)


def _write_kv(bench: Bench) -> None:
    launch = kv_cache.plan_write_kv(_TOKENS, _KV_HEADS, _HEAD_DIM, _BLOCK, "bf16")
    k, v = (bench.normal((_TOKENS, _KV_HEADS, _HEAD_DIM), "bf16") for _ in range(2))
    stride = _KV_HEADS * _HEAD_DIM
    bench.launch(launch, k, v, *_pages(bench), _TOKENS, _KV_HEADS, stride, stride)


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
    yield Case("add f32", "elementwise", f"{_COUNT}", Work(8 * _COUNT, 4 * _COUNT, _COUNT), _add)
    yield Case("cast f32 to bf16", "elementwise", f"{_COUNT}", Work(4 * _COUNT, 2 * _COUNT, 0), _cast)
    for operation in ("sum", "argmax"):
        written = 32 * (4 if operation == "sum" else 8)
        yield Case(
            f"{operation} f32", "reduce", f"32 rows of {_COUNT // 32}", Work(4 * _COUNT, written, _COUNT),
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
