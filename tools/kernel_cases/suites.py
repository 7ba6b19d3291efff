"""The cases that `gpu_check` verifies, and those that it times, at the shapes of serving and at ragged ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from numba_kernels.cuda.gemm import hopper
from runtime.bench.kernels.case import Case
from runtime.bench.kernels.latent import expanded_case, head_map_case, latent_case
from runtime.bench.kernels.operations import (
    QWEN3_8B,
    attention_case,
    norm_case,
    product_case,
    softmax_case,
    swiglu_case,
)
from runtime.bench.kernels.recurrent import (
    NEMOTRON_30B,
    QWEN35_35B,
    delta_rule_case,
    mamba_case,
    short_conv_case,
)
from tools.kernel_cases.experts import Mixture
from tools.kernel_cases.operation import KINDS, sampling_case
from tools.kernel_cases.quantised import exact_case, served_case

SERVED = ((6144, 4096), (4096, 4096), (4096, 12288), (4096, 1024), (1024, 3072))
"""N, K of Qwen3-8B's and 0.6B's matrices."""


def _product(m: int, n: int, k: int, tier: str = "auto", **more: Any) -> Case:
    return product_case(tier, m, n, k, more.pop("dtype", "bf16"), **more)


def hopper_gemm(is_quick: bool) -> Iterator[Case]:
    """Each tile, epilogue, split and gate; ragged edges; one block and many rounds of clusters."""
    if is_quick:
        yield from [
            _product(130, 264, 136, tile=hopper.LARGE, has_bias=True, has_residual=True),
            _product(300, 200, 72, tile=hopper.MIDDLE, activation="silu"),
            _product(70, 136, 520, tile=hopper.SMALL, parts=2), _product(300, 200, 72, activation="silu"),
        ]  # fmt: skip
        return
    yield from (_product(2048, n, k, tile=tile) for tile in hopper.TILES for n, k in SERVED[:3])
    yield from (
        _product(1000, 4096, 4096, tile=tile, has_bias=bias, has_residual=residual)
        for tile in hopper.TILES for bias, residual in ((True, False), (False, True), (True, True))
    )  # fmt: skip
    yield from (
        _product(m, 12288, 4096, tile=tile, activation=gate)
        for m, tile in (
            (2048, hopper.LARGE), (256, hopper.MIDDLE), (100, hopper.SMALL), (300, hopper.SMALL), (128, hopper.MIDDLE),
            (64, hopper.THIN),
        ) for gate in hopper.GATES
    )  # fmt: skip
    yield from (
        _product(m, 12288, 4096, tile=tile, parts=4, activation="silu")
        for m, tile in ((64, hopper.NARROW), (128, hopper.SMALL))
    )  # fmt: skip
    yield from [_product(1999, 12280, 4088, activation="silu")]
    yield from (
        _product(m, n, k, tile=tile, parts=parts, has_residual=residual)
        for tile in hopper.SPLIT_TILES
        for m, n, k, parts, residual in (
            (64, 4096, 4096, 2, False), (64, 4096, 12288, 4, True), (128, 1024, 3072, 8, True),
            (77, 4104, 4104, 3, False),
        )
    )  # fmt: skip
    yield from (
        _product(m, n, k, tile=tile, has_residual=True)
        for tile in hopper.TILES
        for m, n, k in ((1, 8, 64), (129, 264, 200), (257, 4104, 72), (4095, 520, 1032), (640, 151936, 64))
    )  # fmt: skip
    yield from (
        _product(300, 1001, 1024, tile=tile, out_dtype=out, has_bias=True, is_aligned=False)
        for tile in hopper.TILES for out in ("", "f32")
    )  # fmt: skip
    yield from (_product(512, 1024, 1024, tile=tile, dtype="f16") for tile in hopper.TILES)
    yield from [_product(8192, 4096, 4096), _product(256, 4096, 12288), _product(256, 151936, 1024)]


def gemm(is_quick: bool) -> Iterator[Case]:
    """The other tiers, as planned for few rows, for float32 and in exact mode."""
    if is_quick:
        wanted = (1, 128, 256, "auto"), (20, 128, 256, "auto"), (33, 48, 64, "tensor_core")
        yield from (_product(*each) for each in wanted)
        yield exact_case(5, 64, 512)
        return
    yield from (
        _product(m, n, k, has_residual=(n, k) == (4096, 12288))
        for m in (1, 2, 4, 16, 33, 64) for n, k in (*SERVED, (24576, 4096))
    )  # fmt: skip
    yield from (_product(m, 12288, 4096, activation="silu") for m in (1, 2, 16, 33, 64, 128))
    yield from (_product(m, 151936, 4096) for m in (1, 16))
    yield from (_product(m, 4099, 4096, has_bias=True) for m in (1, 7, 63))
    yield from (_product(m, 4096, 4096, exact=True) for m in (1, 5, 64, 300))
    yield from (exact_case(m, 4096, 12288) for m in (1, 64))
    yield from (_product(m, 1000, 1000, tier="tensor_core") for m in (100, 1000))
    yield from (_product(m, 3072, 768, dtype="f32") for m in (1, 8, 9, 512))
    yield from (_product(300, 500, 700, tier, dtype="f32") for tier in ("naive", "tiled", "register"))


def attention(is_quick: bool) -> Iterator[Case]:
    """Prefill and decode: seqs, context, queries, query heads, KV heads, head dim."""
    if is_quick:
        shapes = ((1, 0, 33, 4, 2, 64), (2, 40, 1, 4, 2, 64), (1, 0, 130, 4, 2, 128))
        yield from (attention_case("auto", "bf16", *shape) for shape in shapes)
        return
    qwen3_8b, qwen3_small, gpt2, gemma_4, gemma_e2b = (
        (32, 8, 128),
        (16, 8, 128),
        (12, 12, 64),
        (16, 1, 512),
        (8, 1, 512),
    )
    yield from (
        attention_case("auto", "bf16", seqs, context, queries, *heads)
        for seqs, context, queries, heads in (
            (1, 0, 128, qwen3_8b), (1, 0, 2048, qwen3_8b), (1, 0, 1999, qwen3_8b), (4, 0, 513, qwen3_small),
            (1, 3000, 1024, qwen3_8b), (3, 777, 333, qwen3_small), (2, 0, 700, gpt2), (8, 100, 5, qwen3_8b),
            (1, 0, 1, qwen3_8b), (1, 127, 1, qwen3_8b), (1, 1023, 1, qwen3_8b), (1, 4095, 1, qwen3_8b),
            (1, 16383, 1, qwen3_small), (32, 2047, 1, qwen3_8b), (256, 1023, 1, qwen3_8b), (5, 999, 1, gpt2),
            (1, 0, 1999, gemma_4), (3, 777, 333, gemma_e2b), (1, 4095, 1, gemma_e2b), (32, 4095, 1, gemma_4),
        )
    )  # fmt: skip
    yield from (attention_case("flash", "bf16", 1, 0, 777, *heads) for heads in (qwen3_8b, gpt2))
    towers = ((4, 1023, 128, 72), (2, 2000, 128, 64), (9, 63, 64, 80))  # blocks of a picture's patches, each a token
    yield from (
        attention_case("flash", "bf16", blocks, context, 1, 16 * queries, 16, head_dim)
        for blocks, context, queries, head_dim in towers
    )  # fmt: skip
    yield from (attention_case("flash", "f16", 1, 0, 300, 8, 2, 128), attention_case("flash", "f32", 1, 0, 300, *gpt2))
    yield from [attention_case("naive", "bf16", 1, 0, 128, *qwen3_small)]


def latent(is_quick: bool) -> Iterator[Case]:
    """Latent attention: sequences, context, queries, heads; tried tokens, a chunk, and rows of Mistral 4."""
    if is_quick:
        yield from (latent_case("auto", "bf16", *shape) for shape in ((1, 70, 1, 5), (2, 300, 1, 16)))
        yield from (head_map_case("bf16", 3, 5, is_absorbing=each) for each in (True, False))
        return
    for is_absorbing in (True, False):
        yield from (
            head_map_case(dtype, tokens, heads, is_absorbing=is_absorbing)
            for heads in (16, 128) for tokens in (1, 32, 256) for dtype in ("bf16", "f16")
        )  # fmt: skip
        yield head_map_case("f32", 5, 16, is_absorbing=is_absorbing)
        yield head_map_case("bf16", 2_000, 20, 192, 256, is_absorbing=is_absorbing)
        yield head_map_case("bf16", 33, 32, 64, 128, 320, is_absorbing=is_absorbing)
    yield from (
        latent_case("auto", "bf16", seqs, context, queries, heads)
        for heads in (16, 128) for seqs, context, queries in ((1, 4095, 1), (32, 999, 1), (256, 333, 1), (3, 777, 4))
    )  # fmt: skip
    yield from (latent_case("auto", "bf16", 1, context, 1, 20) for context in (0, 15, 63, 127, 128, 5_000))
    yield from (latent_case("auto", dtype, 2, 500, 60, 32, 320, 256) for dtype in ("bf16", "f16"))
    yield latent_case("auto", "bf16", 2, 1000, 3, 16, exact=True)
    for heads in (16, 128):
        yield from (latent_case("auto", "bf16", seqs, 333, 1, heads, in_bytes=True) for seqs in (1, 32, 256))
    yield latent_case("plain", "bf16", 2, 200, 1, 16)
    yield latent_case("auto", "f32", 2, 200, 2, 16)
    for sizes in ((192, 128), (256, 256), (128, 128)):
        yield from (expanded_case("auto", "bf16", context, 300, 5, *sizes) for context in (0, 70, 2_000))
    yield expanded_case("auto", "f16", 130, 200, 128)
    yield expanded_case("auto", "f32", 130, 100, 3)


def rows(is_quick: bool) -> Iterator[Case]:
    """Row-wise kernels."""
    if is_quick:
        found = [
            norm_case("rms_norm", 4, 128), norm_case("layer_norm", 4, 128), swiglu_case(4, 64),
            softmax_case(2, 300),
        ]  # fmt: skip
        yield from found
        return
    yield from (norm_case("rms_norm", m, size) for m in (1, 33, 4096) for size in (1024, 4096))
    yield from (norm_case("layer_norm", m, 768) for m in (1, 4096))
    yield from (swiglu_case(m, size) for m in (1, 2048) for size in (3072, 12288))
    yield from [softmax_case(32, 151936), softmax_case(1, 50257)]


FORMATS = (
    "int4 g128", "mxfp4", "fp8 blocks", "fp8", "w8a8", "int8", "nvfp4", "int4 g128 zeros", "int4 g32", "fp8 static",
)  # fmt: skip


def quantized(is_quick: bool) -> Iterator[Case]:
    """Quantised weights: all formats at one shape first, and then the other shapes."""
    if is_quick:
        yield served_case("int4 g128", 2, 530, 200)
        yield served_case("fp8 blocks", 20, 48, 200, "residual")
        return
    for name in FORMATS:
        for m in (1, 16, 128, 1000, 4, 17):
            yield served_case(name, m, 6144, 4096, "normed" if m > 16 else "plain")
    for name in FORMATS:
        for m in (1, 16, 1000):
            yield served_case(name, m, 24576, 4096, "gated")
        for m in (1, 16, 128):
            yield served_case(name, m, 4096, 12288, "residual")
        for m in (1, 5, 200):  # tiles, slots and groups that are not full
            yield served_case(name, m, 500, 1544)


def experts(is_quick: bool) -> Iterator[Case]:
    """Few tokens that read their experts directly, some that stream them in tiles of 16 rows, and many in large
    tiles."""
    if is_quick:
        yield Mixture("", "mxfp4", 2, 3, 2, 64, 32, "clamped_silu", True).case()
        yield Mixture("", "bf16", 6, 3, 2, 64, 32, has_bias=True).case()
        return
    for tokens in (1, 4, 5, 64, 200, 333, 500, 4000):
        yield Mixture("", "bf16", tokens, 16, 4, 2048, 768, has_bias=True).case()
    for tokens in (1, 3, 16, 300):
        yield Mixture("", "mxfp4", tokens, 5, 4, 2880, 2880, "clamped_silu", True).case()
    for weight in ("int4 g32", "int8", "fp8"):
        for tokens in (1, 9, 400, 1600):
            yield Mixture("", weight, tokens, 8, 2, 1024, 512, has_bias=True).case()


def recurrent(is_quick: bool) -> Iterator[Case]:
    """Layers with a recurrent state: decodes, drafts, and chunks that continue a prompt."""
    if is_quick:
        yield delta_rule_case(2, 3, num_key_heads=1, num_value_heads=2, key_dim=64, value_dim=20)
        yield mamba_case(2, 3, num_heads=4, head_dim=20, num_groups=2, state_size=64)
        yield short_conv_case(3, 20, 40)
        return
    for seqs, queries in ((1, 1), (5, 1), (33, 1), (3, 4), (1, 130)):
        for state in ("f32", "bf16"):
            yield delta_rule_case(seqs, queries, state=state, **QWEN35_35B)
            yield mamba_case(seqs, queries, state=state, **NEMOTRON_30B)
        yield short_conv_case(seqs, queries, 2048)
    for dtype in ("f16", "f32"):
        yield delta_rule_case(3, 2, dtype=dtype, **QWEN35_35B)
    yield delta_rule_case(3, 2, num_key_heads=2, num_value_heads=6, key_dim=96, value_dim=33)
    yield mamba_case(3, 2, num_heads=6, head_dim=33, num_groups=3, state_size=40)


VOCABULARY = 151_936


def sampling(is_quick: bool) -> Iterator[Case]:
    """A few rows of each kind against the cpu's sampled tokens."""
    for kind in KINDS:
        for m in (3,) if is_quick else (1, 33):
            yield sampling_case(kind, m, 1000 if is_quick else VOCABULARY)


