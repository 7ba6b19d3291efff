"""Drawing tokens and their log-probabilities on the cpu, as `runtime.ops` describes them."""

from __future__ import annotations

import numpy as np

from numba_kernels.cpu import logprobs as _logprobs
from numba_kernels.cpu import sampling as _sampling
from numba_kernels.cpu.launch import address_of
from runtime.backends.cpu import NUM_WORKERS, SERIAL_ELEMENTS
from runtime.backends.cpu_checks import check, fail
from runtime.dtype import float32
from runtime.sampling_arrays import Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.tensor import Tensor


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """Draws one token for each row of ``logits [n, V]`` float32, which stay unchanged.

    The draw of a row depends on its logits and parameters alone, its seed, choice and position among them.
    """
    op = "sample"
    array = check(op, "logits", logits, float32, (None, None))
    rows, vocab = array.shape
    mask_words = -(-vocab // 32)
    for name, dtype, shape in _SAMPLING_FIELDS:
        value = getattr(params, name)
        wanted = {"n": (rows,), "n+1": (rows + 1,), "any": value.shape[:1]}[shape]
        if value.dtype != dtype or value.shape != wanted or not value.flags.c_contiguous:
            raise fail(op, f"params.{name}", f"is {value.dtype} {value.shape}, must be contiguous {dtype} {wanted}")
    for start, ids in (("prompt_start", "prompt_ids"), ("output_start", "output_ids"), ("bias_start", "bias_ids")):
        offsets = getattr(params, start)
        if offsets[0] != 0 or offsets[-1] > getattr(params, ids).size or (rows and np.diff(offsets).min() < 0):
            raise fail(op, f"params.{start}", f"must rise from 0 to at most the number of {ids}")
    if params.bias_values.size != params.bias_ids.size:
        raise fail(op, "params.bias_values", f"has {params.bias_values.size} entries, bias_ids {params.bias_ids.size}")
    mask = params.allowed_mask
    fits = mask is None or (mask.dtype == np.uint32 and mask.shape == (rows, mask_words) and mask.flags.c_contiguous)
    if mask is not None and not fits:
        raise fail(op, "params.allowed_mask", f"is {mask.dtype} {mask.shape}, must be uint32 {(rows, mask_words)}")
    if rows and vocab == 0:
        raise fail(op, "logits", "has no columns")
    token_ids = np.full(rows, -1, np.int32)
    workers = 1 if rows * vocab < SERIAL_ELEMENTS else NUM_WORKERS
    status = _sampling.sampling_kernel()(
        rows, workers, address_of(array), *(address_of(getattr(params, name)) for name, _, _ in _SAMPLING_FIELDS),
        0 if mask is None else address_of(mask), address_of(token_ids), rows, vocab, mask_words,
    )  # fmt: skip
    if status == _sampling.BAD_ID:
        raise fail(op, "params", f"name a token id outside the vocabulary of {vocab}")
    return SampledTokens(token_ids, token_ids >= 0)


_SAMPLING_FIELDS = (
    ("temperature", np.dtype(np.float32), "n"),
    ("top_k", np.dtype(np.int32), "n"),
    ("top_p", np.dtype(np.float32), "n"),
    ("min_p", np.dtype(np.float32), "n"),
    ("repetition_penalty", np.dtype(np.float32), "n"),
    ("presence_penalty", np.dtype(np.float32), "n"),
    ("frequency_penalty", np.dtype(np.float32), "n"),
    ("seed", np.dtype(np.uint64), "n"),
    ("choice_index", np.dtype(np.int32), "n"),
    ("position", np.dtype(np.int32), "n"),
    ("prompt_ids", np.dtype(np.int32), "any"),
    ("prompt_start", np.dtype(np.int32), "n+1"),
    ("output_ids", np.dtype(np.int32), "any"),
    ("output_start", np.dtype(np.int32), "n+1"),
    ("bias_ids", np.dtype(np.int32), "any"),
    ("bias_values", np.dtype(np.float32), "any"),
    ("bias_start", np.dtype(np.int32), "n+1"),
)  # in the order of the kernel's fields


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """Log-probability and rank of ``chosen [n]`` int32, and the ``top_n`` best, of each row of ``logits [n, V]``.

    A row with NaN or +inf gives NaN.
    """
    op = "log_softmax_topk"
    array = check(op, "logits", logits, float32, (None, None))
    rows, vocab = array.shape
    if chosen.dtype != np.int32 or chosen.shape != (rows,) or not chosen.flags.c_contiguous:
        raise fail(op, "chosen", f"is {chosen.dtype} {chosen.shape}, must be contiguous int32 ({rows},)")
    if rows and (chosen.min() < 0 or chosen.max() >= vocab):
        raise fail(op, "chosen", f"holds {chosen.min()} to {chosen.max()}, must lie in 0 to {vocab - 1}")
    if not 0 <= top_n <= vocab:
        raise fail(op, "top_n", f"is {top_n}, must lie in 0 to {vocab}")
    result = TopLogprobs(
        np.empty(rows, np.float32), np.empty(rows, np.int32), np.empty((rows, top_n), np.int32),
        np.empty((rows, top_n), np.float32),
    )  # fmt: skip
    workers = 1 if rows * vocab < SERIAL_ELEMENTS else NUM_WORKERS
    _logprobs.logprobs_kernel()(
        rows, workers, address_of(array), address_of(chosen), *(address_of(part) for part in result), rows, vocab, top_n
    )
    return result
