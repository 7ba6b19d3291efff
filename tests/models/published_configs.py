"""Fields of `config.json` as published models have them, with sizes of their own. Each has to load."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
_TAIL: dict[str, Any] = {"torch_dtype": "bfloat16", "transformers_version": "4.43.0", "rms_norm_eps": 1e-5}


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **_SIZES, **_TAIL, **fields}


def _llama(**fields: Any) -> dict[str, Any]:
    common = {"attention_bias": False, "hidden_act": "silu", "num_key_value_heads": 2, "pretraining_tp": 1}
    return _config("LlamaForCausalLM", "llama", **{**common, "tie_word_embeddings": False, **fields})


def _gpt2(**fields: Any) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 48, "n_head": 4, "n_layer": 2,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, **fields,
    }  # fmt: skip


_LLAMA3_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(),
    "distilgpt2": _gpt2(_num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
    "DialoGPT-small": _gpt2(task_specific_params={"conversational": {"max_length": 1000}}),
    "gpt2-chinese": _gpt2(
        gradient_checkpointing=False, n_inner=None, output_past=True, tokenizer_class="BertTokenizer"
    ),
    "Llama-2-7b-chat-hf": _llama(_name_or_path="x", rope_scaling=None, torch_dtype="float16"),
    "vicuna-7b-v1.5": _llama(max_length=4096, max_sequence_length=4096, pad_token_id=0, do_sample=True),
    "Llama-3.1-8B-Instruct": _llama(
        attention_dropout=0.0, mlp_bias=False, eos_token_id=[2, 3, 4], rope_scaling=_LLAMA3_ROPE, rope_theta=500000.0
    ),
    "unsloth Llama-3.2-1B": _llama(
        head_dim=16, pad_token_id=5, rope_scaling=_LLAMA3_ROPE, tie_word_embeddings=True, unsloth_fixed=True,
        unsloth_version="2025.1",
    ),
    "SmolLM2-135M": _llama(
        is_llama_config=True, rope_interleaved=False, rope_scaling=None, rope_theta=100000,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    ),
    "deepseek-coder": _llama(rope_scaling={"factor": 4.0, "type": "linear"}, rope_theta=100000),
    "Yarn-Llama-2": _llama(
        auto_map={"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
        rope_scaling={"factor": 32.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn"},
    ),
    "Mistral-7B-v0.1": _config(
        "MistralForCausalLM", "mistral", hidden_act="silu", num_key_value_heads=2, rope_theta=10000.0,
        sliding_window=4096, tie_word_embeddings=False,
    ),
    "Mistral-Nemo": _config(
        "MistralForCausalLM", "mistral", hidden_act="silu", num_key_value_heads=2, head_dim=32,
        attention_dropout=0.0, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
    ),
    "Qwen2.5-0.5B": _config(
        "Qwen2ForCausalLM", "qwen2", attention_dropout=0.0, hidden_act="silu", max_window_layers=24,
        num_key_value_heads=2, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, use_mrope=False,
        use_sliding_window=False,
    ),
    "Qwen2.5-7B-Instruct-1M": _config(
        "Qwen2ForCausalLM", "qwen2", attention_dropout=0.0, hidden_act="silu", max_window_layers=28,
        num_key_value_heads=2, rope_theta=10000000.0, sliding_window=1010000, use_sliding_window=False,
        dual_chunk_attention_config={"chunk_size": 4096, "local_size": 128, "original_max_position_embeddings": 4096},
    ),
    "Qwen3-0.6B": _config(
        "Qwen3ForCausalLM", "qwen3", attention_bias=False, attention_dropout=0.0, head_dim=32, hidden_act="silu",
        max_window_layers=28, num_key_value_heads=2, rope_scaling=None, rope_theta=1000000, sliding_window=None,
        tie_word_embeddings=True, use_sliding_window=False,
    ),
    "Phi-3-mini-4k": _config(
        "Phi3ForCausalLM", "phi3", attention_bias=False, attention_dropout=0.0, embd_pdrop=0.0, hidden_act="silu",
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, num_key_value_heads=4, resid_pdrop=0.0,
        original_max_position_embeddings=4096, pad_token_id=3, rope_scaling=None, rope_theta=10000.0,
        sliding_window=2047, tie_word_embeddings=False,
    ),
    "Phi-3-mini-128k": _config(
        "Phi3ForCausalLM", "phi3", hidden_act="silu", num_key_value_heads=4, original_max_position_embeddings=4096,
        rope_scaling={"long_factor": [1.1] * 8, "short_factor": [1.0] * 8, "type": "su"}, rope_theta=10000.0,
        sliding_window=262144, tie_word_embeddings=False,
    ),
    "Phi-4-mini": _config(
        "Phi3ForCausalLM", "phi3", full_attn_mod=1, hidden_act="silu", interpolate_factor=1, lm_head_bias=False,
        mlp_bias=False, num_key_value_heads=2, original_max_position_embeddings=4096, partial_rotary_factor=0.75,
        rope_scaling={"long_factor": [1.1] * 6, "short_factor": [1.0] * 6, "type": "longrope"}, rope_theta=10000.0,
        sliding_window=262144, tie_word_embeddings=True,
    ),
    "SmolLM3-3B": _config(
        "SmolLM3ForCausalLM", "smollm3", attention_bias=False, hidden_act="silu", layer_types=["full_attention"] * 4,
        max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0],
        num_key_value_heads=2, pretraining_tp=2, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
        use_sliding_window=False,
    ),
    "granite-3.1-2b": _config(
        "GraniteForCausalLM", "granite", attention_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0,
        hidden_act="silu", logits_scaling=8.0, mlp_bias=False, num_key_value_heads=2, residual_multiplier=0.22,
        rope_scaling=None, rope_theta=5000000.0, tie_word_embeddings=True,
    ),
    "OLMo-2-7B": _config(
        "Olmo2ForCausalLM", "olmo2", attention_bias=False, hidden_act="silu", num_key_value_heads=4, rope_scaling=None,
        rope_theta=500000, tie_word_embeddings=False,
    ),
    "Olmo-3-7B": _config(
        "Olmo3ForCausalLM", "olmo3", attention_bias=False, hidden_act="silu", num_key_value_heads=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], rope_theta=500000, sliding_window=4096,
        rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        tie_word_embeddings=False,
    ),
    "gemma-2-2b": _config(
        "Gemma2ForCausalLM", "gemma2", attn_logit_softcapping=50.0, cache_implementation="hybrid",
        final_logit_softcapping=30.0, head_dim=32, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", num_key_value_heads=2, query_pre_attn_scalar=256, rope_theta=10000.0,
        sliding_window=4096, sliding_window_size=4096,
    ),
    "gemma-3-1b": _config(
        "Gemma3ForCausalLM", "gemma3_text", attention_bias=False, attn_logit_softcapping=None,
        cache_implementation="hybrid", final_logit_softcapping=None, head_dim=32, hidden_activation="gelu_pytorch_tanh",
        num_key_value_heads=1, query_pre_attn_scalar=256, rope_local_base_freq=10000, rope_scaling=None,
        rope_theta=1000000, sliding_window=512, sliding_window_pattern=6,
    ),
    "GLM-4-9B-0414": _config(
        "Glm4ForCausalLM", "glm4", attention_bias=False, attention_dropout=0.0, head_dim=32, hidden_act="silu",
        num_key_value_heads=2, pad_token_id=5, partial_rotary_factor=0.5, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "GLM-4.5-Air": _config(
        "Glm4MoeForCausalLM", "glm4_moe", attention_bias=True, attention_dropout=0.0, first_k_dense_replace=1,
        head_dim=32, hidden_act="silu", moe_intermediate_size=48, n_group=1, n_routed_experts=16, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=8, num_key_value_heads=2, num_nextn_predict_layers=1, pad_token_id=5,
        partial_rotary_factor=0.5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.0,
        tie_word_embeddings=False, topk_group=1, use_qk_norm=False,
    ),
    "DeepSeek-V2-Lite": _config(
        "DeepseekV2ForCausalLM", "deepseek_v2", attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001,
        first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=512, moe_intermediate_size=48, moe_layer_freq=1,
        n_group=1, n_routed_experts=16, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6,
        num_key_value_heads=4, pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rope_scaling={
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False,
        topk_group=1, topk_method="greedy", v_head_dim=128,
    ),
    "DeepSeek-V3": _config(
        "DeepseekV3ForCausalLM", "deepseek_v3", attention_bias=False, attention_dropout=0.0, ep_size=1,
        first_k_dense_replace=3, hidden_act="silu", kv_lora_rank=512, moe_intermediate_size=48, moe_layer_freq=1,
        n_group=8, n_routed_experts=32, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
        num_key_value_heads=4, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rope_scaling={
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4,
        topk_method="noaux_tc", v_head_dim=128,
    ),
    "Kimi-K2-Instruct": _config(
        "DeepseekV3ForCausalLM", "kimi_k2", attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001,
        first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=512, moe_intermediate_size=48, moe_layer_freq=1,
        n_group=1, n_routed_experts=48, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
        num_key_value_heads=4, num_nextn_predict_layers=0, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rope_scaling={
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        rope_theta=50000.0, routed_scaling_factor=2.827, scoring_func="sigmoid", seq_aux=True,
        tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc", v_head_dim=128,
    ),
    "GLM-4.7-Flash": _config(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", attention_bias=False, attention_dropout=0.0, first_k_dense_replace=1,
        hidden_act="silu", kv_lora_rank=512, moe_intermediate_size=48, n_group=1, n_routed_experts=16,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=4, num_key_value_heads=4,
        num_nextn_predict_layers=1, partial_rotary_factor=1.0, q_lora_rank=768, qk_nope_head_dim=192,
        qk_rope_head_dim=64, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8,
        tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc", v_head_dim=256,
    ),
    "Mistral-4": _config(
        "Mistral4ForCausalLM", "mistral4", attention_bias=False, attention_dropout=0.0, first_k_dense_replace=0,
        head_dim=128, hidden_act="silu", kv_lora_rank=256, moe_intermediate_size=48, n_group=1, n_routed_experts=16,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=4, num_key_value_heads=4, pretraining_tp=1,
        q_lora_rank=1024, qk_head_dim=128, qk_nope_head_dim=64, qk_rope_head_dim=64, rope_interleave=True,
        rope_parameters={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 1048576, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        routed_scaling_factor=1.0, tie_word_embeddings=False, topk_group=1, v_head_dim=128,
    ),
    "Qwen3-Coder-30B-A3B": _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", decoder_sparse_step=1, head_dim=32, hidden_act="silu",
        max_window_layers=28, mlp_only_layers=[], moe_intermediate_size=48, norm_topk_prob=True, num_experts=16,
        num_experts_per_tok=8, num_key_value_heads=2, output_router_logits=False, qkv_bias=False, rope_scaling=None,
        rope_theta=10000000, router_aux_loss_coef=0.0, shared_expert_intermediate_size=0, sliding_window=None,
        tie_word_embeddings=False, use_qk_norm=True, use_sliding_window=False,
    ),
    "DeepSeek-R1-0528-Qwen3-8B": _config(
        "Qwen3ForCausalLM", "qwen3", attention_bias=False, head_dim=32, hidden_act="silu", max_window_layers=36,
        num_key_value_heads=2, rope_theta=1000000, sliding_window=None, tie_word_embeddings=False,
        rope_scaling={
            "attn_factor": 0.8782488562869419, "factor": 4.0, "original_max_position_embeddings": 32768,
            "rope_type": "yarn",
        },
        use_sliding_window=False,
    ),
    "llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
        "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.36.0.dev0",
        "vision_config": {
            "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
    },
    "gpt-oss-20b": _config(
        "GptOssForCausalLM", "gpt_oss", attention_bias=True, attention_dropout=0.0, experts_per_token=4, head_dim=32,
        hidden_act="silu", initial_context_length=4096, layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts_per_tok=4, num_key_value_heads=2, num_local_experts=32, output_router_logits=False, pad_token_id=5,
        quantization_config={
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
            ],
            "quant_method": "mxfp4",
        },
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
    ),
    "Qwen3-VL-30B-A3B": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl_moe",
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
            "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144,
            "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "use_cache": True, "vocab_size": 151936,
        },
        "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
            "model_type": "qwen3_vl_moe", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653, "vision_start_token_id": 151652,
    },
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
        "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000,
        "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True,
        "use_sliding_window": False, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2, "temporal_patch_size": 2,
        },
        "vocab_size": 152064,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "gemma-2b-it": _config(
        "GemmaForCausalLM", "gemma", attention_bias=False, attention_dropout=0.0, head_dim=32, hidden_act="gelu",
        hidden_activation=None, num_key_value_heads=1, pad_token_id=0, rope_scaling=None, rope_theta=10000.0,
    ),
    "c4ai-command-r-v01": {
        "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "model_max_length": 131072, "model_type": "cohere",
        "num_key_value_heads": 4, "pad_token_id": 0, "rope_theta": 8000000.0, "torch_dtype": "float16",
        "use_qk_norm": False, **_SIZES,
    },
    "c4ai-command-r7b-12-2024": {
        "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "cache_implementation": "hybrid", "head_dim": 16, "hidden_act": "silu", "layer_norm_eps": 1e-05,
        "layer_switch": 4, "logit_scale": 0.25, "model_type": "cohere2", "num_key_value_heads": 2,
        "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "position_embedding_type": "rope_gptj",
        "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "torch_dtype": "bfloat16", "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "use_qk_norm": False,
        **_SIZES,
    },
    "starcoder2-3b": {
        "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
        "attention_softmax_in_fp32": True, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-05, "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05,
        "norm_type": "layer_norm", "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096, "use_bias": True,
        **_SIZES,
    },
    "pythia-160m": {
        "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "layer_norm_eps": 1e-05,
        "model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "use_parallel_residual": True, "attention_probs_dropout_prob": 0,
        "hidden_dropout_prob": 0, **_SIZES,
    },
    "OLMo-7B-0424-hf": {
        "architectures": ["OlmoForCausalLM"], "attention_bias": False, "clip_qkv": 8.0, "hidden_act": "silu",
        "model_type": "olmo", "num_key_value_heads": 4, "pad_token_id": 1, "pretraining_tp": 1, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32", **_SIZES,
    },
    "Seed-OSS-36B": _config(
        "SeedOssForCausalLM", "seed_oss", attention_bias=True, attention_dropout=0.1, attention_out_bias=False,
        head_dim=16, hidden_act="silu", mlp_bias=False, num_key_value_heads=2, pad_token_id=1, residual_dropout=0.1,
        rope_scaling={"rope_type": "default"}, rope_theta=10000000.0, tie_word_embeddings=False,
    ),
    "EXAONE-4.0-32B": _config(
        "Exaone4ForCausalLM", "exaone4", attention_dropout=0.0, head_dim=16, hidden_act="silu", num_key_value_heads=2,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], pad_token_id=0, rope_scaling={
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=1000000, sliding_window=4096, sliding_window_pattern="LLLG", tie_word_embeddings=False,
    ),
    "ERNIE-4.5-0.3B-PT": _config(
        "Ernie4_5_ForCausalLM", "ernie4_5", head_dim=16, hidden_act="silu", num_key_value_heads=2, pad_token_id=0,
        rope_theta=500000.0, tie_word_embeddings=True, use_bias=False,
    ),
    "ERNIE-4.5-21B-A3B-PT": _config(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", hidden_act="silu", moe_capacity=[64, 64, 64], moe_gate="topk",
        moe_intermediate_size=48, moe_k=6, moe_layer_end_index=3, moe_layer_interval=1, moe_layer_start_index=1,
        moe_num_experts=64, moe_num_shared_experts=2, moe_use_aux_free=True, num_key_value_heads=2,
        num_nextn_predict_layers=1, pad_token_id=0, rope_scaling=None, rope_theta=500000, tie_word_embeddings=True,
        use_bias=False,
    ),
    "granite-3.1-1b-a400m": _config(
        "GraniteMoeForCausalLM", "granitemoe", attention_bias=False, attention_dropout=0.1, attention_multiplier=0.015,
        embedding_multiplier=12.0, hidden_act="silu", logits_scaling=6.0, num_experts_per_tok=8, num_key_value_heads=2,
        num_local_experts=32, output_router_logits=False, pad_token_id=0, residual_multiplier=0.22, rope_scaling=None,
        rope_theta=1500000.0, router_aux_loss_coef=0.0, tie_word_embeddings=True,
    ),
    "Phi-3.5-MoE": _config(
        "PhiMoEForCausalLM", "phimoe", attention_bias=True, attention_dropout=0.0, hidden_act="silu",
        hidden_dropout=0.0, input_jitter_noise=0.01, lm_head_bias=True, num_experts_per_tok=2, num_key_value_heads=2,
        num_local_experts=16, original_max_position_embeddings=4096, output_router_logits=False, rope_scaling={
            "long_factor": [1.0] * 8, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 8, "short_mscale": 1.243163121016122, "type": "longrope",
        },
        rope_theta=10000.0, router_aux_loss_coef=0.0, router_jitter_noise=0.01, sliding_window=8192,
        tie_word_embeddings=False,
    ),
    "Hunyuan-7B-Instruct": _config(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", add_classification_head=False, attention_bias=False,
        attention_dropout=0.1, attention_head_dim=16, cla_share_factor=2, class_num=0, dense_list=[64, 0],
        head_dim=16, hidden_act="silu", im_end_id=5, im_newline_id=11, im_start_id=4, mask_init_id=12, mlp_bias=False,
        norm_type="rms", num_key_value_heads=2, org_vocab_size=100, pad_id=5, pad_token_id=5, pool_type="last",
        pretraining_tp=1, rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        rope_theta=10000.0, sep_token_id=5, text_end_id=7, text_start_id=6, tie_word_embeddings=True, use_cla=False,
        use_qk_norm=True, use_rotary_pos_emb=True, eod_token_id=3,
    ),
    "internlm2_5-7b-chat": _config(
        "InternLM2ForCausalLM", "internlm2", attn_implementation="eager", bias=False, hidden_act="silu",
        num_key_value_heads=2, pad_token_id=2, rope_scaling={"factor": 2.0, "type": "dynamic"}, rope_theta=1000000,
        tie_word_embeddings=False, pretraining_tp=1,
    ),
    "internlm3-8b-instruct": _config(
        "InternLM3ForCausalLM", "internlm3", attention_dropout=0.0, bias=False, head_dim=16, hidden_act="silu",
        num_key_value_heads=2, pad_token_id=2, qkv_bias=False, rope_scaling={"factor": 6.0, "rope_type": "dynamic"},
        rope_theta=50000000, tie_word_embeddings=False,
    ),
    "Apertus-8B": _config(
        "ApertusForCausalLM", "apertus", attention_bias=False, attention_dropout=0.0, hidden_act="xielu",
        hidden_dropout=0.0, mlp_bias=False, num_key_value_heads=2, pad_token_id=3, post_norm=False, qk_norm=True,
        rope_scaling={
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3", "type": "llama3",
        },
        rope_theta=12000000, tie_word_embeddings=False,
    ),
    "granite-4.0-h-tiny": _config(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", attention_bias=False, attention_dropout=0.0,
        attention_multiplier=0.0078125, embedding_multiplier=12, hidden_act="silu", init_method="mup",
        layer_types=["mamba", "mamba", "mamba", "attention"], logits_scaling=6, mamba_chunk_size=256,
        mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=16, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1,
        mamba_n_heads=8, mamba_proj_bias=False, normalization_function="rmsnorm", num_experts_per_tok=6,
        num_key_value_heads=2, num_local_experts=64, output_router_logits=False, pad_token_id=0,
        position_embedding_type="nope", residual_multiplier=0.22, rope_scaling=None, rope_theta=10000,
        router_aux_loss_coef=0.0, shared_intermediate_size=48, tie_word_embeddings=True,
    ),
    "granite-4.0-350m": _config(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", attention_bias=False, attention_multiplier=0.015625,
        embedding_multiplier=12, hidden_act="silu", layer_types=["attention"] * 4, logits_scaling=4, mamba_d_conv=4,
        mamba_d_head=16, mamba_d_state=256, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=8, num_experts_per_tok=0,
        num_key_value_heads=2, num_local_experts=0, position_embedding_type="rope", residual_multiplier=0.263,
        rope_scaling=None, rope_theta=10000000, shared_intermediate_size=48, tie_word_embeddings=True,
    ),
    "LFM2-1.2B": _config(
        "Lfm2ForCausalLM", "lfm2", block_auto_adjust_ff_dim=True, block_dim=64, block_ff_dim=96,
        block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=256, block_norm_eps=1e-5,
        block_out_init_scale=1.0, block_use_swiglu=True, block_use_xavier_init=True, conv_L_cache=3,
        conv_bias=False, conv_dim=64, conv_dim_out=64, conv_use_xavier_init=True, full_attn_idxs=[1, 3], norm_eps=1e-5,
        num_heads=4,
        num_key_value_heads=2, pad_token_id=0, rms_norm_eps=None, rope_theta=1000000.0, use_pos_enc=True,
    ),
    "LFM2-8B-A1B": _config(
        "Lfm2MoeForCausalLM", "lfm2_moe", conv_L_cache=3, conv_bias=False, moe_intermediate_size=48,
        layer_types=["conv", "conv", "full_attention", "conv"], norm_eps=1e-5, norm_topk_prob=True, num_dense_layers=2,
        num_experts=32, num_experts_per_tok=4, num_key_value_heads=2, pad_token_id=0, rms_norm_eps=None,
        rope_theta=1000000.0, routed_scaling_factor=1.0, use_expert_bias=True,
    ),
}  # fmt: skip
