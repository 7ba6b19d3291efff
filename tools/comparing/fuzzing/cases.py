"""Random configurations for `fuzz_models.py`: a family's fields, prompts, and engine settings.

A case is plain data (JSON): `family`, `fields` of transformers' configuration class, `dtype`, `weights` (a seed),
`prompts` and `num_new`, `max_model_len`, and `runs`: a device and the engine's settings each. `fuses_experts`: all
experts' maps of a kind are saved as one tensor; `notes`: fields that change nothing, added to every config of the
folder; `texts`: the tokenizer's training and test texts. Families that read pictures get texts only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tools.comparing.fuzzing.draw import Draw, Fields
from tools.comparing.fuzzing.encoder_families import draw_pooled, pooled_families
from tools.comparing.fuzzing.latent_families import LATENT
from tools.comparing.fuzzing.later_families import LATER
from tools.comparing.fuzzing.picture_families import GEMMA4, PICTURE_TOKENS, PICTURES, with_pictures
from tools.comparing.fuzzing.state_families import STATES

Case = dict[str, Any]


def draw_case(rng: random.Random, family: str, emulated: list[str], is_small: bool = False) -> Case:
    """A case of a family; it may run on one of the `emulated` devices. A small one has few logits, which are stored."""
    device = rng.choice(emulated) if emulated else None
    is_short = is_small or device is not None  # emulated steps are slow
    num_new = rng.randint(4, 6 if is_short else 14)
    least, most = (8, 24) if is_small else (1, 60)
    lengths = [rng.randint(least, most) for _ in range(2 if is_short else rng.randint(2, 4))]
    fields = _ALL[family][2](Draw(rng, device is not None))
    text = fields.get("text_config", fields)
    if is_small:
        text["vocab_size"] = rng.randint(23, 71)
        names = [f"{kind}_token_{end}" for kind in ("image", "boi", "eoi") for end in ("index", "id")]
        fields |= {name: text["vocab_size"] - 1 - place for place, name in enumerate(names) if fields.get(name)}
    if rng.random() < 0.2:  # the class's default, which may lie outside of the vocabulary
        fields = {name: value for name, value in fields.items() if name not in ("bos_token_id", "eos_token_id")}
    vocab = text["vocab_size"]
    shared = [rng.randrange(vocab) for _ in range(max(lengths) - 1)]
    prompts = []
    for length in lengths:  # some share a prefix
        kept = rng.choice((0, length // 2, length - 1))
        prompts.append(shared[:kept] + [rng.randrange(vocab) for _ in range(length - kept)])
    dtype = rng.choice(("float32", "float32", "bfloat16", "float16"))
    max_model_len = max(lengths) + num_new + rng.randint(0, 8)
    groups = text["num_hidden_layers"] if text.get("sliding_window") else 1  # of pages, at most
    has_states = family in STATES
    if family in POOLED:
        return _pooled_case(rng, family, fields, is_short, device)
    runs = [_draw_run(rng, "cpu", max_model_len, groups, is_tight, has_states) for is_tight in (False, True)]
    if device is not None:
        runs.append(_draw_run(rng, device, max_model_len, groups, rng.random() < 0.6, has_states))
    if whole := fields.get("mm_tokens_per_image") or PICTURE_TOKENS * bool(text.get("use_bidirectional_attention")):
        for run in runs:  # a step fits a whole picture beside all decodes
            if "max_num_batched_tokens" in run:
                run["max_num_batched_tokens"] = max(run["max_num_batched_tokens"], whole + run["max_num_seqs"])
    return {
        "family": family, "fields": fields, "dtype": dtype, "weights": rng.randrange(1 << 16), "prompts": prompts,
        "num_new": num_new, "max_model_len": max_model_len, "runs": runs, "fuses_experts": rng.random() < 0.5,
        "notes": {name: rng.choice(values) for name, values in _NOTES.items() if rng.random() < 0.3},
        "texts": rng.sample(_TEXTS, 2),
    }  # fmt: skip


def draw_forward(rng: random.Random, family: str, devices: list[str]) -> Case:
    """A case of a family in float32 whose forward pass alone runs, on all of the `devices`."""
    fields = _ALL[family][2](Draw(rng, is_emulated=True))
    vocab = fields.get("text_config", fields)["vocab_size"]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, most))] for most in (70, 20)]
    run = {"block_size": 16, "exact": rng.random() < 0.25}
    case = {
        "family": family, "fields": fields, "dtype": "float32", "weights": rng.randrange(1 << 16), "prompts": prompts,
        "num_new": 0, "runs": [{"device": device, **run} for device in devices], "fuses_experts": rng.random() < 0.5,
    }  # fmt: skip
    return with_pictures(rng, case) if family in ("gemma4_vision", "gemma4_unified") else case


def _pooled_case(rng: random.Random, family: str, fields: Fields, is_short: bool, device: str | None) -> Case:
    """A case of a family that generates nothing. Its engines have room for a whole prompt in each step."""
    case = draw_pooled({"family": family, "fields": fields, "weights": rng.randrange(1 << 16)}, rng, is_short)
    longest = max(map(len, case["prompts"]))
    case |= {"dtype": rng.choice(("float32", "float32", "bfloat16", "float16")), "num_new": 0, "runs": []}
    for name in ("cpu", "cpu", *([device] if device else [])):
        block_size = rng.choice((8, 16, 32) if name == "cpu" else (16, 16, 16, 8, 32))
        tight = {"max_num_seqs": rng.randint(1, 4), "max_num_batched_tokens": longest + rng.choice((0, 7, 100))}
        case["runs"].append(
            {"device": name, "block_size": block_size, "exact": rng.random() < 0.5, **(tight if case["runs"] else {})}
        )
    return {**case, "max_model_len": longest, "fuses_experts": rng.random() < 0.5}


_NOTES: dict[str, tuple[Any, ...]] = {
    "_name_or_path": ("", "somebody/something"), "torch_dtype": ("float16", "bfloat16", "float32"),
    "_attn_implementation_autoset": (True, False), "add_cross_attention": (False,), "top_p": (1.0, 0.9),
    "id2label": ({"0": "LABEL_0", "1": "LABEL_1"},), "return_dict": (True,), "use_bfloat16": (True, False),
    "attention_probs_dropout_prob": (0.0, 0.1), "initializer_factor": (1.0, 0.02), "training_stage": (2,),
    "gradient_checkpointing": (True, False), "use_flash_attn": (True, False), "unsloth_version": ("2025.1",),
    "pretraining_tp": (1, 2), "an_extra_head": (False,), "num_extra_layers": (0,), "extra_multiplier": (1.0,),
    "extra_names": ([], None), "sep_token_id": (None, 3), "problem_type": (None, "regression"),
    "mask_token_index": (5,), "num_experts_extra": (0, None),
}  # fmt: skip
_TEXTS = (
    "Hello, world", "the quick brown fox jumps over the lazy dog", "  spaces\t and\nlines ", "1234567890", "",
    "naïve café ☕", "</s>", "def f(x):\n    return x**2\n", "日本語のテキスト", "a<pad>b",
)  # fmt: skip


def classes_of(family: str) -> tuple[str, str]:
    """transformers' configuration class and model class."""
    return _ALL[family][0], _ALL[family][1]


