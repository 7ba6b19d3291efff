"""Sampled tokens and their log-probabilities on the cpu, as `runtime.ops` describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu import logprobs as _logprobs
from numba_kernels.cpu import rejection as _rejection
from numba_kernels.cpu import sampling as _sampling
from numba_kernels.cpu import user_logits as _user_logits
from numba_kernels.cpu.running.launch import Kernel, address_of
from runtime.backends.checks import fail
from runtime.backends.cpu_threads import SERIAL_ELEMENTS, num_workers
from runtime.sampling_arrays import SAMPLING_FIELDS, Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.tensor.tensor import Tensor


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """See `ops.sample`."""
    op, rows = "sample", logits.shape[0]
    mask = params.allowed_mask
    token_ids = np.empty(rows, np.int32)
    fields = [address_of(getattr(params, name)) for name, _, _ in SAMPLING_FIELDS]
    mus = np.empty(rows, np.float32) if params.has_chains else None
    out = address_of(token_ids), 0, 0 if mus is None else address_of(mus)
    kernel = _sampling.sampling_kernel(mus is not None)
    _launch(op, logits, fields, 0 if mask is None else address_of(mask), out, kernel)
    return SampledTokens(token_ids, token_ids >= 0, mus)


def sample_into(
    logits: Tensor, fields: Sequence[Tensor], results: Tensor, *, has_penalties: bool, has_chains: bool
) -> None:
    """See `ops.sample_into`. The kernel reads each row's parameters itself and ignores ``has_penalties``."""
    first, rows = results.address, logits.shape[0]
    out = first, first + 4 * rows, first + 4 * (2 * rows + 1) if has_chains else 0
    _launch("sample_into", logits, [each.address for each in fields], 0, out, _sampling.sampling_kernel(has_chains))


def distributions(logits: Tensor, params: SamplingArrays) -> NDArray[np.float32]:
    """See `ops.distributions`."""
    return _of_draws("distributions", logits, params, _sampling.distributions_kernel(params.has_chains))


def processed_logits(logits: Tensor, params: SamplingArrays) -> NDArray[np.float32]:
    """See `ops.processed_logits`."""
    return _of_draws("processed_logits", logits, params, _sampling.processed_kernel(params.has_chains))


def _of_draws(op: str, logits: Tensor, params: SamplingArrays, kernel: Kernel) -> NDArray[np.float32]:
    found = np.empty(logits.shape, np.float32)
    fields = [address_of(getattr(params, name)) for name, _, _ in SAMPLING_FIELDS]
    mask = 0 if params.allowed_mask is None else address_of(params.allowed_mask)
    _launch(op, logits, fields, mask, (address_of(found), 0, 0), kernel)
    return found


def process_logits_row(
    out: Tensor, logits: Tensor, prompt_ids: Int32Array, output_ids: Int32Array, numbers: NDArray[np.float32],
    function: Callable[..., Any],
) -> None:  # fmt: skip
    """See `ops.process_logits`."""
    ids = (np.array(each) for each in (prompt_ids, output_ids))  # which the function may not write
    _user_logits.row_function(function)(out.array, logits.array, *ids, numbers.copy())


def keep_proposals(
    wanted: NDArray[np.float32], proposed: NDArray[np.float32], drafts: Int32Array, counts: Int32Array,
    seeds: NDArray[np.uint64], choices: Int32Array, positions: Int32Array,
) -> tuple[Int32Array, Int32Array]:  # fmt: skip
    """See `ops.keep_proposals`."""
    rows, vocab = wanted.shape
    first = (np.cumsum(counts) - counts).astype(np.int64)
    kept, replacements = np.empty(len(counts), np.int32), np.empty(len(counts), np.int32)
    arrays: list[NDArray[Any]] = [wanted, proposed, drafts, first, counts, seeds, choices, positions]
    arrays += [kept, replacements]
    workers = 1 if rows * vocab < SERIAL_ELEMENTS else num_workers()
    addresses = (address_of(array) for array in arrays)
    _rejection.rejection_kernel()(len(counts), workers, *addresses, len(counts), rows, vocab)
    return kept, replacements


def _launch(op: str, logits: Tensor, fields: list[int], mask: int, out: tuple[int, int, int], kernel: Kernel) -> None:
    """The arguments but the logits as addresses, 0 for none. ``out``: ids, statuses, mus."""
    rows, vocab = logits.shape

    def explain(status: int) -> Exception:
        return fail(op, "params", f"name a token id outside the vocabulary of {vocab}")

    workers = 1 if rows * vocab < SERIAL_ELEMENTS else num_workers()
    kernel(rows, workers, logits.address, *fields, mask, *out, rows, vocab, -(-vocab // 32), explain=explain)


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
