"""Tensors of GGUF files as the model's safetensors have them: under other names, in other rows, parts joined."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from models.checkpoints.stored_tensor import StoredTensor
from models.errors import WeightsError
from models.gguf.formats import Array
from models.gguf.reader import GgufFile
from runtime.dtype import DType, float32


class GgufWeight(StoredTensor):
    """One tensor of a file, in the rows of the model's safetensors; see `models.checkpoints.checkpoint.StoredTensor`.

    `index` is its number among those that are stacked in the file's tensor; a matrix that `is_transposed` stands inputs
    first there. `pairs_of` elements of a head, rotated as neighbouring pairs in the file, become two halves in the
    first `rotated_rows`, by default all; 0 keeps the rows. `norm_offset` was added by the converter. A convolution over
    time `[channels, taps]` becomes `[channels, 1, taps]`; what `is_flat` a vector; and -exp of a decay, if it
    `is_decay`, the decay. `factor` multiplies elements of a type whose kept blocks have float32 scales.
    """

    def __init__(
        self, file: GgufFile, name: str, index: int | None = None, *, pairs_of: int = 0,
        rotated_rows: int | None = None, norm_offset: float = 0.0, is_transposed: bool = False,
        is_convolution: bool = False, is_flat: bool = False, is_decay: bool = False, factor: float = 1.0,
    ) -> None:  # fmt: skip
        entry = file.tensor(name, index)
        self.file, self.name, self.type_name = file.path.name, name, entry.format.name
        self.shape: tuple[int, ...] = entry.shape
        self.dtype: DType | None = entry.format.dtype
        self.size_bytes = entry.size_bytes
        self.kept_format = entry.format.kept if entry.format.decode and not is_transposed else None
        self.block_format = self.kept_format if len(entry.shape) == 2 else None
        # The rows of values in a map of both are blocks of the latent row; keys are multiplied the other way.
        self.head_formats = {"values": self.block_format if not pairs_of and factor == 1 else None}
        self._file, self._index, self._pairs_of, self._rotated_rows = file, index, pairs_of, rotated_rows
        self._norm_offset, self._is_transposed = norm_offset, is_transposed
        if is_transposed:
            self.shape = self.shape[::-1]
        self._is_decay, self._factor, self._format = is_decay, np.float32(factor), entry.format
        if is_flat:
            self.shape = (math.prod(self.shape),)
        if is_convolution and len(self.shape) == 2:
            self.shape = (self.shape[0], 1, self.shape[1])

    def widen(self, shape: tuple[int, ...]) -> None:
        """llama.cpp's quantiser writes a matrix of one row as a vector, and one matrix alone in a stack as a matrix."""
        inner = self.shape[::-1] if self._is_transposed else self.shape
        stored = shape[::-1] if self._is_transposed else shape
        count = len(stored) - len(inner)
        if count > 0 and stored == (1,) * count + inner:
            self.shape = shape
            self.block_format = self.kept_format if len(shape) == 2 else None

    def _by_rows(self, raw: Array) -> Array:
        """Bytes of the file's rows, `[..., row bytes]`, in this tensor's shape."""
        return raw.reshape(*self.shape[:-1], raw.shape[-1])

    def array(self) -> Array:
        """The elements, made anew where they are quantised or stored otherwise."""
        values = self._in_halves(self._file.array(self.name, self._index))
        if self._factor != 1:
            values = values * self._factor
        if self._norm_offset:
            with np.errstate(invalid="ignore"):  # NaN stays one
                values = values - values.dtype.type(self._norm_offset)
        if self._is_decay:
            with np.errstate(invalid="ignore", divide="ignore"):
                values = np.log(-values.astype(np.float64)).astype(np.float32)
        return np.ascontiguousarray(values.T).reshape(self.shape) if self._is_transposed else values.reshape(self.shape)

    def some_rows(self, rows: slice) -> Array:
        if self.block_format is None or self._pairs_of or self._factor != 1:
            return self.array()[rows]
        return self._format.dequantise(self._by_rows(self._file.raw(self.name, self._index))[rows])

    def stored_rows(self) -> Array:
        assert not self._pairs_of, "rows of heads are looked up in no table"
        assert self._format.keep is None, "rows become other blocks"
        return self._by_rows(self._file.raw(self.name, self._index))

    def part_blocks(self, index: int) -> Array:
        """The blocks of one of the matrices that are stacked in this tensor."""
        alone = len(self._file.tensor(self.name).shape) < len(self.shape)
        return self._file.blocks(self.name, None if alone else index)

    def head_blocks(self, part: str, head: int, rows: slice) -> Array:
        return self._format.kept_blocks(self._file.raw(self.name, self._index)[rows])

    def blocks(self) -> Array:
        blocks = self._by_rows(self._in_halves(self._file.blocks(self.name, self._index)))
        if self._factor != 1:
            blocks = blocks.copy()
            blocks.view(self._format.kept_layout)["d"] *= self._factor
        return blocks

    def _in_halves(self, rows: Array) -> Array:
        if not self._pairs_of:
            return rows
        rotated, others = rows[: self._rotated_rows], rows[len(rows[: self._rotated_rows]) :]
        halves = in_halves(rotated, self._pairs_of)
        return np.concatenate([halves, others]) if len(others) else halves

    def release(self) -> None:
        self._file.release(self.name, self._index)


