"""The vision transformers of CLIP (arXiv 2103.00020) and SigLIP (2303.15343): pictures of one size.

    x = layers(patches . W + learned positions)                 CLIP: after a class token, then normalised

A family chooses the layers whose results it reads, before any last norm.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from models.configuration.config import GELU_NAMES, read_choice
from models.configuration.json_fields import Fields
from models.makers.maker import Maker
from models.towers.encoding import Pace, PatchRows, PictureTower
from models.towers.layers import LayerForm, TowerLayers, TowerNorm, TowerSizes, read_width_and_heads
from runtime import ops
from runtime.tensor.tensor import Tensor

KINDS = ("clip_vision_model", "siglip_vision_model")
_FORM = LayerForm(
    under="encoder.layers", norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), proj="self_attn.out_proj", up=("mlp.fc1",),
    down="mlp.fc2",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainVitConfig(TowerSizes):
    """`has_class`: a class token stands before the patches, as in CLIP."""

    has_class: bool
    image_size: int
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
        activation=activation,
        norm_eps=fields.number("layer_norm_eps", 1e-5 if is_clip else 1e-6, least=1e-12, most=1.0),
    )


class PlainVit:
    """A tower up to the last of the layers that are `kept`: numbers of layers computed before, ascending or not."""

    def __init__(self, config: PlainVitConfig, kept: tuple[int, ...], maker: Maker) -> None:
        width = config.hidden_size
        self.config, self.kept = config, kept
        kernel = (3, config.patch_size, config.patch_size)
        embeddings = maker.under("embeddings")
        self.patch_embed = embeddings.convolution(
            "patch_embedding", outputs=width, kernel=kernel, has_bias=not config.has_class
        )
        self.positions = embeddings.table("position_embedding.weight", config.num_rows, width)
        self.class_row = embeddings.vector("class_embedding", width) if config.has_class else None
        self.first_norm = TowerNorm("pre_layrnorm", width, config.norm_eps, maker) if config.has_class else None
        self.layers = TowerLayers(config, _FORM, config.norm_eps, maker, max(kept))

    def kept_rows(
        self, tower: PictureTower, patches: PatchRows, grid: tuple[int, int], pace: Pace
    ) -> Generator[int, None, list[Tensor]]:
        """The kept layers' results for a picture, each `[num_rows, hidden_size]`; yields the rows of each piece."""
        config, first = self.config, int(self.config.has_class)
        assert grid == (config.side, config.side), f"{grid} patches, must be {config.side} x {config.side}"
        assert len(patches) == config.side**2, f"{len(patches)} patches, must be {config.side**2}"
        (ids,) = ops.place([np.arange(config.num_rows, dtype=np.int32)], tower.device)
        x = pace.keep(lambda: tower.buffer(config.num_rows, config.hidden_size))
        for piece in pace.slices(config.side**2):
            rows = slice(first + piece.start, first + piece.stop)
            places = ops.embedding(ids[rows], self.positions)
            self.patch_embed(tower.pixels(patches, piece), residual=places, out=x[rows])
            yield piece.stop - piece.start
        if self.class_row is not None:
            x[:1] = ops.embedding(ids[:1], self.positions) + self.class_row.to(x.dtype).unsqueeze(0)
        if self.first_norm is not None:
            x[:] = self.first_norm(x)
        return (yield from self.layers.kept(self.kept, x, None, pace))