def has_choice(fields: Fields) -> bool:
    """Whether a model's config has a choice of experts: in 16 bits rounding may change it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = next((fields[name] for name in ("num_experts_per_tok", "top_k_experts", "moe_k") if fields.get(name)), 0)
    return any(chosen < (fields.get(name) or 0) for name in names)


def families() -> list[str]:
    """Those that generate text."""
    return list(_FAMILIES)


def _draw_run(
    rng: random.Random, device: str, max_model_len: int, groups: int, is_tight: bool, has_states: bool = False
) -> Fields:
    """A roomy run in whole steps, or a tight one: chunks, few blocks, few sequences, preemption."""
    block_size = rng.choice((8, 16, 32) if device == "cpu" else (16, 16, 16, 16, 8, 32))
    least = groups * -(-max_model_len // block_size) + 2 * has_states  # blocks of the longest request
    run: Fields = {
        "device": device,
        "block_size": block_size,
        "decode_graphs": rng.choice(("on", "off")),
        "overlap": rng.choice(("on", "off")),
        "exact": rng.random() < 0.5,
        "enable_prefix_caching": rng.random() < 0.7,
        "max_num_seqs": 8,
    }
    if not is_tight:
        return {**run, "num_blocks": 4 * least}
    run["max_num_batched_tokens"] = rng.choice((1, 5, 8, 17, 40))
    run["num_blocks"] = least + rng.randint(1, 2)
    if rng.random() < 0.3:
        return {**run, "preemption": "swap", "swap_space_bytes": 8 << 20}
    return {**run, "preemption": "recompute"}


def _gpt2(draw: Draw) -> Fields:
    heads = draw.integer(1, 7)
    return {
        "vocab_size": draw.integer(30, 420),
        "n_positions": draw.integer(128, 160),
        "n_layer": draw.integer(1, 2 if draw.is_emulated else 4),
        "n_head": heads,
        "n_embd": heads * draw.choice((8, 16) if draw.is_emulated else (8, 16, 32, draw.integer(2, 22))),
        "n_inner": draw.choice((None, draw.integer(5, 300))),
        "activation_function": draw.choice(("gelu_new", "gelu", "quick_gelu", "gelu_pytorch_tanh")),
        "scale_attn_weights": draw.flip(0.8),
        "scale_attn_by_inverse_layer_idx": draw.flip(0.3),
        "layer_norm_epsilon": draw.choice((1e-5, 1e-3)),
        "tie_word_embeddings": draw.flip(),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=draw.flip(), is_divided=True)
    return {**fields, "attention_bias": draw.flip(), "mlp_bias": draw.flip(), "rope_parameters": draw.rope()}


def _mistral(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=draw.flip())
    return {**fields, "sliding_window": draw.choice((None, draw.window())), "rope_parameters": draw.rope()}


def _some_windows(draw: Draw, fields: Fields) -> Fields:
    """Qwen's windows: from a layer on, or by `layer_types`."""
    if draw.flip():
        return fields
    fields = {**fields, "use_sliding_window": True, "sliding_window": draw.window()}
    if draw.flip():
        return {**fields, "layer_types": draw.layer_types(fields["num_hidden_layers"])}
    return {**fields, "max_window_layers": draw.integer(0, fields["num_hidden_layers"])}


