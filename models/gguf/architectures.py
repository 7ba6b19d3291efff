"""What llama.cpp's converter makes of the families that the engine runs: names of tensors, rows and weights that it
changes, and the keys that stand for a `config.json`'s fields."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from models.configuration.json_fields import REQUIRED, Fields

_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    **{name: f"self_attn.{ours}" for name, ours in _ATTENTION.items()},
    "ffn_norm": "post_attention_layernorm",
    **_MLP,
}
_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_LLAMA, "ffn_norm": "pre_feedforward_layernorm", **_BEHIND}
_OLMO2 = {name: ours for name, ours in {**_LLAMA, **_HEAD_NORMS}.items() if name not in ("attn_norm", "ffn_norm")}
_GLM4 = {
    **_LLAMA, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}  # fmt: skip
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj", "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}  # fmt: skip
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3", "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}  # fmt: skip
_GPT_OSS = {
    **_LLAMA, **_EXPERTS, "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip


_GLM4_MOE = {
    **{name: ours for name, ours in {**_LLAMA, **_HEAD_NORMS, **_ROUTER, **_EXPERTS}.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    **{f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
}  # fmt: skip
_DEEPSEEK2 = {
    **_LLAMA, **_ROUTER, **_EXPERTS, "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj.{keys}", "attn_v_b": "self_attn.kv_b_proj.{values}",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    **{f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
}  # fmt: skip
_STARCODER2 = {**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_SEED_OSS = {
    **{name: ours for name, ours in _LLAMA.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_SOFTMAX, _SIGMOID = 1, 2  # values of `expert_gating_func`


class Keys:
    """The metadata of one architecture, `{name}.key`, as fields that record what was read; `tensors` are the file's."""

    def __init__(self, fields: Fields, name: str, tensors: Container[str]) -> None:
        self.fields, self.tensors, self._name = fields, tensors, name

    def __call__(self, key: str) -> str:
        """The whole key."""
        return f"{self._name}.{key}"

    def integer(self, key: str, default: Any = None, *, least: int = 1) -> Any:
        """An integer, or a list with the same one for each layer."""
        name = self(key)
        values = self.fields.raw(name)
        if isinstance(values, list) and values and all(value == values[0] for value in values):
            return Fields({name: values[0]}, self.fields.where).integer(name, least=least)
        return self.fields.integer(name, default, least=least)

    def number(self, key: str, default: Any = None) -> Any:
        """A finite number."""
        return self.fields.number(self(key), default)


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One value of `general.architecture`.

    Attributes:
        config_name: as `architectures` of a config.json names it.
        layer_names: what a layer's tensors are called there, by their names here; those with "{expert}" are stacks of
            all experts here, those with "{keys}" and "{values}" the two parts of one map of each head. A name with its
            ".weight" stands for the whole of the other one.
        has_permuted_heads: rows of queries and keys lie as neighbouring pairs are rotated; config.json's model rotates
            halves.
        norm_offset: is stored added to the weights of norms.
        is_latent: heads' sizes are those of latent attention, which `read` reads; `head_dim` is what is rotated.
        epsilon: the key of the norms' epsilon, under `attention`, and its field in config.json.
        read: further fields of config.json, out of the keys and those that are read already.
    """

    config_name: str
    layer_names: Mapping[str, str]
    has_permuted_heads: bool = False
    norm_offset: float = 0.0
    is_latent: bool = False
    epsilon: tuple[str, str] = ("layer_norm_rms_epsilon", "rms_norm_eps")
    read: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, common: {}


def _read_llama(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """The converter calls Mistral so, too."""
    window = keys.integer("attention.sliding_window", least=0)
    if keys.integer("expert_count", 0, least=0):
        return {"architectures": ["MixtralForCausalLM"], "sliding_window": window or None, **_read_experts(keys)}
    return {"sliding_window": window, "architectures": ["MistralForCausalLM"]} if window else {}


def _read_experts(keys: Keys) -> dict[str, Any]:
    """How many experts there are, and how many of them a token goes to."""
    return {
        "num_experts": keys.integer("expert_count", REQUIRED),
        "num_experts_per_tok": keys.integer("expert_used_count", REQUIRED),
    }


def _read_qwen2_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Whether weights are normalised is the architecture's, as it is for the others."""
    common.pop("attention_bias")
    return {
        **_read_experts(keys),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", REQUIRED),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", REQUIRED),
        "norm_topk_prob": False,
        **_layers_without_router(keys, common),
    }


def _read_qwen3_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_read_experts(keys),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", REQUIRED),
        "norm_topk_prob": True,
        **_layers_without_router(keys, common),
    }


