"""Goals of the cpu path: ratios to peers in one interleaved run on one machine, and a few host times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.bench.kernels.goals import Goal
from runtime.bench.peers.sides import LLAMA
from runtime.bench.peers.workloads import GGUF

BETTER = "the better peer"


@dataclass(frozen=True, slots=True)
class PeerGoal:
    """A goal for one row of `bench peers`.

    goal            the bounds of the ratio
    against         the peer to compare with, or `BETTER`
    least_share     least share of the measured limit, in addition
    or_share        share of the measured limit that suffices without the ratio
    most_ttft_ms    most milliseconds to the first token (median), in addition
    """

    goal: Goal
    against: str
    least_share: float | None = None
    most_ttft_ms: float | None = None
    or_share: float | None = None

    def ratio(self, ratios: Mapping[str, float]) -> float | None:
        """The ratio to the goal's peer; None if that peer is missing."""
        if self.against == BETTER:
            return min(ratios.values(), default=None)
        return ratios.get(self.against)

    def verdict(self, result: Mapping[str, Any]) -> str:
        """ "ahead", "met", "missed", or "unknown" without the goal's peer."""
        ratio = self.ratio(result["ratios"])
        if ratio is None or (self.against == BETTER and result["missing"]):
            return "unknown"
        if self.least_share is not None and not result["share_of_limit"] >= self.least_share:
            return "missed"
        if self.most_ttft_ms is not None and not result["sides"]["xserv"]["ttft_ms"] <= self.most_ttft_ms:
            return "missed"
        verdict = self.goal.verdict(ratio)
        if verdict == "missed" and self.or_share is not None and result["share_of_limit"] >= self.or_share:
            return "met"
        return verdict

    def report(self) -> dict[str, Any]:
        """All bounds, by name."""
        return {
            "must": self.goal.must,
            "ahead": self.goal.ahead,
            "against": self.against,
            "least_share_of_limit": self.least_share,
            "most_ttft_ms": self.most_ttft_ms,
            "or_share_of_limit": self.or_share,
        }


def _ratio(work: str, must: float, ahead: float) -> Goal:
    return Goal(work, work, "× peer", must, ahead)


PEER_GOALS = {
    ("decode-1", "float32"): PeerGoal(_ratio("batch 1", 1.0, 1.1), LLAMA.name, least_share=0.85),
    ("prefill", "float32"): PeerGoal(_ratio("prefill", 1.6, 2.0), LLAMA.name),
    ("decode-8", "float32"): PeerGoal(_ratio("batch 8", 1.1, 2.0), BETTER),
    ("decode-32", "float32"): PeerGoal(_ratio("batch 32", 2.0, 2.5), LLAMA.name),
    ("decode-1", "bfloat16"): PeerGoal(_ratio("batch 1", 1.1, 1.3), BETTER),
    ("prefill", "bfloat16"): PeerGoal(_ratio("prefill", 1.5, 2.2), BETTER),
    ("decode-8", "bfloat16"): PeerGoal(_ratio("batch 8", 1.1, 2.0), BETTER),
    ("decode-32", "bfloat16"): PeerGoal(_ratio("batch 32", 1.5, 2.5), BETTER),
    ("burst", "bfloat16"): PeerGoal(_ratio("burst", 1.5, 2.5), BETTER, most_ttft_ms=50.0),
    ("decode-1", "int8"): PeerGoal(_ratio("batch 1", 1.2, 1.6), LLAMA.name),
    ("decode-1", GGUF): PeerGoal(_ratio("batch 1", 1.1, 1.25), LLAMA.name, or_share=0.85),
    ("prefill", GGUF): PeerGoal(_ratio("prefill", 1.5, 2.0), LLAMA.name),
    ("decode-8", GGUF): PeerGoal(_ratio("batch 8", 2.0, 3.0), LLAMA.name),
    ("decode-32", GGUF): PeerGoal(_ratio("batch 32", 2.0, 3.0), LLAMA.name),
    ("burst", GGUF): PeerGoal(_ratio("burst", 2.5, 3.0), LLAMA.name),
    ("qwen3-decode-1", "bfloat16"): PeerGoal(_ratio("Qwen3-0.6B", 1.0, 1.2), LLAMA.name),
}
"""By workload and type of the weights; the other rows are measured without a goal."""

HOST_GOALS = {
    "load": Goal("load", "500 MB of safetensors, cached by the system, to views", "ms", 50.0, 5.0, is_most=True),
    "pack": Goal("pack", "weights into panels", "× copying", 2.0, 1.2, is_most=True),
    "tokenizer_encode": Goal("tokenizer_encode", "encode prose and code, one thread", "× tiktoken", 1.0, 2.0),
    "tokenizer_prompt": Goal("tokenizer_prompt", "a prompt of 400 characters", "µs", 20.0, 10.0, is_most=True),
}


def host_row(key: str, value: float | None, **details: Any) -> dict[str, Any]:
    """A report's row for one of `HOST_GOALS`; without a value the verdict is "unknown"."""
    goal = HOST_GOALS[key]
    verdict = "unknown" if value is None else goal.verdict(value)
    return {"workload": key, **asdict(goal), "value": value, "verdict": verdict, **details}
