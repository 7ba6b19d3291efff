"""Attention for the kernel report: prompts and decodes of each tier, and pages of a byte."""

from __future__ import annotations

from collections.abc import Iterator

from numba_kernels.cuda.attention.parts import MIN_PART_KEYS, record
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.quantised_pages import PAGES
from runtime.bench.kernels.cases import attention_case as attention_operation
from tools.kernel_costs.case import Case, counted

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
