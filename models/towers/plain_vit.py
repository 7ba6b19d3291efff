"""The vision transformers of CLIP (arXiv 2103.00020) and SigLIP (2303.15343): pictures of one size.

    x = patches . W + learned positions                 CLIP: after a class token, then normalised
    for each layer:   x = x + attention(norm(x));   x = x + mlp(norm(x))

A family chooses the layers whose results it reads, before any last norm.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from models.configuration.config import GELU_NAMES, read_choice, read_width_and_heads
from models.configuration.json_fields import Fields
from models.makers.maker import Maker
from models.towers.encoding import Pace, PatchRows, PictureTower, through
from models.towers.full_attention import FullAttention
from models.towers.shards import share_of_tower
from runtime import ops
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]
Gelu = Literal["erf", "tanh", "sigmoid"]
KINDS = ("clip_vision_model", "siglip_vision_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainVitConfig:
    """`has_class`: a class token stands before the patches, as in CLIP."""

    has_class: bool
    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    image_size: int
    patch_size: int
    activation: Gelu
    norm_eps: float

    @property
    def side(self) -> int:
        """Patches of a picture's side."""
        return self.image_size // self.patch_size

    @property
    def num_rows(self) -> int:
        """Patches, with the class token."""
        return self.side**2 + self.has_class


def read_plain_vit(fields: Fields) -> PlainVitConfig:
    """`vision_config`; the defaults are transformers' of either kind."""
    kind = fields.string("model_type", KINDS[0])
    if kind not in KINDS:
        raise fields.error("model_type", f"{kind!r:.80} must be one of {', '.join(KINDS)}")
    is_clip = kind == KINDS[0]
    fields.expect("num_channels", 3)
    for name in ("projection_dim", "vision_use_head", "vocab_size", "initializer_factor"):
        fields.raw(name)  # of heads that are not used
    width, heads = read_width_and_heads(fields, (768, 12))
    patch = fields.integer("patch_size", 32 if is_clip else 16, most=256)
    size = fields.integer("image_size", 224, most=4096)
    if size < patch:
        raise fields.error("image_size", f"= {size} is below patch_size = {patch}")
    activation = read_choice(fields, "hidden_act", "quick_gelu" if is_clip else "gelu_pytorch_tanh", GELU_NAMES)
    return PlainVitConfig(
        has_class=is_clip,
        hidden_size=width,
        num_layers=fields.integer("num_hidden_layers", 12, most=1 << 10),
        num_heads=heads,
        inner_size=fields.integer("intermediate_size", 3072, most=1 << 24),
        image_size=size,
        patch_size=patch,
        activation=cast(Gelu, activation),
        norm_eps=fields.number("layer_norm_eps", 1e-5 if is_clip else 1e-6, least=1e-12, most=1.0),
    )


class PlainVit:
    """A tower up to the last of the layers that are `kept`: numbers of layers computed before, ascending or not."""

    def __init__(self, config: PlainVitConfig, kept: tuple[int, ...], maker: Maker) -> None:
        width = config.hidden_size
        self.config, self.kept, self.num_layers = config, kept, max(kept)
        self.dtype, self.device = maker.dtype, maker.options.device
        kernel = (3, config.patch_size, config.patch_size)
        embeddings = maker.under("embeddings")
        self.patch_embed = embeddings.convolution(
            "patch_embedding", outputs=width, kernel=kernel, has_bias=not config.has_class
        )
        self.positions = embeddings.table("position_embedding.weight", config.num_rows, width)
        self.class_row = embeddings.vector("class_embedding", width) if config.has_class else None
        self.first_norm = None
        if config.has_class:
            self.first_norm = maker.vector("pre_layrnorm.weight", width), maker.vector("pre_layrnorm.bias", width)
        self.head_dim = width // config.num_heads
        heads = share_of_tower(config.num_heads, maker.options, head_dim=self.head_dim)
        self.num_heads = heads.shard.count // self.head_dim
        self.layers = [VitLayer(config, maker.under(f"encoder.layers.{index}")) for index in range(self.num_layers)]

    def kept_rows(
        self, tower: PictureTower, patches: PatchRows, grid: tuple[int, int], pace: Pace
    ) -> Generator[int, None, list[Tensor]]:
        """The kept layers' results for a picture, each `[num_rows, hidden_size]`; yields the rows of each piece."""
        config, first = self.config, int(self.config.has_class)
        assert grid == (config.side, config.side), f"{grid} patches, must be {config.side} x {config.side}"
        assert len(patches) == config.side**2, f"{len(patches)} patches, must be {config.side**2}"
        (ids,) = ops.place([np.arange(config.num_rows, dtype=np.int32)], self.device)
        x = tower.buffer(config.num_rows, config.hidden_size)
        for piece in pace.slices(config.side**2):
            rows = slice(first + piece.start, first + piece.stop)
            places = ops.embedding(ids[rows], self.positions)
            self.patch_embed(tower.pixels(patches, piece), residual=places, out=x[rows])
            yield piece.stop - piece.start
        if self.class_row is not None:
            x[:1] = ops.embedding(ids[:1], self.positions) + self.class_row.to(x.dtype).unsqueeze(0)
        if self.first_norm is not None:
            x = ops.layer_norm(x, *self.first_norm, config.norm_eps)
        attention = FullAttention([config.num_rows], self.num_heads, self.head_dim, None, x.dtype, self.device)
        kept = {0: x.clone()} if 0 in self.kept else {}
        for index, layer in enumerate(self.layers):
            yield from through(pace, layer, x, attention)
            if index + 1 in self.kept:
                kept[index + 1] = x.clone() if index + 1 < self.num_layers else x
        return [kept[layer] for layer in self.kept]


class VitLayer:
    def __init__(self, config: PlainVitConfig, maker: Maker) -> None:
        width = config.hidden_size
        self.activation, self.eps = config.activation, config.norm_eps
        self.norms = [
            (maker.vector(f"{name}.weight", width), maker.vector(f"{name}.bias", width))
            for name in ("layer_norm1", "layer_norm2")
        ]
        names = tuple(f"self_attn.{each}_proj" for each in "qkv")
        heads = share_of_tower(config.num_heads, maker.options, head_dim=width // config.num_heads)
        inner = share_of_tower(config.inner_size, maker.options)
        self.qkv = maker.linear(names, outputs=(heads.shard,) * 3, inputs=width, has_bias=True, split=heads.outputs)
        self.proj = maker.linear(
            "self_attn.out_proj", outputs=width, inputs=heads.shard, has_bias=True, split=heads.inputs
        )
        self.up = maker.linear("mlp.fc1", outputs=inner.shard, inputs=width, has_bias=True, split=inner.outputs)
        self.down = maker.linear("mlp.fc2", outputs=width, inputs=inner.shard, has_bias=True, split=inner.inputs)

    def qkv_of(self, x: Tensor) -> Tensor:
        return self.qkv(ops.layer_norm(x, *self.norms[0], self.eps))

    def rest(self, x: Tensor, attended: Tensor) -> None:
        self.proj(attended, residual=x, out=x)
        h = self.up(ops.layer_norm(x, *self.norms[1], self.eps))
        self.down(ops.gelu(h, self.activation, out=h), residual=x, out=x)
