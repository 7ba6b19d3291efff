"""The fields that every model's config has, and how a family reads them from `config.json`.

The rule: a field that would change the model's arithmetic is either honoured or refused by its name; none is ignored.
A family reads its fields through `Fields`, which records them; `models.registry.parse_config` refuses the rest.
Defaults of absent fields are those of transformers' configuration classes. The older spelling (`rope_theta`,
`rope_scaling`, `torch_dtype`) and transformers 5's (`rope_parameters`, `dtype`) give the same config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from models.checkpoints.model_files import open_model
from models.configuration.json_fields import REQUIRED, Fields
from models.errors import ConfigError
from models.makers.shards import Shard, equal_shard, shard_of_heads, shard_of_width, whole_shard
from runtime.dtype import DType, bfloat16, float16, float32
from tokenizer.warn import warn_once

FLOAT_DTYPES = (float32, float16, bfloat16)  # the types a weight may be stored in

_OTHER_NAMES = {"float": "float32", "float64": "float32", "double": "float32", "half": "float16"}
"""torch's; numbers of 64 bits are read as float32."""

# transformers' names for the activations; the three GELUs differ by erf, tanh or sigmoid.
SILU_NAMES = {"silu": "silu", "swish": "silu"}
GELU_NAMES = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "quick_gelu": "sigmoid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The fields of every model. A family's config adds its own.

    Sizes are counts of elements, tokens, heads or layers. `recurrence` is the operation of the layers with a recurrent
    state, whose kernels are compiled before a start.
    """

    recurrence: ClassVar[Literal["", "short_conv", "delta_rule", "mamba"]] = ""

    hidden_size: int
    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int  # not always hidden_size / num_heads
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: str  # "silu" in a gated MLP; "erf", "tanh" or "sigmoid": a GELU
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]  # tokens that a query sees in each layer, itself included; None for all
    attention_scales: tuple[float, ...]  # the factor of q·k in each layer
    dtype: DType | None  # of the config, or None if it has none
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    latent_values: int = 0  # numbers of a value in latent pages (`runtime.kv.cache`); 0 for pages of keys and values
    labels: tuple[str, ...] = ()  # of a classifier, by their numbers
    labels_tokens: bool = False  # the classifier reads each token, not the text
    score_tokens: tuple[str, ...] = ()  # whose logits after a pair score it: that of the last less that of the first
    architecture: str = ""  # as in config.json, such as "LlamaForCausalLM"
    shards: tuple[tuple[str, Shard], ...] = ()  # of a rank's config: the whole that each named size is a share of

    @property
    def split_widths(self) -> tuple[str, ...]:
        """Fields, beside the heads, of which each rank has a share."""
        return ("intermediate_size",)

    def of_a_rank(self, rank: int, num_ranks: int, *, exact: bool = False) -> Self:
        """The config of one of so many ranks, with its share of the heads and of the MLP's width.

        Raises `ConfigError` where they cannot be divided.
        """
        if num_ranks == 1:
            return self
        shards = self.head_shards(rank, num_ranks)
        for name in self.split_widths:
            if width := getattr(self, name):
                shards[name] = shard_of_width(width, rank, num_ranks, exact=exact)
        found = {}
        for name, shard in shards.items():
            if shard is None or shard.whole != getattr(self, name):
                how = " in exact mode" if exact and name in self.split_widths else ""
                raise ConfigError(
                    f"{self.architecture}: {name} = {getattr(self, name)} cannot be split over {num_ranks} ranks{how}"
                )
            found[name] = shard
        counts: dict[str, Any] = {name: shard.count for name, shard in found.items()}
        return replace(self, shards=tuple(found.items()), **counts)

    def head_shards(self, rank: int, num_ranks: int) -> dict[str, Shard | None]:
        """A rank's share of each number of heads; None where they cannot be divided."""
        return {
            "num_heads": equal_shard(self.num_heads // num_ranks, rank, num_ranks),
            "num_kv_heads": shard_of_heads(self.num_kv_heads, rank, num_ranks),
        }

    def of_layer(self, index: int) -> Self:
        """The config with the heads of a layer, where layers differ in them."""
        return self

    def shard(self, name: str) -> Shard:
        """This rank's part of a size: all of it where there is one rank."""
        size: int = getattr(self, name)
        return dict(self.shards).get(name, whole_shard(size))


def read_common(
    fields: Fields,
    *,
    head_dim_name: str = "head_dim",
    default_head_dim: int | None = None,
    default_max_positions: Any = REQUIRED,
    norm_eps_name: str = "rms_norm_eps",
    default_norm_eps: float = 1e-6,
    activation_name: str = "hidden_act",
    activations: Mapping[str, str] = SILU_NAMES,
    default_activation: str = "silu",
    default_tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """The fields of `ModelConfig` that decoders spell alike, as keyword arguments of a family's config.

    `layer_windows` are all None and `attention_scales` 1/√head_dim; a family with others replaces them.
    `default_head_dim` None means `hidden_size / num_attention_heads`.
    """
    hidden_size = fields.integer("hidden_size", most=1 << 20)
    num_heads = fields.integer("num_attention_heads", most=1 << 16)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, most=1 << 16)
    num_layers = fields.integer("num_hidden_layers", most=1 << 14)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"= {num_kv_heads} must divide num_attention_heads = {num_heads}")
    head_dim = fields.integer(head_dim_name, default_head_dim, most=1 << 16)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("num_attention_heads", f"= {num_heads} must divide hidden_size = {hidden_size}")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error(head_dim_name, f"must be even for rotary positions, not {head_dim}")
    return {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size", most=1 << 24),
        "vocab_size": read_vocab_size(fields),
        "max_position_embeddings": fields.integer("max_position_embeddings", default_max_positions),
        "norm_eps": fields.number(norm_eps_name, default_norm_eps, least=0.0, most=1.0),
        "activation": read_choice(fields, activation_name, default_activation, activations),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default_tie_word_embeddings),
        "layer_windows": (None,) * num_layers,
        "attention_scales": (head_dim**-0.5,) * num_layers,
        **read_token_ids(fields),
        "dtype": read_dtype(fields),
    }


