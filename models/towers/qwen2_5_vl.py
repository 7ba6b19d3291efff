"""Qwen2.5-VL's tower (arXiv 2502.13923): patches to embeddings of the language model's tokens.

    x = layers(patches . W)      RMSNorms, and a SwiGLU
    embeddings = mlp(norm(x), 2 x 2 patches a token)

Patches attend within windows, in some layers to the whole picture. They lie window by window while they are computed.
Queries and keys are rotated by a patch's line and column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.configuration.config import SILU_NAMES, read_choice
from models.configuration.json_fields import Fields
from models.makers.maker import Maker
from models.towers.encoding import Pace, PatchRows, PictureTower, Pieces, through
from models.towers.layers import (
    Array,
    LayerForm,
    TowerLayers,
    TowerMlp,
    TowerNorm,
    TowerSizes,
    axial_rope,
    patch_places,
    read_width_and_heads,
)
from runtime import ops

_NORM_EPS = 1e-6
_FORM = LayerForm(
    under="blocks", norms=("norm1", "norm2"), qkv=("attn.qkv",), proj="attn.proj",
    up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", is_centred=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedTowerConfig(TowerSizes):
    """`window_tokens`: tokens of a window's side. `full_layers`: numbers of the layers that have no windows."""

    out_size: int
    num_frames: int
    merge_size: int
    window_tokens: int
    full_layers: frozenset[int]
    theta: float


def read_windowed_tower(fields: Fields, hidden_size: int) -> WindowedTowerConfig:
    """`vision_config`, of a language model of this width; the defaults are transformers'."""
    fields.expect("in_channels", 3)
    fields.expect("in_chans", 3)
    fields.raw("tokens_per_second")  # of films
    width, heads = read_width_and_heads(fields, (3584, 16), ("hidden_size", "num_heads"))
    out_size = fields.integer("out_hidden_size", 3584)
    if out_size != hidden_size:
        raise fields.error("out_hidden_size", f"= {out_size} must be the language model's hidden_size = {hidden_size}")
    patch, merge = fields.integer("patch_size", 14, most=256), fields.integer("spatial_merge_size", 2, most=16)
    fields.expect("spatial_patch_size", patch)
    window = fields.integer("window_size", 112, most=1 << 16)
    if window // merge // patch < 1:
        raise fields.error("window_size", f"= {window} is below a token's side, {patch * merge} pixels")
    given = fields.integers("fullatt_block_indexes") if fields.has("fullatt_block_indexes") else (7, 15, 23, 31)
    rope = fields.object("rope_parameters")
    rope.expect("rope_type", "axial")
    return WindowedTowerConfig(
        hidden_size=width,
        num_layers=fields.integer("depth", 32, most=1 << 10),
        num_heads=heads,
        inner_size=fields.integer("intermediate_size", 3420, most=1 << 24),
        out_size=out_size,
        patch_size=patch,
        activation=read_choice(fields, "hidden_act", "silu", SILU_NAMES),
        num_frames=fields.integer("temporal_patch_size", 2, most=16),
        merge_size=merge,
        window_tokens=window // merge // patch,
        full_layers=frozenset(given),
        theta=float(rope.number("rope_theta", 10_000.0, least=1e-6, most=1e12)),
    )


class WindowedTower(PictureTower):
    """See `PictureTower`. The embeddings are `[num_tokens, out_size]`."""

    def __init__(self, config: WindowedTowerConfig, maker: Maker) -> None:
        width, inputs = config.hidden_size, config.hidden_size * config.merge_size**2
        self.config, self.dtype, self.device = config, maker.dtype, maker.options.device
        kernel = (3, config.num_frames, config.patch_size, config.patch_size)
        self.patch_embed = maker.convolution("patch_embed.proj", outputs=width, kernel=kernel, has_bias=False)
        self.layers = TowerLayers(config, _FORM, _NORM_EPS, maker)
        merger = maker.under("merger")
        self.norm = TowerNorm("ln_q", width, _NORM_EPS, merger, is_centred=False)
        self.mlp = TowerMlp(("mlp.0",), "mlp.2", (inputs, inputs, config.out_size), "erf", merger)

    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        config, merge = self.config, self.config.merge_size
        rows, columns = patch_places(grid, merge)
        count, unit = len(rows), merge**2
        assert len(patches) == count, f"{len(patches)} patches, but the grid is {grid}"
        order, lengths = windows_of(grid[0] // merge, grid[1] // merge, config.window_tokens)
        ordered = (order[:, None] * unit + np.arange(unit)).ravel()  # patches, window by window
        x = self.buffer(count, config.hidden_size)
        for piece in pace.slices(count):
            self.patch_embed(self.pixels(patches, ordered[piece]), out=x[piece])
            yield piece.stop - piece.start
        rope = axial_rope(config.head_dim, config.theta, rows[ordered], columns[ordered], self.device)
        full, windowed = (self.layers.attention(each, rope, x) for each in ([count], [each * unit for each in lengths]))
        for index, layer in enumerate(self.layers.layers):
            yield from through(pace, layer, x, full if index in config.full_layers else windowed)
        made = self.buffer(count // unit, config.out_size)
        for piece in pace.slices(made.shape[0], unit):
            merged = self.norm(x[piece.start * unit : piece.stop * unit])
            self.mlp(merged.view(-1, unit * config.hidden_size), made[piece])
            yield (piece.stop - piece.start) * unit
        (back,) = ops.place([np.argsort(order).astype(np.int32)], self.device)
        return (ops.gather_rows(made, back),)


def windows_of(rows: int, columns: int, side: int) -> tuple[Array, list[int]]:
    """A picture's tokens window by window, smaller at the right and bottom edges, and each window's size."""
    places = np.arange(rows * columns).reshape(rows, columns)
    windows = [
        places[row : row + side, column : column + side].ravel()
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]
    return np.concatenate(windows), [len(each) for each in windows]
