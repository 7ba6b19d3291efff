"""`config.json` into a typed `ModelConfig`, for every architecture that the engine runs.

The rule: a field that would change the model's arithmetic is either honoured or refused by its name; none is
ignored. Defaults of absent fields are those of transformers' configuration classes. The older spelling
(`rope_theta`, `rope_scaling`, `torch_dtype`) and transformers 5's (`rope_parameters`, `dtype`) give the same
`ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import ConfigError
from models.json_fields import REQUIRED, Fields, read_json_object
from models.rope_config import RopeConfig, parse_rope
from runtime.dtype import DType, bfloat16, float16, float32

FLOAT_DTYPES = (float32, float16, bfloat16)  # the types a weight may be stored in

# transformers' names for the activations; GPT-2's three GELUs differ by erf, tanh or sigmoid.
_SILU_NAMES = {"silu": "silu", "swish": "silu"}
_GELU_NAMES = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "quick_gelu": "sigmoid",
}

# Fields of other models and variants, and the values with which they change nothing.
_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "audio_config": (),
    "block_configs": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "sparsity_config": ({},),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "vision_config": (),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model's arithmetic depends on. Sizes are counts of elements, tokens, heads or layers."""

    architecture: str  # as in config.json, such as "LlamaForCausalLM"
    hidden_size: int
    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int  # not always hidden_size / num_heads
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: str  # "silu" in a gated MLP; "erf", "tanh" or "sigmoid": the GELU of a plain one
    rope: RopeConfig | None  # None: learned positions
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of queries and keys
    sliding_window: int | None  # tokens that a query sees, itself included; None: all
    layer_windows: tuple[int | None, ...]  # the window of each layer
    attention_scales: tuple[float, ...]  # the factor of q·k in each layer
    dtype: DType | None  # as the config says; None: it does not
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


def load_config(folder: str | Path) -> ModelConfig:
    """The typed form of `folder`/config.json.

    Raises `ConfigError`, naming file, field and value, for a file that is missing or not JSON, a field that
    is missing or out of range, an unknown architecture, and a feature that the engine does not have.
    """
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: there is no such folder")
    return parse_config(read_json_object(path), str(path))


