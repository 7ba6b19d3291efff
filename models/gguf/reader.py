"""One GGUF file, memory-mapped: metadata by key, tensors as views of the mapping.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little-endian: "GGUF", the version, counts
of tensors and of metadata; each metadata's key, type and value; each tensor's name, sizes, type and offset; then the
data, aligned. The file is not trusted: every length and count is checked against the bytes left before anything of that
size is allocated. Lists of strings are decoded on demand.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from models.errors import WeightsError, one_line
from models.gguf.formats import FORMATS, OTHER_TYPES, Array, GgmlFormat
from tokenizer.errors import pointer_problem

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_ENTRIES = 1 << 16  # tensors, and keys; published files have thousands of tensors, sixty keys
_LONGEST_KEY, _LONGEST_NAME = 65_535, 64  # bytes, by the format's description and by ggml
_MOST_AXES = 4
_LONGEST_MESSAGE = 600  # names come from the file
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 13, 33  # an entry's size in the header

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("<u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The header's entry of one tensor; `shape` has the row's length last, `begin` is an offset in the file."""

    format: GgmlFormat
    shape: tuple[int, ...]
    begin: int

    @property
    def size_bytes(self) -> int:
        return self.format.row_bytes(math.prod(self.shape))

    def part(self, index: int) -> GgufTensor:
        """One of those that are stacked along the first axis."""
        part = GgufTensor(self.format, self.shape[1:], self.begin)
        return GgufTensor(part.format, part.shape, self.begin + index * part.size_bytes)


class Strings:
    """A list of strings in the file, whose lengths are checked; iterating over it decodes them.

    Raises `WeightsError` for one that is not UTF-8.
    """

    def __init__(self, file: GgufFile, key: str, start: int, count: int) -> None:
        self._file, self._key, self._start, self._count = file, key, start, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        mapping, position = self._file.mapping, self._start
        for index in range(self._count):
            (length,) = _LENGTH.unpack_from(mapping, position)
            position += 8
            try:
                yield mapping[position : position + length].decode()
            except UnicodeDecodeError:
                raise self._file.error(f"{self._key}[{index}] is not UTF-8") from None
            position += length

    def __repr__(self) -> str:
        return f"a list of {self._count} strings"


Value = int | float | bool | str | Array | Strings
_LENGTH = struct.Struct("<Q")


