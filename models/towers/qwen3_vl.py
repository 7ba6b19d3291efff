"""The towers of Qwen3-VL (arXiv 2511.21631) and Qwen2-VL (2409.12191): patches to embeddings of the language model's
tokens.

    x = layers(patches . W + learned positions, interpolated to the picture's grid)       Qwen2-VL: no positions
    embeddings = mlp(norm(x), 2 x 2 patches a token)

Queries and keys are rotated by a patch's line and column, half of a head's pairs each. Some layers' outputs go through
mergers of their own: the language model adds them after its first layers (deepstack).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from models.configuration.config import GELU_NAMES, read_choice
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
from runtime.tensor.tensor import Tensor

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig(TowerSizes):
    """`positions_side`: lines of the grid of learned positions; 0 if there are none. `deepstack_layers`: layers whose
    outputs are merged, too. `mlp`, `merger`: names of a layer's maps, and of the merger's norm and maps."""

    out_size: int
    num_frames: int
    merge_size: int
    positions_side: int
    deepstack_layers: tuple[int, ...]
    theta: float
    patch_bias: bool = True
    mlp: tuple[str, str] = ("mlp.linear_fc1", "mlp.linear_fc2")
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")


def read_tower(fields: Fields, hidden_size: int) -> TowerConfig:
    """`vision_config`, of a language model of this width."""
    fields.expect("in_channels", 3)
    width, heads = read_width_and_heads(fields, (1152, 16), ("hidden_size", "num_heads"))
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
        activation=read_choice(fields, "hidden_act", "gelu_pytorch_tanh", GELU_NAMES),
        theta=float(rope.number("rope_theta", 10_000.0, least=1e-6, most=1e12)),
    )


def read_second_tower(fields: Fields, hidden_size: int) -> TowerConfig:
    """Qwen2-VL's: its `hidden_size` is the language model's width. The defaults are transformers'."""
    fields.expect("in_channels", 3)
    fields.expect("in_chans", 3)
    width, heads = read_width_and_heads(fields, (1280, 16), ("embed_dim", "num_heads"))
    out_size = fields.integer("hidden_size", 3584)
    if out_size != hidden_size:
        raise fields.error("hidden_size", f"= {out_size} must be the language model's hidden_size = {hidden_size}")
    patch = fields.integer("patch_size", 14, most=256)
    fields.expect("spatial_patch_size", patch)
    rope = fields.object("rope_parameters")
    rope.expect("rope_type", "axial")
    return TowerConfig(
        hidden_size=width,
        num_layers=fields.integer("depth", 32, most=1 << 10),
        num_heads=heads,
        inner_size=int(width * fields.number("mlp_ratio", 4, above=0.0, most=1 << 10)),
        out_size=out_size,
        patch_size=patch,
        num_frames=fields.integer("temporal_patch_size", 2, most=16),
        merge_size=fields.integer("spatial_merge_size", 2, most=16),
        positions_side=0,
        deepstack_layers=(),
        activation=read_choice(fields, "hidden_act", "quick_gelu", GELU_NAMES),
        theta=float(rope.number("rope_theta", 10_000.0, least=1e-6, most=1e12)),
        patch_bias=False,
        mlp=("mlp.fc1", "mlp.fc2"),
        merger=("ln_q", "mlp.0", "mlp.2"),
    )


