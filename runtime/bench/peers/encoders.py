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
    """A model's dimensions."""

    model_type: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    vocab_size: int
    position_rows: int
    type_vocab_size: int
    pad_token_id: int
    norm_eps: float
    pooling: str

    def write(self, folder: Path, seed: int, dtype: str) -> None:
        """A folder with random weights of `dtype`, float32 or bfloat16, that pools as the model does."""
        config = {
            "architectures": [self.architecture], "model_type": self.model_type, "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "intermediate_size": self.inner_size, "hidden_act": "gelu", "vocab_size": self.vocab_size,
            "max_position_embeddings": self.position_rows, "type_vocab_size": self.type_vocab_size,
            "layer_norm_eps": self.norm_eps, "pad_token_id": self.pad_token_id, "dtype": dtype,
        }  # fmt: skip
        write_random_folder(folder, config, seed)

    def least_s(self, limits: CpuLimits, dtype: str, lengths: Sequence[int]) -> float:
        """The longer of reading the layers' weights once and of all products: those with weights by the instruction
        of `dtype`, attention's, of every token with every other, by float32's, in bfloat16 also by its own."""
        tokens, size = sum(lengths), self.hidden_size
        weights = self.num_layers * (4 * size * size + 2 * size * self.inner_size)
        attended = 4 * size * self.num_layers * sum(length * length for length in lengths)
        of_attention = limits.operations_per_s("float32" if dtype == "int8" else dtype)
        products = 2 * weights * tokens / limits.operations_per_s(dtype) + attended / of_attention
        return max(weights * WEIGHT_BYTES[dtype] / limits.read_bytes_per_s, products)


SHAPES = {
    "minilm-l6": EncoderShape("bert", "BertModel", 384, 6, 12, 1536, 30522, 512, 2, 0, 1e-12, "mean"),
    "bge-m3": EncoderShape("xlm-roberta", "XLMRobertaModel", 1024, 24, 16, 4096, 250002, 8194, 1, 1, 1e-5, "cls"),
}

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
)
ON_REQUEST = ("mixed-16",)
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
    head = (
        "model",
        "weights",
        "texts",
        *(f"{name}, ms" for name in report["sides"]),
        "ratio",
        "of the limit",
        "goal",
        "",
    )
    parts = [markdown_table(head, rows)] if rows else []
    if report["served"]:
        head = (
            "model",
            "weights",
            "start, s",
            "MB beside the weights",
            "1 text, ms",
            "over HTTP, ms",
            "more, ms",
            "of the processor",
        )
        parts.append(markdown_table(head, [_served(each) for each in report["served"]]))
    return "\n\n".join(parts)


def _served(each: Mapping[str, Any]) -> list[str]:
    numbers = (
        each["start_s"],
        each["beside_weights_bytes"] / 1e6,
        each["direct_ms"],
        each["http_ms"],
        each["more_ms"],
        each["more_processor_ms"],
    )
    return [each["model"], each["dtype"], *(f"{number:,.2f}" for number in numbers)]
