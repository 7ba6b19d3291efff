"""Rejection sampling: verifies draft tokens that were sampled from the draft's own distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor


def reject(
    logits: Tensor,
    arrays: SamplingArrays,
    counts: list[int],
    proposals: NDArray[np.int32],
    proposed: Sequence[NDArray[np.float32] | None],
    token_ids: NDArray[np.int32],
    is_valid: NDArray[np.bool_],
) -> None:
    """Write the result of rejection sampling to the draws ``[n]`` of ``token_ids`` and ``is_valid``, for the chunks
    that have ``proposed``: accepted draft tokens, then the replacement. If all are accepted, the last sample stands.

    logits     [n, vocab_size], and ``arrays``, their parameters
    counts     draws of each chunk, one more than its draft length
    proposals  [n] draft token that each draw is compared with
    """
    firsts = np.cumsum(counts) - counts
    chosen = [i for i, each in enumerate(proposed) if each is not None]
    nums = np.array([counts[i] - 1 for i in chosen], np.int32)
    rows = np.concatenate([np.arange(firsts[i], firsts[i] + counts[i] - 1) for i in chosen])
    places = Tensor.from_numpy(rows.astype(np.int32)).to(logits.device)
    wanted = ops.distributions(ops.gather_rows(logits, places), arrays.at(rows))
    own = np.concatenate([each for each in proposed if each is not None])
    heads = firsts[chosen]
    kept, instead = ops.keep_proposals(
        wanted, own, proposals[rows], nums, arrays.seed[heads], arrays.choice_index[heads], arrays.position[rows]
    )
    for first, most, count, token_id in zip(heads.tolist(), nums.tolist(), kept.tolist(), instead.tolist()):
        token_ids[first : first + count] = proposals[first : first + count]
        is_valid[first : first + count] = True
        if count < most:
            token_ids[first + count] = token_id
            is_valid[first + count] = token_id >= 0
