"""A decoder that reads pictures: the tower's embeddings replace those of the picture's placeholder tokens."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from models.decoder import Decoder
from models.rope import Array, rotations
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

OLDER_NAMES = MappingProxyType({
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.language_model.",
    "vision_tower.vision_model.": "model.vision_tower.",
    "vision_tower.": "model.vision_tower.",
    "model.vision_tower.vision_model.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
})  # fmt: skip
"""Beginnings of the names that older files of LLaVA and Gemma 3 have, and what they are now (`Model.renames`)."""


class PictureDecoder(Decoder):
    """The parts of a model that reads pictures besides its tower and its `patch_rule`.

    With several stages the first one has the tower and the layers that add its rows.

    Attributes:
        image_token_id: the token that stands for a picture's tokens.
        num_deep_rows: layers after which rows of the tower are added.
        frame: tokens before and after a picture's, which templates leave out; None if there are none.
        frame_sign: the token that templates write for a framed picture: the frame's first one, or the picture's.
        line_ends: the last token of each line of a picture's tokens, and of its last line; None if lines have no ends.
    """

    image_token_id: int
    num_deep_rows = 0
    frame: tuple[int, int] | None = None
    frame_sign: Literal["begin", "picture"] = "begin"
    line_ends: tuple[int, int] | None = None

    @property
    def whole_picture_tokens(self) -> int | None:
        """The most tokens of a picture if they see each other; None if attention is causal."""
        return None

    @property
    def bytes_per_picture_token(self) -> int:
        """Device memory of the tower's result for one token."""
        itemsize = 4 if self.device.kind == "cpu" else self.dtype.itemsize
        return itemsize * self.config.hidden_size * (1 + self.num_deep_rows)

    def embed(self, batch: Batch) -> Tensor:
        x = self.look_up(batch, self.embed_tokens, self.embedding_scale)
        for each in batch.encoded:
            x[each.first_token : each.first_token + each.rows[0].shape[0]] = each.rows[0]
        batch.keep(0, x)
        return x

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        for number, layer in enumerate(self.layers, self.own_layers.start + 1):
            x = layer(x, batch, kv_cache)
            for each in batch.encoded:
                if number < len(each.rows):
                    rows = slice(each.first_token, each.first_token + each.rows[0].shape[0])
                    x[rows] = x[rows] + each.rows[number]
                    x.deferred_norm = None  # was of the old rows
            batch.keep(number, x)
        return x


class AxesDecoder(PictureDecoder):
    """A picture decoder whose tokens have positions on three axes.

    Attributes:
        axes: the axis that turns each pair of a head, `[head_dim / 2]`.
    """

    axes: Array

    def rotations(self, positions: Array) -> RopeTable:
        """A step's rotations, for `Batch.rope`: a row for each token of `positions [3, num_tokens]`."""
        rope = self.config.layer_ropes[0]
        assert rope is not None
        return rotations(rope, self.axes, positions, self.device)
