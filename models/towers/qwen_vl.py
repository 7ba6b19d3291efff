"""The towers of Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (2502.13923) and Qwen3-VL (2511.21631): patches to embeddings
of the language model's tokens.

    x = layers(patches . W + learned positions, interpolated to the picture's grid)       before Qwen3-VL: no positions
    embeddings = mlp(norm(x), 2 x 2 patches a token)

Queries and keys are rotated by a patch's line and column, half of a head's pairs each. In Qwen2.5-VL, with RMSNorms and
a SwiGLU, patches attend within windows, in some layers to the whole picture; they lie window by window while they
are computed. In Qwen3-VL some layers' outputs go through mergers of their own: the language model adds them after its
first layers (deepstack).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.configuration.config import GELU_NAMES, SILU_NAMES, read_choice
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
from runtime.batch import AdaptedRows
from runtime.tensor.tensor import Tensor

_NORM_EPS = 1e-6


def _form(up: tuple[str, ...], down: str, *, is_centred: bool = True) -> LayerForm:
    return LayerForm(
        under="blocks", norms=("norm1", "norm2"), qkv=("attn.qkv",), proj="attn.proj", up=up, down=down,
        is_centred=is_centred,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig(TowerSizes):
    """`form`: of the layers. `merger`: names of the merger's norm and maps. `positions_side`: lines of the grid of
    learned positions; 0 if there are none. `deepstack_layers`: layers whose outputs are merged, too. `window_tokens`:
    tokens of a window's side; 0 if there are no windows, as in the layers `full_layers`."""

    form: LayerForm
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")
    out_size: int
    num_frames: int
    merge_size: int
    theta: float
    patch_bias: bool = False
    positions_side: int = 0
    deepstack_layers: tuple[int, ...] = ()
    window_tokens: int = 0
    full_layers: frozenset[int] = frozenset()


