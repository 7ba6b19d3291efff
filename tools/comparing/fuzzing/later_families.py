"""Random configurations of families newer than those of `cases.py`."""

from __future__ import annotations

from collections.abc import Callable

from tools.comparing.fuzzing.draw import Draw, Fields


def _gemma(draw: Draw) -> Fields:
    """A `hidden_size` whose root is exact in every type."""
    fields = {**draw.decoder(has_head_dim=True), "attention_bias": draw.flip(0.3), "rope_parameters": draw.rope()}
    return {**fields, "hidden_size": draw.choice((16, 36, 64, 100, 144))}


def _layer_norms(fields: Fields, name: str) -> Fields:
    """The epsilon under the name of families with layer norms."""
    eps = fields.pop("rms_norm_eps")
    return {**fields, name: eps}


def _cohere(draw: Draw) -> Fields:
    fields = _layer_norms(draw.decoder(has_head_dim=False), "layer_norm_eps")
    return {
        **fields, "use_qk_norm": draw.flip(), "attention_bias": draw.flip(0.3), "rope_parameters": draw.rope(),
        "logit_scale": draw.choice((0.0625, 0.25, 1.0)),
    }  # fmt: skip


def _cohere2(draw: Draw) -> Fields:
    fields = {**_cohere(draw), "sliding_window": draw.window()}
    del fields["use_qk_norm"]
    return {**fields, "layer_types": draw.layer_types(fields["num_hidden_layers"])} if draw.flip() else fields


def _starcoder2(draw: Draw) -> Fields:
    fields = _layer_norms(draw.decoder(has_head_dim=False), "norm_epsilon")
    return {
        **fields, "use_bias": draw.flip(0.7), "sliding_window": draw.choice((None, draw.window())),
        "rope_parameters": draw.rope(), "hidden_act": draw.choice(("gelu_pytorch_tanh", "gelu", "quick_gelu")),
    }  # fmt: skip


def _gpt_neox(draw: Draw) -> Fields:
    fields = _layer_norms(draw.decoder(has_head_dim=False, step=8), "layer_norm_eps")
    del fields["num_key_value_heads"]
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    partial = draw.choice((1.0, 0.25, 0.5)) if head_dim % 8 == 0 else 1.0
    return {
        **fields, "use_parallel_residual": draw.flip(0.7), "attention_bias": draw.flip(0.7),
        "hidden_act": draw.choice(("gelu", "gelu_new", "quick_gelu")),
        "rope_parameters": {**draw.rope(has_scaling=False), "partial_rotary_factor": partial},
    }  # fmt: skip


def _modernbert_decoder(draw: Draw) -> Fields:
    fields, local = _layer_norms(draw.decoder(has_head_dim=False), "norm_eps"), draw.choice((2, 4, 16, 40))
    del fields["num_key_value_heads"]
    biases = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias", "decoder_bias", "tie_word_embeddings")
    return {
        **fields, "hidden_activation": draw.choice(("gelu", "gelu_new", "quick_gelu", "silu")),
        "classifier_activation": draw.choice(("gelu", "gelu_new", "silu")), "local_attention": local,
        "sliding_window": local // 2, "layer_types": draw.layer_types(fields["num_hidden_layers"]),
        "rope_parameters": {f"{name}_attention": draw.rope(is_entry=True) for name in ("full", "sliding")},
        "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2,
        **{name: draw.flip() for name in biases},
    }  # fmt: skip


def _olmo(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=False)
    del fields["rms_norm_eps"]
    own = {"attention_bias": draw.flip(0.3), "clip_qkv": draw.choice((None, 0.3, 8.0))}
    return {**fields, **own, "rope_parameters": draw.rope()}


def _seed_oss(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=True), "rope_parameters": draw.rope(), "mlp_bias": draw.flip(0.3)}
    return {**fields, "attention_bias": draw.flip(0.7), "attention_out_bias": draw.flip(0.3)}


