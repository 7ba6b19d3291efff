"""Gemma 4's metadata: numbers of heads and columns are lists, one for each layer, or one number for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models.configuration.json_fields import REQUIRED, Fields
from models.gguf.fields import Keys, read_pattern

_NEVER_ROTATED = 1e29
"""Factors of frequencies above this mean pairs that are not rotated: files have 1e30."""


def read_gemma4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """The sizes of heads with a window stand under `_swa`; values are made of keys where a layer that has pages lacks a
    projection of values."""
    count, full_head_dim = common["num_hidden_layers"], common["head_dim"]
    kinds = read_pattern(keys, common)["layer_types"]
    head_dim = keys.integer("attention.key_length_swa", full_head_dim)
    for name, must_be in (("attention.value_length_swa", head_dim), ("rope.dimension_count_swa", head_dim)):
        keys.fields.expect(keys(name), must_be)
    kv_heads = _of_layers(keys, "attention.head_count_kv", count)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    num_sharing = keys.integer("attention.shared_kv_layers", 0, least=0)
    own_full = [layer for layer in full if layer < count - num_sharing]
    sizes = _of_layers(keys, "feed_forward_length", count)
    input_size = keys.integer("embedding_length_per_layer_input", 0, least=0)
    table = keys.tensors.get("per_layer_token_embd.weight")
    found = {
        "head_dim": head_dim,
        "num_key_value_heads": next((n for n, kind in zip(kv_heads, kinds) if kind != "full_attention"), kv_heads[0]),
        "per_layer_config": {
            str(layer): {"head_dim": full_head_dim, "num_key_value_heads": kv_heads[layer]} for layer in full
        },
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in keys.tensors for layer in own_full),
        "layer_types": kinds, "sliding_window": keys.integer("attention.sliding_window", REQUIRED),
        "num_kv_shared_layers": num_sharing, "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "hidden_size_per_layer_input": input_size,
        "vocab_size_per_layer_input": common["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _full_rope(keys, common),
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        },
    }  # fmt: skip
    if keys.integer("expert_count", 0, least=0):
        found |= {
            "enable_moe_block": True, "num_experts": keys.integer("expert_count"),
            "top_k_experts": keys.integer("expert_used_count", REQUIRED),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length", REQUIRED),
        }  # fmt: skip
    return {**found, "rope_theta": None, "rope_scaling": None, "original_max_position_embeddings": None}


def read_assistant(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """An assistant's fields: those of its layers, and the width of the model's hidden states. Files have no groups of
    tokens."""
    keys.fields.expect(keys("nextn_predict_layers"), common["num_hidden_layers"])
    return {
        **read_gemma4(keys, common), "backbone_hidden_size": keys.integer("embedding_length_out", REQUIRED),
        "use_ordered_embeddings": False,
    }  # fmt: skip


def _full_rope(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """That of layers without a window. Frequencies are divided by stored factors: 1, or so many that nothing turns."""
    factors: Sequence[float] = common.get("rope_scaling", {}).get("short_factor", ())
    rotated = [factor for factor in factors if factor < _NEVER_ROTATED]
    if any(factor != 1.0 for factor in rotated) or any(factor >= _NEVER_ROTATED for factor in factors[: len(rotated)]):
        raise keys.fields.error("rope_freqs.weight", "must be ones, then numbers of at least 1e30")
    share = len(rotated) / len(factors) if factors else 1.0
    theta = common["rope_theta"]
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}


def _of_layers(keys: Keys, name: str, count: int) -> list[int]:
    """A number for each layer."""
    values = keys.fields.raw(keys(name))
    if not isinstance(values, list):
        return [keys.integer(name, REQUIRED)] * count
    if len(values) != count:
        raise keys.fields.error(keys(name), f"has {len(values)} numbers, must have one for each of {count} layers")
    named = Fields({f"{keys(name)}[{layer}]": value for layer, value in enumerate(values)}, keys.fields.where)
    return [named.integer(each) for each in named.values()]