def read_third_tower(fields: Fields, hidden_size: int) -> TowerConfig:
    """Qwen3-VL's `vision_config`, of a language model of this width."""
    common = _read_common(
        fields, hidden_size, (1152, "hidden_size"), "out_hidden_size", num_layers=27, patch_size=16,
        activations=GELU_NAMES, default_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    num_layers = common["num_layers"]
    deepstack = fields.integers("deepstack_visual_indexes") if fields.has("deepstack_visual_indexes") else (8, 16, 24)
    if sorted(set(deepstack)) != list(deepstack) or any(layer >= num_layers for layer in deepstack):
        raise fields.error("deepstack_visual_indexes", f"{deepstack} must ascend below depth = {num_layers}")
    num_positions = fields.integer("num_position_embeddings", 2304, most=1 << 24)
    side = round(num_positions**0.5)
    if side * side != num_positions or side < 2:
        raise fields.error("num_position_embeddings", f"= {num_positions} must be a square, at least 4")
    return TowerConfig(
        **common,
        inner_size=fields.integer("intermediate_size", 4304, most=1 << 24),
        positions_side=side,
        deepstack_layers=deepstack,
        patch_bias=True,
        form=_form(("mlp.linear_fc1",), "mlp.linear_fc2"),
        merger=("norm", "linear_fc1", "linear_fc2"),
    )


def read_second_tower(fields: Fields, hidden_size: int) -> TowerConfig:
    """Qwen2-VL's: its `hidden_size` is the language model's width. The defaults are transformers'."""
    common = _read_common(
        fields, hidden_size, (1280, "embed_dim"), "hidden_size", num_layers=32, patch_size=14,
        activations=GELU_NAMES, default_activation="quick_gelu",
    )  # fmt: skip
    fields.expect("in_chans", 3)
    fields.expect("spatial_patch_size", common["patch_size"])
    inner = int(common["hidden_size"] * fields.number("mlp_ratio", 4, above=0.0, most=1 << 10))
    return TowerConfig(**common, inner_size=inner, form=_form(("mlp.fc1",), "mlp.fc2"))


def read_windowed_tower(fields: Fields, hidden_size: int) -> TowerConfig:
    """Qwen2.5-VL's; the defaults are transformers'."""
    common = _read_common(
        fields, hidden_size, (3584, "hidden_size"), "out_hidden_size", num_layers=32, patch_size=14,
        activations=SILU_NAMES, default_activation="silu",
    )  # fmt: skip
    fields.expect("in_chans", 3)
    fields.raw("tokens_per_second")  # of films
    patch, merge = common["patch_size"], common["merge_size"]
    fields.expect("spatial_patch_size", patch)
    window = fields.integer("window_size", 112, most=1 << 16)
    if window // merge // patch < 1:
        raise fields.error("window_size", f"= {window} is below a token's side, {patch * merge} pixels")
    given = fields.integers("fullatt_block_indexes") if fields.has("fullatt_block_indexes") else (7, 15, 23, 31)
    return TowerConfig(
        **common,
        inner_size=fields.integer("intermediate_size", 3420, most=1 << 24),
        window_tokens=window // merge // patch,
        full_layers=frozenset(given),
        form=_form(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", is_centred=False),
    )


def _read_common(
    fields: Fields, hidden_size: int, width: tuple[int, str], out_name: str, *, num_layers: int, patch_size: int,
    activations: Mapping[str, str], default_activation: str,
) -> dict[str, Any]:  # fmt: skip
    """The fields of all three as keyword arguments, by their defaults; `width` is that of the tower, and its name."""
    fields.expect("in_channels", 3)
    own_width, heads = read_width_and_heads(fields, (width[0], 16), (width[1], "num_heads"))
    out_size = fields.integer(out_name, 3584)
    if out_size != hidden_size:
        raise fields.error(out_name, f"= {out_size} must be the language model's hidden_size = {hidden_size}")
    rope = fields.object("rope_parameters")
    rope.expect("rope_type", "axial")
    return {
        "hidden_size": own_width,
        "num_layers": fields.integer("depth", num_layers, most=1 << 10),
        "num_heads": heads,
        "out_size": out_size,
        "patch_size": fields.integer("patch_size", patch_size, most=256),
        "num_frames": fields.integer("temporal_patch_size", 2, most=16),
        "merge_size": fields.integer("spatial_merge_size", 2, most=16),
        "activation": read_choice(fields, "hidden_act", default_activation, activations),
        "theta": float(rope.number("rope_theta", 10_000.0, least=1e-6, most=1e12)),
    }


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
        self.layers = TowerLayers(config, config.form, _NORM_EPS, maker)
        self.merger = Merger(config, maker.under("merger"), norms_tokens=False)
        self.deepstack = [
            Merger(config, maker.under(f"deepstack_merger_list.{index}"), norms_tokens=True)
            for index in range(len(config.deepstack_layers))
        ]

    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        config, merge = self.config, self.config.merge_size
        rows, columns = patch_places(grid, merge)
        count, unit = len(rows), merge**2
        assert len(patches) == count, f"{len(patches)} patches, but the grid is {grid}"
        order: Array | None = None
        if config.window_tokens:
            order, lengths = windows_of(grid[0] // merge, grid[1] // merge, config.window_tokens)
            ordered = (order[:, None] * unit + np.arange(unit)).ravel()  # patches, window by window
            rows, columns = rows[ordered], columns[ordered]
        places: _Interpolated | None = None
        if self.positions is not None:
            places = _Interpolated(self.positions, config.positions_side, rows, columns, grid)
        x = pace.keep(lambda: self.buffer(count, config.hidden_size))
        for piece in pace.slices(count):
            added = None if places is None else places.of(piece)
            pixels = self.pixels(patches, piece if order is None else ordered[piece])
            self.patch_embed(pixels, residual=added, out=x[piece])
            yield piece.stop - piece.start
        rope = pace.keep(lambda: axial_rope(config.head_dim, config.theta, rows, columns, self.device))
        full = windowed = pace.keep(lambda: self.layers.attention([count], rope, x))
        if order is not None:
            windowed = pace.keep(lambda: self.layers.attention([each * unit for each in lengths], rope, x))
        deep: list[Tensor] = []
        for index, layer in enumerate(self.layers.layers):
            yield from through(pace, layer, x, full if index in config.full_layers else windowed)
            if index in config.deepstack_layers:
                deep.append((yield from self._merged(self.deepstack[len(deep)], x, pace)))
        made = yield from self._merged(self.merger, x, pace)
        if order is not None:
            (back,) = ops.place([np.argsort(order).astype(np.int32)], self.device)
            made = ops.gather_rows(made, back)
        return made, *deep

    def _merged(self, merger: Merger, x: Tensor, pace: Pace) -> Generator[int, None, Tensor]:
        unit = self.config.merge_size**2
        made = self.buffer(x.shape[0] // unit, self.config.out_size)
        for piece in pace.slices(made.shape[0], unit):
            merger(x[piece.start * unit : piece.stop * unit], made[piece], pace.of(made[piece]))
            yield (piece.stop - piece.start) * unit
        return made


def windows_of(rows: int, columns: int, side: int) -> tuple[Array, list[int]]:
    """A picture's tokens window by window, smaller at the right and bottom edges, and each window's size."""
    places = np.arange(rows * columns).reshape(rows, columns)
    windows = [
        places[row : row + side, column : column + side].ravel()
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]
    return np.concatenate(windows), [len(each) for each in windows]


class Merger:
    """Merges a token's patches into one embedding. `norms_tokens`: they are normalised together, not one by one."""

    def __init__(self, config: TowerConfig, maker: Maker, *, norms_tokens: bool) -> None:
        self.inputs = config.hidden_size * config.merge_size**2
        self.norms_tokens = norms_tokens
        size = self.inputs if norms_tokens else config.hidden_size
        norm, up, down = config.merger
        self.norm = TowerNorm(norm, size, _NORM_EPS, maker, is_centred=config.form.is_centred)
        self.mlp = TowerMlp((up,), down, (self.inputs, self.inputs, config.out_size), "erf", maker)

    def __call__(self, x: Tensor, out: Tensor, adapted: AdaptedRows) -> None:
        x = self.norm(x.view(-1, self.inputs) if self.norms_tokens else x)
        self.mlp(x.view(-1, self.inputs), out, adapted)


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
