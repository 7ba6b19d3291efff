"""Encoders: models whose tokens see later tokens, too, and that generate nothing.

A prompt is one chunk of a pass outside the steps. Its keys and values lie in pages, but only while a layer runs: layers
of one kind write the same ones, one layer after another. With a window a token sees as far ahead as back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from models.base import Architecture, Model
from models.configuration.config import ModelConfig
from models.configuration.json_fields import Fields
from models.decoder import Decoder
from runtime.batch import Batch
from runtime.dtype import DType, bfloat16, float32
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.pooling import Pooling
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """`pooling`: of the model's own head. `type_vocab_size`: texts that a token tells apart by its type."""

    pooling: Pooling = "cls"
    type_vocab_size: int = 0


class BothWays(Model):
    """Stands before the class of a model whose tokens see later ones, too, and that generates nothing."""

    generates = False

    def source_of(self, index: int) -> int:
        """The first layer with the same window, whose pages the others overwrite."""
        return self.config.layer_windows.index(self.config.layer_windows[index])

    def kv_cache_spec(self, block_size: int, dtype: DType | None = None) -> KVCacheSpec:
        """On a CPU its pages are float32 by default: they are few, and written and read once."""
        usual = float32 if self.device.kind == "cpu" else None
        return super().kv_cache_spec(block_size, dtype or self.kv_dtype or usual)

    def needs_pages(self, page_dtype: DType) -> bool:
        """Whether layers write to pages of this type. If not, the number of pages does not matter."""
        return True

    def compute_logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        raise InvalidArgumentError(f"{self.config.architecture} is an encoder: it has no logits of tokens")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers."""
        return tuple(dict.fromkeys(self.config.layer_windows))

    def in_both_directions(self, batch: Batch) -> dict[int | None, Batch]:
        """The batch of each window's layers: tokens see as far ahead as back."""
        return {
            window: replace(
                batch, bidirectional_until=batch.until_by_window[window], plans={},
                may_round=self.dtype == bfloat16,
            )
            for window in self.windows
        }  # fmt: skip


class DecoderBothWays(BothWays):
    """Stands before a decoder's class whose tokens see later ones, too."""

    layers: Any

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        batches, windows = self.in_both_directions(batch), self.config.layer_windows
        for index, layer in zip(self.own_layers, self.layers, strict=True):
            x = layer(x, batches[windows[index]], kv_cache)
        return x


BIDIRECTIONAL = "Bidirectional"
"""Before the name of a decoder whose config says `is_causal: false`."""


def has_bidirectional(base: Architecture) -> bool:
    """Whether the decoder can be one whose tokens see later ones: its layers are run one by one."""
    return getattr(base.model_class, "run_layers", None) is Decoder.run_layers


@cache
def bidirectional_of(base: Architecture) -> Architecture:
    """The architecture of a decoder whose tokens see later ones (`is_causal: false`, as gte-Qwen2 has it)."""
    harmless = re.compile(rf"{base.model_class.harmless.pattern}|lm_head\..*")
    name = f"{BIDIRECTIONAL}{base.model_class.__name__}"
    kind: Any = type(name, (DecoderBothWays, base.model_class), {"harmless": harmless})
    return Architecture(f"{BIDIRECTIONAL}{base.name}", base.model_type, partial(_read_bidirectional, base), kind)


def _read_bidirectional(base: Architecture, fields: Fields) -> ModelConfig:
    config = base.read_config(fields)
    fields.expect("is_causal", False)
    if config.recurrence or config.latent_values:
        kind = config.recurrence or "latent"
        raise fields.error("is_causal", f"= false is not implemented for a model with {kind} layers")
    if any(window is not None for window in config.layer_windows):
        raise fields.error("is_causal", "= false beside windows is not implemented: whether one lies on both sides")
    return replace(config, tie_word_embeddings=True)


class Encoder(BothWays):
    """A model of `EncoderConfig`, without an `lm_head`. Its layers get the batch of their window, their cache group and
    its planes."""

    config: EncoderConfig
    layers: Sequence[Callable[..., Tensor]]

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        batches, windows = self.in_both_directions(batch), self.config.layer_windows
        for index, layer in zip(self.own_layers, self.layers, strict=True):
            x = layer(x, batches[windows[index]], kv_cache.group_of(index), *kv_cache.layer(index))
        return x

    def finish(self, x: Tensor) -> Tensor:
        return x