def read_attention_bias(fields: Fields, name: str = "attention_bias", default: bool = False) -> dict[str, Any]:
    """One field for the biases of all of attention's maps, as keyword arguments of `DecoderConfig`."""
    has_bias = fields.boolean(name, default)
    return {"attention_bias": has_bias, "attention_output_bias": has_bias}


def read_window(fields: Fields, default: int = 4096, *, least: int = 1) -> int | None:
    """`sliding_window`; a null says that there is none, while absence means the default."""
    window: int | None = fields.integer("sliding_window", None if "sliding_window" in fields else default, least=least)
    return window


def refuse_tied_bias(fields: Fields, name: str, common: Mapping[str, Any], has_bias: bool) -> None:
    """`ConfigError` for a head that has a bias and is the token table, too, which no published model has."""
    if has_bias and common["tie_word_embeddings"]:
        raise fields.error(
            name, "is true beside tie_word_embeddings true: a head that is the token table cannot have a bias here"
        )


def read_vocab_size(fields: Fields) -> int:
    return int(fields.integer("vocab_size", most=1 << 24))


def read_choice(fields: Fields, name: str, default: str, choices: Mapping[str, str]) -> str:
    """The choice of that name, such as an activation's; a name that is not among `choices` is refused."""
    value = fields.string(name, default)
    if value not in choices:
        raise fields.error(name, f"{value!r:.80} is not supported; supported are {', '.join(choices)}")
    return choices[value]


def read_token_ids(fields: Fields) -> dict[str, Any]:
    return {
        "bos_token_id": next(iter(fields.token_ids("bos_token_id")), None),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "pad_token_id": next(iter(fields.token_ids("pad_token_id")), None),
    }


def outer_fields(fields: Fields) -> dict[str, Any]:
    """Token ids and the weights' type beside `text_config`; they take precedence over those in it."""
    found = {**read_token_ids(fields), "dtype": read_dtype(fields)}
    return {name: value for name, value in found.items() if value not in (None, ())}


def read_dtype(fields: Fields) -> DType | None:
    """The type that the weights were saved in; None if the file does not say. The older spelling counts where the
    newer one is absent, as in transformers."""
    name, older = fields.string("dtype", None), fields.string("torch_dtype", None)
    name = name if name is not None else older
    if name in (None, "auto"):
        return None
    plain = name.removeprefix("torch.")
    dtype = next((one for one in FLOAT_DTYPES if one.name == _OTHER_NAMES.get(plain, plain)), None)
    if dtype is None:
        warn_once(
            f"{fields.where}: dtype {name!r:.80} is not one of float32, float16 and bfloat16: the types of the stored"
            " tensors count"
        )
    return dtype


def load_dtype(model: str | Path, overrides: str = "", mmproj: str = "") -> DType | None:
    """The type that a model's config, with its overrides, says the weights were saved in. Imports no kernels.

    Raises `ModelLoadError`.
    """
    return read_dtype(open_model(model, overrides, mmproj).config())


def read_layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    """`layer_types`, one of "full_attention" and "sliding_attention" for each layer; None if the file has none."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"must be a list of {num_layers} names, not {kinds!r:.80}")
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"[{layer}] = {kind!r:.80} is not supported")
    return kinds


def read_windows(fields: Fields, num_layers: int, pattern: int) -> tuple[int | None, ...]:
    """`sliding_window` in the layers that `layer_types` names, by default in all but each `pattern`-th."""
    kinds = read_layer_types(fields, num_layers) or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)
    ]
    window = read_window(fields)
    if window is None and "sliding_attention" in kinds:
        raise fields.error("sliding_window", "is null, but layers have sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def agree_with_layer_types(fields: Fields, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """`windows`, if `layer_types` is absent or names the same layers; `ConfigError` otherwise."""
    for layer, kind in enumerate(read_layer_types(fields, len(windows)) or ()):
        if (kind == "sliding_attention") != (windows[layer] is not None):
            raise fields.error(
                "layer_types", f"[{layer}] = {kind!r}, but the sliding window of that layer is {windows[layer]}"
            )
    return windows
