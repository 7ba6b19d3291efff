"""Sampled tokens and their log-probabilities on a GPU, as `runtime.ops` describes them.

The parameters go up in one copy, and only ids and a few numbers a row come back; `sample_into` is for parameters
already on the device, and does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda import chain_sampling as _chains
from numba_kernels.cuda import logprobs as _logprobs
from numba_kernels.cuda import sampling as _sampling
from numba_kernels.cuda.arithmetic import user_logits as _user_logits
from runtime.backends.checks import fail
from runtime.backends.cuda_tensor import check_id_flag, id_flag, remembered, upload, upload_together
from runtime.device.gpu import Gpu
from runtime.dtype import float32, int32, uint8
from runtime.sampling_arrays import SAMPLING_FIELDS, Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.sampling_table import PENALTIES
from runtime.tensor.tensor import Tensor

_plan = remembered(_sampling.plan)
_plan_chains = remembered(_chains.plan)
_FIRST_OF_CHAINS = next(place for place, (name, _, _) in enumerate(SAMPLING_FIELDS) if name == "chain_words")


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """See `ops.sample`. Waits for the device."""
    rows, vocab = logits.shape
    if rows == 0:
        return SampledTokens(np.empty(0, np.int32), np.empty(0, np.bool_))
    device, mask = logits.device, params.allowed_mask
    arrays = [getattr(params, name) for name, _, _ in SAMPLING_FIELDS] + ([] if mask is None else [mask.view(np.int32)])
    fields = upload_together([_as_tensor_type(array) for array in arrays], device)
    mask_address = 0 if mask is None else fields.pop().address
    has_penalties = any((getattr(params, name) != neutral).any() for name, neutral in PENALTIES.items())
    has_chains = params.has_chains
    # ids, statuses, whether an id was outside its table, and mus
    result = Tensor.new(((3 if has_chains else 2) * rows + 1,), int32, device)
    addresses = [field.address for field in fields]
    _launch(logits, addresses, mask_address, result.address, has_penalties, has_chains)
    sampled = result.to("cpu").array
    token_ids, statuses = sampled[:rows], sampled[rows : 2 * rows]
    if sampled[2 * rows]:
        check_id_flag(device)
    if (statuses == _sampling.BAD_ID).any():
        raise fail("sample", "params", f"name a token id outside the vocabulary of {vocab}")
    mus = sampled[2 * rows + 1 :].view(np.float32) if has_chains else None
    return SampledTokens(token_ids, statuses == _sampling.OK, mus)


def sample_into(
    logits: Tensor, fields: Sequence[Tensor], results: Tensor, *, has_penalties: bool, has_chains: bool
) -> None:
    """See `ops.sample_into`."""
    _launch(logits, [field.address for field in fields], 0, results.address, has_penalties, has_chains)


def process_logits_row(
    out: Tensor, logits: Tensor, prompt_ids: Int32Array, output_ids: Int32Array, numbers: NDArray[np.float32],
    function: Callable[..., Any],
) -> None:  # fmt: skip
    """See `ops.process_logits`."""
    # an empty array cannot be uploaded
    given = [each if len(each) else np.zeros(1, each.dtype) for each in (prompt_ids, output_ids, numbers)]
    prompt, output, values = upload_together([np.ascontiguousarray(each) for each in given], logits.device)
    launch = _user_logits.plan(function, logits.size)
    Gpu.of(logits.device).launch(
        launch, out.address, logits.address, prompt.address, len(prompt_ids), output.address, len(output_ids),
        values.address, logits.size,
    )  # fmt: skip


def _launch(
    logits: Tensor, fields: list[int], mask_address: int, out_address: int, has_penalties: bool, has_chains: bool
) -> None:
    """Draws from at least one row: ids, statuses, the flag for bad ids and, with chains, mus: ``[2 rows + 1]`` or
    ``[3 rows + 1]`` int32 at `out_address`."""
    rows, vocab = logits.shape
    gpu = Gpu.of(logits.device)
    flag_address, mus = out_address + 8 * rows, [out_address + 8 * rows + 4] if has_chains else []
    if has_chains:
        plan = _plan_chains(rows, vocab)
    else:
        fields = fields[:_FIRST_OF_CHAINS]
        plan = _plan(
            rows, vocab, max_clusters=gpu.max_clusters, num_sms=gpu.properties.num_sms,
            max_shared=gpu.properties.shared_bytes_per_block,
        )  # fmt: skip
    assert plan is not None
    work = Tensor.new((plan.work_bytes,), uint8, logits.device) if plan.work_bytes else None
    counts = Tensor.new((rows, vocab), int32, logits.device) if has_penalties else None
    gpu.launch(
        plan.launch, logits.address, *fields, mask_address, 0 if work is None else work.address,
        0 if counts is None else counts.address, out_address, out_address + 4 * rows, *mus,
        id_flag(logits.device).address, flag_address, vocab, -(-vocab // 32),
    )  # fmt: skip


def _as_tensor_type(array: np.ndarray) -> np.ndarray:
    """The same bits in a type that tensors have."""
    return array.view(np.int64) if array.dtype == np.uint64 else array


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """See `ops.log_softmax_topk`. Waits for the device."""
    rows, vocab = logits.shape
    if top_n > _logprobs.MAX_TOP_N:
        raise fail("log_softmax_topk", "top_n", f"is {top_n}, limit on a GPU {_logprobs.MAX_TOP_N}")
    device = logits.device
    if rows == 0:
        nothing = np.empty(0, np.float32), np.empty(0, np.int32)
        return TopLogprobs(*nothing, np.empty((0, top_n), np.int32), np.empty((0, top_n), np.float32))
    ids = upload(chosen, device)
    parts = [
        Tensor.new((rows,), float32, device), Tensor.new((rows,), int32, device),
        Tensor.new((rows, top_n), int32, device), Tensor.new((rows, top_n), float32, device),
    ]  # fmt: skip
    launch = _logprobs.plan(rows, vocab, top_n)
    assert launch is not None
    Gpu.of(device).launch(launch, logits.address, ids.address, *(part.address for part in parts), vocab, top_n)
    return TopLogprobs(*(part.to("cpu").array for part in parts))
