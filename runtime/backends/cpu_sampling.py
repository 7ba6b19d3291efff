"""Drawing tokens and their log-probabilities on the cpu, as `runtime.ops` describes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_kernels.cpu import logprobs as _logprobs
from numba_kernels.cpu import sampling as _sampling
from numba_kernels.cpu.running.launch import address_of
from runtime.backends.checks import fail
from runtime.backends.cpu import SERIAL_ELEMENTS, num_workers
from runtime.sampling_arrays import SAMPLING_FIELDS, Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.tensor.tensor import Tensor


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """See `ops.sample`."""
    op, rows = "sample", logits.shape[0]
    mask = params.allowed_mask
    token_ids = np.empty(rows, np.int32)
    fields = [address_of(getattr(params, name)) for name, _, _ in SAMPLING_FIELDS]
    _launch(op, logits, fields, 0 if mask is None else address_of(mask), address_of(token_ids), 0)
    return SampledTokens(token_ids, token_ids >= 0)


def draw(logits: Tensor, fields: Sequence[Tensor], results: Tensor, *, has_penalties: bool) -> None:
    """See `ops.draw`. The kernel looks at a row's parameters itself: ``has_penalties`` tells it nothing new."""
    out = results.address
    _launch("draw", logits, [field.address for field in fields], 0, out, out + 4 * logits.shape[0])


def _launch(op: str, logits: Tensor, fields: list[int], mask: int, token_ids: int, statuses: int) -> None:
    """All but the logits as addresses, 0 for none."""
    rows, vocab = logits.shape

    def explain(status: int) -> Exception:
        return fail(op, "params", f"name a token id outside the vocabulary of {vocab}")

    workers = 1 if rows * vocab < SERIAL_ELEMENTS else num_workers()
    _sampling.sampling_kernel()(
        rows, workers, logits.address, *fields, mask, token_ids, statuses, rows, vocab, -(-vocab // 32), explain=explain
    )


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """See `ops.log_softmax_topk`."""
    rows, vocab = logits.shape
    result = TopLogprobs(
        np.empty(rows, np.float32), np.empty(rows, np.int32), np.empty((rows, top_n), np.int32),
        np.empty((rows, top_n), np.float32),
    )  # fmt: skip
    workers = 1 if rows * vocab < SERIAL_ELEMENTS else num_workers()
    _logprobs.logprobs_kernel()(
        rows, workers, logits.address, address_of(chosen), *(address_of(part) for part in result), rows, vocab, top_n
    )
    return result
