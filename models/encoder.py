"""Encoders: models whose tokens see later tokens, too, and that generate nothing.

A prompt is one chunk of a pass outside the steps. Its keys and values lie in pages, but only while a layer runs: layers
of one kind write the same ones, one layer after another. With a window a token sees as far ahead as back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from models.base import Model
from models.configuration.config import ModelConfig
from runtime.batch import Batch
from runtime.dtype import DType, float32
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

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise InvalidArgumentError(f"{self.config.architecture} is an encoder: it has no logits of tokens")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers."""
        return tuple(dict.fromkeys(self.config.layer_windows))

    def in_both_directions(self, batch: Batch) -> dict[int | None, Batch]:
        """The batch of each window's layers: tokens see as far ahead as back."""
        return {
            window: replace(batch, bidirectional_until=batch.until_by_window[window], plans={})
            for window in self.windows
        }


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
