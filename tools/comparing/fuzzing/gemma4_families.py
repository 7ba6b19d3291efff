"""Random configurations of Gemma 4."""

from __future__ import annotations

from collections.abc import Callable

from tools.comparing.fuzzing.draw import Draw, Fields
from tools.comparing.fuzzing.picture_families import wrapped

PICTURE_TOKENS = 280
"""A picture's, at most."""
_NOT_UNIFIED = (
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts",
    "moe_intermediate_size",
)  # fmt: skip
"""Fields that the class of the model without a tower lacks."""


def gemma4(draw: Draw) -> Fields:
    """The last layer sees all tokens whatever the file says, so that files say it; layers that use others' pages have
    one of each kind before them, and inputs of their own, without which transformers fails."""
    fields = draw.decoder(has_head_dim=True)
    fields["num_hidden_layers"] = count = draw.integer(1, 3 if draw.is_emulated else 6)
    kinds = [*draw.layer_types(count)[:-1], "full_attention"]
    shared = [n for n in range(count) if {*kinds[count - n :]} <= {*kinds[: count - n]} == {*kinds}]
    is_equal, num_experts = draw.flip(), draw.integer(1, 9)
    has_experts = draw.flip(0.4)
    kv_heads = draw.choice([n for n in range(1, 8) if fields["num_attention_heads"] % n == 0])
    head_dim = draw.choice((32, 64) if draw.is_emulated else (16, 32, 40, 64, 96, 128))
    factor, input_size = draw.choice((0.25, 0.5, 1.0)), draw.choice((0, 8, draw.integer(1, 20)))
    return {
        **fields, "layer_types": kinds, "sliding_window": draw.window(), "global_head_dim": head_dim,
        "num_global_key_value_heads": kv_heads if is_equal else None, "attention_k_eq_v": is_equal,
        "num_kv_shared_layers": draw.choice(shared or [0]) if input_size else 0, "use_double_wide_mlp": draw.flip(),
        "final_logit_softcapping": draw.choice((30.0, 10.0, None)), "attention_bias": draw.flip(0.2),
        "hidden_size_per_layer_input": input_size,
        "vocab_size_per_layer_input": fields["vocab_size"], "enable_moe_block": has_experts,
        "num_experts": num_experts if has_experts else None,
        "top_k_experts": draw.integer(1, num_experts) if has_experts else None,
        "moe_intermediate_size": draw.integer(1, 60) if has_experts else None,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": factor},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip


def _pictures(draw: Draw, model_type: str, text: Fields, tower: Fields) -> Fields:
    """A picture's tokens see each other in some, in which a step has to fit a whole one. A token of a picture that is
    not there is the padding, as transformers has it embedded."""
    text = {**text, "use_bidirectional_attention": draw.choice((None, "vision"))}
    tokens = {"image_token_id": 0, "boi_token_id": text["vocab_size"] - 1, "eoi_token_id": text["vocab_size"] - 2}
    return {**wrapped(draw, model_type, text, {"patch_size": 4, **tower}, "image_token_id"), **tokens}


def _with_tower(draw: Draw) -> Fields:
    heads, head_dim, side = draw.integer(1, 3), draw.choice((4, 8, 12)), draw.integer(1, 3)
    tower = {
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim,
        "hidden_size": heads * head_dim, "intermediate_size": draw.integer(8, 40), "pooling_kernel_size": side,
        "position_embedding_size": 1120 * side, "use_clipped_linears": draw.flip(), "standardize": draw.flip(),
    }  # fmt: skip
    return _pictures(draw, "gemma4_text", gemma4(draw), tower)


def _unified(draw: Draw) -> Fields:
    text = {name: value for name, value in gemma4(draw).items() if name not in _NOT_UNIFIED}
    width = draw.integer(8, 40)
    tower = {"mm_embed_dim": width, "output_proj_dims": width, "pooling_kernel_size": draw.integer(1, 3)}
    return _pictures(draw, "gemma4_unified_text", {**text, "num_kv_shared_layers": 0}, tower)


GEMMA4: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", gemma4),
    "gemma4_vision": ("Gemma4Config", "Gemma4ForConditionalGeneration", _with_tower),
    "gemma4_unified": ("Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration", _unified),
}
