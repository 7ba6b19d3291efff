"""Kernels against numpy at the shapes of serving, and at ragged ones. Nothing is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numba_kernels.cuda.gemm import hopper
from runtime.bench.kernels import cases as bench
from runtime.bench.kernels.table import check
from runtime.device.gpu import Gpu
from tools.gpu.sections import Case, Options

SERVED = ((6144, 4096), (4096, 4096), (4096, 12288), (4096, 1024), (1024, 3072))
"""N, K of Qwen3-8B's and 0.6B's matrices."""


def _product(m: int, n: int, k: int, tier: str = "auto", **more: Any) -> bench.Case:
    return bench.product_case(tier, m, n, k, more.pop("dtype", "bf16"), **more)


def _checks(gpu: Gpu, found: Iterable[bench.Case]) -> Iterator[Case]:
    for number, each in enumerate(found):
        yield Case(f"{each.name}, {each.shape}", functools.partial(check, gpu, each, number))


def hopper_gemm(options: Options) -> Iterator[Case]:
    """Each tile, epilogue, split and gate; ragged edges; one block and many rounds of clusters."""
    gpu = Gpu.of(options.device)
    if gpu.arch != hopper.ARCH:
        yield Case("any", lambda: {"skipped": f"needs {hopper.ARCH}"})
        return
    if options.is_quick:
        yield from _checks(gpu, [
            _product(130, 264, 136, tile=hopper.LARGE, has_bias=True, has_residual=True),
            _product(300, 200, 72, tile=hopper.MIDDLE, activation="silu"),
            _product(70, 136, 520, tile=hopper.SMALL, parts=2), _product(300, 200, 72, activation="silu"),
        ])  # fmt: skip
        return
    yield from _checks(gpu, (_product(2048, n, k, tile=tile) for tile in hopper.TILES for n, k in SERVED[:3]))
    yield from _checks(gpu, (
        _product(1000, 4096, 4096, tile=tile, has_bias=bias, has_residual=residual)
        for tile in hopper.TILES for bias, residual in ((True, False), (False, True), (True, True))
    ))  # fmt: skip
    yield from _checks(gpu, (
        _product(m, 12288, 4096, tile=tile, activation=gate)
        for m, tile in (
            (2048, hopper.LARGE), (256, hopper.MIDDLE), (100, hopper.SMALL), (300, hopper.SMALL), (128, hopper.MIDDLE),
            (64, hopper.THIN),
        ) for gate in hopper.GATES
    ))  # fmt: skip
    yield from _checks(gpu, (
        _product(m, 12288, 4096, tile=tile, parts=4, activation="silu")
        for m, tile in ((64, hopper.NARROW), (128, hopper.SMALL))
    ))  # fmt: skip
    yield from _checks(gpu, [_product(1999, 12280, 4088, activation="silu")])
    yield from _checks(gpu, (
        _product(m, n, k, tile=tile, parts=parts, has_residual=residual)
        for tile in hopper.SPLIT_TILES
        for m, n, k, parts, residual in (
            (64, 4096, 4096, 2, False), (64, 4096, 12288, 4, True), (128, 1024, 3072, 8, True),
            (77, 4104, 4104, 3, False),
        )
    ))  # fmt: skip
    yield from _checks(gpu, (
        _product(m, n, k, tile=tile, has_residual=True)
        for tile in hopper.TILES
        for m, n, k in ((1, 8, 64), (129, 264, 200), (257, 4104, 72), (4095, 520, 1032), (640, 151936, 64))
    ))  # fmt: skip
    yield from _checks(gpu, (
        _product(300, 1001, 1024, tile=tile, out_dtype=out, has_bias=True, is_aligned=False)
        for tile in hopper.TILES for out in ("", "f32")
    ))  # fmt: skip
    yield from _checks(gpu, (_product(512, 1024, 1024, tile=tile, dtype="f16") for tile in hopper.TILES))
    yield from _checks(gpu, [_product(8192, 4096, 4096), _product(256, 4096, 12288), _product(256, 151936, 1024)])


def gemm(options: Options) -> Iterator[Case]:
    """The other tiers, as planned for few rows, for float32 and in exact mode."""
    gpu = Gpu.of(options.device)
    if options.is_quick:
        wanted = (1, 128, 256, "auto"), (20, 128, 256, "auto"), (33, 48, 64, "tensor_core")
        yield from _checks(gpu, (_product(*each) for each in wanted))
        return
    yield from _checks(gpu, (
        _product(m, n, k, has_residual=(n, k) == (4096, 12288))
        for m in (1, 2, 4, 16, 33, 64) for n, k in (*SERVED, (24576, 4096))
    ))  # fmt: skip
    yield from _checks(gpu, (_product(m, 12288, 4096, activation="silu") for m in (1, 2, 16, 33, 64, 128)))
    yield from _checks(gpu, (_product(m, 151936, 4096) for m in (1, 16)))
    yield from _checks(gpu, (_product(m, 4099, 4096, has_bias=True) for m in (1, 7, 63)))
    yield from _checks(gpu, (_product(m, 4096, 4096, exact=True) for m in (1, 5, 64, 300)))
    yield from _checks(gpu, (_product(m, 1000, 1000, tier="tensor_core") for m in (100, 1000)))
    yield from _checks(gpu, (_product(m, 3072, 768, dtype="f32") for m in (1, 8, 9, 512)))
    yield from _checks(gpu, (_product(300, 500, 700, tier, dtype="f32") for tier in ("naive", "tiled", "register")))


def attention(options: Options) -> Iterator[Case]:
    """Prefill and decode: seqs, context, queries, query heads, KV heads, head dim."""
    gpu = Gpu.of(options.device)
    make: Callable[..., bench.Case] = bench.attention_case
    if options.is_quick:
        shapes = ((1, 0, 33, 4, 2, 64), (2, 40, 1, 4, 2, 64), (1, 0, 130, 4, 2, 128))
        yield from _checks(gpu, (make("auto", "bf16", *shape) for shape in shapes))
        return
    qwen3_8b, qwen3_small, gpt2 = (32, 8, 128), (16, 8, 128), (12, 12, 64)
    yield from _checks(gpu, (
        make("auto", "bf16", seqs, context, queries, *heads)
        for seqs, context, queries, heads in (
            (1, 0, 128, qwen3_8b), (1, 0, 2048, qwen3_8b), (1, 0, 1999, qwen3_8b), (4, 0, 513, qwen3_small),
            (1, 3000, 1024, qwen3_8b), (3, 777, 333, qwen3_small), (2, 0, 700, gpt2), (8, 100, 5, qwen3_8b),
            (1, 0, 1, qwen3_8b), (1, 127, 1, qwen3_8b), (1, 1023, 1, qwen3_8b), (1, 4095, 1, qwen3_8b),
            (1, 16383, 1, qwen3_small), (32, 2047, 1, qwen3_8b), (256, 1023, 1, qwen3_8b), (5, 999, 1, gpt2),
        )
    ))  # fmt: skip
    yield from _checks(gpu, (make("flash", "bf16", 1, 0, 777, *heads) for heads in (qwen3_8b, gpt2)))
    towers = ((4, 1023, 128, 72), (2, 2000, 128, 64), (9, 63, 64, 80))  # blocks of a picture's patches, each a token
    yield from _checks(gpu, (
        make("flash", "bf16", blocks, context, 1, 16 * queries, 16, head_dim)
        for blocks, context, queries, head_dim in towers
    ))  # fmt: skip
    yield from _checks(gpu, (make("flash", "f16", 1, 0, 300, 8, 2, 128), make("flash", "f32", 1, 0, 300, *gpt2)))
    yield from _checks(gpu, [make("naive", "bf16", 1, 0, 128, *qwen3_small)])


def rows(options: Options) -> Iterator[Case]:
    """Row-wise kernels."""
    gpu = Gpu.of(options.device)
    if options.is_quick:
        found = [
            bench.rms_norm_case(4, 128), bench.layer_norm_case(4, 128), bench.swiglu_case(4, 64),
            bench.softmax_case(2, 300),
        ]  # fmt: skip
        yield from _checks(gpu, found)
        return
    yield from _checks(gpu, (bench.rms_norm_case(m, size) for m in (1, 33, 4096) for size in (1024, 4096)))
    yield from _checks(gpu, (bench.layer_norm_case(m, 768) for m in (1, 4096)))
    yield from _checks(gpu, (bench.swiglu_case(m, size) for m in (1, 2048) for size in (3072, 12288)))
    yield from _checks(gpu, [bench.softmax_case(32, 151936), bench.softmax_case(1, 50257)])
