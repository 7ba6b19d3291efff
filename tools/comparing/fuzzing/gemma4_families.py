"""Random configurations of Gemma 4."""

from __future__ import annotations

from collections.abc import Callable

from tools.comparing.fuzzing.draw import Draw, Fields


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


GEMMA4: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", gemma4),
}
