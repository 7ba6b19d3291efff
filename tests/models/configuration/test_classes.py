"""Fields that a file leaves out have the values of transformers' configuration classes; bare models; other types.

`class_configs.json` is `Config().to_dict()` of transformers 5.24 for each type, which
`tools/references/make_class_configs.py` writes.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from models.configuration.config import ModelConfig
from models.errors import ConfigError
from models.families import known_architectures
from models.registry import parse_config
from tests.models.published_configs import PUBLISHED

CLASSES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "class_configs.json").read_text())
TYPES = {each.model_type: each.name for each in known_architectures().values() if each.model_type in CLASSES}
INCOMPLETE = {
    "deepseek_v2": {"num_experts_per_tok": 6},  # a class without a value
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "glm4_moe": {"head_dim": 128},  # a class whose heads do not divide its width
}


def without_ids(config: ModelConfig) -> ModelConfig:
    """A file that names no tokens has none here."""
    return replace(config, bos_token_id=None, eos_token_ids=(), pad_token_id=None)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_silent_file_means_its_class(model_type: str) -> None:
    own = INCOMPLETE.get(model_type, {})
    written = {**CLASSES[model_type], "architectures": [TYPES[model_type]], **own}
    silent = {"architectures": [TYPES[model_type]], "model_type": model_type, **own}
    assert without_ids(parse_config(silent)) == without_ids(parse_config(written))


def test_an_inner_config_means_its_class() -> None:
    """The published llava-1.5-7b-hf leaves most of Llama's sizes out, and pixtral-12b most of Mistral's."""
    vision = PUBLISHED["llava-1.5-7b-hf"]["vision_config"]
    for kind, text in (
        ("llama", {"max_position_embeddings": 4096, "vocab_size": 32064}),
        ("mistral", {"head_dim": 128, "max_position_embeddings": 1024000, "sliding_window": None}),
    ):
        values = {
            "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": vision,
            "text_config": {"model_type": kind, **text},
        }  # fmt: skip
        config = parse_config(values)
        inner = parse_config({**CLASSES[kind], **text, "architectures": [TYPES[kind]]})
        for field in fields(inner):
            if field.name not in ("architecture", "bos_token_id", "eos_token_ids", "pad_token_id"):
                assert getattr(config, field.name) == getattr(inner, field.name), field.name


NESTED = {name: values for name, values in PUBLISHED.items() if "vision_config" in values}
NOTES = {
    "dtype": "bfloat16", "torch_dtype": "bfloat16", "_name_or_path": "x", "_attn_implementation_autoset": True,
    "add_cross_attention": False, "chunk_size_feed_forward": 0, "id2label": {"0": "LABEL_0"}, "top_p": 1.0,
    "diversity_penalty": 0.0, "transformers_version": "4.57.1", "use_bfloat16": False,
    "hidden_dropout": 0.1, "initializer_factor": 1.0, "embedding_init_std": 0.02, "ffn_layerdrop": 0.1,
    "attention_softmax_in_fp32": True, "use_fused_kernels": True, "training_stage": 2, "freeze_tower": True,
    "an_extra_head": False, "num_extra_layers": 0, "extra_multiplier": 1.0, "extra_names": [], "extra_objects": {},
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_what_is_harmless_at_the_top_is_harmless_in_the_objects_below(name: str) -> None:
    values = copy.deepcopy(NESTED[name])
    plain = parse_config(values)
    for inner in (values["vision_config"], values.get("text_config", values)):
        inner.update({note: value for note, value in NOTES.items() if note not in inner})
    values["vision_config"]["tie_word_embeddings"] = True  # as transformers 4 wrote all configs
    assert replace(parse_config(values), dtype=plain.dtype) == plain
    values["vision_config"]["an_extra_head"] = True
    with pytest.raises(ConfigError, match=r'an_extra_head = True .*\'{"vision_config": {"an_extra_head": null}}\''):
        parse_config(values)


@pytest.mark.parametrize(
    ("name", "model_type", "architecture"),
    [
        ("Qwen3Model", "qwen3", "Qwen3ForCausalLM"),
        ("LlamaModel", "llama", "LlamaForCausalLM"),
        ("MistralModel", None, "MistralForCausalLM"),
        ("GPT2Model", "gpt2", "GPT2LMHeadModel"),
        ("Gemma3TextModel", "gemma3_text", "Gemma3ForCausalLM"),
        ("Qwen3MoeModel", "qwen3_moe", "Qwen3MoeForCausalLM"),
    ],
)
def test_a_model_without_its_head(name: str, model_type: str | None, architecture: str) -> None:
    config = parse_config({"architectures": [name], "model_type": model_type})
    assert config == parse_config({"architectures": [architecture]})


@pytest.mark.parametrize("name", ["Qwen2ForRewardModel", "Qwen2ForProcessRewardModel", "Qwen2ForMultipleChoice"])
def test_a_model_with_another_head_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"architectures '{name}' is not supported"):
        parse_config({"architectures": [name], "model_type": "qwen2"})


def test_an_unknown_type_beside_a_known_architecture() -> None:
    assert parse_config({**PUBLISHED["DeepSeek-V3"], "model_type": "kimi_k2"}) == parse_config(PUBLISHED["DeepSeek-V3"])