def _qwen2(draw: Draw) -> Fields:
    return _some_windows(draw, {**draw.decoder(has_head_dim=False), "rope_parameters": draw.rope()})


def _qwen3(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=True), "attention_bias": draw.flip(0.3), "rope_parameters": draw.rope()}
    return _some_windows(draw, fields)


def _phi3(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=False, step=8)
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    partial = draw.choice((1.0, 0.75, 0.5)) if head_dim % 8 == 0 else 1.0
    rope = {**draw.rope(has_scaling=False), "partial_rotary_factor": partial}
    fields["original_max_position_embeddings"] = draw.choice((12, 30, fields["max_position_embeddings"]))
    if draw.flip():
        pairs = int(head_dim * partial) // 2
        rope["rope_type"] = "longrope"
        rope["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
        for name, most in (("short_factor", 1.5), ("long_factor", 30.0)):
            rope[name] = [round(1 + most * draw.rng.random(), 3) for _ in range(pairs)]
    else:
        fields["original_max_position_embeddings"] = fields["max_position_embeddings"]
    return {**fields, "sliding_window": draw.choice((None, draw.window())), "rope_parameters": rope}


def _smollm3(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=False), "rope_parameters": draw.rope()}
    fields.update(attention_bias=draw.flip(0.3), mlp_bias=draw.flip(0.3))
    if draw.flip():
        return {**fields, "no_rope_layers": [draw.integer(0, 1) for _ in range(fields["num_hidden_layers"])]}
    return {**fields, "no_rope_layer_interval": draw.integer(1, 4)}


