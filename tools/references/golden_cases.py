"""Models that `generate_reference.py` makes goldens of: configurations of transformers, and lengths of prompts."""

from __future__ import annotations

from typing import Any

import transformers


def gpt2(**changes: Any) -> transformers.GPT2Config:
    fields = {"vocab_size": 97, "n_positions": 96, "n_layer": 2, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2Config(**{**fields, **changes})


def decoder(config_class: type, **changes: Any) -> Any:
    fields = {
        "vocab_size": 97,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return config_class(**{**fields, **changes})


def llama(**changes: Any) -> Any:
    return decoder(transformers.LlamaConfig, **changes)


def mistral(**changes: Any) -> Any:
    return decoder(transformers.MistralConfig, **changes)


def qwen2(**changes: Any) -> Any:
    return decoder(transformers.Qwen2Config, **changes)


def qwen3(**changes: Any) -> Any:
    return decoder(transformers.Qwen3Config, **changes)


def small(family: str, hidden: int, inner: int, **changes: Any) -> Any:
    """A small config."""
    config_class = getattr(transformers, f"{family}Config")
    fields = {"vocab_size": 61, "pad_token_id": None, **sizes(hidden, inner)}
    return decoder(config_class, **{**fields, **changes})


def heads(queries: int, keys: int) -> dict[str, int]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys}


def sizes(hidden: int, inner: int) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": inner}


def linear_rope(factor: float, theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "linear", "rope_theta": theta, "factor": factor}}


def yarn_rope(original: int, factor: float, theta: float, **options: float | bool) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            **options,
        }
    }


def llama3_rope(original: int, factor: float, low: float, high: float, theta: float) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    }


def cases() -> dict[str, tuple[Any, int]]:
    """Each case's config and the length of its prompt, in tokens."""
    tied = {"tie_word_embeddings": True}
    return {
        "gpt2_gelu_new": (gpt2(n_embd=48, n_head=3, activation_function="gelu_new"), 37),
        "gpt2_gelu_erf": (
            gpt2(n_embd=60, n_head=5, n_inner=100, activation_function="gelu", tie_word_embeddings=False),
            24,
        ),
        "gpt2_quick_gelu": (gpt2(n_embd=32, n_head=1, n_inner=52, activation_function="quick_gelu"), 19),
        "gpt2_pytorch_tanh": (
            gpt2(
                n_embd=56,
                n_head=7,
                activation_function="gelu_pytorch_tanh",
                scale_attn_by_inverse_layer_idx=True,
                layer_norm_epsilon=1e-3,
            ),
            33,
        ),
        "gpt2_unscaled": (gpt2(n_embd=36, n_head=9, scale_attn_weights=False, n_layer=3), 21),
        "llama_default": (llama(**sizes(48, 72), **heads(3, 3), rms_norm_eps=1e-5), 35),
        "llama_tied_gqa4": (llama(**sizes(64, 100), **heads(4, 1), **tied), 20),
        "llama_linear_gqa2": (
            llama(**sizes(60, 52), **heads(6, 3), attention_bias=True, **linear_rope(4.0)),
            40,
        ),
        "llama_llama3_gqa4": (
            llama(**sizes(48, 84), **heads(4, 1), head_dim=32, mlp_bias=True, **llama3_rope(64, 8, 1, 4, 5e5)),
            44,
        ),
        "llama_llama3_odd": (
            llama(**sizes(70, 60), **heads(5, 5), num_hidden_layers=3, **tied, **llama3_rope(24, 32, 1, 4, 1e4)),
            29,
        ),
        "mistral_window": (mistral(**sizes(40, 64), **heads(4, 2), head_dim=16, sliding_window=7), 41),
        "mistral_window_odd": (
            mistral(**sizes(54, 64), **heads(9, 3), sliding_window=17, num_hidden_layers=3, **tied),
            46,
        ),
        "mistral_full": (
            mistral(**sizes(48, 70), **heads(3, 1), sliding_window=None, **linear_rope(2.0)),
            18,
        ),
        "mistral_wide_window": (mistral(**sizes(32, 48), **heads(4, 4), sliding_window=100), 26),
        "qwen2_tied": (qwen2(**sizes(48, 80), **heads(6, 2), **tied), 31),
        "qwen2_odd": (qwen2(**sizes(56, 44), **heads(7, 7), rope_parameters={"rope_theta": 1e6}), 22),
        "qwen2_window": (
            qwen2(
                **sizes(64, 72),
                **heads(8, 2),
                num_hidden_layers=3,
                use_sliding_window=True,
                sliding_window=6,
                max_window_layers=1,
            ),
            34,
        ),
        "qwen2_llama3": (qwen2(**sizes(40, 56), **heads(2, 1), **llama3_rope(32, 4, 1, 4, 1e5)), 27),
        "qwen3_odd": (qwen3(**sizes(36, 60), **heads(5, 5), head_dim=16), 30),
        "qwen3_tied_gqa4": (
            qwen3(**sizes(44, 68), **heads(4, 1), head_dim=24, attention_bias=True, **tied),
            25,
        ),
        "qwen3_gqa2_linear": (
            qwen3(**sizes(72, 48), **heads(6, 3), head_dim=8, rms_norm_eps=1e-5, **linear_rope(8.0, 1e6)),
            39,
        ),
        "qwen3_layer_types": (
            qwen3(
                **sizes(48, 64),
                **heads(4, 2),
                head_dim=12,
                num_hidden_layers=4,
                use_sliding_window=True,
                sliding_window=9,
                layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            ),
            43,
        ),
        **newer_cases(),
        **family_cases(),
    }


