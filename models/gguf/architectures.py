"""llama.cpp's conversion of the families that the engine runs: tensor names, the rows and weights that it changes, and
the metadata keys of the fields of `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.gguf import fields
from models.gguf.fields import Keys
from models.gguf.tensor_names import (
    APERTUS,
    BEHIND,
    DEEPSEEK2,
    ERNIE_MOE,
    EXPERTS,
    GEMMA,
    GLM4,
    GLM4_MOE,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GRANITE_MOE,
    HEAD_NORMS,
    HUNYUAN,
    LLAMA,
    MIXTRAL,
    NAMES,
    OLMO2,
    PHI3,
    ROUTER,
    SEED_OSS,
    SHARED,
    STARCODER2,
)

_XIELU: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One value of `general.architecture`.

    Attributes:
        config_name: its name in `architectures` of config.json.
        layer_names: a layer's tensor names in config.json's model, by their names here; those with "{expert}" are
            stacks of all experts here, those with "{keys}" and "{values}" the two parts of one map of each head. A name
            with its ".weight" stands for the whole of the other one.
        has_permuted_heads: rows of queries and keys lie as neighbouring pairs are rotated; config.json's model rotates
            halves.
        norm_offset: is stored added to the weights of norms.
        is_latent: heads' sizes are those of latent attention, which `read` reads; `head_dim` is what is rotated.
        names: of tensors outside of layers, and of the layers ("blk"), here.
        transposed: parts of a layer whose matrices are stored inputs first here.
        layer_numbers: metadata with a number for each layer: the tensor and its shape that a layer has here.
        epsilon: the key of the norms' epsilon, under `attention`, and its field in config.json.
        read: makes further fields of config.json from the keys and the fields read so far.
    """

    config_name: str
    layer_names: Mapping[str, str]
    has_permuted_heads: bool = False
    norm_offset: float = 0.0
    is_latent: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    transposed: frozenset[str] = frozenset()
    layer_numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    epsilon: tuple[str, str] = ("layer_norm_rms_epsilon", "rms_norm_eps")
    read: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, common: {}


_LAYER_NORM = "layer_norm_epsilon"

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "LlamaForCausalLM", {**LLAMA, **MIXTRAL}, has_permuted_heads=True, read=fields.read_llama
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", LLAMA),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", {**LLAMA, **HEAD_NORMS}),
    "qwen2moe": GgufArchitecture(
        "Qwen2MoeForCausalLM", {**LLAMA, **ROUTER, **EXPERTS, **SHARED}, read=fields.read_qwen2_moe
    ),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM", {**LLAMA, **HEAD_NORMS, **ROUTER, **EXPERTS}, read=fields.read_qwen3_moe
    ),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", {**LLAMA, **HEAD_NORMS, **ROUTER, **EXPERTS}, read=fields.read_olmoe),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", GPT_OSS, read=fields.read_gpt_oss),
    "gemma": GgufArchitecture("GemmaForCausalLM", LLAMA, norm_offset=1.0),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", GEMMA, norm_offset=1.0, read=fields.read_gemma2),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", {**GEMMA, **HEAD_NORMS}, norm_offset=1.0, read=fields.read_gemma3),
    "phi3": GgufArchitecture("Phi3ForCausalLM", PHI3, read=fields.read_phi3),
    "granite": GgufArchitecture("GraniteForCausalLM", LLAMA, has_permuted_heads=True, read=fields.read_granite),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", LLAMA, has_permuted_heads=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", {**OLMO2, **BEHIND}, read=fields.read_olmo2),
    "glm4": GgufArchitecture("Glm4ForCausalLM", GLM4),
    "glm4moe": GgufArchitecture("Glm4MoeForCausalLM", GLM4_MOE, read=fields.read_glm4_moe),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", SEED_OSS, read=fields.read_seed_oss),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", {**OLMO2, **BEHIND}, read=fields.read_exaone4),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", LLAMA, read=fields.read_use_bias),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM", STARCODER2, epsilon=(_LAYER_NORM, "norm_epsilon"), read=fields.read_starcoder2
    ),
    "command-r": GgufArchitecture(
        "CohereForCausalLM",
        {**LLAMA, **HEAD_NORMS},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        read=fields.read_command_r,
    ),
    "cohere2": GgufArchitecture(
        "Cohere2ForCausalLM", LLAMA, epsilon=(_LAYER_NORM, "layer_norm_eps"), read=fields.read_cohere2
    ),
    "internlm2": GgufArchitecture("LlamaForCausalLM", LLAMA, has_permuted_heads=True),
    "qwen2vl": GgufArchitecture("Qwen2ForCausalLM", LLAMA, read=fields.read_text),
    "qwen3vl": GgufArchitecture("Qwen3ForCausalLM", {**LLAMA, **HEAD_NORMS}, read=fields.read_text),
    "qwen3vlmoe": GgufArchitecture(
        "Qwen3MoeForCausalLM", {**LLAMA, **HEAD_NORMS, **ROUTER, **EXPERTS}, read=fields.read_text_moe
    ),
    "mistral3": GgufArchitecture("Ministral3ForCausalLM", LLAMA, has_permuted_heads=True, read=fields.read_mistral3),
    "chatglm": GgufArchitecture(
        "GlmForCausalLM", {**LLAMA, "ffn_up": "mlp.gate_up_proj"}, read=fields.read_rotated_part
    ),
    "granitemoe": GgufArchitecture(
        "GraniteMoeForCausalLM", GRANITE_MOE, has_permuted_heads=True, read=fields.read_granite_moe
    ),
    "ernie4_5-moe": GgufArchitecture("Ernie4_5_MoeForCausalLM", ERNIE_MOE, read=fields.read_ernie_moe),
    "phimoe": GgufArchitecture("PhimoeForCausalLM", {**LLAMA, **MIXTRAL}, read=fields.read_phimoe),
    "hunyuan-dense": GgufArchitecture("HunYuanDenseV1ForCausalLM", HUNYUAN),
    "apertus": GgufArchitecture(
        "ApertusForCausalLM",
        APERTUS,
        layer_numbers={f"xielu.{name}": (f"mlp.act_fn.{name}", shape) for name, shape in _XIELU.items()},
    ),
    "olmo": GgufArchitecture(
        "OlmoForCausalLM", LLAMA, has_permuted_heads=True, epsilon=(_LAYER_NORM, "rms_norm_eps"), read=fields.read_olmo
    ),
    "gptneox": GgufArchitecture(
        "GPTNeoXForCausalLM",
        GPT_NEOX,
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        read=fields.read_gpt_neox,
        names={
            "token_embd": "gpt_neox.embed_in",
            "output": "embed_out",
            "output_norm": "gpt_neox.final_layer_norm",
            "blk": "gpt_neox.layers",
        },
    ),
    "gpt2": GgufArchitecture(
        "GPT2LMHeadModel",
        GPT2,
        epsilon=(_LAYER_NORM, _LAYER_NORM),
        read=fields.read_gpt2,
        transposed=frozenset(("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
        names={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output": "lm_head",
            "output_norm": "transformer.ln_f",
            "blk": "transformer.h",
        },
    ),
    "deepseek2": GgufArchitecture("DeepseekV2ForCausalLM", DEEPSEEK2, is_latent=True, read=fields.read_deepseek2),
}
"""By `general.architecture`."""
