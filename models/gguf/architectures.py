"""llama.cpp's conversion of the families that the engine runs: tensor names, the rows and weights that it changes, and
the metadata keys of the fields of `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.gguf import encoders, fields
from models.gguf.fields import Keys
from models.gguf.gemma4 import read_assistant, read_gemma4

# A layer's tensor names in GGUF, and in safetensors. Names with "{expert}" are stacks of all experts in GGUF, "{keys}"
# and "{values}" the two parts of one map of each head.

ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {
    "attn_norm": "input_layernorm",
    **{name: f"self_attn.{ours}" for name, ours in ATTENTION.items()},
    "ffn_norm": "post_attention_layernorm",
    **MLP,
}
_W = {"gate": "w1", "up": "w3", "down": "w2"}
BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GEMMA = {**LLAMA, "ffn_norm": "pre_feedforward_layernorm", **BEHIND}
GEMMA4 = {
    **GEMMA, **HEAD_NORMS, "layer_output_scale.weight": "layer_scalar", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"ffn_{name}_exps": f"experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
OLMO2 = {name: ours for name, ours in {**LLAMA, **HEAD_NORMS}.items() if name not in ("attn_norm", "ffn_norm")}
GLM4 = {
    **LLAMA, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}  # fmt: skip
PHI3 = {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj", "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}  # fmt: skip
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3", "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}  # fmt: skip
GPT_OSS = {
    **LLAMA, **EXPERTS, "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip


SHARED_EXPERTS = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
NEXT_TOKENS = {
    **{f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
}
GLM4_MOE = {
    **{name: ours for name, ours in {**LLAMA, **HEAD_NORMS, **ROUTER, **EXPERTS}.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **SHARED_EXPERTS, **NEXT_TOKENS,
}  # fmt: skip
DEEPSEEK2 = {
    **LLAMA, **ROUTER, **EXPERTS, "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj.{keys}", "attn_v_b": "self_attn.kv_b_proj.{values}",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **SHARED_EXPERTS, **NEXT_TOKENS,
}  # fmt: skip
DELTA_RULE = {
    **{name: ours for name, ours in {**LLAMA, **HEAD_NORMS, **NEXT_TOKENS}.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d", "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.a", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
SSM = {
    "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_dt.bias": "dt_bias", "ssm_a": "A_log", "ssm_d": "D",
    "ssm_norm": "norm", "ssm_out": "out_proj",
}  # fmt: skip
"""A Mamba-2 mixer's."""
NEMOTRON_H = {
    "attn_norm": "norm", **{name: f"mixer.{ours}" for name, ours in {**ATTENTION, **SSM}.items()},
    "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{expert}.up_proj", "ffn_down_exps": "mixer.experts.{expert}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
LFM2 = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")},
    "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias",
    **{f"ffn_{name}_exps": f"feed_forward.experts.{{expert}}.{own}" for name, own in _W.items()},
}  # fmt: skip
STARCODER2 = {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
HUNYUAN = {
    **LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"
}  # fmt: skip
APERTUS = {
    **LLAMA, **HEAD_NORMS, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm",
}  # fmt: skip
GRANITE_MOE = {
    **LLAMA, "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{name: ours.replace("mlp", "block_sparse_moe") for name, ours in EXPERTS.items()},
    "ffn_gate_shexp": "shared_mlp.gate_proj", "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
GRANITE_HYBRID = {
    **GRANITE_MOE, **{name: f"mamba.{ours}" for name, ours in SSM.items()}, "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj", "ffn_down": "shared_mlp.output_linear",
}  # fmt: skip
ERNIE_MOE = {
    **LLAMA, **ROUTER, **EXPERTS, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
    **SHARED_EXPERTS,
}  # fmt: skip
GPT_NEOX = {
    "attn_norm": "input_layernorm", **{f"attn_{name}": f"attention.{name}_proj" for name in "qkv"},
    "attn_output": "attention.dense", "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm", "blk": "model.layers"}
SEED_OSS = {
    **{name: ours for name, ours in LLAMA.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip

FUSED = {"attn_qkv": ("attn_q", "qkv_proj"), "ffn_gate_up_exps": ("ffn_gate_exps", "gate_up_proj")}
"""Tensors that hold the rows of others, one's after another's, where an architecture has them not as such: the first of
those, beside which they are in safetensors, and their name there."""

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
        norm_offset: is stored added to the weights of norms, but for those of `plain_norms`.
        convolutions: parts of a layer that are filters of channels, `[channels, taps]`; `[channels, 1, taps]` there.
        flat: parts of a layer that are vectors there, whatever their shape here; of them `decays` are stored as
            `-exp` of what they are there.
        is_latent: heads' sizes are those of latent attention, which `read` reads; `head_dim` is what is rotated.
        differs_by_layer: numbers of heads and columns are lists, which `read` reads; the common fields take the first.
        names: of tensors outside of layers, and of the layers ("blk"), here.
        transposed: parts of a layer whose matrices are stored inputs first here.
        differences: tensors whose first row less the second is the one row there.
        layer_numbers: metadata with a number for each layer: the tensor and its shape that a layer has here.
        pictures: its name if a second file has its tower, by the projector's type (`models.gguf.mmproj`); empty if it
            reads no pictures.
        epsilon: the key of the norms' epsilon, under `attention`, and its field in config.json.
        has_other_epsilon: the epsilon may be under `layer_norm_epsilon` instead.
        read: makes further fields of config.json from the keys and the fields read so far.
    """

    config_name: str
    layer_names: Mapping[str, str]
    has_permuted_heads: bool = False
    norm_offset: float = 0.0
    plain_norms: frozenset[str] = frozenset()
    convolutions: frozenset[str] = frozenset(("ssm_conv1d",))
    flat: frozenset[str] = frozenset()
    decays: frozenset[str] = frozenset()
    is_latent: bool = False
    differs_by_layer: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    transposed: frozenset[str] = frozenset()
    differences: frozenset[str] = frozenset()
    layer_numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)
    epsilon: tuple[str, str] = ("layer_norm_rms_epsilon", "rms_norm_eps")
    has_other_epsilon: bool = False
    read: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, common: {}


_MAMBA_VECTORS = frozenset(("ssm_a", "ssm_d", "ssm_norm"))
_LAYER_NORM = "layer_norm_epsilon"
_QWEN = "qwen3vl_merger"

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "LlamaForCausalLM", {**LLAMA, **MIXTRAL}, has_permuted_heads=True, read=fields.read_llama
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", LLAMA),
    "qwen3": GgufArchitecture(
        "Qwen3ForCausalLM",
        {**LLAMA, **HEAD_NORMS},
        names={**NAMES, "cls.output": "score"},
        differences=frozenset(("cls.output",)),
        read=encoders.read_qwen3,
    ),
    "bert": GgufArchitecture(
        "BertModel",
        encoders.BERT,
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        names=encoders.BERT_NAMES,
        read=encoders.read_bert,
    ),
    "modern-bert": GgufArchitecture(
        "ModernBertModel",
        encoders.MODERN_BERT,
        epsilon=("layer_norm_rms_epsilon", "norm_eps"),
        has_other_epsilon=True,
        names=encoders.MODERN_BERT_NAMES,
        read=encoders.read_modern_bert,
    ),
    "nomic-bert": GgufArchitecture(
        "NomicBertModel",
        encoders.NOMIC_BERT,
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        names=encoders.NOMIC_BERT_NAMES,
        read=encoders.read_nomic_bert,
    ),
    "gemma-embedding": GgufArchitecture(
        "Gemma3TextModel",
        {**GEMMA, **HEAD_NORMS},
        norm_offset=1.0,
        read=encoders.read_gemma_embedding,
    ),
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
    "gemma4": GgufArchitecture(
        "Gemma4ForCausalLM",
        GEMMA4,
        differs_by_layer=True,
        names={
            **NAMES,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        pictures={
            "gemma4v": "Gemma4ForConditionalGeneration",
            "gemma4uv": "Gemma4UnifiedForConditionalGeneration",
        },
        read=read_gemma4,
    ),
    "gemma4-assistant": GgufArchitecture(
        "Gemma4AssistantForCausalLM",
        GEMMA4,
        differs_by_layer=True,
        names={**NAMES, "nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection"},
        read=read_assistant,
    ),
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
    "qwen3vl": GgufArchitecture(
        "Qwen3ForCausalLM",
        {**LLAMA, **HEAD_NORMS},
        pictures={_QWEN: "Qwen3VLForConditionalGeneration"},
        read=fields.read_text,
    ),
    "qwen3vlmoe": GgufArchitecture(
        "Qwen3MoeForCausalLM",
        {**LLAMA, **HEAD_NORMS, **ROUTER, **EXPERTS},
        pictures={_QWEN: "Qwen3VLMoeForConditionalGeneration"},
        read=fields.read_text_moe,
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM",
        DELTA_RULE,
        norm_offset=1.0,
        plain_norms=frozenset(("ssm_norm",)),
        pictures={_QWEN: "Qwen3_5ForConditionalGeneration"},
        read=fields.read_qwen35,
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM",
        {**DELTA_RULE, **ROUTER, **EXPERTS, **SHARED},
        norm_offset=1.0,
        plain_norms=frozenset(("ssm_norm",)),
        pictures={_QWEN: "Qwen3_5MoeForConditionalGeneration"},
        read=fields.read_qwen35_moe,
    ),
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM",
        {**DELTA_RULE, **ROUTER, **EXPERTS, **SHARED},
        norm_offset=1.0,
        plain_norms=frozenset(("ssm_norm",)),
        read=fields.read_qwen3_next,
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2moe"),
        GgufArchitecture(
            "Lfm2ForCausalLM",
            LFM2,
            convolutions=frozenset(("shortconv.conv",)),
            epsilon=("layer_norm_rms_epsilon", "norm_eps"),
            names={**NAMES, "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
            read=fields.read_lfm2,
        ),
    ),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        GRANITE_HYBRID,
        has_permuted_heads=True,
        flat=_MAMBA_VECTORS,
        decays=frozenset(("ssm_a",)),
        read=fields.read_granite_hybrid,
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        GgufArchitecture(
            "NemotronHForCausalLM",
            NEMOTRON_H,
            flat=_MAMBA_VECTORS,
            decays=frozenset(("ssm_a",)),
            epsilon=("layer_norm_rms_epsilon", "layer_norm_epsilon"),
            has_other_epsilon=True,
            names={**NAMES, "token_embd": "model.embeddings", "output_norm": "model.norm_f"},
            read=fields.read_nemotron_h,
        ),
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
    "mistral4": GgufArchitecture("Mistral4ForCausalLM", DEEPSEEK2, is_latent=True, read=fields.read_mistral4),
}
"""By `general.architecture`."""
