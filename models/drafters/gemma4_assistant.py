"""Gemma 4's assistants: a few layers without keys and values of their own, as drafters.

    x = pre_projection([embed(token i + 1) * scale | h])      h: the model's at token i, after its last norm
    x = layer(x) ...      layers of Gemma 4, over the pages of the model's last layers of each kind, up to token i
    y = norm(x);   token i + 2 ~ head(y);   post_projection(y) takes the place of h for the next token

All tokens of a draft have the same position, that of token i + 1. A layer with a window sees the keys that the model's
own layer saw at token i (transformers' mask has one or two more in long texts, llama.cpp's one less). The head is the
drafter's own table. In the smaller models a map scores groups of tokens, and only tokens of the best are proposed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from models.base import Model
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.model_files import open_model
from models.configuration.class_defaults import add_class_defaults
from models.configuration.harmless_fields import is_harmless
from models.configuration.json_fields import Fields
from models.decoder import Decoder
from models.drafters.hidden_state_drafter import PageDrafter
from models.drafters.making import make_drafter, options_of
from models.errors import ModelLoadError, WeightsError
from models.families.gemma4 import Gemma4Config, Gemma4Layer, Gemma4Model, read_gemma4
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.dtype import float32
from runtime.kv.cache import KVCache
from runtime.linear.options import LoadSettings
from runtime.tensor.tensor import Tensor

_ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_HARMLESS = re.compile(r"masked_embedding\.token_ordering|lm_head\.weight|model\.rotary_emb\..*")
_ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig:
    """An assistant's configuration.

    Attributes:
        decoder: of its layers.
        target_hidden_size: width of the model's hidden states.
        num_groups, top_groups: equal groups of tokens, and how many of the best are proposed from; 0 for all tokens.
    """

    decoder: Gemma4Config
    target_hidden_size: int
    num_groups: int
    top_groups: int


def read_assistant(fields: Fields) -> AssistantConfig:
    """Reads the config. Raises `ConfigError` for a field that is missing, out of range or unknown."""
    names = fields.strings("architectures") or [_ARCHITECTURES[0]]
    if not set(names) & set(_ARCHITECTURES):
        known = ", ".join(_ARCHITECTURES)
        raise fields.error("architectures", f"{', '.join(names)!r:.200} is no drafter apart; those are {known}")
    fields.owner = "Gemma 4's assistants"
    text = _text_fields(fields)
    add_class_defaults(text, "gemma4_text")
    text.default({"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0})
    decoder = read_gemma4(text, is_drafter=True)
    for name, value in (("hidden_size_per_layer_input", decoder.input_size), ("enable_moe_block", decoder.expert_size)):
        if value:
            raise text.error(name, "must be 0 or false: an assistant's layers have no inputs and no experts")
    fields.expect("tie_word_embeddings", True)
    num_groups, top_groups = fields.integer("num_centroids", 2048), fields.integer("centroid_intermediate_top_k", 32)
    if not fields.boolean("use_ordered_embeddings", False):
        num_groups = top_groups = 0
    elif decoder.vocab_size % num_groups or top_groups > num_groups:
        raise fields.error(
            "num_centroids",
            f"= {num_groups} must divide vocab_size = {decoder.vocab_size}, and be at least "
            f"centroid_intermediate_top_k = {top_groups}",
        )
    config = AssistantConfig(
        decoder=decoder, target_hidden_size=fields.integer("backbone_hidden_size"), num_groups=num_groups,
        top_groups=top_groups,
    )  # fmt: skip
    fields.refuse_unread(is_harmless)
    return config


def _text_fields(fields: Fields) -> Fields:
    """Those of its layers; of a GGUF file they stand beside the others."""
    if not fields.has("text_config"):
        return fields
    fields.expect("model_type", "gemma4_assistant", "gemma4_unified_assistant")
    text = fields.object("text_config")
    text.expect("model_type", "gemma4_text", "gemma4_unified_text")
    return text


class AssistantDrafter(PageDrafter):
    """See `PageDrafter`."""

    kind = "assistant"
    longrope_threshold: int | None = None
    token_ids: NDArray[np.int32] | None = None
    weight_bytes: int

    def __init__(self, config: AssistantConfig, maker: Maker, target: Gemma4Model, order: NDArray[np.int32]) -> None:
        decoder, self.config = config.decoder, config
        hidden, width = decoder.hidden_size, config.target_hidden_size
        self.target: Decoder = target
        self.layers: tuple[int, ...] = (target.config.num_layers,)
        self.device, self.dtype, self.max_positions = maker.options.device, maker.dtype, maker.max_positions
        self._eps = decoder.norm_eps
        one = copy.copy(target)  # with this config and these rotations, from which layers are made
        one.config = decoder
        one._ropes = {rope: maker.rope(rope) for rope in set(decoder.layer_ropes) if rope is not None}
        self._before = maker.linear("pre_projection", outputs=hidden, inputs=2 * width)
        self._layers: list[Gemma4Layer] = []
        for index, window in enumerate(decoder.layer_windows):
            layer = Gemma4Layer(one, index, maker.under(f"model.layers.{index}"))
            layer.attention.index = target.config.last_source(window)
            self._layers.append(layer)
        self._norm = maker.vector("model.norm.weight", hidden)
        self._after = maker.linear("post_projection", outputs=width, inputs=hidden)
        self._head = maker.linear("model.embed_tokens", outputs=decoder.vocab_size, inputs=hidden)
        self._order: Tensor | None = None
        if config.num_groups:
            self._groups = maker.router("masked_embedding.centroids", outputs=config.num_groups, inputs=hidden)
            self._order = Tensor.from_numpy(order.reshape(config.num_groups, -1)).to(self.device)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """See `HiddenStateDrafter`: the input of the model's head."""
        (x,) = states
        return self.target.finish(x)

    def forward(self, batch: Batch, hidden: Tensor, pages: KVCache) -> tuple[Tensor, Tensor]:
        embedded = ops.embedding(batch.token_ids, self.target.embed_tokens, scale=self.target.embedding_scale)
        x = self._before(ops.join_columns([embedded, hidden]))
        for layer in self._layers:
            x = layer(x, batch, pages)
        normed = ops.rms_norm(x, self._norm, self._eps)
        return normed, self._after(normed)

    def logits(self, normed: Tensor) -> Tensor:
        logits = self._head.logits(normed)
        if self._order is not None:
            ops.keep_groups(logits, self._groups.logits(normed), self._order, self.config.top_groups)
        return logits


