"""Gemma 4's towers: pictures of any shape, whose tokens are squares of 3 x 3 patches. The larger one is a transformer,

    x = patches . W + line + column;   x = x + norm(attention(norm(x)));   x = x + norm(mlp(norm(x)))
    embeddings = norm(standardised(average of a token's patches * sqrt(width))) . W

with norms of each head of queries, keys and values, whose maps may be clipped to bounds of their own; queries and keys
are rotated by a patch's column in their first half, and by its line in the other. The other has no layers: a token's
pixels are one patch.

    embeddings = rms_norm(layer_norm(layer_norm(layer_norm(pixels) . W + b) + line + column)) . W
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from models.configuration.config import read_choice
from models.configuration.json_fields import Fields
from models.makers.maker import Maker
from models.towers.encoding import FullAttention, Pace, PatchRows, PictureTower, Pieces, through
from models.towers.layers import TowerNorm, TowerShard, TowerSizes, axial_rope, patch_places, share_of_tower
from runtime import ops
from runtime.batch import AdaptedRows
from runtime.dtype import float32
from runtime.images.patches import TOKEN_COUNTS
from runtime.linear.options import Split
from runtime.tensor.tensor import Tensor

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4TowerConfig(TowerSizes):
    """`merge_size`: patches of a token's side. `num_positions`: lines, and columns, that have embeddings. `is_clipped`:
    inputs and outputs of maps have bounds. `is_standardised`: tokens are shifted and scaled."""

    merge_size: int
    num_positions: int
    norm_eps: float
    theta: float
    is_clipped: bool
    is_standardised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelMapConfig:
    """The sizes of a model whose tokens are maps of pixels."""

    width: int
    patch_size: int
    merge_size: int
    num_positions: int
    norm_eps: float


def read_gemma4_tower(fields: Fields) -> Gemma4TowerConfig:
    """`vision_config`; the defaults are transformers'."""
    fields.expect("model_type", "gemma4_vision")
    notes = "default_output_length global_head_dim image_seq_length max_position_embeddings video_seq_length"
    for name in notes.split():
        fields.raw(name)
    width = fields.integer("hidden_size", 768, most=1 << 16)
    heads = fields.integer("num_attention_heads", 12, most=1 << 10)
    if width % heads or width // heads % 4:
        raise fields.error("num_attention_heads", f"= {heads} must divide hidden_size = {width} into multiples of 4")
    fields.expect("num_key_value_heads", heads)
    fields.expect("head_dim", width // heads)
    fields.expect("attention_bias", False)
    rope = fields.object("rope_parameters")
    rope.expect("rope_type", "axial", "default")
    return Gemma4TowerConfig(
        hidden_size=width,
        num_layers=fields.integer("num_hidden_layers", 16, most=1 << 10),
        num_heads=heads,
        inner_size=fields.integer("intermediate_size", 3072, most=1 << 24),
        activation=read_choice(fields, "hidden_activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "gelu_tanh"}),
        **_read_squares(fields, "position_embedding_size", 10_240, is_merged=False),
        theta=float(rope.number("rope_theta", 100.0, least=1e-6, most=1e12)),
        is_clipped=fields.boolean("use_clipped_linears", False),
        is_standardised=fields.boolean("standardize", False),
    )


def read_pixel_map(fields: Fields) -> PixelMapConfig:
    """`vision_config` of a model without a tower; the defaults are transformers'."""
    fields.expect("model_type", "gemma4_unified_vision")
    fields.raw("num_soft_tokens")  # a note
    width = fields.integer("mm_embed_dim", 3840, most=1 << 16)
    fields.expect("output_proj_dims", width)
    squares = _read_squares(fields, "mm_posemb_size", 1120, is_merged=True)
    fields.expect("model_patch_size", squares["patch_size"] * squares["merge_size"])
    return PixelMapConfig(width=width, **squares)


def _read_squares(fields: Fields, positions: str, usual: int, *, is_merged: bool) -> dict[str, Any]:
    """`is_merged`: the places in the table are tokens', not patches'."""
    merge, count = fields.integer("pooling_kernel_size", 3, most=16), fields.integer(positions, usual, most=1 << 20)
    least = TOKEN_COUNTS[-1] * (1 if is_merged else merge)
    if count < least:
        raise fields.error(positions, f"= {count} must be at least {least}, for pictures of {TOKEN_COUNTS[-1]} tokens")
    return {
        "patch_size": fields.integer("patch_size", 16, most=256),
        "merge_size": merge,
        "num_positions": count,
        "norm_eps": fields.number("rms_norm_eps", 1e-6, least=0.0, most=1.0),
    }


class ClippedMaps:
    """Maps of the same rows side by side; each may have bounds of its inputs and outputs."""

    def __init__(
        self, names: Sequence[str], maker: Maker, *, outputs: TowerShard | int, inputs: TowerShard | int,
        is_clipped: bool,
    ) -> None:  # fmt: skip
        width = outputs if isinstance(outputs, int) else outputs.shard
        depth = inputs if isinstance(inputs, int) else inputs.shard
        split: Split | None = None
        if isinstance(outputs, TowerShard):
            split = outputs.outputs
        elif isinstance(inputs, TowerShard):
            split = inputs.inputs
        sides = ("input_min", "input_max", "output_min", "output_max")
        self.bounds = [[maker.number(f"{name}.{side}") for side in sides] for name in names] if is_clipped else []
        groups = [[name] for name in names] if is_clipped else [list(names)]
        self.maps = [
            maker.linear(
                [f"{name}.linear" for name in group], outputs=[width] * len(group), inputs=depth, split=split
            )
            for group in groups
        ]  # fmt: skip

    def __call__(self, x: Tensor, adapted: AdaptedRows) -> Tensor:
        if not self.bounds:
            return self.maps[0](x, adapted)
        parts = [
            _clipped(each(_clipped(x, *bounds[:2]), adapted), *bounds[2:])
            for each, bounds in zip(self.maps, self.bounds, strict=True)
        ]
        return ops.join_columns(parts) if len(parts) > 1 else parts[0]


def _clipped(x: Tensor, low: float, high: float) -> Tensor:
    if low == -math.inf and high == math.inf:
        return x
    if low == -high and high > 0:
        return ops.clamp(x, high)
    within: Tensor = ops.minimum(ops.maximum(x, low), high)
    return within


class Gemma4TowerLayer:
    """See `models.towers.encoding.AttentionLayer`. Heads leave `qkv_of` with their second and third quarters swapped:
    then a pair of turned numbers is half a head apart, as the kernels have it."""

    def __init__(self, config: Gemma4TowerConfig, maker: Maker) -> None:
        width, clipped = config.hidden_size, config.is_clipped
        heads = share_of_tower(config.num_heads, maker.options, head_dim=config.head_dim)
        inner = share_of_tower(config.inner_size, maker.options)
        self.head_dim, self.activation = config.head_dim, config.activation
        self.norms = [TowerNorm(name, width, config.norm_eps, maker, is_centred=False) for name in _NORMS]
        own = maker.under("self_attn")
        self._weights = [own.vector(f"{name}_norm.weight", config.head_dim) for name in "qk"]
        qkv = [f"{name}_proj" for name in "qkv"]
        self.qkv = ClippedMaps(qkv, own, outputs=heads, inputs=width, is_clipped=clipped)
        self.proj = ClippedMaps(["o_proj"], own, outputs=width, inputs=heads, is_clipped=clipped)
        mlp = maker.under("mlp")
        self.up = ClippedMaps(["gate_proj", "up_proj"], mlp, outputs=inner, inputs=width, is_clipped=clipped)
        self.down = ClippedMaps(["down_proj"], mlp, outputs=width, inputs=inner, is_clipped=clipped)

    @cached_property
    def head_norms(self) -> tuple[Tensor, Tensor]:
        """The weights of queries' and keys' norms."""
        q, k = (_turned(each.view(1, -1), self.head_dim).view(-1) for each in self._weights)
        return q, k

    def qkv_of(self, x: Tensor, adapted: AdaptedRows) -> Tensor:
        return _turned(self.qkv(self.norms[0](x), adapted), self.head_dim)

    def rest(self, x: Tensor, attended: Tensor, adapted: AdaptedRows) -> None:
        made = self.proj(_turned(attended, self.head_dim), adapted)
        x[:] = ops.rms_norm(made, self.norms[1].weight, self.norms[1].eps, residual=x)
        made = self.down(ops.glu(self.up(self.norms[2](x), adapted), self.activation), adapted)
        x[:] = ops.rms_norm(made, self.norms[3].weight, self.norms[3].eps, residual=x)


def _turned(x: Tensor, head_dim: int) -> Tensor:
    """Rows of heads with their second and third quarters swapped."""
    quarters = x.view(x.shape[0], x.shape[1] // head_dim, 2, 2, head_dim // 4)
    return quarters.transpose(2, 3).contiguous().view(*x.shape)


class _SquareTower(PictureTower):
    """A tower that reads pixels line by line, the channels of each together."""

    def pixels(self, patches: PatchRows, rows: slice) -> Tensor:
        planes = np.asarray(patches[rows], np.float32)
        mixed = planes.reshape(len(planes), 3, -1).transpose(0, 2, 1).reshape(len(planes), -1)
        return super().pixels(mixed, slice(None))


class Gemma4Tower(_SquareTower):
    """See `PictureTower`. The embeddings are `[num_tokens, out_size]`."""

    def __init__(self, config: Gemma4TowerConfig, out_size: int, maker: Maker) -> None:
        own, width = maker.under("model.vision_tower"), config.hidden_size
        self.config, self.dtype, self.device = config, maker.dtype, maker.options.device
        patches, places = own.under("patch_embedder"), config.num_positions
        self.patch_embed = patches.unrounded(takes_addends=True).linear(
            "input_proj", outputs=width, inputs=3 * config.patch_size**2
        )
        self.positions = patches.vector(
            "position_embedding_table", 2 * places * width, stored=(2, places, width)
        )  # fmt: skip
        self.layers = [
            Gemma4TowerLayer(config, own.under(f"encoder.layers.{index}")) for index in range(config.num_layers)
        ]
        self.num_heads = share_of_tower(config.num_heads, maker.options, head_dim=config.head_dim).shard.count
        self.standard: tuple[Tensor, Tensor] | None = None
        if config.is_standardised:
            self.standard = own.vector("std_bias", width), own.vector("std_scale", width)
        self.unit = maker.ones(width)
        self.projection = maker.unrounded(takes_addends=True).linear(
            "model.embed_vision.embedding_projection", outputs=out_size, inputs=width
        )

    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        config, table = self.config, self.positions.view(-1, self.config.hidden_size)
        rows, columns = patch_places(grid, config.merge_size)
        count, unit = len(rows), config.merge_size**2
        assert len(patches) == count, f"{len(patches)} patches, but the grid is {grid}"
        x = pace.keep(lambda: self.buffer(count, config.hidden_size))
        for piece in pace.slices(count):
            places = (columns[piece], rows[piece] + config.num_positions)
            across, down = ops.place([each.astype(np.int32) for each in places], self.device)
            added = (ops.embedding(across, table) + ops.embedding(down, table)).to(x.dtype)
            pixels = self.pixels(patches, piece)
            self.patch_embed(pixels, pace.of(pixels), residual=added, out=x[piece])
            yield piece.stop - piece.start
        rope = pace.keep(lambda: axial_rope(config.head_dim, config.theta, columns, rows, self.device))
        attention = pace.keep(lambda: FullAttention(
            [count], self.num_heads // config.head_dim, config.head_dim, rope, x.dtype, x.device, scale=1.0,
            norm_eps=config.norm_eps,
        ))  # fmt: skip
        for layer in self.layers:
            yield from through(pace, layer, x, attention)
        made = self.buffer(count // unit, self.projection.weight.shape[0])
        for piece in pace.slices(made.shape[0], unit):
            made[piece] = self.embeddings(x[piece.start * unit : piece.stop * unit], pace)
            yield (piece.stop - piece.start) * unit
        return (made,)

    def embeddings(self, x: Tensor, pace: Pace) -> Tensor:
        """Embeddings of some tokens, whose patches' rows stand together."""
        width = self.config.hidden_size
        squares = x.to(float32).view(-1, self.config.merge_size**2, width)
        pooled = squares.mean(axis=1).to(x.dtype).to(float32) * width**0.5
        if self.standard is not None:
            pooled = (pooled - self.standard[0]) * self.standard[1]
        normed = ops.rms_norm(pooled.to(x.dtype), self.unit, self.config.norm_eps)
        return self.projection(normed, pace.of(normed))


class PixelMap(_SquareTower):
    """See `PictureTower`: no layers, and a token is one patch. The embeddings are `[num_tokens, out_size]`."""

    def __init__(self, config: PixelMapConfig, out_size: int, maker: Maker) -> None:
        own, width, places = maker.under("model.vision_embedder"), config.width, config.num_positions
        self.config, self.dtype, self.device = config, maker.dtype, maker.options.device
        inputs = 3 * (config.patch_size * config.merge_size) ** 2
        self.norms = [
            TowerNorm(name, size, 1e-5, own)
            for name, size in (("patch_ln1", inputs), ("patch_ln2", width), ("pos_norm", width))
        ]
        self.patch_dense = own.unrounded(takes_addends=True).linear(
            "patch_dense", outputs=width, inputs=inputs, has_bias=True
        )
        self.positions = own.vector("pos_embedding", places * 2 * width, stored=(places, 2, width))
        self.unit = maker.ones(width)
        self.projection = maker.unrounded(takes_addends=True).linear(
            "model.embed_vision.embedding_projection", outputs=out_size, inputs=width
        )

    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        table = self.positions.view(-1, self.config.width)  # each place's column, and its line
        rows, columns = patch_places(grid, 1)
        made = self.buffer(len(rows), self.projection.weight.shape[0])
        for piece in pace.slices(len(rows), self.config.merge_size**2):
            pixels = self.norms[0](self.pixels(patches, piece))
            adapted = pace.of(pixels)
            x = self.norms[1](self.patch_dense(pixels, adapted))
            places = [(2 * each[piece] + axis).astype(np.int32) for axis, each in enumerate((columns, rows))]
            across, down = ops.place(places, self.device)
            added = (ops.embedding(across, table) + ops.embedding(down, table)).to(x.dtype)
            x = self.norms[2](x + added)
            made[piece] = self.projection(ops.rms_norm(x, self.unit, self.config.norm_eps), adapted)
            yield (piece.stop - piece.start) * self.config.merge_size**2
        return (made,)
