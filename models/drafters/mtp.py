"""The layer after a model's own that predicts the token after the next one (multi-token prediction, DeepSeek-V3,
arXiv 2412.19437, 2.2), as a drafter.

    x = eh_proj([enorm(embed(token i + 1)) | hnorm(h)])      h: the model's at token i, after its last norm
    x = shared_head.norm(layer(x));   token i + 2 ~ head(x);   x takes the place of h one token further

A checkpoint has it as layer `num_hidden_layers`, with names as above, or apart (`mtp.`). Its layer is one of the
family's, or two where each has one part (Nemotron-H). Table and head are the model's: the copies that a checkpoint
stores beside it are passed over. If there are several such layers, each trained for a token further on, only the first
is used.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from models.base import Model
from models.checkpoints.model_files import open_model
from models.decoder import Decoder
from models.drafters.making import make_drafter, options_of
from models.errors import ModelLoadError
from models.experts import MoeDecoder, PredictionNames
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.dtype import float32
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.linear.options import LoadSettings
from runtime.tensor.tensor import Tensor


class MtpDrafter:
    """See `PairDrafter`."""

    kind = "mtp"
    longrope_threshold: int | None = None
    weight_bytes: int

    def __init__(self, maker: Maker, target: MoeDecoder, names: PredictionNames) -> None:
        config = target.config
        hidden = config.hidden_size
        self.target: Decoder = target
        self.layers: tuple[int, ...] = (config.num_layers,)
        self.device, self.dtype = maker.options.device, maker.dtype
        self.max_positions = min(maker.max_positions, target.max_positions)
        self.token_ids: NDArray[np.int32] | None = None
        self._eps = config.norm_eps
        self._one = _of_one_layer(target)
        own = maker.under(names.under or f"{target.root}.layers.{config.num_layers}")
        self._embed_norm, self._hidden_norm, self._norm = (
            own.vector(f"{name}.weight", hidden, add=target.norm_offset)
            for name in (names.embed_norm, names.hidden_norm, names.norm)
        )
        self._projection = own.linear(names.projection, outputs=hidden, inputs=2 * hidden)
        self._layers = [
            self._one.make_layer(index, own.under(name) if name else own) for index, name in enumerate(names.layers)
        ]

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        return self._one.kv_cache_spec(block_size, self.dtype)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """See `HiddenStateDrafter`: the input of the model's head."""
        (x,) = states
        return self.target.finish(x)

    def forward(self, batch: Batch, hidden: Tensor, pages: KVCache) -> tuple[Tensor, Tensor]:
        embedded = ops.embedding(batch.token_ids, self.target.embed_tokens, scale=self.target.embedding_scale)
        embedded = ops.rms_norm(embedded, self._embed_norm, self._eps)
        normed = ops.rms_norm(hidden, self._hidden_norm, self._eps)
        x = self._projection(ops.join_columns([embedded, normed]))
        for layer in self._layers:
            x = layer(x, batch, pages)
        read = ops.rms_norm(x, self._norm, self._eps)
        return read, read

    def logits(self, normed: Tensor) -> Tensor:
        return self.target.compute_logits(normed)


def _of_one_layer(target: MoeDecoder) -> MoeDecoder:
    """The model with a config of the prediction layers alone, from which layers and pages are made."""
    one = copy.copy(target)
    one.config, one.kv_skip_layers, one.state_dtype = target.prediction_config(), (), float32
    return one


def load_mtp(
    folder: str | Path, target: Model, *, max_model_len: int | None = None, load_format: str = "auto", seed: int = 0,
    declares: bool = False, **settings: Unpack[LoadSettings],
) -> MtpDrafter:  # fmt: skip
    """The prediction layers that the model's folder has. With `declares` they are only declared, and cannot run.

    Raises `ModelLoadError`, naming file, tensor or field, and value.
    """
    config = target.config
    checkpoint = None if load_format == "dummy" else open_model(folder, mmproj=settings.get("mmproj", "")).checkpoint()
    is_apart = checkpoint is None or any(name.startswith("mtp.") for name in checkpoint.tensors)
    apart = target.predicts_apart if is_apart and isinstance(target, MoeDecoder) else None
    is_stored = checkpoint is not None and apart
    if not isinstance(target, MoeDecoder) or not (is_stored or target.config.num_prediction_layers):
        raise ModelLoadError(
            f"{folder}: {config.architecture} has no layer that predicts further tokens (num_nextn_predict_layers); an "
            "assistant of Gemma 4 is named by its folder, mtp:FOLDER"
        )
    options = options_of(target, settings)
    positions = min(target.max_positions, max_model_len or target.max_positions)
    names = apart or PredictionNames()
    return make_drafter(
        lambda maker: MtpDrafter(maker, target, names), checkpoint, options, positions, prefix=target.prefix,
        harmless=_all_others(target, names), renames=target.renames, dummy_dtype=config.dtype or float32, seed=seed,
        declares=declares,
    )  # fmt: skip


def _all_others(target: Decoder, names: PredictionNames) -> re.Pattern[str]:
    """Names of the tensors of a checkpoint that are not the prediction layer's, or copies of the model's."""
    further = rf"layers\.(?![0-{len(names.layers) - 1}]\.).*"
    own = re.escape(f"{names.under or f'{target.root}.layers.{target.config.num_layers}'}.")
    shared = r"(embed_tokens|shared_head\.head)\.weight|(layers\.0\.)?self_attn\.rotary_emb\.inv_freq"
    return re.compile(rf"(?!{own}).*|{own}({shared}|{further})")