# Timed


def kernels_speed(is_quick: bool) -> Iterator[Case]:
    """The shapes of serving, and ladders of tiers at one shape."""
    if is_quick:
        yield _product(1, 64, 128)
        yield attention_case("auto", "bf16", 1, 0, 33, 4, 2, 64)
        yield softmax_case(2, 300)
        return
    for m in (1, 16, 256, 2048, 4, 64):
        for n, k in QWEN3_8B:
            yield _product(m, n, k)
    yield _product(4096, 4096, 4096)
    yield attention_case("auto", "bf16", 1, 0, 8192, 32, 8, 128)
    yield attention_case("auto", "bf16", 1, 0, 2048, 32, 8, 128)
    for seqs, context in ((1, 1023), (1, 4095), (1, 16383), (32, 2047), (256, 1023)):
        yield attention_case("auto", "bf16", seqs, context, 1, 32, 8, 128)
    yield attention_case("auto", "bf16", 4, 0, 1024, 16, 8, 128)
    for m in (1, 32, 4096):
        yield norm_case("rms_norm", m, 4096)
    for m in (1, 32, 2048):
        yield swiglu_case(m, 12288)
    yield softmax_case(32, 151936)
    for seqs in (1, 32, 256):
        yield delta_rule_case(seqs, 1, **QWEN35_35B)
    for seqs in (1, 32):
        yield delta_rule_case(seqs, 1, state="bf16", **QWEN35_35B)
        yield mamba_case(seqs, 1, **NEMOTRON_30B)
        yield short_conv_case(seqs, 1, 2048)
    yield norm_case("layer_norm", 4096, 768)
    yield attention_case("auto", "bf16", 8, 0, 512, 12, 12, 64)
    for m in (1, 32):
        yield _product(m, 2304, 768)
    for tier, dtype in (
        ("tensor_core", "bf16"), ("register", "bf16"), ("tiled", "bf16"), ("naive", "bf16"),
        ("register", "f32"), ("tiled", "f32"), ("naive", "f32"),
    ):  # fmt: skip
        yield _product(2048, 2048, 2048, tier, dtype=dtype)
    yield attention_case("flash", "bf16", 1, 0, 2048, 32, 8, 128)
    yield attention_case("flash", "f32", 1, 0, 1024, 12, 12, 64)
    yield attention_case("naive", "bf16", 1, 0, 1024, 16, 8, 128)


