"""Makes a `config.json` of GGUF's metadata: the families read it as they read any other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.configuration.json_fields import REQUIRED, Fields
from models.errors import ConfigError
from models.gguf.architectures import ARCHITECTURES, GgufArchitecture
from models.gguf.fields import Keys
from models.gguf.reader import GgufFile, GgufTensor, Strings, Value
from runtime.dtype import DType

_LONGEST_LIST = 1 << 14  # as many layers as a model may have

# Keys that change nothing, and values that switch a feature off.
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "expert_count": (0,), "expert_used_count": (0,), "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (1.0,), "nextn_predict_layers": (0,), "attention.clamp_kqv": (0.0,),
}  # fmt: skip


def find_architecture(file: GgufFile) -> GgufArchitecture:
    """The converter's rules for the file's `general.architecture`. Raises `ConfigError` for one that is not known."""
    kind, name = file.metadata.get("general.type", "model"), file.metadata.get("general.architecture")
    if kind != "model":
        raise ConfigError(f"{file.path}: general.type is {kind!r:.80}: give the file of the model itself")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file.path}: general.architecture {name!r:.80} is not supported; supported are {known}")
    return ARCHITECTURES[name]


def config_values(
    file: GgufFile, tensors: Mapping[str, GgufTensor], factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The fields of a config.json.

    `tensors` are those of all shards, whose names show which biases exist; `factors` are the rotary ones, stored as
    tensors. Raises `ConfigError`, naming file, key and value.
    """
    rules, name = find_architecture(file), str(file.metadata["general.architecture"])
    own = {key: plain(value) for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    fields = Fields(own, str(file.path))
    fields.owner = name
    keys = Keys(fields, name, tensors)
    one_of = keys.first if rules.differs_by_layer else keys.integer
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{file.path}: tensor 'token_embd.weight' is missing: the file holds no whole model")
    hidden, num_heads = keys.integer("embedding_length", REQUIRED), keys.integer("attention.head_count", REQUIRED)
    if rules.is_latent:
        head_dim = keys.integer("rope.dimension_count", REQUIRED)
    else:
        head_dim = keys.integer("attention.key_length", hidden // num_heads)
        fields.expect(keys("attention.value_length"), head_dim)
    values: dict[str, Any] = {
        "architectures": [rules.config_name],
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count", REQUIRED),
        "num_attention_heads": num_heads,
        "num_key_value_heads": one_of("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": one_of("feed_forward_length", REQUIRED) if rules.differs_by_layer else _inner_size(keys),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": keys.integer("context_length", REQUIRED),
        rules.epsilon[1]: _epsilon(keys, rules),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(f"blk.0.attn_{each}.bias" in tensors for each in ("q", "qkv", "kv_a_mqa")),
        "dtype": _main_dtype(tensors).name,
        **({"mlp_bias": True} if "blk.0.ffn_down.bias" in tensors else {}),
    }
    values |= _rope(keys, values, factors)
    values |= rules.read(keys, values)
    fields.refuse_unread(lambda key, value: _is_harmless(key.removeprefix(f"{name}."), value))
    return values


def _epsilon(keys: Keys, rules: GgufArchitecture) -> float:
    """The norms' epsilon; Nemotron's files may have it under the other norm's key, alone or beside its own."""
    name, other = (f"attention.{each}" for each in (rules.epsilon[0], "layer_norm_epsilon"))
    found = keys.number(other) if rules.has_other_epsilon else None
    return float(keys.number(name, REQUIRED if found is None else found))


def _inner_size(keys: Keys) -> int:
    """Columns between an MLP's maps; files without any may give those of experts alone."""
    names = ("feed_forward_length", "expert_feed_forward_length")
    name = next((name for name in names if keys.fields.has(keys(name))), names[0])
    return int(keys.integer(name, REQUIRED))


def _rope(keys: Keys, values: dict[str, Any], stored: Mapping[str, list[float]]) -> dict[str, Any]:
    """Fields of the rotary positions; factors that the file stores for each pair become those of longrope."""
    fields, positions, head_dim = keys.fields, values["max_position_embeddings"], values["head_dim"]
    rope: dict[str, Any] = {}
    found: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10_000.0)}
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        found["partial_rotary_factor"] = rotary_dim / head_dim
    kind = fields.string(keys("rope.scaling.type"), "none")
    factor, original = keys.number("rope.scaling.factor"), keys.integer("rope.scaling.original_context_length")
    attention = keys.number("rope.scaling.attn_factor")
    yarn = {name: keys.number(f"rope.scaling.yarn_{name}") for name in ("attn_factor", "beta_fast", "beta_slow")}
    legacy = keys.number("rope.scale_linear")
    if "rope_factors_long.weight" in stored:
        rope = {
            "rope_type": "longrope", "short_factor": stored.get("rope_factors_short.weight"),
            "long_factor": stored["rope_factors_long.weight"], "attention_factor": attention,
        }  # fmt: skip
        found["original_max_position_embeddings"] = original
    elif "rope_freqs.weight" in stored:
        factors = stored["rope_freqs.weight"]
        rope = {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
            "original_max_position_embeddings": positions,
        }  # fmt: skip
    elif kind == "yarn":
        rope = {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "attention_factor": yarn["attn_factor"] or attention, "beta_fast": yarn["beta_fast"],
            "beta_slow": yarn["beta_slow"],
        }  # fmt: skip
    elif kind == "linear" or (kind == "none" and (factor or legacy or 1.0) != 1.0):
        rope = {"rope_type": "linear", "factor": factor or legacy}
    elif kind not in ("none", "longrope"):
        raise fields.error(keys("rope.scaling.type"), f"{kind!r:.80} is not supported")
    if rope:
        found["rope_scaling"] = {name: value for name, value in rope.items() if value is not None}
    return found


def _main_dtype(tensors: Mapping[str, GgufTensor]) -> DType:
    """The type of most elements after reading."""
    counts = Counter[DType]()
    for tensor in tensors.values():
        counts[tensor.format.dtype] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0]


def _is_harmless(key: str, value: Any) -> bool:
    return key in _HARMLESS or value in _NEUTRAL.get(key, ())


def plain(value: Value) -> Any:
    """A value as JSON has it. float32 becomes its shortest decimal: 1e-6, not 9.99999997e-7."""
    if isinstance(value, float):
        return float(str(np.float32(value))) if math.isfinite(value) else value
    if isinstance(value, np.ndarray):
        return list(map(plain, value.tolist())) if value.size <= _LONGEST_LIST else repr(value)
    return list(value) if isinstance(value, Strings) and len(value) <= _LONGEST_LIST else value
