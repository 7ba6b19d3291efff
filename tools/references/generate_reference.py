"""Makes the goldens of tests/models from Hugging Face transformers; needs the extra `reference` (torch,
transformers).

    python tools/references/generate_reference.py [CASE ...]  # writes tests/models/goldens/<case>/, all or those named

Each case is a small random model of one family: `config.json` as transformers writes it now,
`config_older.json` as it wrote it before version 5, `golden.json` (tensor names and shapes, the seed of the
weights, the prompt, greedy continuations) and `logits.npz` (the prompt's logits `[tokens, vocabulary]`, in
float32 arithmetic). Every model is run twice: with its float32 weights, and with the same weights rounded
to bfloat16.

transformers' own reading of the older spelling must give the same logits, or nothing is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.models.golden_weights import (  # noqa: E402
    golden_tensor,
    named_tensors,
    rounded_to_bfloat16,
    stored_tensors,
)

GOLDENS = ROOT / "tests" / "models" / "goldens"
NUM_NEW_TOKENS = 24
LEAST_ROUTER_MARGIN = 0.03
BEAM_MODEL = "llama_default"
ROPE_POSITIONS = [1, 777, 40_959, 131_071]

# Fields of every config that carry no information for a language model.
_SAYS_NOTHING = (
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "is_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
)


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
    """A config of the families whose goldens are kept small."""
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
            llama(
                **sizes(48, 84), **heads(4, 1), head_dim=32, mlp_bias=True, **llama3_rope(64, 8, 1, 4, 5e5)
            ),
            44,
        ),
        "llama_llama3_odd": (
            llama(
                **sizes(70, 60), **heads(5, 5), num_hidden_layers=3, **tied, **llama3_rope(24, 32, 1, 4, 1e4)
            ),
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
    }


def newer_cases() -> dict[str, tuple[Any, int]]:
    """Those of phi3, smollm3, granite, olmo2, olmo3, gemma2, gemma3, ministral3, glm and glm4."""
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
                "Granite", 48, 52, **heads(6, 3), embedding_multiplier=12.0, residual_multiplier=0.22,
                attention_multiplier=0.125, logits_scaling=8.0, attention_bias=True,
            ),
            20,
        ),
        "olmo2_odd": (small("Olmo2", 70, 45, **heads(5, 5), attention_bias=True), 18),
        "olmo3_windows": (
            small(
                "Olmo3", 96, 44, **heads(6, 2), num_hidden_layers=4, sliding_window=5,
                rope_parameters={**yarn_of_full, "sliding_attention": {**theta, "rope_theta": 5e5}},
            ),
            22,
        ),
        "gemma2_odd": (
            small(
                "Gemma2", 25, 37, **heads(5, 1), **two, sliding_window=6, query_pre_attn_scalar=24,
                attn_logit_softcapping=5.0, final_logit_softcapping=10.0,
            ),
            19,
        ),
        "gemma2_wide_heads": (
            small("Gemma2", 64, 48, **heads(2, 1), head_dim=256, sliding_window=9, tie_word_embeddings=False),
            17,
        ),
        "gemma3_odd": (
            small(
                "Gemma3Text", 36, 37, **heads(6, 2), head_dim=16, num_hidden_layers=7, sliding_window=4,
                tie_word_embeddings=False,
                rope_parameters=by_layer_type,
            ),
            21,
        ),
        "ministral3_positions": (
            small(
                "Ministral3", 42, 51, **heads(6, 2), **two,
                rope_parameters={**ministral_rope, "llama_4_scaling_beta": 0.5},
            ),
            21,
        ),
        "glm_odd": (small("Glm", 46, 35, **heads(6, 2), **two, eos_token_id=[2]), 19),
        "glm4_odd": (small("Glm4", 46, 35, **heads(6, 3), **two, eos_token_id=[2], attention_bias=False), 19),
        # The prompt within the original context, most of the continuation beyond.
        "phi3_longrope_crossing": (
            small("Phi3", 48, 60, **heads(3, 1), rope_parameters={**longrope}, original_max_position_embeddings=16), 9
        ),
        "mixtral_odd": (small("Mixtral", 45, 37, **heads(5, 1), head_dim=10, num_local_experts=3), 23),
        "mixtral_all": (small("Mixtral", 48, 20, **heads(4, 2), num_local_experts=2, sliding_window=6), 17),
        "qwen2_moe_shared": (
            small(
                "Qwen2Moe", 56, 30, **heads(4, 4), num_hidden_layers=4, num_experts=7, num_experts_per_tok=3,
                moe_intermediate_size=21, shared_expert_intermediate_size=33, decoder_sparse_step=2,
                mlp_only_layers=[3],
            ),
            19,
        ),
        "qwen3_moe_odd": (
            small(
                "Qwen3Moe", 44, 30, **heads(6, 3), head_dim=14, num_experts=11, num_experts_per_tok=4,
                moe_intermediate_size=19, norm_topk_prob=True,
            ),
            25,
        ),
        "qwen3_moe_one": (
            small(
                "Qwen3Moe", 40, 30, **heads(2, 1), head_dim=20, num_experts=5, num_experts_per_tok=1,
                moe_intermediate_size=24, attention_bias=True,
            ),
            18,
        ),
        "olmoe_odd": (small("Olmoe", 42, 27, **heads(3, 3), num_experts=6, num_experts_per_tok=2), 21),
        "gpt_oss_odd": (
            small(
                "GptOss", 45, 37, **heads(6, 2), head_dim=10, num_local_experts=5, num_experts_per_tok=2,
                sliding_window=7, **yarn_rope(8, 32.0, 150_000.0, truncate=False),
            ),
            17,
        ),
        "glm4_moe_groups": (
            small(
                "Glm4Moe", 46, 35, **heads(6, 2), head_dim=16, num_hidden_layers=3, n_routed_experts=9, n_group=3,
                topk_group=2, num_experts_per_tok=2, moe_intermediate_size=19, n_shared_experts=2,
                first_k_dense_replace=2, routed_scaling_factor=1.7, use_qk_norm=True, attention_bias=True,
            ),
            20,
        ),
        "deepseek_v2_odd": (
            small(
                "DeepseekV2", 42, 35, **heads(3, 3), q_lora_rank=None, kv_lora_rank=22, qk_rope_head_dim=6,
                qk_nope_head_dim=12, v_head_dim=13, n_routed_experts=5, num_experts_per_tok=2,
                moe_intermediate_size=19, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=1.3,
                **yarn_rope(16, 4.0, 10_000.0, mscale=0.707, mscale_all_dim=0.9),
            ),
            21,
        ),
        "deepseek_v2_groups": (
            small(
                "DeepseekV2", 40, 32, **heads(4, 4), q_lora_rank=18, kv_lora_rank=16, qk_rope_head_dim=8,
                qk_nope_head_dim=12, v_head_dim=10, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
                topk_method="group_limited_greedy", moe_intermediate_size=17, n_shared_experts=1, attention_bias=True,
                mlp_bias=True,
            ),
            19,
        ),
        "deepseek_v3_odd": (
            small(
                "DeepseekV3", 46, 35, **heads(2, 2), q_lora_rank=20, kv_lora_rank=24, qk_rope_head_dim=10,
                qk_nope_head_dim=9, v_head_dim=15, n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=2,
                moe_intermediate_size=19, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5,
                **yarn_rope(16, 4.0, 10_000.0, mscale=1.0, mscale_all_dim=1.0),
            ),
            18,
        ),
    }


def older_spelling(fields: dict[str, Any]) -> dict[str, Any]:
    """The same config as versions of transformers before 5 wrote it."""
    older = dict(fields)
    older["torch_dtype"] = older.pop("dtype", None) or "float32"
    rope = older.pop("rope_parameters", None)
    if rope is not None and "full_attention" in rope:  # an older file's scaling was meant for those layers
        rope, local = rope["full_attention"], rope["sliding_attention"]
        if older["model_type"] == "gemma3_text":
            older["rope_local_base_freq"] = local["rope_theta"]
    if rope is not None and rope["rope_type"] == "yarn" and "llama_4_scaling_beta" in rope:
        older["rope_parameters"] = rope  # never written otherwise
    elif rope is not None:
        rope = dict(rope)
        if "partial_rotary_factor" in rope:
            older["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        older["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if scaling["rope_type"] == "linear" and "rope_local_base_freq" not in older:
            scaling = {"type": "linear", "factor": scaling["factor"]}
        older["rope_scaling"] = scaling if scaling.get("rope_type") != "default" else None
    kinds = older.get("layer_types")
    if kinds is not None and kinds == sorted(kinds):  # full layers first: max_window_layers says the same
        del older["layer_types"]
    older["transformers_version"] = "4.40.0"
    return older


def load(config: Any, seed: int, is_rounded: bool) -> Any:
    """The transformers model of a config with the golden weights of a seed, in float32."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in named_tensors(model):
            for stored, place in stored_tensors(name, parameter, config.model_type):
                array = golden_tensor(stored, tuple(place.shape), seed)
                place.copy_(torch.from_numpy(rounded_to_bfloat16(array) if is_rounded else array))
    return model.eval()


