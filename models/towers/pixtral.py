"""Pixtral's tower (arXiv 2410.07073): pictures of any shape, a sequence of patches each.

    x = rms_norm(patches . W)
    for each layer:   x = x + attention(rms_norm(x));   x = x + mlp(rms_norm(x))      a gated MLP

Queries and keys are rotated by a patch's line and column: the even-numbered frequencies of a text's head belong to the
line, the odd ones to the column. Nothing is normalised after the last layer.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.configuration.config import SILU_NAMES, read_choice, read_width_and_heads
from models.configuration.json_fields import Fields
from models.makers.maker import Maker
from models.towers.encoding import Pace, PatchRows, PictureTower, through
from models.towers.full_attention import FullAttention
from models.towers.qwen3_vl import patch_places
from models.towers.shards import share_of_tower
from runtime import ops
from runtime.device.device import Device
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]
KIND = "pixtral"

_NORM_EPS = 1e-5
_GATED_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig:
    """`image_size`: pixels of a picture's longer side, at most, by default. `activation`: an `ops.GluActivation`, or
    "erf"."""

    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    image_size: int
    patch_size: int
    activation: Any
    theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def read_pixtral(fields: Fields) -> PixtralConfig:
    """`vision_config`; the defaults are transformers'."""
    fields.expect("model_type", KIND)
    fields.expect("num_channels", 3)
    fields.raw("vocab_size")  # unused
    width, heads = read_width_and_heads(fields, (1024, 16))
    fields.expect("head_dim", width // heads)
    rope = fields.object("rope_parameters")
    rope.expect("rope_type", "axial", "default")
    older = fields.number("rope_theta", 10_000.0, least=1e-6, most=1e12)
    theta = rope.number("rope_theta", older, least=1e-6, most=1e12)
    activations = {**SILU_NAMES, **_GATED_GELUS, "gelu": "erf"}
    return PixtralConfig(
        hidden_size=width,
        num_layers=fields.integer("num_hidden_layers", 24, most=1 << 10),
        num_heads=heads,
        inner_size=fields.integer("intermediate_size", 4096, most=1 << 24),
        image_size=fields.integer("image_size", 1024, most=1 << 15),
        patch_size=fields.integer("patch_size", 16, most=256),
        activation=read_choice(fields, "hidden_act", "gelu", activations),
        theta=float(theta),
    )


class PixtralVit:
    """A tower up to the last of the layers that are `kept`: numbers of layers computed before, ascending or not. The
    patches of `merge_size` lines and columns stand together."""

    def __init__(self, config: PixtralConfig, kept: tuple[int, ...], merge_size: int, maker: Maker) -> None:
        width = config.hidden_size
        self.config, self.kept, self.merge_size = config, kept, merge_size
        kernel = (3, config.patch_size, config.patch_size)
        self.patch_embed = maker.convolution("patch_conv", outputs=width, kernel=kernel, has_bias=False)
        self.first_norm = maker.vector("ln_pre.weight", width)
        heads = share_of_tower(config.num_heads, maker.options, head_dim=config.head_dim)
        self.num_heads = heads.shard.count // config.head_dim
        self.layers = [PixtralLayer(config, maker.under(f"transformer.layers.{index}")) for index in range(max(kept))]

    def kept_rows(
        self, tower: PictureTower, patches: PatchRows, grid: tuple[int, int], pace: Pace
    ) -> Generator[int, None, list[Tensor]]:
        """A picture's rows after each kept layer, each `[num_patches, hidden_size]`; yields each piece's rows."""
        config = self.config
        rows, columns = patch_places(grid, self.merge_size)
        count = len(rows)
        assert len(patches) == count, f"{len(patches)} patches, but the grid is {grid}"
        x = tower.buffer(count, config.hidden_size)
        for piece in pace.slices(count):
            x[piece] = ops.rms_norm(self.patch_embed(tower.pixels(patches, piece)), self.first_norm, _NORM_EPS)
            yield piece.stop - piece.start
        rope = rope_of_patches(config.head_dim, config.theta, rows, columns, tower.device)
        attention = FullAttention([count], self.num_heads, config.head_dim, rope, x.dtype, tower.device)
        kept = {0: x.clone()} if 0 in self.kept else {}
        for number, layer in enumerate(self.layers, 1):
            yield from through(pace, layer, x, attention)
            if number in self.kept:
                kept[number] = x.clone() if number < len(self.layers) else x
        return [kept[number] for number in self.kept]


class PixtralLayer:
    def __init__(self, config: PixtralConfig, maker: Maker) -> None:
        width = config.hidden_size
        heads = share_of_tower(config.num_heads, maker.options, head_dim=config.head_dim)
        inner = share_of_tower(config.inner_size, maker.options)
        self.activation = config.activation
        self.norms = [maker.vector(f"{name}.weight", width) for name in ("attention_norm", "ffn_norm")]
        names = tuple(f"attention.{each}_proj" for each in "qkv")
        self.qkv = maker.linear(names, outputs=(heads.shard,) * 3, inputs=width, has_bias=False, split=heads.outputs)
        self.proj = maker.linear(
            "attention.o_proj", outputs=width, inputs=heads.shard, has_bias=False, split=heads.inputs
        )
        gate_up = ("feed_forward.gate_proj", "feed_forward.up_proj")
        self.gate_up = maker.linear(
            gate_up, outputs=(inner.shard,) * 2, inputs=width, has_bias=False, split=inner.outputs
        )
        self.down = maker.linear(
            "feed_forward.down_proj", outputs=width, inputs=inner.shard, has_bias=False, split=inner.inputs
        )

    def qkv_of(self, x: Tensor) -> Tensor:
        return self.qkv(ops.rms_norm(x, self.norms[0], _NORM_EPS))

    def rest(self, x: Tensor, attended: Tensor) -> None:
        self.proj(attended, residual=x, out=x)
        h = ops.rms_norm(x, self.norms[1], _NORM_EPS)
        self.down(self._gated(h), residual=x, out=x)

    def _gated(self, h: Tensor) -> Tensor:
        if self.activation != "erf":
            return self.gate_up.glu(h, self.activation)
        both = self.gate_up(h)
        inner = both.shape[1] // 2
        return ops.gelu(both[:, :inner].contiguous(), "erf") * both[:, inner:].contiguous()


def rope_of_patches(head_dim: int, theta: float, rows: Array, columns: Array, device: Device) -> RopeTable:
    """Rotations of each patch: the first half of the pairs by its line, the other by its column."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    halves = ((rows, frequencies[0::2]), (columns, frequencies[1::2]))
    angles = np.concatenate([each[:, None].astype(np.float32) * own for each, own in halves], axis=1)
    cos, sin = ops.place([np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)], device)
    return RopeTable(cos=cos, sin=sin, interleaved=False)
