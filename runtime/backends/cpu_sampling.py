"""Drawing tokens and their log-probabilities on the cpu, as `runtime.ops` describes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_kernels.cpu import logprobs as _logprobs
from numba_kernels.cpu import sampling as _sampling
from numba_kernels.cpu.launch import address_of
from runtime.backends.checks import fail
from runtime.backends.cpu import SERIAL_ELEMENTS, num_workers
from runtime.backends.cpu_checks import check, checked_address
from runtime.backends.sampling_checks import SAMPLING_FIELDS, check_chosen, check_sampling
from runtime.dtype import DType, float32, int32, int64
from runtime.sampling_arrays import Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.tensor.tensor import Tensor


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """Draws one token for each row of ``logits [n, V]`` float32, which stay unchanged.

    The draw of a row depends on its logits and parameters alone, its seed, choice and position among them.
    """
    op = "sample"
    rows, vocab = check(op, "logits", logits, float32, (None, None)).shape
    check_sampling(op, rows, vocab, params)
    mask = params.allowed_mask
    token_ids = np.empty(rows, np.int32)
    fields = [address_of(getattr(params, name)) for name, _, _ in SAMPLING_FIELDS]
    _launch(op, logits, fields, 0 if mask is None else address_of(mask), address_of(token_ids), 0)
    return SampledTokens(token_ids, token_ids >= 0)


def draw(logits: Tensor, fields: Sequence[Tensor], results: Tensor, *, has_penalties: bool) -> None:
    """See `ops.draw`. The kernel looks at a row's parameters itself: ``has_penalties`` tells it nothing new."""
    op = "draw"
    rows = check(op, "logits", logits, float32, (None, None)).shape[0]
    addresses = []
    for field, (name, dtype, shape) in zip(fields, SAMPLING_FIELDS, strict=True):
        wanted = int64 if dtype == np.uint64 else DType.parse(dtype)
        addresses.append(checked_address(op, f"fields.{name}", field, wanted, (rows if shape == "n" else None,)))
    out = checked_address(op, "results", results, int32, (2 * rows + 1,))
    _launch(op, logits, addresses, 0, out, out + 4 * rows)


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
