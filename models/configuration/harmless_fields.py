"""Fields of `config.json` that change no logits, whatever the architecture.

A field that no family reads is refused by its name, unless it stands here: in `HARMLESS`, or in `NEUTRAL` with one
of the values that switch its feature off. A null means that the field is absent, and is always harmless.

The names are those that transformers 4.30 to 5.23 write for the families that the engine runs, and those that
published models carry. A name that can change the arithmetic of any architecture does not belong in `HARMLESS`.
"""

from __future__ import annotations

from typing import Any

# Where the file and the model come from.
_PROVENANCE = {
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "base_model_name_or_path", "custom_pipelines",
    "language", "license", "model_name", "model_type", "name_or_path", "tokenizer_class", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version",
}  # fmt: skip

# Training: dropouts, initial values, losses.
_TRAINING = {
    "attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "attn_pdrop", "aux_loss_alpha",
    "classifier_bias", "classifier_dropout", "classifier_dropout_prob", "dropout", "embd_pdrop",
    "embedding_dropout", "ffn_dropout", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob",
    "initializer_range", "loss_type", "output_router_logits", "resid_dropout", "resid_pdrop",
    "router_aux_loss_coef", "router_jitter_noise", "seq_aux", "tf_legacy_loss", "use_liger_kernel",
}  # fmt: skip

# How transformers, or another engine, runs the model.
_EXECUTION = {
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_experts_implementation_internal", "_flash_attn_2_enabled", "_output_attentions", "attn_implementation",
    "cache_implementation", "chunk_size_feed_forward", "ep_size", "experts_implementation", "flash_attention",
    "ignore_keys_at_rope_validation", "model_parallel", "output_attentions", "output_hidden_states", "output_past",
    "pretraining_tp", "reorder_and_upcast_attn", "return_dict", "tie_encoder_decoder", "tie_last_hidden_states",
    "torchscript", "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attn", "use_flashattn",
    "use_return_dict", "use_sdpa", "xla_device",
}  # fmt: skip

# Lengths that are notes; `max_position_embeddings` is the one that counts.
_LENGTHS = {"max_sequence_length", "model_max_length", "n_ctx", "seq_len", "seq_length"}

# Heads for other tasks, and their labels.
_TASKS = {
    "_num_labels", "finetuning_task", "id2label", "is_decoder", "is_llama_config", "label2id", "num_labels",
    "predict_special_tokens", "problem_type", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params",
}  # fmt: skip

# Generation settings of older files. The engine takes a model's recommended sampling from generation_config.json.
_GENERATION = {
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_ids", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "mask_token_id", "max_length", "max_new_tokens",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "prefix", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id",
}  # fmt: skip

HARMLESS = frozenset().union(_PROVENANCE, _TRAINING, _EXECUTION, _LENGTHS, _TASKS, _GENERATION)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attn_output_gate": (False,),
    "embedding_multiplier": (1,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "n_special": (0,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": ([],),
    "norm_after": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "partial_rotary_factor": (1,),
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "qk_layernorm": (False,),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rope_scaling": ({},),
    "rope_parameters": ({},),
    "rotary_pct": (1,),
    "scale_emb": (1,),
    "sparsity_config": ({},),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}


def is_harmless(name: str, value: Any) -> bool:
    """True if an unread field changes nothing."""
    return value is None or name in HARMLESS or value in NEUTRAL.get(name, ())
