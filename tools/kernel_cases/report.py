"""The kernel report's cases: each family at a shape small enough to emulate and large enough to matter.

A case with uncoalesced accesses, or conflicts by design, gives the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from numba_kernels.cuda import dynamic_quantisation, logprobs, qkv, rounded_norm
from numba_kernels.cuda.gemm import hopper
from numba_kernels.cuda.gemm.hopper_packed import HIGH, LOW
from numba_kernels.cuda.quantised_pages import PAGES
from numba_kernels.cuda.specialisation import Launch
from runtime import ops
from runtime.bench.kernels.case import TOLERANCE, Array, Case, Inputs, Prepared
from runtime.bench.kernels.latent import expanded_case, head_map_case, latent_case
from runtime.bench.kernels.operations import attention_case, norm_case, product_case, softmax_case, swiglu_case
from runtime.bench.kernels.recurrent import delta_rule_case, mamba_case, short_conv_case
from runtime.dtype import bfloat16
from runtime.tensor.tensor import Tensor
from tools.kernel_cases.experts import gathered_case, tier_cases
from tools.kernel_cases.operation import operation_case, sampling_case
from tools.kernel_cases.quantised import bytes_case, dequantised_case, exact_case, packed_case
from tools.kernel_cases.recurrent import chunk_cases


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _products()
    yield from tier_cases()
    for format in ("mxfp4", "int4 g128"):
        for is_gated in (True, False):
            yield gathered_case(format, is_gated)
    yield from _attentions()
    yield from _latents()
    yield from _rows()
    yield from _tokens()
    yield from chunk_cases()
    yield from _recurrent()
    yield from _glue()


# Matrix products

_ONE_COLUMN_A_LANE = (
    "the tier's point: neighbouring lanes read different rows of the weight, and every element comes from memory"
)


def _product(tier: str, sizes: tuple[int, int, int], dtype: str, reason: str = "", **more: Any) -> Case:
    case = product_case(tier, *sizes, dtype, **{"num_sms": 132} | more)
    return replace(case, name=f"gemm {tier} {dtype} m={sizes[0]}", scattered_because=reason)


def _products() -> Iterator[Case]:
    for tier, dtype in (("naive", "f32"), ("tiled", "f32"), ("naive", "bf16"), ("tiled", "bf16")):
        yield _product(tier, (256, 256, 256), dtype, _ONE_COLUMN_A_LANE if tier == "naive" else "")
    for tier, dtype in (("register", "f32"), ("register", "bf16"), ("tensor_core", "bf16")):
        yield _product(tier, (256, 256, 256), dtype, block=(64, 64))
    for dtype in ("bf16", "f32"):
        yield _product("gemv", (1, 1024, 1024), dtype, block=(1, 4))  # a warp reads x by itself
    for rows in (1, 16, 64):
        yield _product("skinny", (rows, 1024, 1024), "bf16", block=(64, 32))
    for rows in (16, 64):  # two tiles of 128 columns share x
        yield _product("hopper_few", (rows, 1024, 1024), "bf16", block=(64, 256))
    # The large tile, of two blocks, alternating between two multiprocessors; small ones; narrow ones, four of which
    # share a sum.
    yield _product("hopper", (512, 512, 256), "bf16", block=(256, 256), tile=hopper.LARGE, num_sms=2)
    yield _product("hopper", (256, 256, 256), "bf16", block=(128, 128), tile=hopper.SMALL)
    yield _product("hopper", (128, 256, 1024), "bf16", block=(64, 128), tile=hopper.NARROW, parts=4)
    for rows in (1, 128):
        yield exact_case(rows, 1024, 1024)
    for format in ("int8", "int4 g128", "fp8 blocks", "mxfp4", "nvfp4"):
        for rows in (1, 16, 64) if format in ("int8", "int4 g128") else (1,):
            yield packed_case(format, rows, 1024, 1024)
    for format in ("int8", "int4 g128"):
        for rows in (1, 5) if format == "int4 g128" else (1,):
            yield packed_case(format, rows, 1024, 1024, "quantised_gemv")
    for format in ("int8", "int4 g128", "fp8 blocks", "mxfp4"):
        yield packed_case(format, 256, 512, 512, "mixed_input")
    for format, tile in (("int4 g128", HIGH), ("int4 g128", LOW), ("int8", HIGH), ("mxfp4", HIGH)):
        yield packed_case(format, tile.block_m, 512, 512, "hopper_packed", tile)
    yield bytes_case("w8a8", 256, 512, 512)
    for format in ("fp8", "fp8 blocks"):
        yield bytes_case(format, 256, 512, 512, arch="sm_120a")
        yield bytes_case(format, 256, 512, 512)
    for format in ("fp8 blocks", "int4 g128"):
        yield dequantised_case(format, 256, 1024)


# Attention: prompts and decodes of each tier, and pages of a byte

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16
_SIZES = (HEADS, KV_HEADS, HEAD_DIM)
_KEY_A_LANE = "the tier's point: a lane has a key of its own, a whole row away from its neighbour's"


def _attentions() -> Iterator[Case]:
    for tier, dtype in (
        ("naive", "f32"), ("flash", "f32"), ("naive", "bf16"), ("flash", "bf16"), ("flash_hopper", "bf16"),
    ):  # fmt: skip
        yield _attention(tier, dtype, (1, 0, 256))
    for dtype in ("f32", "bf16"):
        yield _attention("decode", dtype, (4, 511, 1))
    yield _attention("decode", "bf16", (4, 511, 1), num_sms=1)  # keeps it from splitting sequences
    for chunks, tier in (((2, 1023, 1), "decode"), ((1, 0, 256), "flash"), ((1, 0, 512), "flash_hopper")):
        yield _attention(tier, "bf16", chunks, (8, 2, 128))
    for pages in PAGES:
        yield _attention("decode", "bf16", (2, 1023, 1), (8, 2, 128), pages=pages)
    yield _attention("flash", "bf16", (1, 0, 256), (8, 2, 128), pages="e4m3")
    for chunks, tier in (((2, 1023, 1), "decode"), ((1, 128, 32), "flash"), ((1, 128, 32), "flash_hopper")):
        yield _attention(tier, "bf16", chunks, (16, 1, 512))
    yield _attention("decode", "bf16", (2, 1023, 1), (16, 1, 512), pages="e4m3")


def _attention(
    tier: str, dtype: str, chunks: tuple[int, int, int], sizes: tuple[int, int, int] = _SIZES, *, num_sms: int = 108,
    pages: str = "",
) -> Case:  # fmt: skip
    """`chunks`: sequences, context and queries of each; `sizes`: query heads, KV heads, head dim."""
    case = attention_case(tier, dtype, *chunks, *sizes, num_sms=num_sms, pages=pages)
    suffix = (" unsplit" if num_sms == 1 else "") + (f" d{sizes[2]}" if sizes != _SIZES else "")
    return replace(case, name=case.name + suffix, scattered_because=_KEY_A_LANE if tier == "naive" else "")


def _latents() -> Iterator[Case]:
    reason = "the tier's point: a lane has a key of its own, a whole row away from its neighbour's"
    yield replace(latent_case("plain", "bf16", 1, 127, 1, 16), scattered_because=reason)
    for heads, queries in ((16, 1), (16, 4), (128, 1)):
        yield latent_case("tensor_core", "bf16", 1, 512 - queries, queries, heads, exact=True)
    yield latent_case("tensor_core", "bf16", 2, 1023, 1, 16)
    yield latent_case("hopper", "bf16", 1, 511, 1, 128, exact=True)
    for tier, heads in (("tensor_core", 16), ("tensor_core", 128), ("hopper", 128)):
        in_bytes = latent_case(tier, "bf16", 1, 511, 1, heads, exact=True, in_bytes=True)
        yield replace(in_bytes, scattered_because="every other row of 656 bytes begins within a sector")
    yield latent_case("tensor_core", "bf16", 1, 511, 1, 32, 320, 256, exact=True)
    yield latent_case("hopper", "bf16", 1, 0, 256, 2, exact=True)
    for sizes in ((192, 128), (256, 256), (128, 128)):
        yield expanded_case("flash_hopper", "bf16", 0, 256, 2, *sizes)
    for tokens in (1, 64):
        yield from (head_map_case("bf16", tokens, 16, is_absorbing=each) for each in (True, False))


# Row-wise kernels

_ROWS, _SIZE = 32, 1024
_WEIGHTS_IN_HALVES = (
    "a lane's 8 float32 weights are two loads of 16 bytes, each of which takes half of every sector; rows share them"
)


def _launched(
    name: str, family: str, shape: str, least_bytes: int, flops: int, make: Callable[[Inputs], tuple[Any, ...]],
    scattered_because: str = "",
) -> Case:  # fmt: skip
    """A launch that is counted only: `make` gives it and its arguments. Tests compare its results."""

    def prepare(inputs: Inputs) -> Prepared:
        launch, *arguments = make(inputs)
        assert isinstance(launch, Launch)
        return Prepared(inputs.bind((launch, arguments)))

    return Case(name, shape, least_bytes, flops, 0.0, prepare, family, scattered_because=scattered_because)


def _rows() -> Iterator[Case]:
    for name, has_residual in (("rms_norm", False), ("layer_norm", False), ("rms_norm", True)):
        yield norm_case(name, _ROWS, _SIZE, has_residual=has_residual)
    for is_log in (False, True):
        yield softmax_case(_ROWS, _SIZE, is_log=is_log)
    yield swiglu_case(_ROWS, _SIZE)
    count, shape = _ROWS * _SIZE, f"{_ROWS} x {_SIZE}"
    codes, both = dynamic_quantisation.sections(_ROWS, _SIZE)
    scales, all_bytes = dynamic_quantisation.sections(_ROWS, _SIZE, is_grouped=True)

    def round_rows(inputs: Inputs) -> tuple[Any, ...]:
        x, memory = inputs.put_normal(_ROWS, _SIZE), inputs.empty(both)
        return dynamic_quantisation.plan(_ROWS, _SIZE, "bf16"), x, memory, memory + codes, _ROWS, _SIZE

    def round_normed(inputs: Inputs) -> tuple[Any, ...]:
        x, weight, memory = (
            inputs.put_normal(_ROWS, _SIZE),
            inputs.put_normal(_SIZE, dtype="f32"),
            inputs.empty(all_bytes),
        )
        launch = rounded_norm.plan(_ROWS, _SIZE, "bf16", "e4m3", is_grouped=True)
        return launch, x, weight, memory, memory + scales, _ROWS, _SIZE, 1.0 / _SIZE, 1e-5, 0.0, 0.0

    yield _launched("dynamic_quantisation s8 bf16", "activation", shape, 2 * count + both, 3 * count, round_rows)
    yield _launched(
        "rounded_norm e4m3_g128 bf16", "activation", shape, 2 * count + 4 * _SIZE + all_bytes, 8 * count, round_normed,
        _WEIGHTS_IN_HALVES,
    )  # fmt: skip
    for name, call in (
        ("silu", ops.silu), ("gelu_tanh", functools.partial(ops.gelu, kind="tanh")),
        ("gelu_erf", functools.partial(ops.gelu, kind="erf")),
    ):  # fmt: skip
        yield operation_case(f"{name} bf16", "activation", f"{count}", 4 * count, 4 * count, call, _x(_ROWS, _SIZE))


def _x(*shape: int, dtype: str = "bf16", count: int = 1) -> Callable[[Inputs], tuple[Array, ...]]:
    """So many arrays of normal numbers."""
    return lambda inputs: tuple(inputs.normal(shape, dtype) for _ in range(count))


# Token kernels

_TOKENS, _VOCAB = 64, 4096
_VOCABULARY = 151_936  # Qwen3's: the blocks of a cluster share its row


def _tokens() -> Iterator[Case]:
    row = _TOKENS * _SIZE * 2
    angles, whole = _TOKENS * HEAD_DIM * 4, _TOKENS * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 2
    logits = 4 * 4 * _VOCAB
    yield operation_case(
        "embedding bf16", "embedding", f"{_TOKENS} of {_VOCAB} rows of {_SIZE}", 2 * row + 4 * _TOKENS, 0,
        ops.embedding, lambda inputs: (
            inputs.rng.integers(0, _VOCAB, _TOKENS).astype(np.int32), inputs.normal((_VOCAB, _SIZE), "bf16"),
        ), tolerance=0.0,
    )  # fmt: skip
    yield _launched(
        "qkv_prepare bf16", "qkv", f"{_TOKENS} x {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, norms, rope",
        whole + angles + 12 * _TOKENS + 8 * HEAD_DIM + whole, 5 * whole, _qkv_prepare,
    )  # fmt: skip
    for kind in ("greedy", "temperature", "top_p", "top_k top_p"):
        yield replace(sampling_case(kind, 1, _VOCABULARY), name=f"sampling {kind}", shape=f"1 x {_VOCABULARY}")
    yield _launched("logprobs top 5", "logprobs", f"4 x {_VOCAB}", logits + 192, 2 * logits, _logprobs)


def _positions(inputs: Inputs) -> tuple[int, int, int]:
    """positions, cos and sin."""
    angles = [inputs.put_normal(_TOKENS, HEAD_DIM // 2, dtype="f32") for _ in range(2)]
    return inputs.put(np.arange(_TOKENS, dtype=np.int32)), angles[0], angles[1]


def _pages(inputs: Inputs) -> tuple[int, int, int]:
    """slot_mapping of consecutive slots, K and V pages."""
    size = _TOKENS * KV_HEADS * HEAD_DIM * 2
    return inputs.put(np.arange(_TOKENS, dtype=np.int64)), inputs.empty(size), inputs.empty(size)


def _qkv_prepare(inputs: Inputs) -> tuple[Any, ...]:
    launch = qkv.plan_qkv_prepare(
        _TOKENS, HEADS, KV_HEADS, HEAD_DIM, BLOCK, "bf16", rotary=HEAD_DIM, norm="head"
    )  # fmt: skip
    x = inputs.put_normal(_TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    norms = [inputs.put_normal(HEAD_DIM, dtype="f32") for _ in range(2)]
    q = inputs.empty(_TOKENS * HEADS * HEAD_DIM * 2)
    memory = *_positions(inputs), 0, 0, *norms, *_pages(inputs), 0, 0, q
    return launch, x, *memory, _TOKENS, HEADS, KV_HEADS, 1e-6


def _logprobs(inputs: Inputs) -> tuple[Any, ...]:
    logits, ids = inputs.put_normal(4, _VOCAB, dtype="f32"), inputs.put(np.arange(4, dtype=np.int32))
    outputs = [inputs.empty(size) for size in (16, 16, 80, 80)]
    return logprobs.plan(4, _VOCAB, 5), logits, ids, *outputs, _VOCAB, 5


# Layers with a recurrent state: decodes, and a chunk of a short convolution

_FILTERS = "a lane's filters are 16-byte loads, each of which takes half of every sector; tokens share them"


def _recurrent() -> Iterator[Case]:
    for state in ("f32", "bf16"):
        yield delta_rule_case(
            2, 1, state=state, num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=128
        )  # fmt: skip
    yield mamba_case(2, 1, num_heads=4, head_dim=64, num_groups=1, state_size=128)
    yield replace(short_conv_case(1, 64, 1024), scattered_because=_FILTERS)


# Glue

_COUNT = 1 << 15


def _glue() -> Iterator[Case]:
    exact = TOLERANCE["f32"]
    arrays, columns = _x(32, _COUNT // 32, dtype="f32"), _COUNT // 32
    yield operation_case(
        "add f32", "elementwise", f"{_COUNT}", 12 * _COUNT, _COUNT, lambda a, b: a + b,
        _x(_COUNT, dtype="f32", count=2), tolerance=exact,
    )  # fmt: skip
    yield operation_case(
        "cast f32 to bf16", "elementwise", f"{_COUNT}", 6 * _COUNT, 0, lambda a: a.to(bfloat16), _x(_COUNT, dtype="f32")
    )
    reductions: tuple[tuple[str, int, Callable[[Tensor], Tensor]], ...] = (
        ("sum", 4, lambda a: a.sum(1)), ("argmax", 8, lambda a: a.argmax(1)),
    )  # fmt: skip
    for name, size, call in reductions:
        yield operation_case(
            f"{name} f32",
            "reduce",
            f"32 rows of {columns}",
            4 * _COUNT + 32 * size,
            _COUNT,
            call,
            arrays,
            tolerance=exact,
        )