class GgufFile:
    """A memory-mapped GGUF file.

    Attributes:
        path: of the file.
        metadata: numbers, truths, strings, arrays of numbers (views of the mapping) and `Strings`, by key.
        tensors: in the file's order.
        mapping: the file's bytes; lives as long as the object or any array taken from it.

    Raises `WeightsError`, naming file, key or tensor, and value, for a file that is missing, truncated or malformed, or
    has a tensor of a type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size_bytes = file.seek(0, 2)
                if self.size_bytes < 24:
                    raise self.error(f"truncated: {self.size_bytes} bytes, less than the 24 of a GGUF header")
                self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise self.error("the file is missing") from None
        except OSError as error:
            raise self.error(f"cannot be read ({error.strerror or error})") from None
        if problem := pointer_problem(self.mapping[:64]):
            raise self.error(problem)
        header = _Header(self)
        num_tensors, num_keys = header.counts()
        self.metadata: Mapping[str, Value] = header.metadata(num_keys)
        self.tensors: Mapping[str, GgufTensor] = header.tensors(num_tensors, self._alignment())

    def tensor(self, name: str, index: int | None = None) -> GgufTensor:
        """The entry of a tensor, or of one of those that are stacked in it."""
        tensor = self.tensors[name]
        return tensor if index is None else tensor.part(index)

    def raw(self, name: str, index: int | None = None) -> Array:
        """A tensor's bytes as a read-only view of the mapping, `[..., row bytes]`; `index` as for `tensor`."""
        tensor = self.tensor(name, index)
        array = np.frombuffer(self.mapping, np.uint8, tensor.size_bytes, tensor.begin)
        return array.reshape(*tensor.shape[:-1], -1)

    def blocks(self, name: str, index: int | None = None) -> Array:
        """`raw`, or the blocks in which it is kept, whose scales are finite. Raises `WeightsError` where one is not."""
        format = self.tensor(name, index).format
        kept = format.kept_blocks(self.raw(name, index))
        blocks = kept.view(format.kept_layout)
        for field in (field for field in ("d", "dmin") if field in (blocks.dtype.names or ())):
            if not (is_finite := np.isfinite(blocks[field])).all():
                raise self._damaged(name, index, int(np.flatnonzero(~is_finite)[0]) // math.prod(is_finite.shape[2:]))
        return kept

    def array(self, name: str, index: int | None = None) -> Array:
        """A tensor's elements: a read-only view of floats that are stored as such, else made anew in float32.

        Raises `WeightsError` where a scale is not finite.
        """
        tensor = self.tensor(name, index)
        with np.errstate(all="ignore"):  # of scales that are not finite
            values = tensor.format.dequantise(self.raw(name, index))
        if tensor.format.decode is None:
            return values if values.flags.aligned else values.copy()
        if not np.isfinite(values).all():
            raise self._damaged(name, index, int(np.flatnonzero(~np.isfinite(values))[0]) // tensor.format.block)
        return values

    def release(self, name: str, index: int | None = None) -> None:
        """Let go of the memory pages that only this tensor uses; reading it again reads the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        tensor = self.tensor(name, index)
        begin = -(-tensor.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.begin + tensor.size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _damaged(self, name: str, index: int | None, block: int) -> WeightsError:
        place = "" if index is None else f"expert {index}, "
        return self.error(
            f"tensor {name!r}: {place}block {block} has a scale that is not finite; the file is damaged: download it"
            " again"
        )

    def error(self, message: str) -> WeightsError:
        """The error of this file."""
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[:_LONGEST_MESSAGE]}…"
        return WeightsError(f"{self.path}: {one_line(message)}")

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value & (value - 1):
            raise self.error(f"general.alignment must be a power of two, not {value!r:.80}")
        return value


class _Header:
    """Walks through a file's header, and never beyond the file's end."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._mapping, self._position = file, file.mapping, 0

    def counts(self) -> tuple[int, int]:
        """How many tensors and keys there are."""
        if (magic := self._mapping[:4]) != MAGIC:
            self._fail(f"is no GGUF file: it begins with {magic!r}", "give one that begins with b'GGUF', or a folder")
        self._position = 4
        version = self._number("<I", "the version")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                self._fail("is big-endian, and only little-endian files are read", "convert the model anew")
            self._fail(f"has version {version} of GGUF, but 2 and 3 are read", "convert the model anew")
        num_tensors, num_keys = self._number("<Q", "the counts"), self._number("<Q", "the counts")
        for count, least, what in (
            (num_tensors, _LEAST_TENSOR_BYTES, "tensors"),
            (num_keys, _LEAST_KEY_BYTES, "keys of metadata"),
        ):
            if count > _MOST_ENTRIES or count * least > self._left:
                self._fail(f"claims {count} {what}, for which its {self._file.size_bytes} bytes have no room")
        return num_tensors, num_keys

    def metadata(self, count: int) -> dict[str, Value]:
        """The keys and their values."""
        values: dict[str, Value] = {}
        for index in range(count):
            key = self._string(f"key {index}", _LONGEST_KEY)
            if key in values:
                self._fail(f"has the key {key!r} twice")
            values[key] = self._value(key, self._number("<I", key))
        return values

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """The tensors, whose data must follow each other in their order, aligned and within the file."""
        entries: dict[str, GgufTensor] = {}
        for index in range(count):
            name = self._string(f"tensor {index}", _LONGEST_NAME)
            if name in entries:
                self._fail(f"has the tensor {name!r} twice")
            entries[name] = self._tensor(name)
        start = -(-self._position // alignment) * alignment
        expected = 0
        for name, tensor in entries.items():
            if tensor.begin != expected:
                self._fail(f"tensor {name!r} is at byte {tensor.begin} of the data, but should be at {expected}")
            end = start + expected + tensor.size_bytes
            if end > self._file.size_bytes:
                self._fail(
                    f"tensor {name!r} ends at byte {end} of {self._file.size_bytes}",
                    "the file is truncated: download it again",
                )
            entries[name] = GgufTensor(tensor.format, tensor.shape, start + expected)
            expected += -(-tensor.size_bytes // alignment) * alignment
        return entries

    def _tensor(self, name: str) -> GgufTensor:
        num_axes = self._number("<I", name)
        if not 1 <= num_axes <= _MOST_AXES:
            self._fail(f"tensor {name!r} has {num_axes} axes, must be from 1 to {_MOST_AXES}")
        shape = tuple(self._number("<Q", name) for _ in range(num_axes))[::-1]
        number, begin = self._number("<I", name), self._number("<Q", name)
        if number not in FORMATS:
            known = ", ".join(each.name for each in FORMATS.values())
            kind, reason = OTHER_TYPES.get(number, (f"of the unknown type {number}", "which is not read"))
            self._fail(f"tensor {name!r} is {kind}, {reason}", f"take the model in one of {known}")
        format = FORMATS[number]
        if 0 in shape or math.prod(shape) >= 1 << 63:
            self._fail(f"tensor {name!r} has the sizes {list(shape)}, each must be at least 1, and all be below 2^63")
        if shape[-1] % format.block:
            self._fail(f"tensor {name!r} has rows of {shape[-1]}, but blocks of {format.name} are of {format.block}")
        return GgufTensor(format, shape, begin)

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key, self._number("<I", key), self._number("<Q", key))
        if kind not in _NUMBERS:
            self._fail(f"{key} is of the unknown type {kind}")
        value = self._numbers(key, kind, 1)[0].item()
        if kind == _BOOL:
            if value not in (0, 1):
                self._fail(f"{key} must be 0 or 1, not {value}")
            return bool(value)
        return value  # type: ignore[no-any-return]

    def _array(self, key: str, kind: int, count: int) -> Array | Strings:
        if kind in _NUMBERS:
            return self._numbers(key, kind, count)
        if kind != _STRING:
            self._fail(f"{key} is a list of the type {kind}, must be one of numbers or strings")
        if count * 8 > self._left:
            self._fail(f"{key} claims {count} strings, but {self._left} bytes are left")
        strings = Strings(self._file, key, self._position, count)
        mapping, position, size = self._mapping, self._position, self._file.size_bytes
        for _ in range(count):
            if position + 8 > size:
                self._end(key)
            position += 8 + _LENGTH.unpack_from(mapping, position)[0]
        if position > size:
            self._end(key)
        self._position = position
        return strings

    def _numbers(self, key: str, kind: int, count: int) -> Array:
        dtype = _NUMBERS[kind]
        if count * dtype.itemsize > self._left:
            self._fail(f"{key} claims {count} numbers, but {self._left} bytes are left")
        array: Array = np.frombuffer(self._mapping, dtype, count, self._position)
        self._position += array.nbytes
        return array

    def _string(self, what: str, longest: int | None = None) -> str:
        length = self._number("<Q", what)
        if longest is not None and length > longest:
            self._fail(f"the name of {what} has {length} bytes, more than {longest}")
        if length > self._left:
            self._fail(f"{what} claims {length} bytes, but {self._left} are left")
        self._position += length
        try:
            return self._mapping[self._position - length : self._position].decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _number(self, code: str, what: str) -> int:
        size = struct.calcsize(code)
        if size > self._left:
            self._end(what)
        (value,) = struct.unpack_from(code, self._mapping, self._position)
        self._position += size
        return int(value)

    @property
    def _left(self) -> int:
        return self._file.size_bytes - self._position

    def _end(self, what: str) -> NoReturn:
        self._fail(f"truncated: its {self._file.size_bytes} bytes end inside of {what}", "download it again")

    def _fail(self, message: str, remedy: str = "the file is damaged: download it again") -> NoReturn:
        raise self._file.error(f"{message}; {remedy}")