def parse_config(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The typed form of a `config.json` already read; `where` names it in errors."""
    fields = Fields(values, where)
    architecture = _architecture(fields)
    for name, harmless in _HARMLESS_VALUES.items():
        value = values.get(name)
        if value is not None and value not in harmless:
            raise fields.error(name, f"= {value!r:.80} is not supported")
    return _PARSERS[architecture](fields, architecture)


def _architecture(fields: Fields) -> str:
    named = fields.values.get("architectures")
    model_type = fields.string("model_type", None)
    supported = ", ".join(_PARSERS)
    if named:
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise fields.error("architectures", f"must be a list of names, not {named!r:.80}")
        known = [name for name in named if name in _PARSERS]
        if not known:
            shown = ", ".join(named)[:200]
            raise fields.error("architectures", f"{shown!r} is not supported; supported are {supported}")
        architecture = str(known[0])
    else:
        if model_type is None:
            raise fields.error("architectures", "is missing, and model_type too")
        if model_type not in _MODEL_TYPES.values():
            raise fields.error("model_type", f"{model_type!r} is not supported; supported are {supported}")
        return next(name for name, kind in _MODEL_TYPES.items() if kind == model_type)
    if model_type is not None and model_type != _MODEL_TYPES[architecture]:
        raise fields.error("model_type", f"{model_type!r} contradicts the architecture {architecture}")
    return architecture


def _parse_gpt2(fields: Fields, architecture: str) -> ModelConfig:
    hidden_size = _either(fields, "n_embd", "hidden_size", most=1 << 20)
    num_heads = _either(fields, "n_head", "num_attention_heads", most=1 << 16)
    num_layers = _either(fields, "n_layer", "num_hidden_layers", most=1 << 14)
    if hidden_size % num_heads:
        raise fields.error("n_head", f"= {num_heads} must divide n_embd = {hidden_size}")
    head_dim = hidden_size // num_heads
    scale = head_dim**-0.5 if fields.boolean("scale_attn_weights", True) else 1.0
    scales = [scale] * num_layers
    if fields.boolean("scale_attn_by_inverse_layer_idx", False):
        scales = [scale / (layer + 1) for layer in range(num_layers)]
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size, most=1 << 24),
        vocab_size=_vocab_size(fields),
        max_position_embeddings=_either(fields, "n_positions", "max_position_embeddings"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, least=0.0),
        activation=_activation(fields, "activation_function", "gelu_new", _GELU_NAMES),
        rope=None,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_window=None,
        layer_windows=(None,) * num_layers,
        attention_scales=tuple(scales),
        **_token_ids_and_dtype(fields),
    )


def _parse_llama(fields: Fields, architecture: str) -> ModelConfig:
    has_bias = fields.boolean("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        windows=_full_attention_only,
    )


def _parse_mistral(fields: Fields, architecture: str) -> ModelConfig:
    _refuse_unless(fields, "attention_bias", False)
    _refuse_unless(fields, "mlp_bias", False)
    return _decoder(fields, architecture, windows=_window_in_every_layer)


def _parse_qwen2(fields: Fields, architecture: str) -> ModelConfig:
    # Its query, key and value always have biases, its output never.
    _refuse_unless(fields, "attention_bias", True)
    _refuse_unless(fields, "mlp_bias", False)
    return _decoder(fields, architecture, attention_bias=True, windows=_window_in_some_layers)


def _parse_qwen3(fields: Fields, architecture: str) -> ModelConfig:
    _refuse_unless(fields, "mlp_bias", False)
    has_bias = fields.boolean("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        qk_norm=True,
        default_head_dim=128,
        windows=_window_in_some_layers,
    )


def _decoder(
    fields: Fields,
    architecture: str,
    *,
    windows: Callable[[Fields, int], tuple[int | None, ...]],
    attention_bias: bool = False,
    attention_output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
) -> ModelConfig:
    """The fields that Llama, Mistral, Qwen2 and Qwen3 have in common."""
    hidden_size = fields.integer("hidden_size", most=1 << 20)
    num_heads = fields.integer("num_attention_heads", most=1 << 16)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, most=1 << 16)
    num_layers = fields.integer("num_hidden_layers", most=1 << 14)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"= {num_kv_heads} must divide num_attention_heads = {num_heads}"
        )
    head_dim = fields.integer("head_dim", default_head_dim, most=1 << 16)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error(
                "num_attention_heads", f"= {num_heads} must divide hidden_size = {hidden_size}"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary positions, not {head_dim}")
    max_position_embeddings = fields.integer("max_position_embeddings")
    layer_windows = windows(fields, num_layers)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", most=1 << 24),
        vocab_size=_vocab_size(fields),
        max_position_embeddings=max_position_embeddings,
        norm_eps=fields.number("rms_norm_eps", 1e-6, least=0.0),
        activation=_activation(fields, "hidden_act", "silu", _SILU_NAMES),
        rope=parse_rope(fields, max_position_embeddings),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=attention_bias,
        attention_output_bias=attention_output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=next((window for window in layer_windows if window is not None), None),
        layer_windows=layer_windows,
        attention_scales=(head_dim**-0.5,) * num_layers,
        **_token_ids_and_dtype(fields),
    )


def _full_attention_only(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    _refuse_unless(fields, "sliding_window", None)
    _refuse_unless(fields, "use_sliding_window", False)
    return _agreeing_with_layer_types(fields, (None,) * num_layers)


def _window_in_every_layer(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    _refuse_unless(fields, "use_sliding_window", True)
    # An explicit null is "no window"; only an absent field takes the default.
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    return _agreeing_with_layer_types(fields, (window,) * num_layers)


def _window_in_some_layers(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    if window is None:
        return _agreeing_with_layer_types(fields, (None,) * num_layers)
    if fields.has("layer_types"):
        kinds = _layer_types(fields, num_layers)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = fields.integer("max_window_layers", 28, least=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _agreeing_with_layer_types(fields: Fields, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    if fields.has("layer_types"):
        for layer, kind in enumerate(_layer_types(fields, len(windows))):
            if (kind == "sliding_attention") != (windows[layer] is not None):
                raise fields.error(
                    "layer_types",
                    f"[{layer}] = {kind!r}, but the sliding window of that layer is {windows[layer]}",
                )
    return windows


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    kinds = fields.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"must be a list of {num_layers} names, not {kinds!r:.80}")
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"[{layer}] = {kind!r:.80} is not supported")
    return kinds


def _refuse_unless(fields: Fields, name: str, accepted: bool | None) -> None:
    """Refuse a field that this architecture does not have, unless it says what is true anyway."""
    value = fields.values.get(name)
    if value is not None and value is not accepted:
        architecture = _architecture(fields)
        raise fields.error(name, f"= {value!r:.80} is not supported for {architecture}")


def _either(fields: Fields, name: str, other: str, *, most: int = 1 << 30) -> int:
    """A field that GPT-2's configs spell in either of two ways."""
    value = fields.integer(name, None, most=most)
    other_value = fields.integer(other, None, most=most)
    if value is None and other_value is None:
        return int(fields.integer(name, REQUIRED))
    if value is not None and other_value is not None and value != other_value:
        raise fields.error(name, f"is {value}, but {other} is {other_value}")
    return int(value if value is not None else other_value)


def _vocab_size(fields: Fields) -> int:
    return int(fields.integer("vocab_size", most=1 << 24))


def _activation(fields: Fields, name: str, default: str, kinds: dict[str, str]) -> str:
    value = fields.string(name, default)
    if value not in kinds:
        raise fields.error(name, f"{value!r} is not supported; supported are {', '.join(kinds)}")
    return kinds[value]


def _token_ids_and_dtype(fields: Fields) -> dict[str, Any]:
    name = fields.string("dtype", None)
    older = fields.string("torch_dtype", None)
    if name is not None and older is not None and name != older:
        raise fields.error("dtype", f"is {name!r}, but torch_dtype is {older!r}")
    name = name if name is not None else older
    dtype = None
    if name not in (None, "auto"):
        dtype = next((one for one in FLOAT_DTYPES if name in (one.name, f"torch.{one.name}")), None)
        if dtype is None:
            raise fields.error("dtype", f"{name!r} is not one of float32, float16 and bfloat16")
    return {
        "dtype": dtype,
        "bos_token_id": next(iter(fields.token_ids("bos_token_id")), None),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "pad_token_id": next(iter(fields.token_ids("pad_token_id")), None),
    }


_PARSERS: dict[str, Callable[[Fields, str], ModelConfig]] = {
    "GPT2LMHeadModel": _parse_gpt2,
    "LlamaForCausalLM": _parse_llama,
    "MistralForCausalLM": _parse_mistral,
    "Qwen2ForCausalLM": _parse_qwen2,
    "Qwen3ForCausalLM": _parse_qwen3,
}
_MODEL_TYPES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
