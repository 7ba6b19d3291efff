"""Drawing tokens and their log-probabilities on the cpu, as `runtime.ops` describes them."""

from __future__ import annotations

import numpy as np

from numba_kernels.cpu import logprobs as _logprobs
from numba_kernels.cpu import sampling as _sampling
from numba_kernels.cpu.launch import address_of
from runtime.backends.cpu import SERIAL_ELEMENTS, num_workers
from runtime.backends.cpu_checks import check, fail
from runtime.backends.sampling_checks import SAMPLING_FIELDS, check_chosen, check_sampling
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
    check_sampling(op, rows, vocab, params)
    mask, mask_words = params.allowed_mask, -(-vocab // 32)
    token_ids = np.full(rows, -1, np.int32)
    workers = 1 if rows * vocab < SERIAL_ELEMENTS else num_workers()
    status = _sampling.sampling_kernel()(
        rows, workers, address_of(array), *(address_of(getattr(params, name)) for name, _, _ in SAMPLING_FIELDS),
        0 if mask is None else address_of(mask), address_of(token_ids), rows, vocab, mask_words,
    )  # fmt: skip
    if status == _sampling.BAD_ID:
        raise fail(op, "params", f"name a token id outside the vocabulary of {vocab}")
    return SampledTokens(token_ids, token_ids >= 0)


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """Log-probability and rank of ``chosen [n]`` int32, and the ``top_n`` best, of each row of ``logits [n, V]``.

    A row with NaN or +inf gives NaN.
    """
    op = "log_softmax_topk"
    array = check(op, "logits", logits, float32, (None, None))
    rows, vocab = array.shape
    check_chosen(op, rows, vocab, chosen, top_n)
    result = TopLogprobs(
        np.empty(rows, np.float32), np.empty(rows, np.int32), np.empty((rows, top_n), np.int32),
        np.empty((rows, top_n), np.float32),
    )  # fmt: skip
    workers = 1 if rows * vocab < SERIAL_ELEMENTS else num_workers()
    _logprobs.logprobs_kernel()(
        rows, workers, address_of(array), address_of(chosen), *(address_of(part) for part in result), rows, vocab, top_n
    )
    return result
