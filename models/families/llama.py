"""Llama, Mistral, Qwen2, Qwen3 and Seed-OSS: one decoder family.

    x = embed(ids)
    for each layer:   x = x + attention(rms_norm(x));   x = x + mlp(rms_norm(x))
    logits = lm_head(rms_norm(x))

with `mlp(h) = down(silu(gate(h)) * up(h))` and causal grouped-query attention over rotated queries and
keys. Differences that the config gives: biases of the projections (Qwen2: query, key and value; Seed-OSS: perhaps of
the output, too), RMSNorm over each head of queries and keys (Qwen3), sliding windows (Mistral, some Qwen), the scaling
of the rotary frequencies (Llama 3).

Sources: Touvron et al. 2023 (arXiv 2302.13971), Jiang et al. 2023 (2310.06825), Qwen2 (2407.10671), Qwen3
(2505.09388)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from models.base import Architecture
from models.configuration.config import agree_with_layer_types, read_attention_bias, read_layer_types, read_window
from models.configuration.json_fields import Fields
from models.configuration.rope_config import KINDS
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer, read_rotated
from models.makers.maker import Maker
from tokenizer.warn import warn_once


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    qk_norm: bool = False  # RMSNorm over each head of queries and keys


class LlamaModel(Decoder):
    config: LlamaConfig

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, attention={"norm": "head" if self.config.qk_norm else "none"})


def read_llama(fields: Fields) -> LlamaConfig:
    fields.expect("sliding_window")
    return LlamaConfig(
        **read_decoder(fields), **read_attention_bias(fields), mlp_bias=fields.boolean("mlp_bias", False)
    )


def read_mistral(fields: Fields) -> LlamaConfig:
    """A window in every layer, unless the file says null."""
    _expect_no_bias(fields, "attention_bias", "mlp_bias")
    fields.expect("use_sliding_window", True)
    window = read_window(fields)
    return LlamaConfig(**read_decoder(fields, windows=lambda layer: window))


def read_qwen2(fields: Fields) -> LlamaConfig:
    """Biases: query, key and value always have them, the output never."""
    fields.expect("attention_bias", True)
    _expect_no_bias(fields, "mlp_bias")
    config = LlamaConfig(**read_decoder(fields, windows=windows_of_qwen(fields)), attention_bias=True)
    return replace(config, max_position_embeddings=_within_a_chunk(fields, config.max_position_embeddings))


def read_qwen3(fields: Fields) -> LlamaConfig:
    _expect_no_bias(fields, "mlp_bias")
    fields.expect("use_qk_norm", True)
    common = read_decoder(fields, default_head_dim=128, windows=windows_of_qwen(fields))
    return LlamaConfig(**common, **read_attention_bias(fields), qk_norm=True)


def read_decoder(
    fields: Fields, *, windows: Callable[[int], int | None] = lambda layer: None, default_theta: float = 10_000.0,
    **defaults: Any,
) -> dict[str, Any]:  # fmt: skip
    """`read_rotated` with longrope, which GGUF files with a factor for each pair have, and the layers' windows."""
    common = read_rotated(fields, {"kinds": (*KINDS, "longrope"), "default_theta": default_theta}, **defaults)
    return common | {"layer_windows": agree_with_layer_types(fields, tuple(map(windows, range(common["num_layers"]))))}


def _expect_no_bias(fields: Fields, *names: str) -> None:
    for name in names:
        fields.expect(name, False)


def windows_of_qwen(fields: Fields) -> Callable[[int], int | None]:
    """The window of a layer: none unless `use_sliding_window`, then that of the layers that `layer_types` names, or of
    those from `max_window_layers` on."""
    is_used = fields.boolean("use_sliding_window", False)
    window = read_window(fields, least=int(is_used))
    first = fields.integer("max_window_layers", 28, least=0)
    if not is_used:
        return lambda layer: None
    if fields.has("layer_types"):
        kinds = read_layer_types(fields, fields.integer("num_hidden_layers")) or []
        return lambda layer: window if kinds[layer] == "sliding_attention" else None
    return lambda layer: window if layer >= first else None


def _within_a_chunk(fields: Fields, positions: int) -> int:
    """The longest sequence, in tokens, whose attention is the usual one by `dual_chunk_attention_config` (Qwen2.5-1M):
    positions are counted anew beyond a chunk, which is not implemented."""
    chunks = fields.object("dual_chunk_attention_config")
    for name in chunks.names():  # sparse attention, where it is named, is of longer sequences, too
        chunks.raw(name)
    # Within a chunk distances are the usual ones; beyond the original context scores are scaled, too.
    chunk = int(min(chunks.integer(name, positions) for name in ("chunk_size", "original_max_position_embeddings")))
    if chunk < positions:
        warn_once(
            f"{chunks.where}: sequences have at most {chunk} tokens here, a chunk. For plain attention over up to"
            f" {positions}, as transformers has it: --hf-overrides '{{\"dual_chunk_attention_config\": null}}'"
        )
    return min(chunk, positions)


def read_seed_oss(fields: Fields) -> LlamaConfig:
    return LlamaConfig(
        **read_decoder(fields, default_head_dim=None if "head_dim" in fields else 128, default_max_positions=524_288),
        attention_bias=fields.boolean("attention_bias", True),
        attention_output_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", read_llama, LlamaModel),
    Architecture("MistralForCausalLM", "mistral", read_mistral, LlamaModel),
    Architecture("Qwen2ForCausalLM", "qwen2", read_qwen2, LlamaModel),
    Architecture("Qwen3ForCausalLM", "qwen3", read_qwen3, LlamaModel),
    Architecture("SeedOssForCausalLM", "seed_oss", read_seed_oss, LlamaModel),
)
