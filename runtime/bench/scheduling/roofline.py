"""A step's time on GPUs by a roofline of its traffic and computation, split over ranks and stages.

A rank reads and multiplies its part of the weights, of the keys and of the queries; with fewer KV heads than ranks,
several have the same ones. Two all-reduces over a stage's ranks end each layer's halves, and the ranks gather the
logits. Stages have neighbouring layers, balanced as in the engine, and pass hidden states on.

A link has a latency and a bandwidth. A ring of n ranks sends `2 (n - 1) / n` of what they reduce over each link, and
`(n - 1) / n` of what they gather, as in NCCL's own tests; so a link's bandwidth is their bus bandwidth. A collective's
latency is assumed to be the same for 2 ranks and for 8.

``PRESETS`` has the shapes of published models, for rooflines without their files, as fields of ``config.json``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.configuration.config import ModelConfig
from models.registry import load_config, parse_config
from models.stages import balanced
from runtime.bench.metrics import BenchmarkError
from runtime.engine.scheduling.step_model import Pipeline, StepFeatures
from runtime.errors import InvalidArgumentError
from runtime.kv.groups import cut_layers, of_layers
from runtime.kv.kinds import kind_of_window


@dataclass(frozen=True, slots=True)
class Link:
    """A latency, and bytes a second in one direction. The methods give the seconds of a collective of so many bytes on
    each rank (``all_gather``: in all), and of sending them on."""

    latency_s: float
    bytes_per_s: float

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        return self.latency_s + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bytes_per_s

    def all_gather_s(self, num_bytes: float, num_ranks: int) -> float:
        return self.latency_s + (num_ranks - 1) / num_ranks * num_bytes / self.bytes_per_s

    def send_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


LINKS = {"nvlink4": Link(10e-6, 370e9), "infiniband400": Link(26e-6, 48e9)}
"""NVLink 4 in a machine of H100s or H200s: NCCL's bandwidth in a ring (NVIDIA/nccl-tests, issue 212), and a latency
between 7 µs (one shot, two H100s) and 17 µs (fused, of 10 KB). A port of 400 Gbit/s between machines: what NCCL itself
takes a sum of 4 KB on H100s to need (NVIDIA/nccl, issue 1453), and 96 % of the line's rate."""


