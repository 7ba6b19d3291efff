"""The models and texts of `bench encoders`, its goals, and its report as Markdown.

Folders have the shapes of all-MiniLM-L6-v2 and bge-m3 with seeded random weights and no tokenizer: ids go in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.metrics import markdown_table
from runtime.bench.peers.cpu_limits import WEIGHT_BYTES, CpuLimits
from runtime.bench.peers.workloads import write_random_folder


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """A model's `config.json`, and how it pools."""

    config: Mapping[str, Any]
    pooling: str

    def write(self, folder: Path, seed: int, dtype: str) -> None:
        """A folder with random weights of `dtype`, float32 or bfloat16."""
        write_random_folder(folder, {**self.config, "dtype": dtype}, seed)

    def least_s(self, limits: CpuLimits, dtype: str, lengths: Sequence[int]) -> float:
        """The longer of reading the layers' weights once and of all products: those with weights by the instruction
        of `dtype`, attention's, of every token with every other, by float32's, in bfloat16 also by its own."""
        size: int = self.config["hidden_size"]
        tokens, num_layers = sum(lengths), int(self.config["num_hidden_layers"])
        weights = num_layers * (4 * size * size + 2 * size * int(self.config["intermediate_size"]))
        attended = 4 * size * num_layers * sum(length * length for length in lengths)
        of_attention = limits.operations_per_s("float32" if dtype == "int8" else dtype)
        products = 2 * weights * tokens / limits.operations_per_s(dtype) + attended / of_attention
        return max(weights * WEIGHT_BYTES[dtype] / limits.read_bytes_per_s, products)


SHAPES = {
    "minilm-l6": EncoderShape({
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6,
        "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": 30522, "max_position_embeddings": 512,
        "type_vocab_size": 2, "pad_token_id": 0, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    }, "mean"),
    "bge-m3": EncoderShape({
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 250002,
        "max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
    }, "cls"),
}  # fmt: skip

DTYPES = ("float32", "bfloat16", "int8")
PEER_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "float32"}
"""The peers' weights beside ours: int8 is compared with float32."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of one call, by their numbers of tokens. `goals`: the least ratio to the better peer, by dtype."""

    key: str
    name: str
    lengths: tuple[int, ...]
    goals: Mapping[str, float]

    def ids(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random ids from 5 on: the first may be special."""
        generator = np.random.default_rng(seed)
        return [generator.integers(5, vocab_size, length).tolist() for length in self.lengths]


def _mixed(count: int) -> tuple[int, ...]:
    return tuple(int(length) for length in np.linspace(16, 512, count))


TEXTS = (
    Texts("one-20", "1 text of 20 tokens", (20,), {}),
    Texts("equal-64", "64 texts of 64", (64,) * 64, {"float32": 1.1, "bfloat16": 1.5, "int8": 3.0}),
    Texts("mixed-64", "64 texts of 16 to 512", _mixed(64), {"float32": 1.5, "bfloat16": 1.5, "int8": 3.0}),
    Texts("mixed-16", "16 texts of 16 to 512", _mixed(16), {"float32": 1.5, "bfloat16": 1.5, "int8": 3.0}),
    Texts("equal-8", "8 texts of 64", (64,) * 8, {"float32": 1.1, "bfloat16": 1.5, "int8": 3.0}),
    Texts("mixed-4", "4 texts of 16 to 512", _mixed(4), {"float32": 1.5, "bfloat16": 1.5, "int8": 3.0}),
)
ON_REQUEST = ("mixed-16", "equal-8", "mixed-4")
"""Fewer texts, for large models on busy machines."""
LEAST_SHARE = 0.65
"""The least share of the compute limit, for texts with a goal."""
MOST_TIMES_LIMIT = 1.5
"""How many times the limit texts without a goal may take."""
MOST_HTTP_MS, MOST_START_S, MOST_MB = 1.0, 1.0, 300.0


def judge(texts: Texts, dtype: str, row: dict[str, Any]) -> None:
    """Adds the goals and whether they are met; without a peer a goal of a ratio is not met."""
    goal, ratio = texts.goals.get(dtype), row["ratio"]
    if goal is None:
        row.update(goal=f"≤ {MOST_TIMES_LIMIT:g} × the limit", is_met=row["times_limit"] <= MOST_TIMES_LIMIT)
    else:
        row.update(
            goal=f"{goal:g} × the better peer, {LEAST_SHARE:.0%} of the limit",
            is_ratio_met=ratio is not None and ratio >= goal,
            is_met=ratio is not None and ratio >= goal and row["share_of_limit"] >= LEAST_SHARE,
        )


def markdown(report: Mapping[str, Any]) -> str:
    """Times are medians of the rounds."""
    rows = []
    for row in report["results"]:
        sides = [
            f"{1e3 * row['sides'][name]['median_s']:,.1f}" if name in row["sides"] else "missing"
            for name in report["sides"]
        ]
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        share = f"{row['share_of_limit']:.0%}"
        rows.append([row["model"], row["dtype"], row["texts"], *sides, ratio, share, row["goal"],
                     "met" if row["is_met"] else "missed"])  # fmt: skip
    sides = [f"{name}, ms" for name in report["sides"]]
    head = ["model", "weights", "texts", *sides, "ratio", "of the limit", "goal", ""]
    parts = [markdown_table(head, rows)] if rows else []
    if report["served"]:
        head = ["model", "weights", "start, s", "MB beside the weights", "1 text, ms", "over HTTP, ms", "more, ms"]
        head.append("of the processor")
        parts.append(markdown_table(head, [_served(each) for each in report["served"]]))
    return "\n\n".join(parts)


def _served(each: Mapping[str, Any]) -> list[str]:
    times = (each[name] for name in ("direct_ms", "http_ms", "more_ms", "more_processor_ms"))
    numbers = each["start_s"], each["beside_weights_bytes"] / 1e6, *times
    return [each["model"], each["dtype"], *(f"{number:,.2f}" for number in numbers)]
