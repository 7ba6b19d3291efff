"""EAGLE-3 drafters (arXiv 2503.01840): a small decoder that predicts the next token from a model's hidden states.

    f = fc(x_a, x_b, x_c)                     the model's hidden states after three layers, at token i
    h = layer(norm(embed(token i + 1)), norm(f))      the first layer's projections read both, side by side
    token i + 2 ~ head(norm(h));  h takes the place of f one token further

Two layouts of checkpoints are read: that of `speculators`, whose config wraps the layer's, and the plain one, whose
layer is called `midlayer`. A checkpoint without a token table or head has the model's. The head may know fewer tokens
than the model: `d2t` is what is added to each of its ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from models.configuration.harmless_fields import is_harmless
from models.configuration.json_fields import Fields
from models.decoder import Attention, Decoder, GatedMlp, NormKind
from models.drafters.making import DraftConfig, OwnLayersDrafter, StoredEnds, begin_reading, load_own_layers
from models.families.llama import read_llama, read_qwen3
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

_LAYERS = MappingProxyType({"llama": read_llama, "qwen3": read_qwen3})
_ARCHITECTURES = (
    "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel",
)  # fmt: skip
_HARMLESS = re.compile(r"d2t|t2d|verifier_(norm|lm_head)\.weight|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_RENAMES = MappingProxyType({
    "model.midlayer.": "layers.0.", "midlayer.": "layers.0.", "model.": "",
})  # fmt: skip
_WITHOUT_EFFECT = {"embed_requires_grad", "has_no_defaults_at_init", "speculators_version", "ttt_steps", "tie_weights"}
"""Fields of `speculators` that tell how a drafter was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """A drafter's configuration.

    Attributes:
        norm_before_residual: the first layer's residual is normalised.
        norm_before_fc, norm_each: the hidden states are normalised, side by side or each for itself.
        norm_output: a step's input from the step before is normalised.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    norm_each: bool
    norm_output: bool


def read_eagle3(fields: Fields, num_target_layers: int) -> Eagle3Config:
    """Reads the config. Raises `ConfigError` for a field that is missing, out of range or unknown."""
    names = fields.strings("architectures") or []
    inner = begin_reading(fields, names, _ARCHITECTURES, "EAGLE-3", ("eagle3",))
    for name in _WITHOUT_EFFECT:
        fields.raw(name)
    kind = inner.string("model_type", "llama" if inner is fields else "qwen3")
    if kind not in _LAYERS:
        raise inner.error("model_type", f"{kind!r:.80} must be one of {', '.join(_LAYERS)}")
    decoder = _LAYERS[kind](inner)
    config = Eagle3Config(
        decoder=decoder,
        draft_vocab_size=fields.integer("draft_vocab_size", decoder.vocab_size, most=decoder.vocab_size),
        target_hidden_size=fields.integer("target_hidden_size", decoder.hidden_size),
        layers=_read_layers(fields, num_target_layers),
        norm_before_residual=fields.boolean("norm_before_residual", False),
        norm_before_fc=fields.boolean("norm_before_fc", False),
        norm_each=fields.boolean("fc_norm", False),
        norm_output=fields.boolean("norm_output", False),
    )
    if config.norm_before_fc and config.norm_each:
        raise fields.error("fc_norm", "and norm_before_fc exclude each other")
    fields.refuse_unread(is_harmless)
    return config


def _read_layers(fields: Fields, num_target_layers: int) -> tuple[int, ...]:
    """Those that the file names, itself or in `eagle_config`; else an early, a middle and a late one."""
    name, place = "eagle_aux_hidden_state_layer_ids", fields
    if fields.has("eagle_config"):
        inner = fields.object("eagle_config")
        inner.expect("use_aux_hidden_state", True)
        place = fields if fields.has(name) else inner
        inner.raw(name)
    given = place.integers(name)
    if not given:
        if num_target_layers < 4:
            raise place.error(name, f"is missing, and a model of {num_target_layers} layers has no usual ones")
        given = (2, num_target_layers // 2, num_target_layers - 3)
    if max(given) > num_target_layers:
        raise place.error(name, f"= {list(given)}: the model has {num_target_layers} layers")
    return given


class Eagle3Drafter(OwnLayersDrafter):
    """See `PairDrafter`."""

    kind = "eagle3"

    def __init__(self, config: Eagle3Config, maker: Maker, target: Decoder, ends: StoredEnds) -> None:
        super().__init__(config, maker, target, ends)
        self.config, decoder, hidden = config, config.decoder, config.decoder.hidden_size
        eps, width = decoder.norm_eps, config.target_hidden_size * len(config.layers)
        self._input_norm = maker.vector("input_norm.weight", width) if config.norm_before_fc else None
        self._input_norms = [
            maker.vector(f"fc_norm.{number}.weight", config.target_hidden_size)
            for number in range(len(config.layers) if config.norm_each else 0)
        ]
        norm: NormKind = "head" if decoder.qk_norm else "none"
        first = maker.under("layers.0")
        self._embed_norm = first.vector("input_layernorm.weight", hidden)
        self._hidden_norm = first.vector("hidden_norm.weight", hidden)
        self._layers = []
        for index in range(decoder.num_layers):
            each = maker.under(f"layers.{index}")
            input_norm = each.rms_norm("input_layernorm.weight", hidden, eps) if index else None
            attention = Attention(
                decoder, index, each.under("self_attn"), self._rope, norm=norm, input_norm=input_norm,
                inputs=None if index else 2 * hidden,
            )  # fmt: skip
            mlp_norm = each.rms_norm("post_attention_layernorm.weight", hidden, eps)
            self._layers.append((attention, GatedMlp(decoder, each.under("mlp"), input_norm=mlp_norm)))

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        if self._input_norms:
            states = [ops.rms_norm(x, norm, self._eps) for x, norm in zip(states, self._input_norms, strict=True)]
        x = ops.join_columns(states)
        if self._input_norm is not None:
            x = ops.rms_norm(x, self._input_norm, self._eps)
        return self._fc(x)

    def forward(self, batch: Batch, hidden: Tensor, pages: KVCache) -> tuple[Tensor, Tensor]:
        embedded = ops.rms_norm(self._ends.embed(batch.token_ids), self._embed_norm, self._eps)
        normed = ops.rms_norm(hidden, self._hidden_norm, self._eps)
        x = ops.join_columns([embedded, normed])
        residual = normed if self.config.norm_before_residual else hidden
        for attention, mlp in self._layers:
            residual = attention(x, batch, pages, residual=residual)
            x = residual = mlp(residual, batch, residual=residual)
        normed = ops.rms_norm(x, self._norm, self._eps)
        return normed, normed if self.config.norm_output else x

    def logits(self, normed: Tensor) -> Tensor:
        return self._ends.logits(normed)


load_eagle3 = partial(load_own_layers, "EAGLE-3", read_eagle3, Eagle3Drafter, _HARMLESS, _RENAMES)