def _granite(draw: Draw) -> Fields:
    multipliers = {
        "embedding_multiplier": draw.choice((1.0, 12.0, 0.5)),
        "residual_multiplier": draw.choice((1.0, 0.22)),
        "attention_multiplier": draw.choice((1.0, 0.125, 0.0625)),
        "logits_scaling": draw.choice((1.0, 8.0)),
    }
    biases = {"attention_bias": draw.flip(0.3), "mlp_bias": draw.flip(0.3)}
    return {**draw.decoder(has_head_dim=False), **multipliers, **biases, "rope_parameters": draw.rope()}


def _olmo2(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=False)
    return {**fields, "attention_bias": draw.flip(0.3), "rope_parameters": draw.rope()}


def _olmo3(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=False), "attention_bias": draw.flip(0.3), "sliding_window": draw.window()}
    theta = draw.choice((1e4, 5e5))
    fields["rope_parameters"] = {
        "full_attention": {**draw.rope(is_entry=True), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }
    return {**fields, "layer_types": draw.layer_types(fields["num_hidden_layers"])} if draw.flip() else fields


def _gemma2(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=True, is_divided=True)
    if draw.flip(0.2):
        fields["head_dim"] = 256
    fields.update(
        query_pre_attn_scalar=draw.choice((16, 24, 256)),
        attn_logit_softcapping=draw.choice((50.0, 5.0, None)),
        final_logit_softcapping=draw.choice((30.0, 10.0, None)),
        sliding_window=draw.window(),
        rope_parameters=draw.rope(has_scaling=False),
    )
    return {**fields, "layer_types": draw.layer_types(fields["num_hidden_layers"])} if draw.flip() else fields


def _gemma3(draw: Draw) -> Fields:
    fields = _gemma2(draw)
    fields.update(attn_logit_softcapping=None, final_logit_softcapping=draw.choice((None, None, 20.0)))
    scaled = draw.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}))
    fields["rope_parameters"] = {
        "full_attention": {**scaled, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    return fields


def _ministral3(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=True)
    original = draw.choice((16, 64))
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": draw.choice((0.1, 0.5))}
    return {**fields, "rope_parameters": {**rope, "original_max_position_embeddings": original}}


def _glm4(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=True, step=8), "attention_bias": draw.flip(), "eos_token_id": [2]}
    partial = draw.choice((0.5, 1.0)) if fields["head_dim"] % 4 == 0 else 1.0
    return {**fields, "rope_parameters": {**draw.rope(has_scaling=False), "partial_rotary_factor": partial}}


def _experts(draw: Draw, most: int) -> Fields:
    count = draw.choice((1, 2, draw.integer(3, most)))
    return {"num_experts_per_tok": draw.choice((1, count, draw.integer(1, count))), "num_experts": count}


def _mixtral(draw: Draw) -> Fields:
    experts = _experts(draw, 9)
    count = {"num_local_experts": experts.pop("num_experts")}
    return {**_mistral(draw), "rope_parameters": draw.rope(has_scaling=False), **experts, **count}


def _some_dense(draw: Draw, fields: Fields) -> Fields:
    """Qwen's layers with an MLP instead of experts."""
    step = draw.choice((1, 1, 2))
    dense = [index for index in range(fields["num_hidden_layers"]) if draw.flip(0.2)]
    return {
        **fields, "decoder_sparse_step": step, "mlp_only_layers": dense, "norm_topk_prob": draw.flip(),
        "moe_intermediate_size": draw.choice((1, draw.integer(2, 80))), **_experts(draw, 20),
    }  # fmt: skip


def _qwen2_moe(draw: Draw) -> Fields:
    shared = {"shared_expert_intermediate_size": draw.integer(1, 90), "qkv_bias": draw.flip(0.7)}
    return _some_dense(draw, {**_qwen2(draw), **shared})


def _qwen3_moe(draw: Draw) -> Fields:
    fields = _qwen3(draw)
    fields.pop("layer_types", None)  # a field that this class does not have
    return _some_dense(draw, fields)


def _olmoe(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=False), "attention_bias": draw.flip(0.3), "norm_topk_prob": draw.flip()}
    return {**fields, "rope_parameters": draw.rope(), **_experts(draw, 20)}


