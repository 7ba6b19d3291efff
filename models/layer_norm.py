"""Decoders whose norms subtract the mean, and the plain MLP: the LayerNorm and MLP of GPT-2 and its descendants."""

from __future__ import annotations

from typing import Literal, cast

from models.configuration.config import ModelConfig
from models.decoder import Attention, Decoder, DecoderConfig, FeedForward
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor


class LayerNorm:
    """Layer normalisation over the hidden size; weights that are not stored are ones."""

    def __init__(self, config: ModelConfig, maker: Maker, *, has_weight: bool = True, has_bias: bool = True) -> None:
        size, self.eps = config.hidden_size, config.norm_eps
        self.weight = maker.vector("weight", size) if has_weight else maker.ones(size)
        self.bias = maker.vector("bias", size) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class LayerNormDecoder(Decoder):
    """A decoder whose norms are layer norms.

    Attributes:
        norms_have_weights, norms_have_biases: whether each norm stores them.
    """

    norms_have_weights = True
    norms_have_biases = True

    def make_final_norm(self, maker: Maker) -> None:
        self.layer_norm = self.make_norm(self.norm_name, maker.under(self.root))

    def make_norm(self, name: str, maker: Maker) -> LayerNorm:
        return LayerNorm(
            self.config, maker.under(name), has_weight=self.norms_have_weights, has_bias=self.norms_have_biases
        )

    def finish(self, x: Tensor) -> Tensor:
        return self.layer_norm(x)


class LayerNormLayer:
    """`x = x + attention(norm(x));  x = x + mlp(norm'(x))`, or at once `x + attention(norm(x)) + mlp(norm'(x))`."""

    def __init__(
        self, attention: Attention, mlp: FeedForward, norm: LayerNorm | None, mlp_norm: LayerNorm | None, *,
        is_parallel: bool = False,
    ) -> None:  # fmt: skip
        """Without a `norm` attention reads x, without an `mlp_norm` the MLP reads what attention reads."""
        assert mlp_norm is not None or is_parallel
        self.attention, self.mlp, self.norm, self.mlp_norm = attention, mlp, norm, mlp_norm
        self.is_parallel = is_parallel

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        h = mlp_h = x if self.norm is None else self.norm(x)
        if self.is_parallel and self.mlp_norm is not None:
            mlp_h = self.mlp_norm(x)  # before attention, whose result may overwrite x
        x = self.attention(h, batch, kv_cache, residual=x)
        if not self.is_parallel and self.mlp_norm is not None:
            mlp_h = self.mlp_norm(x)
        return self.mlp(mlp_h, batch, residual=x)


class PlainMlp:
    """`down(gelu(up(x)))`, by the GELU that the config names."""

    def __init__(self, config: DecoderConfig, maker: Maker, *, up: str, down: str) -> None:
        hidden, inner, has_bias = config.hidden_size, config.shard("intermediate_size"), config.mlp_bias
        self.kind = cast(Literal["erf", "tanh", "sigmoid"], config.activation)
        self.up = maker.linear(up, outputs=inner, inputs=hidden, has_bias=has_bias, split="outputs")
        self.down = maker.linear(down, outputs=hidden, inputs=inner, has_bias=has_bias, split="inputs")

    def __call__(self, x: Tensor, batch: Batch, *, residual: Tensor | None = None) -> Tensor:
        inner = self.up(x, batch)
        return self.down(ops.gelu(inner, self.kind, out=inner), batch, residual=residual)
