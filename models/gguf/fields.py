"""Makes the fields of config.json from the metadata of one architecture, for each family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from models.configuration.json_fields import REQUIRED, Fields

_SOFTMAX, _SIGMOID = 1, 2  # values of `expert_gating_func`


class Keys:
    """The metadata of one architecture, `{name}.key`; records the fields that were read. `tensors` are the file's."""

    def __init__(self, fields: Fields, name: str, tensors: Mapping[str, Any]) -> None:
        self.fields, self.tensors, self._name = fields, tensors, name

    def __call__(self, key: str) -> str:
        """The key with its prefix."""
        return f"{self._name}.{key}"

    def integer(self, key: str, default: Any = None, *, least: int = 1) -> Any:
        """An integer, or a list with the same one for each layer, or 0 for layers that have none."""
        name = self(key)
        values = self.fields.raw(name)
        if isinstance(values, list) and values and len(found := {*map(repr, values)} - {"0"}) < 2:
            value = next((each for each in values if repr(each) in found), None)
            return Fields({name: value}, self.fields.where).integer(name, default, least=least)
        return self.fields.integer(name, default, least=least)

    def first(self, key: str, default: Any = None) -> Any:
        """An integer, or the first of a list, one for each layer."""
        value = self.fields.raw(self(key))
        value = value[0] if isinstance(value, list) and value else value
        return Fields({self(key): value}, self.fields.where).integer(self(key), default)

    def number(self, key: str, default: Any = None) -> Any:
        """A finite number."""
        return self.fields.number(self(key), default)


def read_llama(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Llama's fields; the converter also uses this name for Mistral."""
    window = keys.integer("attention.sliding_window", least=0)
    if keys.integer("expert_count", 0, least=0):
        return {"architectures": ["MixtralForCausalLM"], "sliding_window": window or None, **_read_experts(keys)}
    return {"sliding_window": window, "architectures": ["MistralForCausalLM"]} if window else {}


def _read_experts(keys: Keys) -> dict[str, Any]:
    """The number of experts, and of those that a token goes to."""
    return {
        "num_experts": keys.integer("expert_count", REQUIRED),
        "num_experts_per_tok": keys.integer("expert_used_count", REQUIRED),
    }


def read_qwen2_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    common.pop("attention_bias")
    size = keys.integer("expert_shared_feed_forward_length", REQUIRED)
    return {**read_qwen3_moe(keys, common), "shared_expert_intermediate_size": size, "norm_topk_prob": False}


def read_qwen3_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Adds whether weights are normalised, which the architecture fixes. Layers without a router have an MLP."""
    layers = range(common["num_hidden_layers"])
    return {
        **_read_experts(keys),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", REQUIRED),
        "norm_topk_prob": True,
        "mlp_only_layers": [each for each in layers if f"blk.{each}.ffn_gate_inp.weight" not in keys.tensors],
    }


def read_qwen35(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Fields of layers with states; the layer count includes those that predict further tokens."""
    keys.fields.raw(keys("rope.dimension_sections"))  # text tokens have one position on all axes
    further = _read_further_layers(keys, common)
    num_layers = common["num_hidden_layers"] = further["num_hidden_layers"]
    heads, inner = keys.integer("ssm.time_step_rank", REQUIRED), keys.integer("ssm.inner_size", REQUIRED)
    if inner % heads:
        raise keys.fields.error(keys("ssm.inner_size"), f"= {inner} must be a multiple of ssm.time_step_rank = {heads}")
    interval, name = keys.integer("full_attention_interval", 4), keys("attention.recurrent_layers")
    has_state = keys.fields.raw(name)
    if has_state is None:
        has_state = [bool((index + 1) % interval) for index in range(num_layers)]
    if not isinstance(has_state, list) or len(has_state) < num_layers or any(each not in (0, 1) for each in has_state):
        raise keys.fields.error(name, f"must be a truth for each of {num_layers} layers, not {has_state!r:.80}")
    return {
        "mtp_num_hidden_layers": further["num_nextn_predict_layers"],
        "layer_types": ["linear_attention" if each else "full_attention" for each in has_state[:num_layers]],
        "linear_num_key_heads": keys.integer("ssm.group_count", REQUIRED), "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size", REQUIRED), "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", REQUIRED), "linear_attn_stored_as": "tiled",
        **read_rotated_part(keys, common),
    }  # fmt: skip