def load_assistant(
    folder: Path, target: Model, *, max_model_len: int | None = None, load_format: str = "auto", seed: int = 0,
    declares: bool = False, **settings: Unpack[LoadSettings],
) -> AssistantDrafter:  # fmt: skip
    """The assistant in a folder, for a model that it shares the device and the types with. With `declares` it is only
    declared, and cannot run.

    Raises `ModelLoadError`, naming file, field or tensor, and value.
    """
    files = open_model(folder)
    fields = files.config()
    config = read_assistant(fields)
    if not isinstance(target, Gemma4Model):
        raise ModelLoadError(
            f"{folder}: the drafter is an assistant of Gemma 4, which reads its keys and values: "
            f"{target.config.architecture} is another model"
        )
    _check_target(config, fields, target.config)
    checkpoint = None if load_format == "dummy" else files.checkpoint()
    order = _order_of(checkpoint, config)
    positions = min(config.decoder.max_position_embeddings, max_model_len or target.max_positions)
    return make_drafter(
        lambda maker: AssistantDrafter(config, maker, target, order), checkpoint, options_of(target, settings),
        positions, prefix="", harmless=_HARMLESS, dummy_dtype=config.decoder.dtype or float32, seed=seed,
        declares=declares,
    )  # fmt: skip


def _check_target(config: AssistantConfig, fields: Fields, target: Gemma4Config) -> None:
    """Raises `ConfigError` unless the drafter's layers fit the model's pages."""
    decoder = config.decoder
    if config.target_hidden_size != target.hidden_size:
        raise fields.error(
            "backbone_hidden_size", f"= {config.target_hidden_size}, but the model has {target.hidden_size}"
        )
    text = _text_fields(fields)
    if decoder.vocab_size != target.vocab_size:
        raise text.error("vocab_size", f"= {decoder.vocab_size}, but the model has {target.vocab_size}")
    known = set(target.layer_windows[: target.first_sharing])
    for index, window in enumerate(decoder.layer_windows):
        if window not in known:
            windows = ", ".join(sorted(str(each) for each in known if each is not None)) or "none"
            raise text.error("sliding_window", f"= {window}, but the model's layers have windows of {windows}")
        own, others = decoder.of_layer(index), target.of_layer(target.last_source(window))
        sizes, wanted = ((each.num_kv_heads, each.head_dim) for each in (own, others))
        if sizes != wanted:
            raise text.error(
                "num_key_value_heads" if sizes[0] != wanted[0] else "head_dim",
                f"of layer {index}: {sizes[0]} heads of keys of {sizes[1]}, but the model's layer "
                f"{target.last_source(window)} has {wanted[0]} of {wanted[1]}",
            )


def _order_of(checkpoint: Checkpoint | None, config: AssistantConfig) -> NDArray[np.int32]:
    """The tokens of all groups, one after another. Raises `WeightsError` unless each token is in one group."""
    count = config.decoder.vocab_size if config.num_groups else 0
    if not count or checkpoint is None:
        return np.arange(count, dtype=np.int32)
    if (stored := checkpoint.tensors.get(_ORDER)) is None:
        raise WeightsError(
            f"{checkpoint.place}: tensor {_ORDER!r} [{count}] is missing: use_ordered_embeddings is true"
        )
    where = f"{checkpoint.place}: tensor {_ORDER!r}"
    if stored.shape != (count,) or stored.type_name not in ("I64", "I32"):
        raise WeightsError(f"{where} is {stored.type_name} {list(stored.shape)}, must be I64 or I32 [{count}]")
    ids = stored.array().astype(np.int64)
    if not np.array_equal(np.sort(ids), np.arange(count)):
        raise WeightsError(f"{where} must name each of the {count} tokens once")
    return ids.astype(np.int32)