def _layers_without_router(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Qwen's layers without a router have an MLP."""
    layers = range(common["num_hidden_layers"])
    return {"mlp_only_layers": [each for each in layers if f"blk.{each}.ffn_gate_inp.weight" not in keys.tensors]}


def _read_glm4_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    keys.fields.expect(keys("expert_gating_func"), 0, _SIGMOID)
    return {
        **_read_further_layers(keys, common),
        **_read_shared_and_routed(keys),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "partial_rotary_factor": common.get("partial_rotary_factor", 1.0),
    }


def _read_further_layers(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Layers that predict further tokens are counted among the others, and may have been left out all the same."""
    num_further = keys.integer("nextn_predict_layers", 0, least=0)
    num_layers = common["num_hidden_layers"]
    if num_further >= num_layers:
        raise keys.fields.error(keys("nextn_predict_layers"), f"= {num_further} must be below block_count {num_layers}")
    return {"num_hidden_layers": num_layers - num_further, "num_nextn_predict_layers": num_further}


def _read_shared_and_routed(keys: Keys) -> dict[str, Any]:
    """Of GLM's and DeepSeek's experts."""
    experts = _read_experts(keys)
    return {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "n_shared_experts": keys.integer("expert_shared_count", REQUIRED, least=0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", REQUIRED),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.fields.boolean(keys("expert_weights_norm"), False),
    }


def _read_deepseek2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """V2, whose routers choose by a softmax, or V3, by sigmoids. Newer files tell the sizes of what is kept of a token
    as a head's, and those of heads apart; older ones tell heads' alone."""
    rotary_dim, latent_dim = common["head_dim"], keys.integer("attention.kv_lora_rank", REQUIRED)
    sizes = [keys.integer(f"attention.{name}_length", REQUIRED) for name in ("key", "value")]
    by_head = [keys.integer(f"attention.{name}_length_mla") for name in ("key", "value")]
    if None not in by_head:
        for name, value, must_be in zip(("key", "value"), sizes, (latent_dim + rotary_dim, latent_dim), strict=True):
            if value != must_be:
                raise keys.fields.error(keys(f"attention.{name}_length"), f"= {value} must be {must_be}, a kept row's")
        sizes = by_head
    key_size, value_size = sizes
    if key_size <= rotary_dim:
        problem = f"= {key_size} must be above rope.dimension_count = {rotary_dim}"
        raise keys.fields.error(keys("attention.key_length"), problem)
    common["num_key_value_heads"] = common["num_attention_heads"]
    found = {
        **_read_shared_and_routed(keys),
        "kv_lora_rank": latent_dim, "q_lora_rank": keys.integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary_dim, "qk_nope_head_dim": key_size - rotary_dim, "v_head_dim": value_size,
    }  # fmt: skip
    factor = keys.number("rope.scaling.yarn_log_multiplier")  # a tenth of `mscale_all_dim`, which `mscale` is in all
    if factor is not None and (rope := common.get("rope_scaling", {})).get("rope_type") == "yarn":
        rope["mscale"] = rope["mscale_all_dim"] = round(10.0 * factor, 7)
    gating = keys.integer("expert_gating_func", _SOFTMAX, least=0)
    groups, best = keys.integer("expert_group_count", 1), keys.integer("expert_group_used_count", 1)
    if gating == _SIGMOID:
        return {
            **found, **_read_further_layers(keys, common), "architectures": ["DeepseekV3ForCausalLM"],
            "n_group": groups, "topk_group": best,
        }  # fmt: skip
    keys.fields.expect(keys("expert_gating_func"), 0, _SOFTMAX)
    is_grouped = {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": best}
    return {**found, **(is_grouped if groups > 1 else {})}


def _read_olmoe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {**_read_experts(keys), "norm_topk_prob": False}


def _read_gpt_oss(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """The file does not say that the rotary ramp has no whole ends: gpt-oss's config.json does, and it always says how
    positions are scaled, where a file without scaling is silent."""
    rope = common.get("rope_scaling", {"rope_type": "default"})
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    size = keys.integer("expert_feed_forward_length", common["intermediate_size"])
    return {
        **_read_experts(keys),
        "intermediate_size": size,
        "rope_scaling": rope,
        "sliding_window": keys.integer("attention.sliding_window", 128),
        **_read_pattern(keys, common),
    }


def _read_gemma2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _score_divisor(common, num_layers_of_largest=46),
        **_read_pattern(keys, common),
    }


def _read_gemma3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", least=0)
    return {
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "sliding_window": window or None,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _score_divisor(common, num_layers_of_largest=62),
        **({"layer_types": ["full_attention"] * common["num_hidden_layers"]} if not window else {}),
        **_read_pattern(keys, common),
    }


def _score_divisor(common: dict[str, Any], *, num_layers_of_largest: int) -> int:
    """`query_pre_attn_scalar`, which the file lacks: of the model with 27 billion parameters it is not the head's."""
    if common["num_hidden_layers"] == num_layers_of_largest:
        return int(common["hidden_size"] // common["num_attention_heads"])
    return int(common["head_dim"])


def _read_pattern(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """`layer_types` out of one truth for each layer, whether it has a window."""
    name, num_layers = keys("attention.sliding_window_pattern"), common["num_hidden_layers"]
    pattern = keys.fields.raw(name)
    if pattern is None:
        return {}
    if not isinstance(pattern, list) or len(pattern) != num_layers or any(value not in (0, 1) for value in pattern):
        raise keys.fields.error(name, f"must be a truth for each of {num_layers} layers, not {pattern!r:.80}")
    return {"layer_types": ["sliding_attention" if value else "full_attention" for value in pattern]}


def _read_phi3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": keys.integer("attention.sliding_window", least=0) or None}


def _read_olmo2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window")
    if not window:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, **_read_pattern(keys, common)}


def _read_granite(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    names = {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }  # fmt: skip
    return {ours: keys.number(name, 1.0) for name, ours in names.items()}


def _read_seed_oss(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in keys.tensors}


def _read_exaone4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": keys.integer("attention.sliding_window", least=0) or None, **_read_pattern(keys, common)}


def _read_use_bias(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Reads the biases of families with one field for all of them."""
    return {"use_bias": common["attention_bias"], "attention_bias": None, "mlp_bias": None}


def _read_starcoder2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Without a window, which the file does not tell."""
    return {**_read_use_bias(keys, common), "sliding_window": None}


def _read_command_r(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in keys.tensors
    return {"logit_scale": keys.number("logit_scale", 0.0625), "use_qk_norm": has_norms}


def _read_cohere2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", REQUIRED)
    logit_scale = keys.number("logit_scale", 0.0625)
    return {"logit_scale": logit_scale, "sliding_window": window, **_read_pattern(keys, common)}


_LAYER_NORM = "layer_norm_epsilon"

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", {**_LLAMA, **_MIXTRAL}, has_permuted_heads=True, read=_read_llama),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _LLAMA),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", {**_LLAMA, **_HEAD_NORMS}),
    "qwen2moe": GgufArchitecture(
        "Qwen2MoeForCausalLM", {**_LLAMA, **_ROUTER, **_EXPERTS, **_SHARED}, read=_read_qwen2_moe
    ),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM", {**_LLAMA, **_HEAD_NORMS, **_ROUTER, **_EXPERTS}, read=_read_qwen3_moe
    ),
    "olmoe": GgufArchitecture(
        "OlmoeForCausalLM", {**_LLAMA, **_HEAD_NORMS, **_ROUTER, **_EXPERTS}, read=_read_olmoe
    ),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", _GPT_OSS, read=_read_gpt_oss),
    "gemma": GgufArchitecture("GemmaForCausalLM", _LLAMA, norm_offset=1.0),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _GEMMA, norm_offset=1.0, read=_read_gemma2),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM", {**_GEMMA, **_HEAD_NORMS}, norm_offset=1.0, read=_read_gemma3
    ),
    "phi3": GgufArchitecture("Phi3ForCausalLM", _PHI3, read=_read_phi3),
    "granite": GgufArchitecture("GraniteForCausalLM", _LLAMA, has_permuted_heads=True, read=_read_granite),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", _LLAMA, has_permuted_heads=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", {**_OLMO2, **_BEHIND}, read=_read_olmo2),
    "glm4": GgufArchitecture("Glm4ForCausalLM", _GLM4),
    "glm4moe": GgufArchitecture("Glm4MoeForCausalLM", _GLM4_MOE, read=_read_glm4_moe),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", _SEED_OSS, read=_read_seed_oss),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", {**_OLMO2, **_BEHIND}, read=_read_exaone4),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", _LLAMA, read=_read_use_bias),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM", _STARCODER2, epsilon=(_LAYER_NORM, "norm_epsilon"), read=_read_starcoder2
    ),
    "command-r": GgufArchitecture(
        "CohereForCausalLM", {**_LLAMA, **_HEAD_NORMS}, epsilon=(_LAYER_NORM, "layer_norm_eps"), read=_read_command_r
    ),
    "cohere2": GgufArchitecture(
        "Cohere2ForCausalLM", _LLAMA, epsilon=(_LAYER_NORM, "layer_norm_eps"), read=_read_cohere2
    ),
    "internlm2": GgufArchitecture("LlamaForCausalLM", _LLAMA, has_permuted_heads=True),
    "deepseek2": GgufArchitecture("DeepseekV2ForCausalLM", _DEEPSEEK2, is_latent=True, read=_read_deepseek2),
}
"""By `general.architecture`."""