def _exaone4(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=False), "rope_parameters": draw.rope()}
    kinds, num_layers = draw.choice(("", "given", "full")), fields["num_hidden_layers"]
    if kinds == "full":
        return {**fields, "sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    if kinds == "given":
        fields["layer_types"] = draw.layer_types(num_layers)
    return {**fields, "sliding_window": draw.window(), "sliding_window_pattern": draw.choice((2, 4))}


def _ernie(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=True), "use_bias": draw.flip(0.3)}
    return {**fields, "rope_parameters": draw.rope(has_scaling=False)}


def _ernie_moe(draw: Draw) -> Fields:
    """A head with a bias is not tied."""
    fields, count = draw.decoder(has_head_dim=False), draw.integer(2, 20)
    fields["use_bias"] = not fields["tie_word_embeddings"] and draw.flip(0.3)
    return {
        **fields, "moe_num_experts": count, "moe_k": draw.integer(1, count),
        "moe_num_shared_experts": draw.integer(0, 2), "moe_intermediate_size": draw.integer(1, 60),
        "moe_layer_start_index": draw.integer(0, 2),
        "moe_layer_interval": draw.choice((1, 1, 2)), "rope_parameters": draw.rope(has_scaling=False),
    }  # fmt: skip


def _hunyuan(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=True, step=4), "attention_bias": draw.flip(0.3)}
    rope = draw.rope(has_scaling=False)
    if draw.flip():
        rope |= {"rope_type": "dynamic", "factor": 1.0, "alpha": draw.choice((50.0, 1000.0))}
    return {**fields, "rope_parameters": rope}


def _internlm3(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=True, is_divided=True)
    rope, has_bias = draw.rope(has_scaling=False), draw.flip(0.3)
    if draw.flip():
        rope |= {"rope_type": "dynamic", "factor": 6.0}
    return {**fields, "attention_bias": has_bias, "mlp_bias": has_bias, "rope_parameters": rope}


def _apertus(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=False), "attention_bias": draw.flip(0.3)}
    return {**fields, "rope_parameters": draw.rope()}


def _granite_moe(draw: Draw) -> Fields:
    count = draw.integer(1, 9)
    return {
        **draw.decoder(has_head_dim=False), "attention_bias": draw.flip(0.3), "rope_parameters": draw.rope(),
        "embedding_multiplier": draw.choice((1.0, 12.0)), "residual_multiplier": draw.choice((1.0, 0.22)),
        "attention_multiplier": draw.choice((1.0, 0.125)), "logits_scaling": draw.choice((1.0, 8.0)),
        "num_local_experts": count, "num_experts_per_tok": draw.integer(1, count),
    }  # fmt: skip


def _granite_moe_shared(draw: Draw) -> Fields:
    return {**_granite_moe(draw), "shared_intermediate_size": draw.choice((0, draw.integer(1, 90)))}


def _phimoe(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=False)
    return {
        **fields, "attention_bias": draw.flip(), "sliding_window": draw.choice((None, draw.window())),
        "lm_head_bias": not fields["tie_word_embeddings"] and draw.flip(), "num_local_experts": draw.integer(3, 12),
        "router_jitter_noise": draw.choice((0.01, 0.3)), "rope_parameters": draw.rope(has_scaling=False),
    }  # fmt: skip


LATER: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _gemma),
    "cohere": ("CohereConfig", "CohereForCausalLM", _cohere),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _cohere2),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", _starcoder2),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _gpt_neox),
    "modernbert_decoder": ("ModernBertDecoderConfig", "ModernBertDecoderForCausalLM", _modernbert_decoder),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _olmo),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", _seed_oss),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _exaone4),
    "ernie": ("Ernie4_5Config", "Ernie4_5ForCausalLM", _ernie),
    "ernie_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", _ernie_moe),
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", _hunyuan),
    "internlm3": ("InternLM3Config", "LlamaForCausalLM", _internlm3),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", _apertus),
    "granite_moe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", _granite_moe),
    "granite_moe_shared": ("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", _granite_moe_shared),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", _phimoe),
}