def newer_cases() -> dict[str, tuple[Any, int]]:
    """The cases of phi3, smollm3, granite, olmo2, olmo3, gemma2, gemma3, ministral3, glm and glm4."""
    theta, two = {"rope_type": "default", "rope_theta": 1e4}, {"head_dim": 16, "num_hidden_layers": 2}
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 24.0],
    }
    by_layer_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": theta,
    }
    yarn_of_full = {"full_attention": yarn_rope(8, 8.0, 5e5)["rope_parameters"]}
    ministral_rope = yarn_rope(8, 16.0, 1e6, mscale=1.0, mscale_all_dim=1.0)["rope_parameters"]
    return {
        "phi3_window_odd": (
            small("Phi3", 54, 41, **heads(9, 3), sliding_window=7, rope_parameters={**theta}),
            19,
        ),
        "phi3_longrope": (
            small("Phi3", 48, 60, **heads(3, 1), rope_parameters={**longrope}, original_max_position_embeddings=16),
            21,
        ),
        "phi3_longrope_short": (
            small("Phi3", 48, 60, **heads(3, 3), rope_parameters={**longrope}, original_max_position_embeddings=128),
            21,
        ),
        "smollm3_odd": (
            small("SmolLM3", 60, 37, **heads(6, 2), num_hidden_layers=4, no_rope_layer_interval=2, mlp_bias=True),
            20,
        ),
        "granite_multipliers": (
            small(
                "Granite",
                48,
                52,
                **heads(6, 3),
                embedding_multiplier=12.0,
                residual_multiplier=0.22,
                attention_multiplier=0.125,
                logits_scaling=8.0,
                attention_bias=True,
            ),
            20,
        ),
        "olmo2_odd": (small("Olmo2", 70, 45, **heads(5, 5), attention_bias=True), 18),
        "olmo3_windows": (
            small(
                "Olmo3",
                96,
                44,
                **heads(6, 2),
                num_hidden_layers=4,
                sliding_window=5,
                rope_parameters={**yarn_of_full, "sliding_attention": {**theta, "rope_theta": 5e5}},
            ),
            22,
        ),
        "gemma2_odd": (
            small(
                "Gemma2",
                25,
                37,
                **heads(5, 1),
                **two,
                sliding_window=6,
                query_pre_attn_scalar=24,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=10.0,
            ),
            19,
        ),
        "gemma2_wide_heads": (
            small("Gemma2", 64, 48, **heads(2, 1), head_dim=256, sliding_window=9, tie_word_embeddings=False),
            17,
        ),
        "gemma3_odd": (
            small(
                "Gemma3Text",
                36,
                37,
                **heads(6, 2),
                head_dim=16,
                num_hidden_layers=7,
                sliding_window=4,
                tie_word_embeddings=False,
                rope_parameters=by_layer_type,
            ),
            21,
        ),
        "ministral3_positions": (
            small(
                "Ministral3",
                42,
                51,
                **heads(6, 2),
                **two,
                rope_parameters={**ministral_rope, "llama_4_scaling_beta": 0.5},
            ),
            21,
        ),
        "glm_odd": (small("Glm", 46, 35, **heads(6, 2), **two, eos_token_id=[2]), 19),
        "glm4_odd": (small("Glm4", 46, 35, **heads(6, 3), **two, eos_token_id=[2], attention_bias=False), 19),
        # The prompt within the original context, most of the continuation beyond.
        "phi3_longrope_crossing": (
            small("Phi3", 48, 60, **heads(3, 1), rope_parameters={**longrope}, original_max_position_embeddings=16),
            9,
        ),
        **mixture_cases(),
    }


