"""The goals of `bench peers` on a cpu, and its report as Markdown: tables of token rates and of the host's work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.bench.kernels.goals import Goal, verdict
from runtime.bench.metrics import markdown_table
from runtime.bench.peers.cpu_limits import RATES
from runtime.bench.peers.ik_llama import NAME as IK_LLAMA
from runtime.bench.peers.rounds import LLAMA, OURS, PEER_ENGINES, QUIET_SHARE
from runtime.bench.peers.workloads import GGUF

BETTER = "the better peer"


@dataclass(frozen=True, slots=True)
class PeerGoal:
    """A goal for one row of `bench peers`.

    must, ahead             the bounds of the ratio
    against                 the peer to compare with, or `BETTER`
    least_share_of_limit    least share of the measured limit, in addition
    most_ttft_ms            most milliseconds to the first token (median), in addition
    or_share_of_limit       share of the measured limit that suffices without the ratio
    """

    must: float
    ahead: float
    against: str
    least_share_of_limit: float | None = None
    most_ttft_ms: float | None = None
    or_share_of_limit: float | None = None

    def ratio(self, ratios: Mapping[str, float]) -> float | None:
        """The ratio to the goal's peer; None if that peer is missing."""
        if self.against == BETTER:
            return min((ratios[engine.name] for engine in PEER_ENGINES if engine.name in ratios), default=None)
        return ratios.get(self.against)

    def verdict(self, result: Mapping[str, Any]) -> str:
        """ "ahead", "met", "missed", or "unknown" without the goal's peer."""
        ratio, share = self.ratio(result["ratios"]), result["share_of_limit"]
        if ratio is None or (self.against == BETTER and result["missing"]):
            return "unknown"
        if self.least_share_of_limit is not None and not share >= self.least_share_of_limit:
            return "missed"
        if self.most_ttft_ms is not None and not result["sides"]["xserv"]["ttft_ms"] <= self.most_ttft_ms:
            return "missed"
        found = verdict(ratio, self.must, self.ahead)
        is_enough = self.or_share_of_limit is not None and share >= self.or_share_of_limit
        return "met" if found == "missed" and is_enough else found


