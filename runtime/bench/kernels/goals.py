"""Goals of the GPU path: ratios in one run on one machine, and milliseconds for one model.

The milliseconds are for an H200 (4.3 TB/s of copies, 790 TFLOP/s of bf16 by cuBLAS, both measured).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table.

    Attributes:
        name: in reports.
        work: the work, in words.
        measure: the measured number, and its reference.
        must, ahead: the required value, and one ahead of every peer.
        is_most: whether smaller is better.
    """

    name: str
    work: str
    measure: str
    must: float
    ahead: float
    is_most: bool = False

    def verdict(self, value: float) -> str:
        """ "ahead", "met" or "missed"; NaN is "missed"."""
        return verdict(value, self.must, self.ahead, is_most=self.is_most)


def verdict(value: float, must: float, ahead: float, *, is_most: bool = False) -> str:
    """See `Goal.verdict`."""
    for word, bound in (("ahead", ahead), ("met", must)):
        if value <= bound if is_most else value >= bound:
            return word
    return "missed"


GOALS = {
    goal.name: goal
    for goal in (
        Goal("gemm", "GEMM bf16, 8192³ and Qwen3-8B's shapes at M ≥ 2048", "× cuBLAS", 0.90, 1.02),
        Goal("linear_1", "linear layer, M = 1", "share of the read bandwidth", 0.88, 0.93),
        Goal("linear_few", "linear layer, M = 16 and 64", "share of the read bandwidth", 0.70, 0.85),
        Goal("prefill", "causal prefill, head dim 128, 8k tokens", "× the best SDPA backend", 0.85, 1.1),
        Goal("decode", "paged decode attention, ≥ 0.5 GB of K/V", "share of the read bandwidth", 0.75, 0.88),
        Goal("state", "decode of a gated delta rule, 0.5 GB of states", "share of the copy bandwidth", 0.65, 0.85),
        Goal("tpot", "Qwen3-8B bf16, batch 1, TPOT (floor 3.5)", "ms", 4.4, 4.0, is_most=True),
        Goal("batch_256", "Qwen3-8B bf16, batch 256, 1k context", "share of the bound", 0.60, 0.80),
        Goal("prefill_2k", "Qwen3-8B bf16, prefill of 2k tokens (floor 38)", "ms", 45.0, 41.0, is_most=True),
        Goal("graph", "step's wall time ÷ GPU time of the replayed graph", "ratio", 1.05, 1.02, is_most=True),
        Goal("launch", "launch of one kernel", "× as fast as Numba's dispatcher", 3.0, 5.0),
        Goal("upload", "weights to the GPU", "share of the pinned copy bandwidth", 0.7, 0.9),
        Goal("start", "Qwen3-8B, process start to first token, kernels cached", "s", 10.0, 4.0, is_most=True),
    )
}
"""All of them by name."""
