"""Images on an executor's device: encoded piece by piece, kept by slot, inserted into the batches of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch, EncodedTokens
from runtime.engine.steps.step_input import PassPictures, StepInput
from runtime.engine.steps.tower_recordings import RecordedSize, TowerRecordings
from runtime.images.patches import NormalisedPatches, Rule
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor


class Encoding(Protocol):
    """An image being encoded. ``num_rows`` have been computed; each counts twice in each layer."""

    @property
    def num_rows(self) -> int: ...

    def advance(self, num_rows: int) -> tuple[Tensor, ...] | None: ...


class Tower(Protocol):
    """Encodes images."""

    def start(
        self, patches: NormalisedPatches, grid: tuple[int, int], adapter: int, keeper: RecordedSize | None
    ) -> Encoding: ...


@runtime_checkable
class PictureModel(Protocol):
    """A model that reads images; ``models.picture_decoder.PictureDecoder`` is one.

    ``frame``: tokens before and after an image's; ``frame_sign``: whether templates write the first of them for all, or
    the image's. ``line_ends``: those after each line of an image's and after the last. ``whole_picture_tokens``: the
    most of an image, if they attend to each other, so that one step computes them; None if it may be cut.
    """

    patch_rule: Rule
    line_ends: tuple[int, int] | None

    @property
    def tower(self) -> Tower: ...

    @property
    def image_token_id(self) -> int: ...

    @property
    def bytes_per_picture_token(self) -> int: ...

    @property
    def frame(self) -> tuple[int, int] | None: ...

    @property
    def frame_sign(self) -> Literal["begin", "picture"]: ...

    @property
    def whole_picture_tokens(self) -> int | None: ...


@runtime_checkable
class RotatingModel(Protocol):
    """A model whose tokens have positions on three axes."""

    def rotations(self, positions: NDArray[Any]) -> RopeTable: ...


class PictureStore:
    """The embeddings of images by slot, and the images that are being encoded."""

    def __init__(
        self, model: PictureModel, recordings: TowerRecordings | None = None, *, has_tower: bool = True
    ) -> None:
        """`has_tower`: False if the model begins in an earlier stage."""
        self._model, self._recordings, self._has_tower = model, recordings, has_tower
        self._encodings: dict[int, tuple[Encoding, RecordedSize | None]] = {}
        self._made: dict[int, tuple[Tensor, ...]] = {}

    def use(self, model: PictureModel, recordings: TowerRecordings | None) -> None:
        """Encode with this model, whose numbers are the same. No image is being encoded."""
        assert not self._encodings, "an image is being encoded"
        self.release()
        self._model, self._recordings = model, recordings

    def release(self) -> None:
        """Free the recordings, which hold weights' addresses."""
        if self._recordings is not None:
            self._recordings.release()

    @property
    def are_whole(self) -> bool:
        """Whether an image's tokens attend to each other."""
        return self._model.whole_picture_tokens is not None

    def start(self, slot: int, patches: NDArray[np.uint8], grid: tuple[int, int], adapter: int) -> None:
        """Begin to encode ``patches [rows * columns, patch_bytes]`` into a free slot, with the adapter in this slot of
        adapters, or -1."""
        assert slot not in self._made, "a slot is encoded twice"
        normalised = NormalisedPatches(patches, self._model.patch_rule)
        size = None if self._recordings is None else self._recordings.begin(grid, adapter)
        self._encodings[slot] = self._model.tower.start(normalised, grid, adapter, size), size

    def advance(self, slot: int, num_rows: int) -> tuple[bool, int]:
        """Compute so many rows more; returns whether the image is complete, and how many rows were computed."""
        encoding, size = self._encodings[slot]
        before = encoding.num_rows
        made = encoding.advance(num_rows)
        if made is not None:
            del self._encodings[slot]
            if size is not None:  # the next picture of this size writes over the kept arrays
                made = tuple(each.clone() for each in made)
                size.end(is_complete=True)
            self._made[slot] = made
        return made is not None, encoding.num_rows - before

    def drop(self, slot: int) -> None:
        _, size = self._encodings.pop(slot, (None, None))
        if size is not None:
            size.end(is_complete=False)
        self._made.pop(slot, None)

    def complete(self, batch: Batch, step: StepInput | PassPictures) -> None:
        """Set the positions and the images' embeddings in a step's or a pass's batch."""
        if step.rotary_positions is not None:
            assert isinstance(self._model, RotatingModel), "the model has no axes"
            batch.rope = self._model.rotations(step.rotary_positions)
            (batch.positions,) = ops.place([np.arange(batch.num_tokens, dtype=np.int32)], batch.token_ids.device)
        batch.encoded = tuple(
            EncodedTokens(span.first_token, self._rows(self._made[span.slot], span.first_row, span.count))
            for span in step.features
            if self._has_tower
        )
        if step.bidirectional_spans:
            until = np.concatenate(
                [
                    np.arange(start + 1, start + count + 1, dtype=np.int32)
                    for start, count in zip(step.starts.tolist(), step.counts.tolist(), strict=True)
                ]
            )
            for span in step.bidirectional_spans:
                until[span.first_token : span.first_token + span.count] = until[span.first_token + span.count - 1]
            (batch.bidirectional_until,) = ops.place([until], batch.token_ids.device)

    @staticmethod
    def _rows(made: Sequence[Tensor], first: int, count: int) -> tuple[Tensor, ...]:
        return tuple(each[first : first + count] for each in made)