PEER_GOALS = {
    ("decode-1", "float32"): PeerGoal(1.0, 1.1, LLAMA.name, least_share_of_limit=0.85),
    ("prefill", "float32"): PeerGoal(1.6, 2.0, LLAMA.name),
    ("decode-8", "float32"): PeerGoal(1.1, 2.0, BETTER),
    ("decode-32", "float32"): PeerGoal(2.0, 2.5, LLAMA.name),
    ("decode-1", "bfloat16"): PeerGoal(1.1, 1.3, BETTER),
    ("prefill", "bfloat16"): PeerGoal(1.5, 2.2, BETTER),
    ("decode-8", "bfloat16"): PeerGoal(1.1, 2.0, BETTER),
    ("decode-32", "bfloat16"): PeerGoal(1.5, 2.5, BETTER),
    ("burst", "bfloat16"): PeerGoal(1.5, 2.5, BETTER, most_ttft_ms=50.0),
    ("decode-1", "int8"): PeerGoal(1.2, 1.6, LLAMA.name),
    ("decode-1", GGUF): PeerGoal(1.1, 1.25, LLAMA.name, or_share_of_limit=0.85),
    ("prefill", GGUF): PeerGoal(1.5, 2.0, LLAMA.name),
    ("decode-8", GGUF): PeerGoal(2.0, 3.0, LLAMA.name),
    ("decode-32", GGUF): PeerGoal(2.0, 3.0, LLAMA.name),
    ("burst", GGUF): PeerGoal(2.5, 3.0, LLAMA.name),
    ("qwen3-decode-1", "bfloat16"): PeerGoal(1.0, 1.2, LLAMA.name),
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


_PEERS = (*(engine.name for engine in PEER_ENGINES), IK_LLAMA)
_HEAD = ("workload", "weights", OURS, *_PEERS, "ratio", "rounds", "must", "ahead")


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report. Rates are tokens per second, medians; an unavailable peer is "missing", one without such a file
    a dash. The ratio is to the goal's peer, else to the fastest."""
    parts = []
    if report["results"]:
        parts.append(
            markdown_table((*_HEAD, "verdict", "limit", "share"), [_row(result) for result in report["results"]])
        )
    if report["host_results"]:
        head = ("of the host", "measured", "in numbers", "must", "ahead", "verdict")
        parts.append(markdown_table(head, map(_host_row, report["host_results"])))
    parts += [_burst(result) for result in report["results"] if result["measure"] == "burst"]
    parts += [_concurrent(result) for result in report["results"] if "one_after_another" in result]
    parts += [f"Refused: {each['workload']} ({each['dtype']}): {each['reason']}" for each in report["refused"]]
    parts += [f"Left out of {each['model']} ({each['dtype']}): {each['reason']}" for each in report["died"]]
    parts += [_disturbed(each) for each in report["results"] if each["largest_others_share"] > QUIET_SHARE]
    parts += _notes(report)
    return "\n\n".join(parts)


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    sides = result["sides"]

    def rate(name: str) -> str:
        if name in sides:
            return f"{sides[name]['median_tokens_per_second']:,.1f}"
        return "missing" if name in result["missing"] else "–"

    goal = result.get("goal")
    ratio, against = result.get("ratio"), goal["against"] if goal else None
    if ratio is None and result["ratios"]:
        ratio = min(result["ratios"].values())
    if ratio is None:
        rounds = "–"
    else:
        nearest = min(result["ratios"], key=lambda name: abs(result["ratios"][name] - ratio))
        rounds = f"{min(result['round_ratios'][nearest]):.2f} … {max(result['round_ratios'][nearest]):.2f}"
    must = "–"
    if goal:
        must = f"{goal['must']:g}× {against}"
        if goal["or_share_of_limit"] is not None:
            must += f" or {goal['or_share_of_limit']:.0%} of the limit"
        if goal["least_share_of_limit"] is not None:
            must += f", {goal['least_share_of_limit']:.0%} of the limit"
        if goal["most_ttft_ms"] is not None:
            must += f", TTFT {goal['most_ttft_ms']:g} ms"
    return (
        result["name"],
        result["model"] if result["dtype"] == GGUF else result["dtype"],
        rate(OURS),
        *(rate(name) for name in _PEERS),
        "–" if ratio is None else f"{ratio:.2f}",
        rounds,
        must,
        f"{goal['ahead']:g}×" if goal else "–",
        result.get("verdict", "–"),
        f"{result['limit_tokens_per_second']:,.0f}",
        f"{result['share_of_limit']:.0%}",
    )


def _host_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    sign = "≤" if result["is_most"] else "≥"
    bounds = (f"{sign} {result['must']:g}", f"{sign} {result['ahead']:g}")
    value = "–" if result["value"] is None else f"{result['value']:.3g} {result['measure']}"
    return (result["work"], value, result.get("said", ""), *bounds, result["verdict"])


def _burst(result: Mapping[str, Any]) -> str:
    words = [f"{name} {side['ttft_ms']:.0f} and {side['latency_ms']:.0f} ms" for name, side in result["sides"].items()]
    return f"{result['name']}, {result['dtype']}: time to first token and latency, medians: {'; '.join(words)}."


def _concurrent(result: Mapping[str, Any]) -> str:
    alone = result["one_after_another"]["median_tokens_per_second"]
    times = result["times_one_after_another"]
    return f"{result['name']}: one after another {alone:.1f} tokens per second; together {times:.2f} times that."


def _disturbed(result: Mapping[str, Any]) -> str:
    busy = f"others used up to {result['largest_others_share']:.0%} of the machine"
    return f"{result['name']} ({result['dtype']}): {busy}; do not trust its ratio."


def _rate(name: str, rate: float) -> str:
    """One of `RATES` in words."""
    unit, how = {
        "read_bytes_per_s": ("GB/s", "read"),
        "float32_flops_per_s": ("GFLOP/s", "in float32"),
        "bfloat16_flops_per_s": ("GFLOP/s", "by vdpbf16ps"),
        "int8_ops_per_s": ("Gop/s", "by vpdpbusd"),
    }[name]
    return f"{rate / 1e9:.{1 if unit == 'GB/s' else 0}f} {unit} {how}"


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = []
    if limits := report["limits"]:
        words = [_rate(name, limits[name]) for name in RATES if limits[name]]
        measured = f"the best of {limits['num_measured']} measurements beside the work"
        notes.append(f"Limits of {limits['num_threads']} threads, {measured}: {', '.join(words)}.")
        if limits["lowest"]:
            lowest = ", ".join(_rate(name, rate) for name, rate in limits["lowest"].items())
            notes.append(f"The limits were not steady, others used the machine: at worst {lowest}.")
    for name, groups in report["peers"].items():
        if name == IK_LLAMA:
            said = next(iter(groups.values()))
            notes.append(f"{name} ({said['build']}), {said['threads']} threads; it tells times alone, not its answers.")
            continue
        agreement = ", ".join(f"{each['logits_relative_error']:.1e} ({group})" for group, each in groups.items())
        said = next(iter(groups.values()))
        versions = ", ".join(
            f"{what} {said[what]}" for what in ("transformers", "torch", "llama_cpp_python") if what in said
        )
        notes.append(f"{name} ({versions}), {said['threads']} threads; its logits agree to {agreement}.")
    return notes
