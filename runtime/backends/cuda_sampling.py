"""Drawing tokens and their log-probabilities on a GPU, as `runtime.ops` describes them."""

from __future__ import annotations

from runtime.backends import cpu_sampling
from runtime.sampling_arrays import Int32Array, SampledTokens, SamplingArrays, TopLogprobs
from runtime.tensor import Tensor


def sample(logits: Tensor, params: SamplingArrays) -> SampledTokens:
    """See `ops.sample`."""
    return cpu_sampling.sample(logits.to("cpu"), params)


def log_softmax_topk(logits: Tensor, chosen: Int32Array, top_n: int) -> TopLogprobs:
    """See `ops.log_softmax_topk`."""
    return cpu_sampling.log_softmax_topk(logits.to("cpu"), chosen, top_n)
