"""Latent attention on tensor cores beside float64: lengths, heads, parts and tried tokens; bits in exact mode."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from numba_kernels.cuda import latent
from numba_kernels.cuda.intrinsics.shared_memory import SHARED_BYTES
from numba_kernels.cuda.latent.tensor_core import choose_tiles
from numba_kernels.latent_rows import GROUP, LatentBytes
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from tests.numba_kernels.cuda.harness import assert_close, both_archs, empty, get, numpy_dtype, put
from tests.numba_kernels.cuda.paged import PagedBatch, paged, paged_batch
from tests.oracles.attention import attention

SCALE = 0.21
SMALL = {"dtype": "bf16", "width": 72, "value_dim": 64, "block_size": 8}
BYTES = {"dtype": "bf16", "width": 320, "value_dim": 256, "block_size": 16, "pages": "e4m3"}
PANELS = {"dtype": "bf16", "width": 192, "value_dim": 128, "block_size": 16}
TOLERANCE = {"bf16": 1e-2, "f16": 2e-3}


def batch_of(chunks: list[tuple[int, int]], heads: int, sizes: dict[str, Any], seed: int = 0) -> PagedBatch:
    """(context, query length) of each sequence; -1 and 1 for a padded entry of a captured batch."""
    rng = np.random.default_rng(seed)
    batch = paged_batch(
        rng, chunks, heads=heads, kv_heads=1, head_dim=sizes["width"], dtype=sizes["dtype"],
        block_size=sizes["block_size"],
    )  # fmt: skip
    return in_bytes(batch, sizes["value_dim"]) if sizes.get("pages") else batch


def in_bytes(batch: PagedBatch, value_dim: int) -> PagedBatch:
    """The batch with rows of `numba_kernels.latent_rows`, and with the keys that these give back in the batch's type,
    to which kernels widen them. What no sequence owns is NaN, in bytes, scales and rotated numbers."""
    layout = LatentBytes(batch.queries.shape[2], value_dim)
    pages = np.full((*batch.k_pages.shape[:3], layout.row_bytes), 0xFF, np.uint8)
    given_back = []
    for table, keys in zip(batch.block_tables, batch.keys):
        keys = keys[:, 0].astype(np.float32)
        rows = np.zeros((len(keys), layout.row_bytes), np.uint8)
        found = np.empty(keys.shape, np.float32)
        rotated = keys[:, : layout.rotary].astype(ml_dtypes.bfloat16)
        found[:, : layout.rotary] = rotated
        rows[:, layout.rotated_at : layout.rotated_at + 2 * layout.rotary] = rotated.view(np.uint8)
        for first in range(0, value_dim, GROUP):
            group = keys[:, layout.rotary + first :][:, : min(GROUP, value_dim - first)]
            scale = np.abs(group).max(1, keepdims=True, initial=0) / np.float32(448)
            numbers = (group / scale).astype(ml_dtypes.float8_e4m3fn)
            found[:, layout.rotary + first :][:, : group.shape[1]] = numbers.astype(np.float32) * scale
            rows[:, first : first + group.shape[1]] = numbers.view(np.uint8)
            rows[:, layout.value_bytes + first // GROUP * 4 :][:, :4] = scale.view(np.uint8)
        places = np.arange(len(keys))
        pages[table[places // batch.block_size], 0, places % batch.block_size] = rows
        given_back.append(found[:, None].astype(numpy_dtype(batch.dtype)))
    return replace(batch, k_pages=pages, keys=given_back)


def run(
    gpu: Gpu, batch: PagedBatch, sizes: dict[str, Any], *, exact: bool = False, num_sms: int = 4,
    tier: str | None = "tensor_core", later_lengths: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """With `later_lengths` the launch is recorded, and replayed after the sequences got these."""
    tokens, heads, _ = batch.queries.shape
    plan = latent.plan_attention(
        num_tokens=tokens, num_seqs=len(batch.chunks), max_query_len=max(count for _, count in batch.chunks),
        max_seq_len=int(batch.seq_lens.max()), num_heads=heads, table_width=batch.block_tables.shape[1],
        num_sms=num_sms, most_shared=sizes.get("most_shared", gpu.properties.shared_bytes_per_block), exact=exact,
        arch=gpu.arch, num_blocks=len(batch.k_pages), tier=tier, pages=sizes.get("pages", ""),
        **{name: sizes[name] for name in SMALL},
    )  # fmt: skip
    shape = tokens, heads, sizes["value_dim"]
    out, workspace = empty(gpu, shape, sizes["dtype"]), empty(gpu, plan.workspace_bytes // 4, np.float32)
    arrivals = put(gpu, np.zeros(max(1, plan.num_arrivals), np.uint32))
    given = batch.queries, batch.k_pages, batch.query_start, batch.seq_lens, batch.block_tables
    q, pages, *tables = blocks = [put(gpu, each) for each in given]
    places = [block.address for block in (q, pages, out, workspace, arrivals, *tables)]
    work = functools.partial(gpu.launch, plan.launch, *plan.arguments(*places, SCALE))
    if later_lengths is None:
        work()
    else:
        graph = Graph.capture(gpu, work)
        gpu.write(tables[1].address, later_lengths)
        graph.replay()
        graph.release()
    found = get(gpu, out, shape, sizes["dtype"])
    assert blocks
    assert not get(gpu, arrivals, max(1, plan.num_arrivals), np.uint32).any(), "arrivals must be zeros again"
    return found


def expected(batch: PagedBatch, sizes: dict[str, Any]) -> np.ndarray:
    first = sizes["width"] - sizes["value_dim"]
    return np.concatenate([
        attention(batch.queries[batch.rows(seq)], keys, keys[..., first:], SCALE) if len(keys)
        else np.zeros((1, batch.queries.shape[1], sizes["value_dim"]))
        for seq, keys in enumerate(batch.keys)
    ])  # fmt: skip


def check(gpu: Gpu, chunks: list[tuple[int, int]], heads: int, sizes: dict[str, Any], **how: Any) -> None:
    batch = batch_of(chunks, heads, sizes)
    tolerance = TOLERANCE[sizes["dtype"]]
    wanted = expected(batch, sizes)
    assert_close(run(gpu, batch, sizes, **how).astype(np.float64), wanted, rtol=tolerance, atol=2 * tolerance)


@both_archs
@pytest.mark.parametrize(
    ("chunks", "heads", "num_sms"),
    [
        ([(0, 1)], 1, 1),
        ([(62, 1), (-1, 1), (63, 1), (64, 1), (200, 1)], 5, 9),  # parts of 128 keys, and sequences of one
        ([(1_130, 1)], 20, 40),  # nine parts of two tiles of rows
        ([(0, 9), (129, 4), (3, 2)], 16, 4),  # tokens that were tried, and a chunk
        ([(150, 2)], 128, 1),
    ],
)
def test_beside_float64(gpu: Gpu, chunks: list[tuple[int, int]], heads: int, num_sms: int) -> None:
    check(gpu, chunks, heads, SMALL, num_sms=num_sms)


@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("chunks", "heads", "num_sms"),
    [
        ([(0, 1)], 64, 1),
        ([(190, 1)], 100, 1),  # an odd number of tiles, and a tile of rows that is not full
        ([(62, 1), (-1, 1), (128, 1), (200, 1)], 128, 9),
        ([(0, 9), (129, 40), (3, 2)], 16, 4),
        ([(700, 1)], 128, 20),
    ],
)
def test_wgmma_beside_float64(gpu: Gpu, chunks: list[tuple[int, int]], heads: int, num_sms: int) -> None:
    check(gpu, chunks, heads, PANELS, num_sms=num_sms, tier="hopper")


@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("chunks", "heads", "num_sms"),
    [
        ([(0, 1)], 64, 1),
        ([(190, 1)], 20, 1),
        ([(62, 1), (-1, 1), (63, 1), (128, 1), (143, 1)], 128, 9),
        ([(0, 9), (129, 40), (3, 2)], 16, 4),
        ([(700, 1)], 128, 20),
    ],
)
def test_wgmma_of_bytes_beside_float64(gpu: Gpu, chunks: list[tuple[int, int]], heads: int, num_sms: int) -> None:
    check(gpu, chunks, heads, BYTES, num_sms=num_sms, tier="hopper")


@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
def test_recorded_wgmma_of_bytes_reads_lengths_as_they_are(gpu: Gpu) -> None:
    batch = batch_of([(700, 1), (-1, 1), (129, 1)], 20, BYTES)
    lengths = np.array([65, 0, 130], np.int32)
    found = run(gpu, batch, BYTES, tier=None, num_sms=20, later_lengths=lengths)
    shorter = replace(batch, keys=[keys[:length] for keys, length in zip(batch.keys, lengths)])
    assert_close(found.astype(np.float64), expected(shorter, BYTES), rtol=1e-2, atol=2e-2)


def test_many_rows_take_wgmma() -> None:
    """From 49 rows a sequence on, of fp8 from 17, where the device has it and bits may depend on the batch."""
    sizes: dict[str, Any] = {
        "num_tokens": 2, "num_seqs": 2, "max_query_len": 1, "max_seq_len": 900, "width": 576, "value_dim": 512,
        "table_width": 60, "dtype": "bf16", "block_size": 16, "num_sms": 132, "most_shared": SHARED_BYTES["sm_90a"],
        "arch": "sm_90a", "num_blocks": 120,
    }  # fmt: skip
    for heads, changed, tier in (
        (16, {}, "tensor_core"), (48, {}, "tensor_core"), (64, {}, "hopper"), (128, {"exact": True}, "tensor_core"),
        (128, {"arch": "sm_100a"}, "tensor_core"), (128, {"num_blocks": None}, "tensor_core"),
        (128, {"width": 584}, "tensor_core"), (128, {"dtype": "f32"}, "plain"), (16, {"max_query_len": 4}, "hopper"),
        (16, {"pages": "e4m3"}, "tensor_core"), (20, {"pages": "e4m3"}, "hopper"),
        (20, {"pages": "e4m3", "block_size": 8}, "tensor_core"),
        (128, {"pages": "e4m3", "dtype": "f16"}, "tensor_core"),
        (128, {"pages": "e4m3", "exact": True}, "tensor_core"),
    ):  # fmt: skip
        assert latent.plan_attention(num_heads=heads, **(sizes | changed)).tier == tier
    decode = latent.plan_attention(num_heads=16, **sizes)
    chunk = latent.plan_attention(num_heads=128, **(sizes | {"num_tokens": 8192, "max_query_len": 8191}))
    assert decode.workspace_bytes > 0
    assert chunk.workspace_bytes == 0  # a prompt's tiles fill the device without parts


def test_exact_bits_depend_on_the_row_alone(gpu: Gpu) -> None:
    """A prompt in one chunk, in three, and its last token as a decode step beside another sequence."""
    whole = batch_of([(0, 170)], 5, SMALL)
    bits = run(gpu, whole, SMALL, exact=True).view(np.uint16)
    for chunks in ([(0, 3), (0, 170)], [(0, 70)], [(70, 99)], [(169, 1), (140, 1)]):
        keys = [whole.keys[0][: context + count] for context, count in chunks]
        queries = np.concatenate([whole.queries[context : context + count] for context, count in chunks])
        cut = paged(np.random.default_rng(1), chunks, queries, keys, keys, dtype="bf16", block_size=8)
        found = run(gpu, cut, SMALL, exact=True).view(np.uint16)
        wanted = np.concatenate([bits[context : context + count] for context, count in chunks])
        np.testing.assert_array_equal(found, wanted)


def test_tiles_fit_each_architecture() -> None:
    for width, value_dim, keys in ((576, 512, (64, 48, 32)), (320, 256, (64, 64, 64))):
        for arch, num_keys in zip(("sm_90a", "sm_80", "sm_86"), keys, strict=True):
            tiles = choose_tiles("bf16", width, value_dim, SHARED_BYTES[arch])
            assert tiles is not None
            assert (tiles.num_keys, tiles.shared_bytes <= SHARED_BYTES[arch]) == (num_keys, True)
    for sizes in (("f32", 576, 512), ("bf16", 6 + 512, 512), ("bf16", 1024, 1016), ("bf16", 138, 130)):
        assert choose_tiles(*sizes, SHARED_BYTES["sm_90a"]) is None
    with pytest.raises(ValueError, match=r"tier tensor_core has no kernel for rows of 576 f32 with values of 512"):
        latent.plan_attention(
            num_tokens=1, num_seqs=1, max_query_len=1, max_seq_len=1, num_heads=1, width=576, value_dim=512,
            table_width=1, dtype="f32", block_size=16, num_sms=1, most_shared=SHARED_BYTES["sm_80"], tier="tensor_core",
        )  # fmt: skip


@pytest.mark.exhaustive
@both_archs
@pytest.mark.parametrize("most_shared", [101_376, None])
@pytest.mark.parametrize(
    ("dtype", "width", "value_dim", "block_size"),
    [
        ("bf16", 576, 512, 16),
        ("f16", 320, 256, 16),
        ("bf16", 138, 130, 8),
        ("f16", 73, 17, 32),
        ("f16", 200, 192, 32),
        ("bf16", 784, 768, 16),
    ],
)
def test_widths_and_random_batches(
    gpu: Gpu, dtype: str, width: int, value_dim: int, block_size: int, most_shared: int | None
) -> None:
    sizes: dict[str, Any] = {"dtype": dtype, "width": width, "value_dim": value_dim, "block_size": block_size}
    if most_shared:
        sizes["most_shared"] = most_shared
    rng = np.random.default_rng(width)
    for _ in range(4):
        chunks = [(int(rng.integers(0, 300)), int(rng.integers(1, 6))) for _ in range(int(rng.integers(1, 5)))]
        tier = "plain" if value_dim % 64 else "tensor_core"
        check(gpu, chunks, int(rng.integers(1, 33)), sizes, num_sms=int(rng.integers(1, 30)), tier=tier)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "width", "value_dim", "block_size", "pages"),
    [
        ("bf16", 576, 512, 16, ""), ("f16", 320, 256, 8, ""), ("f16", 192, 128, 32, ""), ("bf16", 576, 512, 16, "e4m3"),
        ("bf16", 576, 512, 64, "e4m3"), ("bf16", 320, 256, 32, "e4m3"),
    ],
)  # fmt: skip
def test_wgmma_on_random_batches(gpu: Gpu, dtype: str, width: int, value_dim: int, block_size: int, pages: str) -> None:
    sizes: dict[str, Any] = {
        "dtype": dtype, "width": width, "value_dim": value_dim, "block_size": block_size, "pages": pages,
    }  # fmt: skip
    rng = np.random.default_rng(width)
    for heads in (int(rng.integers(1, 65)), 16, 20, 64, 128):
        chunks = [(int(rng.integers(0, 300)), int(rng.integers(1, 9))) for _ in range(int(rng.integers(1, 4)))]
        check(gpu, [*chunks, (-1, 1), (0, 1)], heads, sizes, num_sms=int(rng.integers(1, 12)), tier="hopper")
