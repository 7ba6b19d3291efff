"""Pixtral's tower (arXiv 2410.07073): pictures of any shape, a sequence of patches each.

    x = rms_norm(patches . W);   x = layers(x)      RMSNorms, and a gated MLP

Queries and keys are rotated by a patch's line and column: the even-numbered frequencies of a text's head belong to the
line, the odd ones to the column. Nothing is normalised after the last layer.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from models.configuration.config import SILU_NAMES, read_choice
from models.configuration.json_fields import Fields
from models.makers.maker import Maker
from models.towers.encoding import Pace, PatchRows, PictureTower
from models.towers.layers import LayerForm, TowerLayers, TowerSizes, axial_rope, patch_places, read_width_and_heads
from runtime import ops
from runtime.tensor.tensor import Tensor

KIND = "pixtral"

_NORM_EPS = 1e-5
_GATED_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_FORM = LayerForm(
    under="transformer.layers", norms=("attention_norm", "ffn_norm"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), proj="attention.o_proj",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj", is_centred=False,
    attention_bias=False, mlp_bias=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig(TowerSizes):
    """`image_size`: pixels of a picture's longer side, at most, by default."""

    image_size: int
    theta: float


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
        self.layers = TowerLayers(config, _FORM, _NORM_EPS, maker, max(kept))

    def kept_rows(
        self, tower: PictureTower, patches: PatchRows, grid: tuple[int, int], pace: Pace
    ) -> Generator[int, None, list[Tensor]]:
        """A picture's rows after each kept layer, each `[num_patches, hidden_size]`; yields each piece's rows."""
        config = self.config
        rows, columns = patch_places(grid, self.merge_size)
        count = len(rows)
        assert len(patches) == count, f"{len(patches)} patches, but the grid is {grid}"
        x = pace.keep(lambda: tower.buffer(count, config.hidden_size))
        for piece in pace.slices(count):
            x[piece] = ops.rms_norm(self.patch_embed(tower.pixels(patches, piece)), self.first_norm, _NORM_EPS)
            yield piece.stop - piece.start
        rope = pace.keep(
            lambda: axial_rope(config.head_dim, config.theta, rows, columns, tower.device, takes_turns=True)
        )
        return (yield from self.layers.kept(self.kept, x, rope, pace))