def run(model: Any, prompt: list[int]) -> tuple[np.ndarray, list[int]]:
    """Logits `[tokens, vocabulary]` of the prompt, and the greedy continuation."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert np.isfinite(logits).all()
    return logits, output[0, len(prompt) :].tolist()


def random_prompt(config: Any, num_tokens: int, seed: int) -> list[int]:
    raw = np.random.PCG64(seed).random_raw(num_tokens)
    prompt: list[int] = (raw % np.uint64(config.vocab_size)).tolist()
    return prompt


def layers_with_experts(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def choice_margin(config: Any, experts: Any, logits: torch.Tensor) -> float:
    """By how much the choice of a layer's router is clear, `logits [tokens, experts]`: in logits, or in four times
    sigmoids, of groups of experts and of those within the best ones."""
    correction = getattr(getattr(experts, "gate", None), "e_score_correction_bias", None)
    numbers, least, kept = logits, float("inf"), config.num_experts_per_tok
    if correction is not None:
        numbers = 4 * (logits.sigmoid() + correction)
        by_group = numbers.view(len(logits), config.n_group, -1)
        ranks, best = by_group.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True)
        if config.n_group > config.topk_group:
            least = float((ranks[:, config.topk_group - 1] - ranks[:, config.topk_group]).min())
        chosen = best[:, : config.topk_group, None].expand(-1, -1, by_group.shape[-1])
        numbers = by_group.gather(1, chosen).flatten(1)
    top = numbers.sort(dim=-1, descending=True).values
    return min(least, float((top[:, kept - 1] - top[:, kept]).min())) if top.shape[-1] > kept else least


def least_router_margin(config: Any, prompt: list[int], seed: int) -> float:
    """By how much the logit of an expert that is just chosen is above that of one that is just not, at least, with
    either kind of weights, over the prompt and its continuation: rounding to bfloat16 must not choose another one.
    Infinite for a model without experts."""
    top_k = getattr(config, "num_experts_per_tok", None)
    least = float("inf")
    if top_k is None:
        return least
    for is_rounded in (False, True):
        model, ids = load(config, seed, is_rounded), prompt
        for is_continued in (False, True):
            if is_continued:
                ids = prompt + run(model, prompt)[1]
            with torch.no_grad():
                found = model(torch.tensor([ids]), output_router_logits=True).router_logits
            for layer, logits in zip(layers_with_experts(model), found, strict=True):
                least = min(least, choice_margin(config, layer, logits))
            if least < LEAST_ROUTER_MARGIN:
                return least
    return least


def make_case(name: str, config: Any, num_prompt_tokens: int, seed: int) -> None:
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    family = type(config).__name__.removesuffix("Config")
    family = family.removesuffix("Text")  # Gemma 3's text model
    config.architectures = ["GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"]
    config.dtype = "float32"
    config.to_json_file(folder / "config.json", use_diff=False)
    fields = json.loads((folder / "config.json").read_text())
    for key in _SAYS_NOTHING:
        fields.pop(key, None)
    fields = {key: value for key, value in fields.items() if not key.startswith("summary_")}
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
    (folder / "config_older.json").write_text(json.dumps(older_spelling(fields), indent=1) + "\n")

    prompt = random_prompt(config, num_prompt_tokens, seed)
    for attempt in range(1, 3000):
        if least_router_margin(config, prompt, seed) > LEAST_ROUTER_MARGIN:
            break
        prompt = random_prompt(config, num_prompt_tokens, seed + 1000 * attempt)
    else:
        raise AssertionError(f"{name}: no prompt whose experts are clear was found")
    logits, greedy = {}, {}
    for weights in ("float32", "bfloat16"):
        spellings = [transformers.AutoConfig.from_pretrained(folder, _configuration_file=file)
                     for file in ("config.json", "config_older.json")]  # fmt: skip
        results = [run(load(spelling, seed, weights == "bfloat16"), prompt) for spelling in spellings]
        assert np.array_equal(results[0][0], results[1][0]), (
            f"{name}: the two spellings differ in transformers"
        )
        logits[weights], greedy[weights] = results[0]
    model = load(spellings[0], seed, is_rounded=False)
    golden = {
        "seed": seed,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "prompt_ids": prompt,
        "greedy_ids": greedy,
        "tensors": {
            key: list(place.shape)
            for name, parameter in named_tensors(model)
            for key, place in stored_tensors(name, parameter, config.model_type)
        },
    }
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")
    np.savez(folder / "logits.npz", allow_pickle=False, **logits)
    top = np.sort(logits["float32"], axis=1)
    print(
        f"{name}: std {logits['float32'].std():.2f}, least top-1 margin {(top[:, -1] - top[:, -2]).min():.1e}"
    )


def make_rope_references() -> None:
    """Frequencies, and cosines and sines far into the context, of real models' rotary positions."""
    shapes = {
        "llama2": (128, linear_rope(1.0)),
        "llama31": (128, llama3_rope(8192, 8.0, 1.0, 4.0, 5e5)),
        "llama32": (64, llama3_rope(8192, 32.0, 1.0, 4.0, 5e5)),
        "qwen3": (128, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        "linear": (80, linear_rope(3.0)),
        "qwen3_yarn": (128, yarn_rope(32768, 4.0, 1e6)),
        "yarn_options": (64, yarn_rope(4096, 16.0, 1e4, beta_fast=20.0, beta_slow=2.0, truncate=False)),
        "yarn_mscale": (64, yarn_rope(4096, 40.0, 1e4, mscale=1.0, mscale_all_dim=0.707)),
    }
    references = {}
    for name, (head_dim, fields) in shapes.items():
        config = llama(
            **sizes(2 * head_dim, 8),
            **heads(2, 2),
            head_dim=head_dim,
            **fields,
            max_position_embeddings=1 << 17,
        )
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        cos, sin = rotary(torch.zeros(1), torch.tensor([ROPE_POSITIONS]))
        references[name] = {
            "head_dim": head_dim,
            "rope_parameters": fields["rope_parameters"],
            "positions": ROPE_POSITIONS,
            "frequencies": rotary.inv_freq.tolist(),
            "cos": cos[0, :, : head_dim // 2].tolist(),
            "sin": sin[0, :, : head_dim // 2].tolist(),
        }
    (GOLDENS / "rope.json").write_text(json.dumps(references) + "\n")


def make_beam_searches() -> None:
    """The beams of `BEAM_MODEL`, and their log probabilities, for widths, penalties and ids that end a beam."""
    config, num_prompt_tokens = cases()[BEAM_MODEL]
    seed = list(cases()).index(BEAM_MODEL) + 1
    model = load(config, seed, is_rounded=False)
    random = np.random.default_rng(16)
    searches = []
    for eos_token_ids in ([], [11], [3, 40], [5, 17, 60]):
        for beam_width, length_penalty in ((1, 1.0), (2, 1.0), (3, 0.0), (4, -1.0), (5, 2.0)):
            prompt = random.integers(0, config.vocab_size, num_prompt_tokens).tolist()
            max_tokens = int(random.integers(4, 20))
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=96,
                num_beams=beam_width, num_return_sequences=beam_width, length_penalty=length_penalty,
                eos_token_id=eos_token_ids or None, return_dict_in_generate=True, output_scores=beam_width > 1,
            )  # fmt: skip
            beams = []
            for row in output.sequences.tolist():
                new = row[len(prompt) :]
                ends = [place for place, token_id in enumerate(new) if token_id in eos_token_ids]
                beams.append(new[: ends[0] + 1] if ends else new)
            asked = {"eos_token_ids": eos_token_ids, "beam_width": beam_width, "length_penalty": length_penalty}
            scores = output.sequences_scores.tolist() if beam_width > 1 else None
            searches.append({**asked, "max_tokens": max_tokens, "prompt": prompt, "beams": beams, "scores": scores})
    (GOLDENS / "beam_search.json").write_text(json.dumps({"model": BEAM_MODEL, "searches": searches}) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    if not wanted:
        make_rope_references()
    if not wanted or "beam_search" in wanted:
        make_beam_searches()
    for seed, (name, (config, num_prompt_tokens)) in enumerate(cases().items(), start=1):
        if not wanted or name in wanted:
            make_case(name, config, num_prompt_tokens, seed)


if __name__ == "__main__":
    main()
