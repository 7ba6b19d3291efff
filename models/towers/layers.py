"""The parts of all towers: their sizes, layers and MLPs, and a rank's share of them.

    x = x + attention(norm(x));   x = x + mlp(norm(x))

A rank has some heads of the attention and columns of the MLP, as of the language model's layers. Widths that cannot be
split are whole in each rank: published towers have widths that ranks and formats do not divide, and are small beside
their language models. In exact mode the choice must not depend on the number of ranks, since a split map adds up its
inputs in another order.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from models.configuration.json_fields import Fields
from models.makers.maker import Maker
from models.makers.shards import UNIT, Shard, shard_of_width
from models.towers.encoding import FullAttention, Pace, through
from numba_kernels.split_k import SEGMENTS, STEP
from runtime import ops
from runtime.batch import AdaptedRows
from runtime.device.device import Device
from runtime.linear.options import LoadOptions
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSizes:
    """The fields of every tower's config. `activation`: an `ops.GluActivation` of a gated MLP, or "erf"; else a
    GELU."""

    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    patch_size: int
    activation: Any

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """A tower's layers: the names of their tensors. The norms are LayerNorms, or RMSNorms if not `is_centred`; with two
    names in `up`, gate first, the MLP is gated. `attention_bias`, `mlp_bias`: whether these maps have biases."""

    under: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    proj: str
    up: tuple[str, ...]
    down: str
    is_centred: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True


class TowerNorm:
    """A LayerNorm, or an RMSNorm if it is not `is_centred`."""

    def __init__(self, name: str, size: int, eps: float, maker: Maker, *, is_centred: bool = True) -> None:
        self.weight = maker.vector(f"{name}.weight", size)
        self.bias = maker.vector(f"{name}.bias", size) if is_centred else None
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class TowerMlp:
    """`down(gelu(up(x)))`; with two names for `up`, gate first, `down(f(gate(x)) * up(x))`."""

    def __init__(
        self, up: tuple[str, ...], down: str, sizes: tuple[int, int, int], activation: Any, maker: Maker, *,
        has_bias: bool = True,
    ) -> None:  # fmt: skip
        """`sizes` are those of inputs, of the rows between the maps, and of outputs."""
        inputs, inner, outputs = sizes
        split = share_of_tower(inner, maker.options)
        self.activation, self.is_gated = activation, len(up) > 1
        widths = (split.shard,) * len(up)
        self.up = maker.linear(up, outputs=widths, inputs=inputs, has_bias=has_bias, split=split.outputs)
        self.down = maker.linear(down, outputs=outputs, inputs=split.shard, has_bias=has_bias, split=split.inputs)

    def __call__(self, x: Tensor, out: Tensor, adapted: AdaptedRows, *, residual: Tensor | None = None) -> None:
        if self.is_gated and self.activation != "erf":
            h = self.up.glu(x, self.activation, adapted)
        elif self.is_gated:
            both = self.up(x, adapted)
            inner = both.shape[1] // 2
            h = ops.gelu(both[:, :inner].contiguous(), "erf") * both[:, inner:].contiguous()
        else:
            h = self.up(x, adapted)
            h = ops.gelu(h, self.activation, out=h)
        self.down(h, adapted, residual=residual, out=out)


class TowerLayer:
    """See `models.towers.encoding.AttentionLayer`."""

    head_norms = None

    def __init__(self, sizes: TowerSizes, form: LayerForm, eps: float, maker: Maker) -> None:
        width, has_bias = sizes.hidden_size, form.attention_bias
        heads = share_of_tower(sizes.num_heads, maker.options, head_dim=sizes.head_dim)
        self.norms = [TowerNorm(name, width, eps, maker, is_centred=form.is_centred) for name in form.norms]
        self.qkv = maker.linear(
            form.qkv, outputs=(heads.shard,) * 3, inputs=width, has_bias=has_bias, split=heads.outputs
        )
        self.proj = maker.linear(form.proj, outputs=width, inputs=heads.shard, has_bias=has_bias, split=heads.inputs)
        inner = (width, sizes.inner_size, width)
        self.mlp = TowerMlp(form.up, form.down, inner, sizes.activation, maker, has_bias=form.mlp_bias)

    def qkv_of(self, x: Tensor, adapted: AdaptedRows) -> Tensor:
        return self.qkv(self.norms[0](x), adapted)

    def rest(self, x: Tensor, attended: Tensor, adapted: AdaptedRows) -> None:
        self.proj(attended, adapted, residual=x, out=x)
        self.mlp(self.norms[1](x), x, adapted, residual=x)


class TowerLayers:
    """So many layers, which stand under `form.under.0`, `.1` and so on."""

    def __init__(self, sizes: TowerSizes, form: LayerForm, eps: float, maker: Maker, count: int | None = None) -> None:
        heads = share_of_tower(sizes.num_heads, maker.options, head_dim=sizes.head_dim)
        self.num_heads, self.head_dim = heads.shard.count // sizes.head_dim, sizes.head_dim
        numbers = range(sizes.num_layers if count is None else count)
        self.layers = [TowerLayer(sizes, form, eps, maker.under(f"{form.under}.{index}")) for index in numbers]

    def attention(self, lengths: list[int], rope: RopeTable | None, x: Tensor) -> FullAttention:
        """The attention of a picture with rows `x`, in consecutive windows of these lengths."""
        return FullAttention(lengths, self.num_heads, self.head_dim, rope, x.dtype, x.device)

    def kept(
        self, kept: tuple[int, ...], x: Tensor, rope: RopeTable | None, pace: Pace
    ) -> Generator[int, None, list[Tensor]]:
        """`x [num_rows, hidden_size]` after each of these numbers of layers; yields each piece's rows."""
        attention = pace.keep(lambda: self.attention([x.shape[0]], rope, x))
        found = {0: x.clone()} if 0 in kept else {}
        for number, layer in enumerate(self.layers, 1):
            yield from through(pace, layer, x, attention)
            if number in kept:
                found[number] = x.clone() if number < len(self.layers) else x
        return [found[number] for number in kept]