def link_of(text: str) -> Link:
    """A link of ``LINKS`` by its name, or `MICROSECONDS,GB_PER_S`. Raises ``BenchmarkError``."""
    if text in LINKS:
        return LINKS[text]
    latency, comma, rate = text.partition(",")
    if comma:
        try:
            link = Link(1e-6 * float(latency), 1e9 * float(rate))
        except ValueError:
            raise BenchmarkError(f"a link is {text!r}: its latency and bandwidth must be numbers") from None
        if not (0.0 <= link.latency_s < math.inf and 0.0 < link.bytes_per_s < math.inf):
            raise BenchmarkError(f"a link is {text!r}: its bandwidth must be positive, its latency not negative")
        return link
    raise BenchmarkError(f"a link is {text!r}, must be {', '.join(LINKS)} or MICROSECONDS,GB_PER_S")


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Sustained rates of a GPU, below its data sheet: bytes and bf16 operations a second; its memory."""

    bytes_per_s: float
    flops_per_s: float
    memory_bytes: int


GPUS = {
    "h200": GpuRates(4.3e12, 790e12, 141_000_000_000),
    "h100": GpuRates(3.0e12, 790e12, 80_000_000_000),
    "a100": GpuRates(1.8e12, 270e12, 80_000_000_000),
}


@dataclass(frozen=True, slots=True)
class Sums:
    """The communication of a stage's ranks in a step.

    num_sums        all-reduces of the hidden states
    hidden_bytes    of one token's
    logits_bytes    of one row, gathered; 0 if the stage has no head
    """

    link: Link
    num_ranks: int
    num_sums: int
    hidden_bytes: int
    logits_bytes: int

    def seconds(self, features: StepFeatures) -> float:
        total = self.num_sums * self.link.all_reduce_s(self.hidden_bytes * features.tokens, self.num_ranks)
        if self.logits_bytes:
            total += self.link.all_gather_s(self.logits_bytes * features.sequences, self.num_ranks)
        return total


@dataclass(frozen=True, slots=True)
class RooflineStepModel:
    """A step's time: the larger of moving its bytes and computing its operations on one rank, plus communication, plus
    a constant for the host and launches.

    Attributes:
        weight_bytes: read once a step; kv_bytes_per_token: of all layers, keys and values.
        kv_bytes_per_block_token: of the layers of one cache group, padding included.
        flops_per_token: of the weights' products; flops_per_pair: of attention, a query with one key, all layers.
        flops_per_logits_row: of the output projection, once a sequence (an upper bound: unfinished prompts have none).
        sums: among several ranks.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_block_token: int
    flops_per_token: float
    flops_per_pair: float
    flops_per_logits_row: float
    rates: GpuRates
    overhead_s: float
    sums: Sums | None = field(default=None)

    def seconds(self, features: StepFeatures) -> float:
        tokens, sequences, pairs, context = features
        moved = self.weight_bytes + self.kv_bytes_per_token * (context + tokens)
        flops = (
            self.flops_per_token * tokens
            + self.flops_per_pair * (pairs + context)
            + self.flops_per_logits_row * sequences
        )
        computed_s = max(moved / self.rates.bytes_per_s, flops / self.rates.flops_per_s)
        told_s = 0.0 if self.sums is None else self.sums.seconds(features)
        return computed_s + told_s + self.overhead_s

    def num_blocks(self, block_size: int, memory_share: float) -> int:
        """Blocks that fit beside the weights in this share of the GPU's memory."""
        free = memory_share * self.rates.memory_bytes - self.weight_bytes
        return max(0, int(free // (self.kv_bytes_per_block_token * block_size)))


def rooflines(
    config: ModelConfig, rates: GpuRates, *, overhead_s: float, bytes_per_value: int = 2, num_ranks: int = 1,
    num_stages: int = 1, link: Link | None = None,
) -> list[RooflineStepModel]:  # fmt: skip
    """The roofline of each of ``num_stages`` stages of a dense model of these shapes, with ``bytes_per_value`` for
    weights and KV cache, on ``num_ranks`` ranks that a link joins. Raises ``ConfigError`` for more stages than layers,
    ``BenchmarkError`` for heads that the ranks cannot divide."""
    if config.num_heads % num_ranks or (config.num_kv_heads % num_ranks and num_ranks % config.num_kv_heads):
        shown = f"{config.num_heads} heads, {config.num_kv_heads} of keys"
        raise BenchmarkError(f"{config.architecture}: {shown}, are not divided by {num_ranks} ranks")
    if num_ranks > 1 and link is None:
        raise BenchmarkError(f"{num_ranks} ranks need a link")
    heads = config.num_heads * config.head_dim
    own_kv = max(config.num_kv_heads // num_ranks, 1) * config.head_dim  # of one rank
    num_mlp = 3 if config.activation == "silu" else 2
    per_layer = config.hidden_size * (
        2 * heads + num_mlp * config.intermediate_size + 2 * own_kv * num_ranks
    )  # of all ranks
    logits = config.vocab_size * config.hidden_size
    groups = cut_layers(tuple(map(kind_of_window, config.layer_windows)))
    kv_bytes = bytes_per_value * 2 * own_kv  # of a token in a layer, on one rank
    stages = balanced([per_layer] * config.num_layers, num_stages, last_bytes=logits, name=config.architecture)
    found = []
    for number, layers in enumerate(stages):
        own = of_layers(groups, layers)[0]
        has_head = number == len(stages) - 1
        sums = None
        if link is not None and num_ranks > 1:
            sums = Sums(
                link, num_ranks, 2 * len(layers), bytes_per_value * config.hidden_size, 4 * config.vocab_size * has_head
            )
        found.append(
            RooflineStepModel(
                weight_bytes=bytes_per_value * (len(layers) * per_layer + logits * has_head) // num_ranks,
                kv_bytes_per_token=kv_bytes * len(layers),
                kv_bytes_per_block_token=kv_bytes * (len(own.layers) + own.num_padding),
                flops_per_token=2 * len(layers) * per_layer / num_ranks,
                flops_per_pair=4 * len(layers) * heads / num_ranks,
                flops_per_logits_row=2 * logits * has_head / num_ranks,
                rates=rates,
                overhead_s=overhead_s,
                sums=sums,
            )
        )
    return found


def pipeline_of(config: ModelConfig, stages: list[RooflineStepModel], link: Link, bytes_per_value: int = 2) -> Pipeline:
    """Stages that pass hidden states on over a link."""
    per_token = bytes_per_value * config.hidden_size
    return Pipeline(tuple(stages), lambda features: link.send_s(per_token * features.tokens))


def _shape(architecture: str, model_type: str, sizes: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    common = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "dtype": "bfloat16", "tie_word_embeddings": False}
    return {
        "architectures": [architecture], "model_type": model_type, **dict(zip(names, sizes, strict=True)), **common,
        **fields,
    }  # fmt: skip


def _qwen3(*sizes: int, **fields: Any) -> dict[str, Any]:
    known = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6}
    return _shape("Qwen3ForCausalLM", "qwen3", sizes, **{**known, **fields})


def _llama3(*sizes: int, factor: float = 8.0, **fields: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    known = {"vocab_size": 128_256, "max_position_embeddings": 131_072, "rope_theta": 5e5, "rope_scaling": rope}
    return _shape("LlamaForCausalLM", "llama", sizes, **{**known, **fields})


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, 8),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": _llama3(4096, 14_336, 32, 32, 8),
    "llama-3.1-70b": _llama3(8192, 28_672, 80, 64, 8),
    "mistral-7b": _shape(
        "MistralForCausalLM", "mistral", (4096, 14_336, 32, 32, 8), vocab_size=32_768, max_position_embeddings=32_768,
        rope_theta=1e6, sliding_window=None,
    ),
}  # fmt: skip


def find_config(name: str) -> ModelConfig:
    """The configuration of a preset, in any case of letters, or of a folder. Raises ``InvalidArgumentError`` with the
    names of the presets for anything else, and the errors of ``load_config``."""
    if name.lower() in PRESETS and not Path(name).is_dir():
        return parse_config(PRESETS[name.lower()], name)
    if not Path(name).exists():
        raise InvalidArgumentError(f"{name}: no such folder, and none of {', '.join(PRESETS)}", param="config")
    return load_config(name)