def mixture_cases() -> dict[str, tuple[Any, int]]:
    """The cases of families with experts."""
    return {
        "mixtral_odd": (small("Mixtral", 45, 37, **heads(5, 1), head_dim=10, num_local_experts=3), 23),
        "mixtral_all": (small("Mixtral", 48, 20, **heads(4, 2), num_local_experts=2, sliding_window=6), 17),
        "qwen2_moe_shared": (
            small(
                "Qwen2Moe",
                56,
                30,
                **heads(4, 4),
                num_hidden_layers=4,
                num_experts=7,
                num_experts_per_tok=3,
                moe_intermediate_size=21,
                shared_expert_intermediate_size=33,
                decoder_sparse_step=2,
                mlp_only_layers=[3],
            ),
            19,
        ),
        "qwen3_moe_odd": (
            small(
                "Qwen3Moe",
                44,
                30,
                **heads(6, 3),
                head_dim=14,
                num_experts=11,
                num_experts_per_tok=4,
                moe_intermediate_size=19,
                norm_topk_prob=True,
            ),
            25,
        ),
        "qwen3_moe_one": (
            small(
                "Qwen3Moe",
                40,
                30,
                **heads(2, 1),
                head_dim=20,
                num_experts=5,
                num_experts_per_tok=1,
                moe_intermediate_size=24,
                attention_bias=True,
            ),
            18,
        ),
        "olmoe_odd": (small("Olmoe", 42, 27, **heads(3, 3), num_experts=6, num_experts_per_tok=2), 21),
        "gpt_oss_odd": (
            small(
                "GptOss",
                45,
                37,
                **heads(6, 2),
                head_dim=10,
                num_local_experts=5,
                num_experts_per_tok=2,
                sliding_window=7,
                **yarn_rope(8, 32.0, 150_000.0, truncate=False),
            ),
            17,
        ),
        "glm4_moe_groups": (
            small(
                "Glm4Moe",
                46,
                35,
                **heads(6, 2),
                head_dim=16,
                num_hidden_layers=3,
                n_routed_experts=9,
                n_group=3,
                topk_group=2,
                num_experts_per_tok=2,
                moe_intermediate_size=19,
                n_shared_experts=2,
                first_k_dense_replace=2,
                routed_scaling_factor=1.7,
                use_qk_norm=True,
                attention_bias=True,
            ),
            20,
        ),
        **latent_cases(),
    }


def latent_cases() -> dict[str, tuple[Any, int]]:
    """The cases of families with latent attention."""
    return {
        "deepseek_v2_odd": (
            small(
                "DeepseekV2",
                42,
                35,
                **heads(3, 3),
                q_lora_rank=None,
                kv_lora_rank=22,
                qk_rope_head_dim=6,
                qk_nope_head_dim=12,
                v_head_dim=13,
                n_routed_experts=5,
                num_experts_per_tok=2,
                moe_intermediate_size=19,
                n_shared_experts=2,
                first_k_dense_replace=1,
                routed_scaling_factor=1.3,
                **yarn_rope(16, 4.0, 10_000.0, mscale=0.707, mscale_all_dim=0.9),
            ),
            21,
        ),
        "deepseek_v2_groups": (
            small(
                "DeepseekV2",
                40,
                32,
                **heads(4, 4),
                q_lora_rank=18,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=12,
                v_head_dim=10,
                n_routed_experts=8,
                num_experts_per_tok=2,
                n_group=4,
                topk_group=2,
                topk_method="group_limited_greedy",
                moe_intermediate_size=17,
                n_shared_experts=1,
                attention_bias=True,
                mlp_bias=True,
            ),
            19,
        ),
        "deepseek_v3_odd": (
            small(
                "DeepseekV3",
                46,
                35,
                **heads(2, 2),
                q_lora_rank=20,
                kv_lora_rank=24,
                qk_rope_head_dim=10,
                qk_nope_head_dim=9,
                v_head_dim=15,
                n_routed_experts=6,
                n_group=3,
                topk_group=2,
                num_experts_per_tok=2,
                moe_intermediate_size=19,
                n_shared_experts=1,
                first_k_dense_replace=1,
                routed_scaling_factor=2.5,
                **yarn_rope(16, 4.0, 10_000.0, mscale=1.0, mscale_all_dim=1.0),
            ),
            18,
        ),
    }


