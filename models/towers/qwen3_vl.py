"""Qwen3-VL's tower (arXiv 2511.21631): patches to embeddings of the language model's tokens.

    x = patches . W + learned positions, interpolated to the picture's grid
    for each layer:   x = x + attention(norm(x));   x = x + mlp(norm(x))
    embeddings = mlp(norm(x), 2 x 2 patches a token)

Queries and keys are rotated by a patch's line and column, half of a head's pairs each. Some layers' outputs go through
mergers of their own: the language model adds them behind its first layers (deepstack).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from models.config import GELU_NAMES, read_choice
from models.json_fields import Fields
from models.maker import Maker
from models.towers.full_attention import FullAttention
from runtime import ops
from runtime.device.device import Device
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]
Gelu = Literal["erf", "tanh", "sigmoid"]

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """`positions_side`: lines of the grid of learned positions. `deepstack_layers`: whose outputs are merged, too."""

    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    out_size: int
    patch_size: int
    num_frames: int
    merge_size: int
    positions_side: int
    deepstack_layers: tuple[int, ...]
    activation: Gelu
    theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def read_tower(fields: Fields, hidden_size: int) -> TowerConfig:
    """`vision_config`, of a language model of this width."""
    fields.expect("in_channels", 3)
    width, heads = fields.integer("hidden_size", 1152, most=1 << 16), fields.integer("num_heads", 16, most=1 << 10)
    if width % heads or width // heads % 4:
        raise fields.error("num_heads", f"= {heads} must divide hidden_size = {width} into multiples of 4")
    out_size = fields.integer("out_hidden_size", 3584)
    if out_size != hidden_size:
        raise fields.error("out_hidden_size", f"= {out_size} must be the language model's hidden_size = {hidden_size}")
    num_layers = fields.integer("depth", 27, most=1 << 10)
    deepstack = fields.integers("deepstack_visual_indexes") if fields.has("deepstack_visual_indexes") else (8, 16, 24)
    if sorted(set(deepstack)) != list(deepstack) or any(layer >= num_layers for layer in deepstack):
        raise fields.error("deepstack_visual_indexes", f"{deepstack} must ascend below depth = {num_layers}")
    num_positions = fields.integer("num_position_embeddings", 2304, most=1 << 24)
    side = round(num_positions**0.5)
    if side * side != num_positions or side < 2:
        raise fields.error("num_position_embeddings", f"= {num_positions} must be a square, at least 4")
    rope = fields.object("rope_parameters")
    rope.expect("rope_type", "axial")
    return TowerConfig(
        hidden_size=width,
        num_layers=num_layers,
        num_heads=heads,
        inner_size=fields.integer("intermediate_size", 4304, most=1 << 24),
        out_size=out_size,
        patch_size=fields.integer("patch_size", 16, most=256),
        num_frames=fields.integer("temporal_patch_size", 2, most=16),
        merge_size=fields.integer("spatial_merge_size", 2, most=16),
        positions_side=side,
        deepstack_layers=deepstack,
        activation=cast(Gelu, read_choice(fields, "hidden_act", "gelu_pytorch_tanh", GELU_NAMES)),
        theta=float(rope.number("rope_theta", 10_000.0, least=1e-6, most=1e12)),
    )


class Tower:
    """Makes a picture's embeddings."""

    def __init__(self, config: TowerConfig, maker: Maker) -> None:
        width = config.hidden_size
        self.config, self.dtype, self.device = config, maker.dtype, maker.options.device
        kernel = (3, config.num_frames, config.patch_size, config.patch_size)
        self.patch_embed = maker.convolution("patch_embed.proj", outputs=width, kernel=kernel, has_bias=True)
        self.positions = maker.table("pos_embed.weight", config.positions_side**2, width)
        self.layers = [TowerLayer(config, maker.under(f"blocks.{index}")) for index in range(config.num_layers)]
        self.merger = Merger(config, maker.under("merger"), norms_tokens=False)
        self.deepstack = [
            Merger(config, maker.under(f"deepstack_merger_list.{index}"), norms_tokens=True)
            for index in range(len(config.deepstack_layers))
        ]

    def start(self, patches: Array, grid: tuple[int, int]) -> Encoding:
        """Begin with a picture of `grid` patches, `[rows * columns, 3 * num_frames * patch_size**2]` float32,
        normalised, those of a token together."""
        return Encoding(self, patches, grid)

    def __call__(self, patches: Array, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """All of it at once: see `Encoding.advance`."""
        made = self.start(patches, grid).advance(self.config.num_layers)
        assert made is not None
        return made


class Encoding:
    """A picture on its way through the tower, which can stop between any two layers."""

    def __init__(self, tower: Tower, patches: Array, grid: tuple[int, int]) -> None:
        config, device = tower.config, tower.device
        rows, columns = patch_places(grid, config.merge_size)
        assert len(patches) == len(rows), f"{len(patches)} patches, but the grid is {grid}"
        self._tower, self._next = tower, 0
        self._deep: list[Tensor] = []
        pixels = Tensor.from_numpy(np.ascontiguousarray(patches, np.float32)).to(device)
        if device.kind != "cpu":
            pixels = pixels.to(tower.dtype)
        self._x = tower.patch_embed(pixels, residual=_interpolated(tower, rows, columns, grid))
        rope = axial_rope(config.head_dim, config.theta, rows, columns, device)
        pages = self._x.dtype
        self._attention = FullAttention([len(rows)], config.num_heads, config.head_dim, rope, pages, device)

    @property
    def num_layers_left(self) -> int:
        return self._tower.config.num_layers - self._next

    def advance(self, num_layers: int) -> tuple[Tensor, ...] | None:
        """Compute so many layers more. Behind the last: the embeddings `[num_tokens, out_size]`, and what is added
        behind the language model's first layers, each of the same shape."""
        tower = self._tower
        for _ in range(min(num_layers, self.num_layers_left)):
            self._x = tower.layers[self._next](self._x, self._attention)
            if self._next in tower.config.deepstack_layers:
                self._deep.append(tower.deepstack[len(self._deep)](self._x))
            self._next += 1
        return None if self.num_layers_left else (tower.merger(self._x), *self._deep)


class TowerLayer:
    def __init__(self, config: TowerConfig, maker: Maker) -> None:
        width = config.hidden_size
        self.activation = config.activation
        self.norms = [
            (maker.vector(f"{name}.weight", width), maker.vector(f"{name}.bias", width)) for name in ("norm1", "norm2")
        ]
        self.qkv = maker.linear("attn.qkv", outputs=(width,) * 3, inputs=width, has_bias=True)
        self.proj = maker.linear("attn.proj", outputs=width, inputs=width, has_bias=True)
        self.up = maker.linear("mlp.linear_fc1", outputs=config.inner_size, inputs=width, has_bias=True)
        self.down = maker.linear("mlp.linear_fc2", outputs=width, inputs=config.inner_size, has_bias=True)

    def __call__(self, x: Tensor, attention: FullAttention) -> Tensor:
        h = ops.layer_norm(x, *self.norms[0], _NORM_EPS)
        x = self.proj(attention(self.qkv(h)), residual=x)
        h = self.up(ops.layer_norm(x, *self.norms[1], _NORM_EPS))
        return self.down(ops.gelu(h, self.activation, out=h), residual=x)


class Merger:
    """The patches of a token become one embedding. `norms_tokens`: they are normalised together, else each alone."""

    def __init__(self, config: TowerConfig, maker: Maker, *, norms_tokens: bool) -> None:
        self.inputs = config.hidden_size * config.merge_size**2
        self.norms_tokens = norms_tokens
        size = self.inputs if norms_tokens else config.hidden_size
        self.norm = maker.vector("norm.weight", size), maker.vector("norm.bias", size)
        self.up = maker.linear("linear_fc1", outputs=self.inputs, inputs=self.inputs, has_bias=True)
        self.down = maker.linear("linear_fc2", outputs=config.out_size, inputs=self.inputs, has_bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        x = ops.layer_norm(x.view(-1, self.inputs) if self.norms_tokens else x, *self.norm, _NORM_EPS)
        h = self.up(x.view(-1, self.inputs))
        return self.down(ops.gelu(h, "erf", out=h))


def patch_places(grid: tuple[int, int], merge_size: int) -> tuple[Array, Array]:
    """The line and the column of each patch, in the order in which they stand: token by token."""
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    blocks = grid[0] // merge_size, merge_size, grid[1] // merge_size, merge_size
    in_order = [each.reshape(blocks).transpose(0, 2, 1, 3).ravel() for each in (rows, columns)]
    return in_order[0], in_order[1]


def _interpolated(tower: Tower, rows: Array, columns: Array, grid: tuple[int, int]) -> Tensor:
    """The learned positions of a picture's patches, `[num_patches, hidden_size]`: the grid of the table is stretched
    over the picture, corner to corner, and read bilinearly."""
    side = tower.config.positions_side
    taps = [_taps(places, count, side) for places, count in ((rows, grid[0]), (columns, grid[1]))]
    total: Tensor | None = None
    for line, line_weight in taps[0]:
        for column, column_weight in taps[1]:
            ids, weights = ops.place(
                [(line * side + column).astype(np.int32), (line_weight * column_weight).astype(np.float32)],
                tower.device,
            )
            part = ops.embedding(ids, tower.positions)
            part = part * weights.to(part.dtype).unsqueeze(1)
            total = part if total is None else total + part
    assert total is not None
    return total


def _taps(places: Array, count: int, side: int) -> Sequence[tuple[Array, Array]]:
    """The two lines of the table beside each place of `count`, and their weights."""
    exact = places * np.float32((side - 1) / max(1, count - 1))
    low = np.minimum(np.floor(exact).astype(np.int64), side - 1)
    part = exact - low
    return (low, 1 - part), (np.minimum(low + 1, side - 1), part)


def axial_rope(head_dim: int, theta: float, rows: Array, columns: Array, device: Device) -> RopeTable:
    """Rotations of each patch: the first half of the pairs by its line, the other by its column."""
    half = head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = np.float32(1.0) / np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    angles = np.concatenate([each[:, None].astype(np.float32) * frequencies for each in (rows, columns)], axis=1)
    cos, sin = ops.place([np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)], device)
    return RopeTable(cos=cos, sin=sin, interleaved=False)
