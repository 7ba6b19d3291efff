"""The kernels that a model will use, to be compiled before it is loaded (`runtime.engine.process.compile_ahead`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from numba_kernels.blocks import BLOCKS
from numba_kernels.cpu import activation, decode_inputs, embedding, logprobs, ngram_lookup, norm, qkv, sampling
from numba_kernels.cpu import experts as _experts
from numba_kernels.cpu.attention import kernel as attention
from numba_kernels.cpu.attention import texts
from numba_kernels.cpu.gemm import block_panels, linear, low_rank, panels
from numba_kernels.cpu.gemm.experts import experts_kernel
from numba_kernels.cpu.latent import attention as latent_attention
from numba_kernels.cpu.latent.head_maps import head_maps_kernel
from numba_kernels.cpu.latent.prepare import latent_kernel
from numba_kernels.cpu.pooled_texts import pooled_texts_kernel
from numba_kernels.cpu.recurrent import convolution, prepare, scan


def kernels_of(
    stored: str,
    is_int8: bool,
    block_size: int,
    formats: Sequence[str] = (),
    pages: str = "",
    has_experts: bool = False,
    recurrence: str = "",
    states: str = "float32",
    has_latents: bool = False,
    has_adapters: bool = False,
    is_encoder: bool = False,
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Factories and arguments of all that a model's forward passes and draws use, those first that take longest.

    stored      carrier of the bits of its weights: "float32", "uint16" (bfloat16), "int16" (float16)
    is_int8     whether its matrices are made into int8
    block_size  tokens in a page
    pages       carrier of the bits of its pages, if not `stored`; also "int8", and "uint8" (fp8)
    formats     ggml's, in whose blocks matrices are kept
    has_experts whether there are mixtures of experts
    recurrence  the operation of its layers with a state, if any: "short_conv", "delta_rule", "mamba"
    states      carrier of the bits of its states
    has_latents whether its pages are latent attention's
    has_adapters whether low-rank adapters may be loaded
    is_encoder   whether its tokens see later ones
    """
    kind = np.dtype(stored).type
    paged = np.dtype(pages or stored).type
    matrices = np.uint8 if is_int8 else kind
    yield sampling.sampling_kernel, ()
    yield sampling.sampling_kernel, (True,)  # for DRY, XTC and their like: the first would stall other requests
    if has_latents:
        yield latent_attention.latent_attention_kernel, (paged,)
        yield latent_kernel, (paged,)
    else:
        span, rounds = attention.span_of(block_size), is_encoder and kind is np.uint16
        yield attention.attention_kernel, (paged, span, attention.takes_pairs(paged, span, 2, rounds))
        if is_encoder:
            yield texts.text_attention_kernel, (texts.rounds_text(rounds),)
            yield pooled_texts_kernel, ()
    yield linear.linear_kernel, (matrices,)
    yield panels.pack_kernel, (kind, matrices)
    in_blocks = [each for each in BLOCKS if each in formats]
    for each in in_blocks:
        yield linear.linear_kernel, (each,)
        yield block_panels.pack_blocks_kernel, (each,)
    if has_latents:
        for kept in (kind, *in_blocks):
            yield head_maps_kernel, (kept,)
    if formats:
        yield embedding.take_columns_kernel, ()  # of matrices whose columns have another order
    if has_adapters:
        for kept in {kind, np.uint16} if is_int8 or formats else {kind}:  # see `runtime.linear.low_rank.LowRankMap`
            yield low_rank.functions_of, (kept,)
        yield _experts.group_kernel, ()
    if has_experts:
        for kept in (matrices, *in_blocks):
            yield experts_kernel, (kept,)
        for factory in (_experts.route_kernel, _experts.group_kernel, _experts.combine_kernel):
            yield factory, ()
    if recurrence == "short_conv":
        yield convolution.short_conv_kernel, ()
    elif recurrence:
        is_delta = recurrence == "delta_rule"
        yield scan.scan_kernel, (is_delta, np.dtype(states).type)
        yield prepare.prepare_kernel, (is_delta,)
        yield scan.gated_norm_kernel, (is_delta,)
    for table in {kind, matrices, np.float32, *in_blocks}:
        yield embedding.embedding_kernel, (table,)
    yield attention.group_starts_kernel, ()
    yield attention.merge_kernel, ()
    yield qkv.qkv_kernel, (paged,)
    yield norm.rms_norm_kernel, (np.float32,)  # norms are widened when they are loaded
    yield norm.layer_norm_kernel, (np.float32,)
    for name in activation.NAMES:
        yield activation.activation_kernel, (name,)
    yield logprobs.logprobs_kernel, ()
    yield decode_inputs.decode_inputs_kernel, ()
    yield ngram_lookup.ngram_lookup_kernel, ()