def read_qwen35_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    size = keys.integer("expert_shared_feed_forward_length", REQUIRED)
    found = read_qwen35(keys, common)
    return {**found, **read_qwen3_moe(keys, common), "shared_expert_intermediate_size": size}


def read_qwen3_next(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {**read_qwen35_moe(keys, common), "linear_attn_stored_as": "llama.cpp"}


def _layers_with(keys: Keys, common: dict[str, Any], part: str) -> list[bool]:
    """Whether each layer has the tensor `part.weight`."""
    return [f"blk.{layer}.{part}.weight" in keys.tensors for layer in range(common["num_hidden_layers"])]


def _has_any(keys: Keys, end: str) -> bool:
    """Whether some layer's tensor ends so."""
    return any(name.startswith("blk.") and name.endswith(end) for name in keys.tensors)


def read_lfm2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """LFM2's fields. Layers with a convolution, and with experts, are those that have their tensors."""
    kinds = ["conv" if each else "full_attention" for each in _layers_with(keys, common, "shortconv.conv")]
    found = {"layer_types": kinds, "conv_L_cache": keys.integer("shortconv.l_cache", REQUIRED)}
    found["conv_bias"] = _has_any(keys, ".shortconv.conv.bias")
    has_experts = _layers_with(keys, common, "ffn_gate_inp")
    if not any(has_experts):
        return {**found, "block_auto_adjust_ff_dim": False}
    keys.fields.expect(keys("expert_gating_func"), 0, _SIGMOID)
    first = has_experts.index(True)
    return {
        **found, **_read_experts(keys), "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": keys.integer("leading_dense_block_count", 0, least=0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", REQUIRED),
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in keys.tensors,
        "norm_topk_prob": keys.fields.boolean(keys("expert_weights_norm"), True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }  # fmt: skip


def _read_mamba(keys: Keys, common: dict[str, Any]) -> Iterator[int]:
    """Heads, groups, a head's size, a state's, and taps of Mamba-2 layers."""
    heads, inner = keys.integer("ssm.time_step_rank", REQUIRED), keys.integer("ssm.inner_size", REQUIRED)
    if inner % heads:
        raise keys.fields.error(keys("ssm.inner_size"), f"= {inner} must be a multiple of ssm.time_step_rank = {heads}")
    yield from (heads, keys.integer("ssm.group_count", REQUIRED), inner // heads)
    yield from (keys.integer(f"ssm.{name}", REQUIRED) for name in ("state_size", "conv_kernel"))


def read_granite_hybrid(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Granite 4's fields. Its attention has positions unless "finetuned" is false, which has no other use there."""
    heads, groups, head_dim, state_size, taps = _read_mamba(keys, common)
    has_states = _layers_with(keys, common, "ssm_in")
    found = {
        **_read_multipliers(keys, common), "mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_head": head_dim,
        "mamba_d_state": state_size, "mamba_d_conv": taps, "mamba_conv_bias": _has_any(keys, ".ssm_conv1d.bias"),
        "mamba_proj_bias": _has_any(keys, ".ssm_in.bias"),
        "layer_types": ["linear_attention" if each else "full_attention" for each in has_states],
        "position_embedding_type": "rope" if keys.fields.boolean(keys("rope.scaling.finetuned"), True) else None,
    }  # fmt: skip
    if heads * head_dim % common["hidden_size"]:
        problem = f"= {heads * head_dim} must be a multiple of embedding_length = {common['hidden_size']}"
        raise keys.fields.error(keys("ssm.inner_size"), problem)
    found["mamba_expand"] = heads * head_dim // common["hidden_size"]
    shared = keys.integer("expert_shared_feed_forward_length", 0, least=0)
    if not keys.integer("expert_count", 0, least=0):
        keys.integer("expert_used_count", 0, least=0)
        up = keys.tensors.get("blk.0.ffn_up.weight", keys.tensors.get("blk.0.ffn_up_shexp.weight"))
        shared = shared or (common["intermediate_size"] if up is None else up.shape[0])
        return {**found, "num_local_experts": 0, "shared_intermediate_size": shared}
    experts = _read_experts(keys)
    return {**found, **experts, "num_local_experts": experts["num_experts"], "shared_intermediate_size": shared}


def read_nemotron_h(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Nemotron's fields. The tensors say what each layer is."""
    heads, groups, head_dim, state_size, taps = _read_mamba(keys, common)
    parts = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    have = {kind: _layers_with(keys, common, part) for part, kind in parts.items()}
    layers = range(common["num_hidden_layers"])
    kinds = [next((kind for kind, each in have.items() if each[layer]), "mlp") for layer in layers]
    found = {
        "layers_block_type": kinds, "mamba_num_heads": heads, "n_groups": groups, "mamba_head_dim": head_dim,
        "ssm_state_size": state_size, "conv_kernel": taps, "use_conv_bias": _has_any(keys, ".ssm_conv1d.bias"),
        "use_bias": _has_any(keys, ".ssm_in.bias"), "mlp_bias": _has_any(keys, ".ffn_up.bias"),
    }  # fmt: skip
    if "moe" not in kinds:
        return found
    keys.fields.expect(keys("expert_gating_func"), 0, _SIGMOID)
    keys.fields.expect(keys("expert_shared_count"), 1)
    experts = _read_experts(keys)
    return {
        **found, "n_routed_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", REQUIRED),
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", REQUIRED),
        "moe_latent_size": keys.integer("moe_latent_size", 0, least=0) or None,
        "n_group": keys.integer("expert_group_count", 1), "topk_group": keys.integer("expert_group_used_count", 1),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.fields.boolean(keys("expert_weights_norm"), False),
    }  # fmt: skip


def read_glm4_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
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
    """The layer count includes layers that predict further tokens, even if the file omits them."""
    num_further = keys.integer("nextn_predict_layers", 0, least=0)
    num_layers = common["num_hidden_layers"]
    if num_further >= num_layers:
        raise keys.fields.error(keys("nextn_predict_layers"), f"= {num_further} must be below block_count {num_layers}")
    return {"num_hidden_layers": num_layers - num_further, "num_nextn_predict_layers": num_further}


def _read_shared_and_routed(keys: Keys) -> dict[str, Any]:
    """The shared and routed experts of GLM and DeepSeek."""
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


def read_deepseek2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """V2, whose routers choose by a softmax, V3 and GLM-4.7-Flash, by sigmoids, or Mistral, whose weights of a softmax
    are normalised. Newer files give the sizes of a latent row as a head's, and those of heads apart; older ones only
    give those of heads."""
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
    # A file without the key routes by sigmoids if it has a correction.
    has_correction = f"blk.{found['first_k_dense_replace']}.exp_probs_b.bias" in keys.tensors
    gating = keys.integer("expert_gating_func", _SIGMOID if has_correction else _SOFTMAX, least=0)
    groups, best = keys.integer("expert_group_count", 1), keys.integer("expert_group_used_count", 1)
    if gating == _SIGMOID:
        return {
            **found, **_read_further_layers(keys, common), "architectures": ["DeepseekV3ForCausalLM"],
            "n_group": groups, "topk_group": best,
        }  # fmt: skip
    keys.fields.expect(keys("expert_gating_func"), 0, _SOFTMAX)
    if found["norm_topk_prob"] and (rope := common.get("rope_scaling", {})).get("rope_type") == "yarn":
        return {**found, **_mistral4_fields(keys, rope), "head_dim": key_size, "n_group": groups, "topk_group": best}
    is_grouped = {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": best}
    return {**found, **(is_grouped if groups > 1 else {})}


def _mistral4_fields(keys: Keys, rope: dict[str, Any]) -> dict[str, Any]:
    """Mistral 4's class, and how queries grow with their position: not at all in a file that does not tell."""
    context, name = rope.get("original_max_position_embeddings"), "attention.temperature_length"
    if (length := keys.integer(name)) not in (None, context):
        raise keys.fields.error(keys(name), f"= {length} must be rope.scaling.original_context_length = {context}")
    scaling = {"llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0)}
    return {"architectures": ["Mistral4ForCausalLM"], "rope_scaling": {**rope, **scaling}}


def read_mistral4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Mistral Small 4's fields. A file that does not tell of normalised weights, or of YaRN, is refused."""
    if not keys.fields.boolean(keys("expert_weights_norm"), False):
        raise keys.fields.error(keys("expert_weights_norm"), "must be true: Mistral 4's weights are normalised")
    if common.get("rope_scaling", {}).get("rope_type") != "yarn":
        raise keys.fields.error(keys("rope.scaling.type"), "must be 'yarn' for mistral4")
    return read_deepseek2(keys, common)


def read_olmoe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {**_read_experts(keys), "norm_topk_prob": False}


def read_gpt_oss(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Adds fields that gpt-oss's config.json always has and the file lacks: that the rotary ramp's ends are not
    rounded, and the scaling of positions."""
    rope = common.get("rope_scaling", {"rope_type": "default"})
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    size = keys.integer("expert_feed_forward_length", common["intermediate_size"])
    return {
        **_read_experts(keys),
        "intermediate_size": size,
        "rope_scaling": rope,
        "sliding_window": keys.integer("attention.sliding_window", 128),
        **read_pattern(keys, common),
    }


def read_gemma2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _score_divisor(common, num_layers_of_largest=46),
        **read_pattern(keys, common),
    }


def read_gemma3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", least=0)
    return {
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "sliding_window": window or None,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _score_divisor(common, num_layers_of_largest=62),
        **({"layer_types": ["full_attention"] * common["num_hidden_layers"]} if not window else {}),
        **read_pattern(keys, common),
    }


def _score_divisor(common: dict[str, Any], *, num_layers_of_largest: int) -> int:
    """`query_pre_attn_scalar`, which the file lacks: it differs from the head's size in the 27B model."""
    if common["num_hidden_layers"] == num_layers_of_largest:
        return int(common["hidden_size"] // common["num_attention_heads"])
    return int(common["head_dim"])


def read_pattern(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """`layer_types` from one flag a layer: whether it has a window."""
    name, num_layers = keys("attention.sliding_window_pattern"), common["num_hidden_layers"]
    pattern = keys.fields.raw(name)
    if pattern is None:
        return {}
    if not isinstance(pattern, list) or len(pattern) != num_layers or any(value not in (0, 1) for value in pattern):
        raise keys.fields.error(name, f"must be a truth for each of {num_layers} layers, not {pattern!r:.80}")
    return {"layer_types": ["sliding_attention" if value else "full_attention" for value in pattern]}


def read_phi3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": keys.integer("attention.sliding_window", least=0) or None}


def read_olmo2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Layers with windows are rotated by the same base, but not scaled."""
    keys.fields.expect(keys("rope.freq_base_swa"), common["rope_theta"])
    window = keys.integer("attention.sliding_window")
    if not window:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, **read_pattern(keys, common)}


def read_granite(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Granite's fields. "finetuned" is false in files of layers without positions, which only hybrids have."""
    keys.fields.expect(keys("rope.scaling.finetuned"), True)
    return _read_multipliers(keys, common)


def _read_multipliers(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Granite's four multipliers. One that is absent or 0 changes nothing: scores are divided by a head's root."""
    names = {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }  # fmt: skip
    usual = {"attention_multiplier": float(common["head_dim"]) ** -0.5}
    return {ours: keys.number(name) or usual.get(ours, 1.0) for name, ours in names.items()}


def read_seed_oss(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in keys.tensors}


def read_exaone4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": keys.integer("attention.sliding_window", least=0) or None, **read_pattern(keys, common)}


def read_use_bias(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Reads the biases of families with one field for all of them."""
    return {"use_bias": common["attention_bias"], "attention_bias": None, "mlp_bias": None}


def read_starcoder2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """StarCoder 2's fields, without a window, which the file does not give."""
    return {**read_use_bias(keys, common), "sliding_window": None}


def read_command_r(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in keys.tensors
    return {"logit_scale": keys.number("logit_scale", 0.0625), "use_qk_norm": has_norms}


def read_cohere2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", REQUIRED)
    logit_scale = keys.number("logit_scale", 0.0625)
    return {"logit_scale": logit_scale, "sliding_window": window, **read_pattern(keys, common)}


def read_granite_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """With an expert of all tokens or without; or that alone, which is Granite's MLP."""
    found = _read_multipliers(keys, common)
    shared = keys.integer("expert_shared_feed_forward_length", 0, least=0)
    if not keys.integer("expert_count", 0, least=0):
        keys.integer("expert_used_count", 0, least=0)
        return {**found, "architectures": ["GraniteForCausalLM"], "intermediate_size": shared or None}
    name = "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"
    is_shared = {"shared_intermediate_size": shared} if shared else {}
    return {**found, **_read_experts(keys), **is_shared, "architectures": [name]}


def read_ernie_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Ernie's fields; a layer is sparse if it has a router's tensors."""
    experts, layers = _read_experts(keys), range(common["num_hidden_layers"])
    sparse = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" in keys.tensors]
    keys.fields.raw(keys("expert_shared_feed_forward_length"))  # no length of any map
    return {
        **read_use_bias(keys, common),
        "moe_num_experts": experts["num_experts"], "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", REQUIRED),
        "moe_num_shared_experts": keys.integer("expert_shared_count", 0, least=0),
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0, least=0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
        "moe_layer_end_index": sparse[-1] if sparse else 0,
    }  # fmt: skip


def read_phimoe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """The file has one factor of cosines and sines, for both contexts."""
    rope = common.get("rope_scaling", {})
    if "attention_factor" in rope:
        rope["short_mscale"] = rope["long_mscale"] = rope["attention_factor"]
    return {**read_phi3(keys, common), **_read_experts(keys), "lm_head_bias": "output.bias" in keys.tensors}


def read_olmo(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {"clip_qkv": keys.number("attention.clamp_kqv") or None}


def read_mistral3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Ministral 3, whose queries grow with their position, or Mistral under its newer name."""
    beta, rope = keys.number("attention.temperature_scale"), common.get("rope_scaling", {})
    factor = keys.number("rope.scaling.yarn_log_multiplier")
    if factor and rope.get("rope_type") == "yarn":
        rope["mscale"], rope["mscale_all_dim"] = 1.0, factor
    if not beta:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    rope["llama_4_scaling_beta"] = beta
    return {"rope_scaling": rope}


def read_gpt_neox(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_parallel_residual": keys.fields.boolean(keys("use_parallel_residual"), True),
        "mlp_bias": None,  # there always is one
        **read_rotated_part(keys, common),
    }


def read_rotated_part(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """The rotated part of a head, by default all of it, for families whose config must name it."""
    return {"partial_rotary_factor": common.get("partial_rotary_factor", 1.0)}


def read_gpt2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """GPT-2's fields, under its own config's names, without rotary positions."""
    names = {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
    }  # fmt: skip
    absent = (*names, "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rope_theta")
    return {**dict.fromkeys(absent), **{own: common[name] for name, own in names.items()}}


def read_text(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """The text part of models that read pictures. Text tokens have one position on all axes."""
    for name in ("rope.dimension_sections", "n_deepstack_layers"):
        keys.fields.raw(keys(name))
    return {}


def read_text_moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {**read_text(keys, common), **read_qwen3_moe(keys, common)}
