"""Defaults of transformers' configuration classes (5.24) for fields that a file leaves out, by `model_type`.

A config inside another, such as `text_config`, is written without the fields that have its class's values, and
`from_pretrained` takes these for any absent field. Other values, such as the epsilon of norms, stand where a family
reads them. Token ids are left out: a class's default does not make a token an end of text.
"""

from __future__ import annotations

from typing import Any

from models.configuration.json_fields import Fields

_NAMES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
_SIZES: dict[str, tuple[int | None, ...]] = {
    "apertus": (131_072, 4096, 14_336, 32, 32, None, None, 65_536),
    "cohere": (256_000, 8192, 22_528, 40, 64, None, None, 8192),
    "cohere2": (256_000, 8192, 22_528, 40, 64, None, None, 8192),
    "deepseek_v2": (102_400, 4096, 11_008, 32, 32, None, None, 2048),
    "deepseek_v3": (129_280, 7168, 18_432, 61, 128, 128, None, 4096),
    "ernie4_5": (103_424, 1024, 3072, 18, 16, 2, 128, 131_072),
    "ernie4_5_moe": (103_424, 2560, 12_288, 28, 20, 4, None, 131_072),
    "exaone4": (102_400, 4096, 16_384, 32, 32, 32, None, 2048),
    "gemma": (256_000, 3072, 24_576, 28, 16, 16, 256, 8192),
    "gemma2": (256_000, 2304, 9216, 26, 8, 4, 256, 8192),
    "gemma3_text": (262_208, 2304, 9216, 26, 8, 4, 256, 131_072),
    "gemma4_text": (262_144, 2304, 9216, 30, 8, 4, 256, 131_072),
    "glm": (151_552, 4096, 13_696, 40, 32, 2, 128, 131_072),
    "glm4": (151_552, 4096, 13_696, 40, 32, 2, 128, 131_072),
    "glm4_moe": (151_552, 4096, 10_944, 46, 96, 8, None, 131_072),
    "glm4_moe_lite": (154_880, 2048, 10_240, 47, 20, 20, None, 202_752),
    "gpt_neox": (50_432, 6144, 24_576, 44, 64, None, None, 2048),
    "gpt_oss": (201_088, 2880, 2880, 36, 64, 8, 64, 131_072),
    "granite": (32_000, 4096, 11_008, 32, 32, None, None, 2048),
    "granitemoe": (32_000, 4096, 11_008, 32, 32, None, None, 2048),
    "granitemoehybrid": (32_000, 4096, 11_008, 32, 32, None, None, 2048),
    "hunyuan_v1_dense": (290_943, 4096, 11_008, 32, 32, None, None, 2048),
    "lfm2": (65_536, 2560, 12_288, 32, 32, 8, None, 128_000),
    "lfm2_moe": (65_536, 2048, 7168, 32, 32, 8, None, 128_000),
    "llama": (32_000, 4096, 11_008, 32, 32, None, None, 2048),
    "ministral3": (131_072, 4096, 14_336, 34, 32, 8, 128, 262_144),
    "mistral": (32_000, 4096, 14_336, 32, 32, 8, None, 131_072),
    "mistral4": (131_072, 4096, 12_288, 36, 32, 32, None, 1_048_576),
    "mixtral": (32_000, 4096, 14_336, 32, 32, 8, None, 131_072),
    "nemotron_h": (131_072, 4096, 21_504, None, 32, 8, 128, 4096),
    "olmo": (50_304, 4096, 11_008, 32, 32, None, None, 2048),
    "olmo2": (50_304, 4096, 11_008, 32, 32, None, None, 2048),
    "olmo3": (50_304, 4096, 11_008, 32, 32, None, None, 2048),
    "olmoe": (50_304, 2048, 2048, 16, 16, None, None, 4096),
    "phi3": (32_064, 3072, 8192, 32, 32, None, None, 4096),
    "phimoe": (32_064, 4096, 6400, 32, 32, 8, None, 131_072),
    "qwen2": (151_936, 4096, 22_016, 32, 32, 32, None, 32_768),
    "qwen2_5_vl_text": (152_064, 8192, 29_568, 80, 64, 8, None, 32_768),
    "qwen2_moe": (151_936, 2048, 5632, 24, 16, 16, None, 32_768),
    "qwen2_vl_text": (152_064, 8192, 29_568, 80, 64, 8, None, 32_768),
    "qwen3": (151_936, 4096, 22_016, 32, 32, 32, 128, 32_768),
    "qwen3_5_moe_text": (248_320, 2048, 512, 40, 16, 2, 256, 32_768),
    "qwen3_5_text": (248_320, 4096, 12_288, 32, 16, 4, 256, 32_768),
    "qwen3_moe": (151_936, 2048, 6144, 24, 32, 4, None, 32_768),
    "qwen3_next": (151_936, 2048, 5632, 48, 16, 2, 256, 32_768),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16, 16, None, 128_000),
    "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32, 32, 128, 128_000),
    "seed_oss": (155_136, 4096, 27_648, 64, 80, 8, 128, 524_288),
    "smollm3": (128_256, 2048, 11_008, 36, 16, 4, None, 32_768),
    "starcoder2": (49_152, 3072, 12_288, 30, 24, 2, None, 4096),
}
_OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
}
_ROPES: dict[str, dict[str, Any]] = {
    "apertus": {
        "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "gemma4_text": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "gpt_oss": {
        "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
    "ministral3": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    },
    "mistral4": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip


def add_class_defaults(fields: Fields, model_type: str) -> None:
    """Gives absent fields the values of the class of `model_type`; does nothing for one that is not known."""
    sizes = zip(_NAMES, _SIZES.get(model_type, (None,) * len(_NAMES)), strict=True)
    fields.default({name: value for name, value in sizes if value is not None} | _OTHERS.get(model_type, {}))
    if not any(fields.has(name) for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        fields.default({"rope_parameters": rope} if (rope := _ROPES.get(model_type)) else {})


def model_types() -> list[str]:
    """The known model types."""
    return sorted({*_SIZES, *_OTHERS})
