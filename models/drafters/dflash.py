"""DFlash drafters (arXiv 2602.06036): a few layers that propose a block of tokens in one pass; and DSpark's, which add
a bias of each token to the next one's logits.

    c = norm(fc(x_a, x_b, ...))        the model's hidden states after some layers, at token i: the context
    block = embed(token n, mask, mask, ...)        the last known token, and the mask's embedding in the others' places
    x = x + attention(norm(x));  x = x + mlp(norm(x))        of the block's rows alone

Keys and values are maps of c at places before n, by each layer's own projections, and of the block's rows from n on.
A block's rows see each other, unless a layer is causal. Row j proposes token n + j, or n + j + 1 if the first row also
proposes one (DSpark). DSpark adds `w2(w1[t])` to the logits after token t, so that its tokens are sampled one after
another. Its `confidence_head` is not used: acceptance rates are counted instead.

Three layouts are read: z-lab's (`dflash_config`), DeepSpec's (`Qwen3DSparkModel`) and that of `speculators`. A
checkpoint without a token table or head has the model's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from models.configuration.harmless_fields import is_harmless
from models.configuration.json_fields import Fields
from models.decoder import Attention, Decoder, GatedMlp
from models.drafters.making import DraftConfig, OwnLayersDrafter, StoredEnds, begin_reading, load_own_layers
from models.families.llama import LlamaConfig, read_qwen3
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

_DEEPSPEC = "Qwen3DSparkModel"
_ARCHITECTURES = (
    "DFlashDraftModel", _DEEPSPEC, "DFlashSpeculator", "DSparkSpeculator", "DSparkDraftModel",
)  # fmt: skip
_HARMLESS = re.compile(
    r"d2t|t2d|verifier_(norm|lm_head)\.weight|layers\.\d+\.self_attn\.rotary_emb\.inv_freq|confidence_head\.proj\.\w+"
)
_WITHOUT_EFFECT = (
    "num_anchors", "enable_confidence_head", "confidence_head_with_markov", "speculators_version",
    "has_no_defaults_at_init", "embed_requires_grad",
)  # fmt: skip
"""Fields that tell how a drafter was trained, or of the head that is not asked."""

MOST_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """A drafter's configuration.

    Attributes:
        block_size: tokens of a block, the known one included.
        mask_token_id: stands for the others.
        first_proposal: see `BlockDrafter`.
        are_causal: of each layer, whether rows of a block see no later ones.
        markov_rank: width of the map from a token to the next one's bias; 0 if there is none.
    """

    block_size: int
    mask_token_id: int
    first_proposal: int
    are_causal: tuple[bool, ...]
    markov_rank: int


def read_dflash(fields: Fields, num_target_layers: int) -> DFlashConfig:
    """Reads the config. Raises `ConfigError` for a field that is missing, out of range or unknown."""
    names = fields.strings("architectures") or [""]  # a DFlash drafter names it
    inner = begin_reading(fields, names, _ARCHITECTURES, "DFlash", ("dflash", "dspark"))
    for name in _WITHOUT_EFFECT:
        fields.raw(name)
    if inner is not fields:
        config = _read_speculators(fields, inner, num_target_layers)
    else:
        config = _read_plain(fields, num_target_layers, is_deepspec=_DEEPSPEC in names)
    fields.refuse_unread(is_harmless)
    return config


def _read_speculators(fields: Fields, inner: Fields, num_target_layers: int) -> DFlashConfig:
    decoder, is_dspark = _read_decoder(inner), fields.string("speculators_model_type") == "dspark"
    sees_all = fields.boolean("sliding_window_non_causal", False)
    return DFlashConfig(
        decoder=decoder,
        draft_vocab_size=fields.integer("draft_vocab_size", decoder.vocab_size, most=decoder.vocab_size),
        target_hidden_size=fields.integer("target_hidden_size", decoder.hidden_size),
        layers=_read_layers(fields, "aux_hidden_state_layer_ids", 0, num_target_layers),
        block_size=_read_block_size(fields),
        mask_token_id=_read_mask(fields, decoder),
        first_proposal=0 if fields.boolean("sample_from_anchor", is_dspark) else 1,
        are_causal=tuple(window is not None and not sees_all for window in decoder.layer_windows),
        markov_rank=_read_markov(fields, 256 if is_dspark else 0),
    )


def _read_plain(fields: Fields, num_target_layers: int, *, is_deepspec: bool) -> DFlashConfig:
    """z-lab's layout, or DeepSpec's, which has its fields at the top."""
    count = fields.integer("num_target_layers", num_target_layers)
    if count != num_target_layers:
        raise fields.error("num_target_layers", f"= {count}, but the model has {num_target_layers}")
    decoder = _read_decoder(fields)
    own = fields if is_deepspec else fields.object("dflash_config")
    own.expect("use_aux_hidden_state", True)
    if own.boolean("use_swa", False) and not any(decoder.layer_windows):
        window = own.integer("swa_window_size", fields.integer("sliding_window", None))
        if window is None:
            raise own.error("swa_window_size", "is missing, and use_swa is true")
        decoder = replace(decoder, layer_windows=(window,) * decoder.num_layers)
        causal = (False,) * decoder.num_layers
    else:
        own.expect("swa_window_size", *decoder.layer_windows)
        causal = tuple(window is not None for window in decoder.layer_windows)
    for place, name in ((fields, "is_causal"), (own, "causal")):
        if (given := place.boolean(name, None)) is not None:
            causal = (given,) * decoder.num_layers
            break
    place = fields if fields.has("block_size") else own
    return DFlashConfig(
        decoder=decoder,
        draft_vocab_size=decoder.vocab_size,
        target_hidden_size=fields.integer("target_hidden_size", decoder.hidden_size),
        layers=_read_layers(own, "target_layer_ids", 1, num_target_layers),
        block_size=_read_block_size(place),
        mask_token_id=_read_mask(own, decoder),
        first_proposal=0 if is_deepspec else 1,
        are_causal=causal,
        markov_rank=_read_markov(fields, 0) if is_deepspec else 0,
    )


def _read_decoder(fields: Fields) -> LlamaConfig:
    kind = fields.string("model_type", "qwen3")
    if kind != "qwen3":
        raise fields.error("model_type", f"{kind!r:.80} must be qwen3")
    return read_qwen3(fields)


def _read_layers(fields: Fields, name: str, added: int, num_target_layers: int) -> tuple[int, ...]:
    """``added`` to each of the field gives our count. The last layer is refused: trainers disagree on whether its
    states are taken before or after the last norm."""
    given = fields.integers(name, least=-added)
    if not given:
        raise fields.error(name, "is missing")
    layers, limit = tuple(each + added for each in given), num_target_layers - added
    if max(given) >= limit:
        raise fields.error(name, f"= {list(given)}: must be below {limit}, the model has {num_target_layers} layers")
    return layers


def _read_block_size(fields: Fields) -> int:
    return int(fields.integer("block_size", least=2, most=MOST_BLOCK))


def _read_mask(fields: Fields, decoder: LlamaConfig) -> int:
    return int(fields.integer("mask_token_id", least=0, most=decoder.vocab_size - 1))


def _read_markov(fields: Fields, default: int) -> int:
    rank = int(fields.integer("markov_rank", default, least=0))
    kind = fields.string("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise fields.error("markov_head_type", f"{kind!r:.80} must be vanilla")
    return rank


class DFlashDrafter(OwnLayersDrafter):
    """See `BlockDrafter`."""

    def __init__(self, config: DFlashConfig, maker: Maker, target: Decoder, ends: StoredEnds) -> None:
        super().__init__(config, maker, target, ends)
        decoder, hidden = config.decoder, config.decoder.hidden_size
        self.config, self.kind = config, "dspark" if config.markov_rank else "dflash"
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        self.first_proposal, self.is_chained = config.first_proposal, config.markov_rank > 0
        self._context_norm = maker.vector("hidden_norm.weight", hidden)
        self._layers = []
        for index in range(decoder.num_layers):
            each = maker.under(f"layers.{index}")
            input_norm = each.vector("input_layernorm.weight", hidden)  # of the block's rows, not of the context
            attention = Attention(decoder, index, each.under("self_attn"), self._rope, norm="head")
            mlp_norm = each.rms_norm("post_attention_layernorm.weight", hidden, self._eps)
            self._layers.append((input_norm, attention, GatedMlp(decoder, each.under("mlp"), input_norm=mlp_norm)))
        if self.is_chained:
            head, rank = maker.under("markov_head"), config.markov_rank
            self._before = head.table("markov_w1.weight", decoder.vocab_size, rank)
            self._bias = head.linear("markov_w2", outputs=config.draft_vocab_size, inputs=rank)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        return ops.rms_norm(self._fc(ops.join_columns(states)), self._context_norm, self._eps)

    def absorb(self, batch: Batch, hidden: Tensor, pages: KVCache) -> None:
        """See `BlockDrafter`. Queries are computed, too, and dropped: they share one matrix with keys and values."""
        for _, attention, _ in self._layers:
            attention.prepare(hidden, batch, pages)

    def forward(self, batch: Batch, pages: KVCache) -> Tensor:
        x = self._ends.embed(batch.token_ids, scale=self.target.embedding_scale)
        causal = replace(batch, bidirectional_until=None, plans={}) if any(self.config.are_causal) else batch
        for is_causal, (input_norm, attention, mlp) in zip(self.config.are_causal, self._layers, strict=True):
            normed = ops.rms_norm(x, input_norm, self._eps)
            x = attention(normed, causal if is_causal else batch, pages, residual=x)
            x = mlp(x, batch, residual=x)
        return ops.rms_norm(x, self._norm, self._eps)

    def logits(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        if not self.is_chained:
            return self._ends.logits(normed)
        return self._ends.logits(normed, self._bias.logits(ops.embedding(token_ids, self._before)))


load_dflash = partial(
    load_own_layers, "DFlash", read_dflash, DFlashDrafter, _HARMLESS, {"model.": ""},
    more_positions=lambda config: config.block_size,
)  # fmt: skip