TIMED_SHAPES = ((8192, 8192), (6144, 4096), (4096, 12288))


def quantized_speed(is_quick: bool) -> Iterator[Case]:
    """Products of few rows and of many, compared with bfloat16's at the same sizes."""
    for n, k in [(64, 128)] if is_quick else TIMED_SHAPES:
        for name in FORMATS[:1] if is_quick else (*FORMATS[:6], "int4 g32", "nvfp4"):
            for m in (1,) if is_quick else (1, 16, 2048, 64, 128):
                yield served_case(name, m, n, k, has_peer=True)


MIXTURES = {"gpt-oss-20b": (32, 4, 2880, 2880), "qwen3-30b-a3b": (128, 8, 2048, 768)}
"""Experts, how many of them a token chooses, hidden, inner."""
ROWS_OF_EXPERT = 128
"""Rows of each expert in a prompt."""


def experts_speed(is_quick: bool) -> Iterator[Case]:
    """One token, few, and prompts with `ROWS_OF_EXPERT` rows per expert and four times as many, compared with dense
    bfloat16 products of as many rows of these sizes."""
    if is_quick:
        yield Mixture("tiny", "mxfp4", 2, 4, 2, 64, 64).case(has_peer=True)
        return
    for model, sizes in MIXTURES.items():
        prompt = ROWS_OF_EXPERT * sizes[0] // sizes[1]
        for name in ("mxfp4", "bf16") if model == "gpt-oss-20b" else ("bf16", "fp8 blocks", "int4 g128", "mxfp4"):
            for tokens in (1, 16, prompt, 4 * prompt, 4, 64):
                yield Mixture(model, name, tokens, *sizes).case(has_peer=True)