def _gpt_oss(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=True), "attention_bias": draw.flip(0.7), "sliding_window": draw.window()}
    experts = _experts(draw, 9)
    fields |= {"num_local_experts": experts.pop("num_experts"), **experts, "rope_parameters": draw.rope()}
    return {**fields, "layer_types": draw.layer_types(fields["num_hidden_layers"])} if draw.flip() else fields


def _glm4_moe(draw: Draw) -> Fields:
    fields = {**draw.decoder(has_head_dim=True, step=8), "attention_bias": draw.flip(), "use_qk_norm": draw.flip()}
    partial = draw.choice((0.5, 1.0)) if fields["head_dim"] % 4 == 0 else 1.0
    groups, size = draw.choice((1, 1, draw.integer(2, 4))), draw.integer(2, 6)
    best = draw.integer(1, groups)
    return {
        **fields, "rope_parameters": {**draw.rope(), "partial_rotary_factor": partial},
        "n_routed_experts": groups * size, "n_group": groups, "topk_group": best,
        "num_experts_per_tok": draw.integer(1, best * size), "moe_intermediate_size": draw.integer(1, 60),
        "n_shared_experts": draw.integer(1, 3), "first_k_dense_replace": draw.integer(0, 2),
        "norm_topk_prob": draw.flip(0.7), "routed_scaling_factor": draw.choice((1.0, 2.5)),
    }  # fmt: skip


def _inner(model_type: str, fields: Fields) -> Fields:
    """A config nested in another one."""
    fields = {name: value for name, value in fields.items() if not name.endswith("_token_id") or value is not None}
    return {"model_type": model_type, **fields}


def _plain_tower(draw: Draw) -> Fields:
    heads = draw.integer(1, 3)
    return {
        "model_type": draw.choice(("clip_vision_model", "siglip_vision_model")), "hidden_size": 8 * heads,
        "num_attention_heads": heads, "num_hidden_layers": draw.integer(2, 3), "intermediate_size": draw.integer(8, 40),
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip


def _llava(draw: Draw) -> Fields:
    kind, drawn = draw.choice((("llama", _llama), ("mistral", _mistral), ("qwen2", _qwen2)))
    text = _inner(kind, drawn(draw))
    return {
        "text_config": text, "vision_config": _plain_tower(draw), "image_token_index": text["vocab_size"] - 1,
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
    }  # fmt: skip


def _gemma3_vision(draw: Draw) -> Fields:
    fields = _gemma3(draw)
    fields.pop("final_logit_softcapping", None)  # transformers leaves it out here
    text = _inner("gemma3_text", fields)
    tower = {**_plain_tower(draw), "model_type": "siglip_vision_model"}
    tokens = {f"{name}_token_index": text["vocab_size"] - 1 - at for at, name in enumerate(("image", "boi", "eoi"))}
    return {
        "text_config": text, "vision_config": tower, "mm_tokens_per_image": 4, **tokens,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }  # fmt: skip


WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", *LATENT)

_FAMILIES: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _gpt2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _llama),
    "mistral": ("MistralConfig", "MistralForCausalLM", _mistral),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _qwen3),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _phi3),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _smollm3),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _granite),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _olmo2),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", _olmo3),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _gemma3),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", _ministral3),
    "glm": ("GlmConfig", "GlmForCausalLM", _glm4),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", _glm4),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", _gpt_oss),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", _glm4_moe),
    **LATENT,
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _mixtral),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _qwen3_moe),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", _olmoe),
    **LATER,
    **PICTURES,
    **STATES,
    **GEMMA4,
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", _llava),
    "gemma3_vision": ("Gemma3Config", "Gemma3ForConditionalGeneration", _gemma3_vision),
}
POOLED = pooled_families(_FAMILIES)
"""Families that generate nothing."""
FORWARD = [family for family in _FAMILIES if family != "phi3"]
"""Families whose prompts may share a batch of a lone forward pass: a rotation does not depend on a prompt's length."""

_ALL = _FAMILIES | POOLED