def read_width_and_heads(
    fields: Fields, defaults: tuple[int, int], names: tuple[str, str] = ("hidden_size", "num_attention_heads")
) -> tuple[int, int]:
    """A tower's width and number of heads, which divide it into multiples of 4, for kernels and rotations."""
    width = fields.integer(names[0], defaults[0], most=1 << 16)
    heads = fields.integer(names[1], defaults[1], most=1 << 10)
    if width % heads or width // heads % 4:
        raise fields.error(names[1], f"= {heads} must divide {names[0]} = {width} into multiples of 4")
    return width, heads


def patch_places(grid: tuple[int, int], merge_size: int) -> tuple[Array, Array]:
    """The line and the column of each patch, in the order in which they stand: token by token."""
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    blocks = grid[0] // merge_size, merge_size, grid[1] // merge_size, merge_size
    in_order = [each.reshape(blocks).transpose(0, 2, 1, 3).ravel() for each in (rows, columns)]
    return in_order[0], in_order[1]


def axial_rope(
    head_dim: int, theta: float, rows: Array, columns: Array, device: Device, *, takes_turns: bool = False
) -> RopeTable:
    """Rotations of each patch: the first half of the pairs by its line, the other by its column. Both have every second
    frequency of a text's head; those of columns are the ones between if they take turns."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    halves = ((rows, frequencies[0::2]), (columns, frequencies[int(takes_turns) :: 2]))
    angles = np.concatenate([each[:, None].astype(np.float32) * own for each, own in halves], axis=1)
    cos, sin = ops.place([np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)], device)
    return RopeTable(cos=cos, sin=sin, interleaved=False)


class TowerShard:
    """A width of which each rank has a part, or all of it.

    Attributes:
        shard: this rank's part.
        outputs, inputs: the cuts of the maps that make it and that read it, or None if they are whole.
    """

    def __init__(self, shard: Shard, *, is_parted: bool) -> None:
        self.shard = shard
        self.outputs: Literal["outputs"] | None = "outputs" if is_parted else None
        self.inputs: Literal["inputs"] | None = "inputs" if is_parted else None


def share_of_tower(width: int, options: LoadOptions, *, head_dim: int = 1) -> TowerShard:
    """This rank's part of `width` columns, or of as many heads of so many columns."""
    whole = TowerShard(Shard(width * head_dim, 0, width * head_dim), is_parted=False)
    columns, ranks = width * head_dim, options.num_ranks
    unit = 1 if options.format is None else options.format.split
    if options.rounding:
        return whole  # rows are rounded together
    if options.exact:
        step = math.lcm(STEP, unit)
        if width % SEGMENTS or columns % (SEGMENTS * step):
            return whole
        shard = shard_of_width(columns, options.rank, ranks, exact=True)
    elif head_dim > 1:
        if width % ranks or columns // ranks % unit:
            return whole
        shard = shard_of_width(columns, options.rank, ranks, exact=True)
    else:
        unit = math.lcm(UNIT, unit)
        each, more = divmod(-(-columns // unit), ranks)
        if not each:
            return whole
        first = (options.rank * each + min(options.rank, more)) * unit
        end = min(columns, first + (each + (options.rank < more)) * unit)
        shard = Shard(columns, first, end - first)
    assert shard is not None, "the width is divided evenly"
    return TowerShard(shard, is_parted=True)
