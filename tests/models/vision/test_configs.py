"""Configs of models that read pictures: those that are refused, and as transformers saves them again, which say what
those they were made of say (`tools/references/make_vision_goldens.py`)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from models.configuration.config import ModelConfig
from models.errors import ConfigError
from models.registry import parse_config
from tests.models.vision import cases, gemma4_cases, pixtral_cases, square_cases

CASES: dict[str, dict[str, Any]] = {**cases.CASES, **square_cases.CASES, **pixtral_cases.CASES, **gemma4_cases.CASES}
RESAVED: dict[str, dict[str, Any]] = json.loads((cases.FOLDER / "resaved_configs.json").read_text(encoding="utf-8"))
_TEXT, _VISION = "text_config", "vision_config"


@pytest.mark.parametrize(
    ("case", "where", "changes", "message"),
    [
        ("qwen3_vl", _VISION, {"out_hidden_size": 44}, "= 44 must be the language model's hidden_size = 40"),
        ("qwen3_vl", _VISION, {"num_heads": 5}, "num_heads = 5 must divide hidden_size = 36"),
        ("qwen3_vl", _VISION, {"num_position_embeddings": 24}, "num_position_embeddings = 24 must be a square"),
        ("qwen3_vl", _VISION, {"deepstack_visual_indexes": [2, 3]}, "must ascend below depth = 3"),
        ("qwen3_vl", _VISION, {"window_size": 112}, "window_size = 112 is not supported"),
        ("qwen3_vl", _TEXT, {"rope_parameters": {"mrope_section": [4, 3, 4]}}, "must be three numbers, 10 in all"),
        ("qwen3_vl", _TEXT, {"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved = False"),
        ("llava_clip_llama", "", {"vision_feature_layer": 4}, "= 4 must be an integer, or several, of -4 to 3"),
        ("llava_clip_llama", "", {"vision_feature_layer": []}, "vision_feature_layer"),
        ("llava_clip_llama", "", {"vision_feature_select_strategy": "some"}, "'some' must be default or full"),
        ("llava_clip_llama", _VISION, {"model_type": "dinov2"}, "'dinov2' must be one of clip_vision_model"),
        ("llava_clip_llama", _VISION, {"num_attention_heads": 5}, "_heads = 5 must divide hidden_size = 12"),
        ("llava_clip_llama", _VISION, {"image_size": 3}, "image_size = 3 is below patch_size = 4"),
        ("llava_clip_llama", _VISION, {"window_size": 3}, "window_size = 3 is not supported"),
        ("llava_clip_llama", _TEXT, {"model_type": "gpt2"}, "'gpt2' must be one of llama, mistral, qwen2"),
        ("pixtral", "", {"vision_feature_select_strategy": "default"}, "must be full: Pixtral has no class token"),
        ("pixtral", _VISION, {"head_dim": 12}, "head_dim = 12 is not supported"),
        ("pixtral", _VISION, {"num_attention_heads": 5}, "= 5 must divide hidden_size = 24"),
        ("mistral3", "", {"vision_feature_layer": [-1, -2]}, "vision_feature_layer names 2 layers"),
        ("mistral3", _TEXT, {"model_type": "llama"}, "'llama' must be one of mistral, ministral3"),
        ("mistral3", _VISION, {"model_type": "clip_vision_model"}, "'clip_vision_model' is not supported"),
        ("gemma3_window", "", {"mm_tokens_per_image": 8}, "= 8 must be the square of a number into which 6 patches"),
        ("gemma3_window", "", {"mm_tokens_per_image": 16}, "mm_tokens_per_image = 16 must be the square"),
        ("gemma3_window", "", {"mm_tokens_per_image": 49}, "mm_tokens_per_image = 49 must be the square"),
        ("gemma3_window", "", {"image_token_index": 96}, "image_token_index = 96 is not in the vocabulary of 96"),
        ("gemma3_window", "", {"eoi_token_index": 96}, "eoi_token_index = 96 is not in the vocabulary of 96"),
        ("gemma3_window", _VISION, {"model_type": "clip_vision_model"}, "= 'clip_vision_model' is not supported"),
        ("gemma4_whole", "", {"boi_token_id": 96}, "boi_token_id = 96 is not in the vocabulary of 96"),
        ("gemma4_whole", _VISION, {"num_attention_heads": 5}, "_heads = 5 must divide hidden_size = 36"),
        ("gemma4_whole", _VISION, {"model_type": "siglip_vision_model"}, "'siglip_vision_model' is not supported"),
        ("gemma4_whole", _TEXT, {"use_bidirectional_attention": "all"}, "attention = 'all' is not supported"),
        ("gemma4_unified", _VISION, {"output_proj_dims": 40}, "output_proj_dims = 40 is not supported"),
        ("gemma3_window", _TEXT, {"model_type": "gemma2"}, "model_type = 'gemma2' is not supported"),
        ("gemma3_window", _TEXT, {"final_logit_softcapping": 30.0}, "softcapping = 30.0 is not supported"),
        ("gemma3_window", _TEXT, {"use_bidirectional_attention": True}, "attention = True is not supported"),
    ],
)
def test_configs_that_are_refused(case: str, where: str, changes: dict[str, Any], message: str) -> None:
    config = CASES[case]
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse_config({**config, where: {**config[where], **changes}} if where else {**config, **changes})


def without_notes(config: ModelConfig) -> ModelConfig:
    """Without what transformers fills in: the type, and tokens of its classes."""
    return replace(config, dtype=None, bos_token_id=None, eos_token_ids=(), pad_token_id=None)


@pytest.mark.parametrize("case", CASES)
def test_a_config_saved_again_says_the_same(case: str) -> None:
    said = parse_config(RESAVED[case])
    assert said.dtype is not None
    assert said.dtype.name == "bfloat16"
    assert without_notes(said) == without_notes(parse_config(CASES[case]))