def in_halves(rows: Array, head_dim: int) -> Array:
    """Rows of heads whose neighbouring pairs are rotated, as rows whose halves are."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


class GgufHeadMaps(StoredTensor):
    """The map from a latent row to heads' keys and values, `[heads (keys + values), latent]`, of which a file has the
    parts: keys `[heads, latent, keys]` and values `[heads, values, latent]`. See
    `models.checkpoints.checkpoint.StoredTensor`."""

    def __init__(self, keys: GgufWeight, values: GgufWeight) -> None:
        for part in (keys, values):  # of one head
            part.widen((1,) * (3 - len(part.shape)) + part.shape)
        heads, latent, key_dim = keys.shape if len(keys.shape) == 3 else (0, 0, 0)
        if not heads or len(values.shape) != 3 or (values.shape[0], values.shape[2]) != (heads, latent):
            raise WeightsError(
                f"{keys.file}: tensors {keys.name!r} {list(keys.shape)} and {values.name!r} {list(values.shape)}"
                " must be [heads, latent, keys] and [heads, values, latent]"
            )
        self.file, self.name, self.type_name = keys.file, keys.name, keys.type_name
        self.shape: tuple[int, ...] = (heads * (key_dim + values.shape[1]), latent)
        self.dtype: DType | None = keys.dtype if keys.dtype == values.dtype else float32
        self.size_bytes = keys.size_bytes + values.size_bytes
        self._keys, self._values = keys, values
        self.head_formats = {"keys": keys.kept_format, "values": values.kept_format}

    def head_blocks(self, part: str, head: int, rows: slice) -> Array:
        return {"keys": self._keys, "values": self._values}[part].part_blocks(head)

    def array(self) -> Array:
        """The elements, made anew."""
        assert self.dtype is not None
        parts = [self._keys.array().swapaxes(1, 2), self._values.array()]
        whole = np.concatenate([part.astype(self.dtype.numpy, copy=False) for part in parts], axis=1)
        return whole.reshape(self.shape)

    def release(self) -> None:
        self._keys.release()
        self._values.release()


class GgufFrames(StoredTensor):
    """The map of a patch's frames, `[width, 3, frames, size, size]`, of which a file has a tensor for each frame. See
    `models.checkpoints.checkpoint.StoredTensor`."""

    def __init__(self, frames: list[GgufWeight]) -> None:
        first = frames[0]
        if len(first.shape) != 4 or any(frame.shape != first.shape for frame in frames):
            shapes = [list(frame.shape) for frame in frames]
            raise WeightsError(f"{first.file}: {first.name!r} and that of the next frame must be alike, not {shapes}")
        self.file, self.name, self.type_name, self.dtype = first.file, first.name, first.type_name, first.dtype
        self.shape = (*first.shape[:2], len(frames), *first.shape[2:])
        self.size_bytes = sum(frame.size_bytes for frame in frames)
        self._frames = frames

    def array(self) -> Array:
        """The elements, made anew."""
        return np.stack([frame.array() for frame in self._frames], axis=2)

    def release(self) -> None:
        for frame in self._frames:
            frame.release()


class Rearranged(StoredTensor):
    """A tensor whose elements stand otherwise in safetensors: `change` makes them, of this shape, of the file's. See
    `models.checkpoints.checkpoint.StoredTensor`."""

    def __init__(self, weight: GgufWeight, shape: tuple[int, ...], change: Callable[[Array], Array]) -> None:
        self.file, self.name, self.type_name, self.dtype = weight.file, weight.name, weight.type_name, weight.dtype
        self.shape, self.size_bytes = shape, weight.size_bytes
        self._weight, self._change = weight, change

    def array(self) -> Array:
        """The elements, made anew."""
        return np.ascontiguousarray(self._change(self._weight.array())).reshape(self.shape)

    def release(self) -> None:
        self._weight.release()


class GgufNumber(StoredTensor):
    """A number of the metadata that is a tensor in safetensors; see `models.checkpoints.checkpoint.StoredTensor`."""

    type_name = "F32"
    dtype: DType | None = float32
    size_bytes = 4

    def __init__(self, file: str, key: str, value: float, shape: tuple[int, ...]) -> None:
        self.file, self.name, self.shape, self._value = file, key, shape, value

    def array(self) -> Array:
        """The number."""
        return np.full(self.shape, self._value, np.float32)