def family_cases() -> dict[str, tuple[Any, int]]:
    """The cases of newer families. Append new ones: a case's index is the seed of its weights."""
    untied = {"tie_word_embeddings": False}
    return {
        "gemma_odd": (small("Gemma", 36, 37, **heads(3, 1), head_dim=14, attention_bias=True), 19),
        "cohere_norms": (
            small("Cohere", 60, 37, **heads(6, 2), use_qk_norm=True, logit_scale=0.25, attention_bias=True),
            20,
        ),
        "cohere2_windows": (
            small("Cohere2", 48, 41, **heads(4, 2), num_hidden_layers=4, sliding_window=5, logit_scale=0.5),
            22,
        ),
        "starcoder2_odd": (small("Starcoder2", 42, 51, **heads(3, 1), sliding_window=7), 19),
        "gpt_neox_odd": (
            small(
                "GPTNeoX",
                60,
                43,
                num_attention_heads=5,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            ),
            21,
        ),
        "gpt_neox_behind": (
            small(
                "GPTNeoX",
                48,
                30,
                num_attention_heads=3,
                use_parallel_residual=False,
                attention_bias=False,
                hidden_act="gelu_new",
            ),
            18,
        ),
        "olmo_clipped": (small("Olmo", 54, 35, **heads(9, 3), clip_qkv=0.9), 20),
        "seed_oss_odd": (small("SeedOss", 46, 37, **heads(6, 2), head_dim=14, attention_out_bias=True), 18),
        "exaone4_windows": (
            small(
                "Exaone4",
                60,
                35,
                **heads(6, 3),
                num_hidden_layers=4,
                sliding_window=6,
                **llama3_rope(16, 8, 1, 4, 1e5),
            ),
            23,
        ),
        "exaone4_full": (
            small(
                "Exaone4",
                40,
                26,
                **heads(4, 2),
                sliding_window=None,
                layer_types=["full_attention"] * 2,
                tie_word_embeddings=True,
            ),
            17,
        ),
        "ernie_odd": (small("Ernie4_5", 46, 37, **heads(6, 2), head_dim=14, use_bias=True), 19),
        "hunyuan_alpha": (
            small(
                "HunYuanDenseV1",
                42,
                35,
                **heads(6, 2),
                head_dim=10,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
            ),
            20,
        ),
        "internlm3_odd": (
            small(
                "InternLM3",
                48,
                37,
                **heads(6, 2),
                head_dim=12,
                attention_bias=True,
                mlp_bias=True,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            18,
        ),
        "apertus_odd": (small("Apertus", 48, 37, **heads(6, 2)), 19),
        "ernie_moe_odd": (
            small(
                "Ernie4_5_Moe",
                56,
                35,
                **heads(4, 2),
                num_hidden_layers=3,
                moe_num_experts=7,
                moe_k=3,
                moe_intermediate_size=19,
                use_bias=True,
                **untied,
            ),
            20,
        ),
        "granite_moe_shared": (
            small(
                "GraniteMoeShared",
                46,
                33,
                num_attention_heads=1,
                num_key_value_heads=1,
                num_local_experts=5,
                num_experts_per_tok=2,
                shared_intermediate_size=21,
                residual_multiplier=0.22,
                embedding_multiplier=12.0,
                attention_multiplier=0.125,
                logits_scaling=8.0,
            ),
            19,
        ),
        "granite_moe_square": (
            small("GraniteMoe", 40, 20, **heads(4, 2), num_local_experts=3, num_experts_per_tok=1),
            17,
        ),
        "phimoe_odd": (
            small(
                "Phimoe",
                48,
                25,
                **heads(4, 2),
                num_hidden_layers=1,
                num_local_experts=3,
                attention_bias=True,
                lm_head_bias=True,
                router_jitter_noise=0.3,
            ),
            13,
        ),
    }