def latent_speed(is_quick: bool) -> Iterator[Case]:
    """A decode step's, a tried step's and a chunk's."""
    if is_quick:
        yield latent_case("auto", "bf16", 1, 200, 1, 16)
        return
    for heads in (16, 128):
        for seqs in (1, 32, 256):
            yield latent_case("auto", "bf16", seqs, 4095 if seqs < 256 else 1023, 1, heads)
        yield latent_case("auto", "bf16", 32, 4092, 4, heads)
    yield from (latent_case("auto", "bf16", 32, 4095, 1, heads, in_bytes=True) for heads in (16, 128))
    yield latent_case("auto", "bf16", 32, 4095, 1, 32, 320, 256)
    yield latent_case("auto", "bf16", 1, 4096, 128, 16)
    for context, heads in ((0, 16), (6144, 16), (0, 128)):
        yield latent_case("auto", "bf16", 1, context, 2048, heads)
        yield expanded_case("auto", "bf16", context, 2048, heads)
    yield expanded_case("auto", "bf16", 0, 2048, 20, 256, 256)
    yield expanded_case("auto", "bf16", 0, 2048, 32, 128, 128)
    yield latent_case("plain", "bf16", 1, 4095, 1, 16)


def sampling_speed(is_quick: bool) -> Iterator[Case]:
    """A decode step's sampling."""
    for m in (2,) if is_quick else (1, 32, 256):
        for kind in KINDS:
            yield sampling_case(kind, m, 1000 if is_quick else VOCABULARY)


SUITES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "hopper gemm": hopper_gemm, "gemm": gemm, "experts": experts, "quantized": quantized, "attention": attention,
    "latent": latent, "rows": rows, "recurrent": recurrent, "sampling": sampling, "kernels": kernels_speed,
    "quantized speed": quantized_speed, "experts speed": experts_speed, "latent speed": latent_speed,
    "sampling speed": sampling_speed,
}  # fmt: skip
"""By the section of `gpu_check`; an argument says whether sizes are small enough to emulate."""
