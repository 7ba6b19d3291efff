"""Fields of `config.json` that change no logits, whatever the architecture, at the top and in the objects below.

A field that no family reads is refused by its name, unless it is harmless in one of three ways:

- its name marks a note, or a setting of training, of other tasks or of running the model (`HARMLESS`: the names
  that transformers 4.30 to 5.24 write and published models carry; `_PATTERNS`: patterns of similar names);
- its value switches its feature off: false, an empty string or list, an object of nulls; 0 of a count, 1 of a factor.
  This excludes parts that every decoder has (a norm, a rotation, a gate ...), whose absence would change the model,
  unless `NEUTRAL` lists the field;
- it is null, which means absent.

A name that can change the arithmetic of any architecture belongs neither in `HARMLESS` nor in `_PATTERNS`.
"""

from __future__ import annotations

import re
from typing import Any

# The source of the file and the model.
_PROVENANCE = {
    "architectures", "auto_map", "custom_pipelines", "model_name", "model_type", "name_or_path",
    "is_composition", "transformers.js_config",
}  # fmt: skip

# Training: dropouts, initial values, losses.
_TRAINING = {
    "ignore_index", "neftune_noise_alpha", "output_router_logits", "router_jitter_noise", "seq_aux",
}  # fmt: skip

# How transformers, or another engine, runs the model.
_EXECUTION = {
    "cache_implementation", "chunk_size_feed_forward", "ignore_keys_at_rope_validation",
    "keys_to_ignore_at_inference", "low_cpu_mem_usage", "model_parallel", "padding_side",
    "output_attentions", "output_hidden_states", "output_past", "pretraining_tp", "reorder_and_upcast_attn",
    "return_dict", "tie_encoder_decoder", "tie_last_hidden_states", "torchscript", "use_bfloat16",
    "use_cache", "use_return_dict", "use_sdpa", "xla_device",
}  # fmt: skip

# Lengths that are notes; `max_position_embeddings` is the one that counts.
_LENGTHS = {
    "max_seq_len", "max_seq_length", "max_sequence_length", "model_max_length", "n_ctx", "seq_len", "seq_length",
}  # fmt: skip

# Heads for other tasks, and their labels.
_TASKS = {
    "finetuning_task", "id2label", "is_decoder", "is_llama_config", "label2id", "predict_special_tokens",
    "problem_type", "sbert_ce_default_activation_function",
}  # fmt: skip

# Generation settings of older files. The engine takes a model's recommended sampling from generation_config.json.
_GENERATION = {
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty", "max_length",
    "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "prefix", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip

HARMLESS = frozenset().union(_PROVENANCE, _TRAINING, _EXECUTION, _LENGTHS, _TASKS, _GENERATION)

_PATTERNS = re.compile(
    "|".join((
        r"_(?!sliding).*",  # written by transformers and tools for themselves
        r".*(dropout|pdrop|drop_path|drop_rate|layerdrop).*|.*(^|_)(initializer|init)(_.*|$)|.*(^|_)loss(_.*|$)",
        r"(aux|router_aux|router_z|z)_.*coef.*|label_smoothing.*|gradient_checkpointing.*|(train|training|freeze|tune)_.*",
        r"(.*_)?(dtype|in_fp32)|(bf|fp|tf)(16|32)|.*(attn|attention|experts)_implementation.*|.*flash_?(attn|attention).*",
        r"(use_|enable_)?(fused?|triton|cuda|deepspeed|xformers|torch_compile|liger|kernels?)(_.*|$)",
        r"(base_model_)?(ep|tp|pp|dp|fsdp)_(size|plan|rank|degree)",
        r"(transformers|torch|unsloth|trl|axolotl|accelerate|peft|diffusers|model|sentence_transformers)_version",
        r"(unsloth|sentence_transformers).*",
        r"(license|language|base_model|model_card|author|description|homepage|created|dataset|tags|finetun|task)(_.*|$)",
        r"(tokenizer|summary|classifier|num_labels)(_.*|$)|.*_token_(id|ids|index)|(bos|eos|pad|unk)_token",
    ))
)  # fmt: skip

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_factor": (1,),
    "attn_output_gate": (False,),
    "full_attn_mod": (1,),
    "is_causal": (True,),
    "norm_after": (False,),
    "partial_rotary_factor": (1,),
    "position_embedding_xdrope": (False,),
    "qk_layernorm": (False,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_emb": (1,),
    "use_qk_norm": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
}
"""Values that switch a feature off where the rules below would not say so."""

_EVERYBODYS = re.compile(r".*(norm|rope|rotary|causal|gate|glu|residual|scal|topk|top_k|position).*")
_FACTORS = re.compile(r".*(multiplier|factor|scal(e|es|ing)|_mod|theta|eps|epsilon|temperature|ratio|beta)")
_NO_FACTOR_OF_ITS_OWN = re.compile(r".*(att|softmax|query|key|depth|theta|eps|beta).*")
"""Factors that stand in another's place: 1 is no neutral scale of scores, nor of what is divided by the depth."""


def is_harmless(name: str, value: Any) -> bool:
    """True if an unread field changes nothing."""
    if value is None or name in HARMLESS or _PATTERNS.fullmatch(name) or value in NEUTRAL.get(name, ()):
        return True
    if isinstance(value, dict):
        return all(each is None for each in value.values())
    if isinstance(value, str | list):
        return not value
    if value is False:
        return not _EVERYBODYS.fullmatch(name)
    if value is True or not isinstance(value, int | float):
        return False
    if _FACTORS.fullmatch(name):
        return value == 1 and not _NO_FACTOR_OF_ITS_OWN.fullmatch(name)
    return value == 0