class Tower(PictureTower):
    """See `PictureTower`. The embeddings are `[num_tokens, out_size]`; those added after the language model's first
    layers have the same shape."""

    def __init__(self, config: TowerConfig, maker: Maker) -> None:
        width = config.hidden_size
        self.config, self.dtype, self.device = config, maker.dtype, maker.options.device
        kernel = (3, config.num_frames, config.patch_size, config.patch_size)
        self.patch_embed = maker.convolution(
            "patch_embed.proj", outputs=width, kernel=kernel, has_bias=config.patch_bias
        )
        self.positions: Tensor | None = None
        if config.positions_side:
            self.positions = maker.table("pos_embed.weight", config.positions_side**2, width)
        up, down = config.mlp
        form = LayerForm(
            under="blocks", norms=("norm1", "norm2"), qkv=("attn.qkv",), proj="attn.proj", up=(up,), down=down
        )
        self.layers = TowerLayers(config, form, _NORM_EPS, maker)
        self.merger = Merger(config, maker.under("merger"), norms_tokens=False)
        self.deepstack = [
            Merger(config, maker.under(f"deepstack_merger_list.{index}"), norms_tokens=True)
            for index in range(len(config.deepstack_layers))
        ]

    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        config = self.config
        rows, columns = patch_places(grid, config.merge_size)
        count = len(rows)
        assert len(patches) == count, f"{len(patches)} patches, but the grid is {grid}"
        places: _Interpolated | None = None
        if self.positions is not None:
            places = _Interpolated(self.positions, config.positions_side, rows, columns, grid)
        x = self.buffer(count, config.hidden_size)
        for piece in pace.slices(count):
            added = None if places is None else places.of(piece)
            self.patch_embed(self.pixels(patches, piece), residual=added, out=x[piece])
            yield piece.stop - piece.start
        rope = axial_rope(config.head_dim, config.theta, rows, columns, self.device)
        attention = self.layers.attention([count], rope, x)
        deep: list[Tensor] = []
        for index, layer in enumerate(self.layers.layers):
            yield from through(pace, layer, x, attention)
            if index in config.deepstack_layers:
                deep.append((yield from self._merged(self.deepstack[len(deep)], x, pace)))
        return (yield from self._merged(self.merger, x, pace)), *deep

    def _merged(self, merger: Merger, x: Tensor, pace: Pace) -> Generator[int, None, Tensor]:
        unit = self.config.merge_size**2
        made = self.buffer(x.shape[0] // unit, self.config.out_size)
        for piece in pace.slices(made.shape[0], unit):
            merger(x[piece.start * unit : piece.stop * unit], made[piece])
            yield (piece.stop - piece.start) * unit
        return made


class Merger:
    """Merges a token's patches into one embedding. `norms_tokens`: they are normalised together, not one by one."""

    def __init__(self, config: TowerConfig, maker: Maker, *, norms_tokens: bool) -> None:
        self.inputs = config.hidden_size * config.merge_size**2
        self.norms_tokens = norms_tokens
        size = self.inputs if norms_tokens else config.hidden_size
        norm, up, down = config.merger
        self.norm = TowerNorm(norm, size, _NORM_EPS, maker)
        self.mlp = TowerMlp((up,), down, (self.inputs, self.inputs, config.out_size), "erf", maker)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        x = self.norm(x.view(-1, self.inputs) if self.norms_tokens else x)
        self.mlp(x.view(-1, self.inputs), out)


class _Interpolated:
    """The learned positions of a picture's patches: the grid of the table is stretched over the picture, corner to
    corner, and read bilinearly."""

    def __init__(self, table: Tensor, side: int, rows: Array, columns: Array, grid: tuple[int, int]) -> None:
        """`table [side**2, hidden_size]`; the line and the column of each patch."""
        self._table = table
        lines, places = (_taps(each, count, side) for each, count in ((rows, grid[0]), (columns, grid[1])))
        self._taps = [
            ((line * side + column).astype(np.int32), (line_weight * column_weight).astype(np.float32))
            for line, line_weight in lines
            for column, column_weight in places
        ]

    def of(self, piece: slice) -> Tensor:
        """Some patches' positions, `[n, hidden_size]`."""
        total: Tensor | None = None
        for ids, weights in self._taps:
            rows, factors = ops.place([ids[piece], weights[piece]], self._table.device)
            part = ops.embedding(rows, self._table)
            part = part * factors.to(part.dtype).unsqueeze(1)
            total = part if total is None else total + part
        assert total is not None
        return total


def _taps(places: Array, count: int, side: int) -> Sequence[tuple[Array, Array]]:
    """The two lines of the table beside each place of `count`, and their weights."""
    exact = places * np.float32((side - 1) / max(1, count - 1))
    low = np.minimum(np.floor(exact).astype(np.int64), side - 1)
    part = exact - low
    return (low, 1 - part), (np.minimum(low + 1, side - 1), part)
