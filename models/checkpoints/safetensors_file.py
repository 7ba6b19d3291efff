"""One safetensors file, memory-mapped: tensors are views of the mapping and nothing is copied.

The format (https://github.com/huggingface/safetensors): eight bytes of little-endian header length, a JSON
header `{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}`, then the data
without gaps. The file is not trusted: every number in the header is checked against the file's size before it is used.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from models.errors import WeightsError
from runtime.device.pinned import FileMapping
from tokenizer.errors import pointer_problem

_LARGEST_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MOST_COMMAS = 1_000_000
"""The most commas of a header, since parsing more takes seconds. 200,000 matrices have as many; an adapter of all of
Kimi K2's experts has 138,240."""
_MOST_AXES = 32  # numpy allows 64

# Every element type of the format, in bits; numpy types are given for those that weights and their scales may have.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ":
    8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64,
    "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_NUMPY = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "U8": np.dtype("u1"),
    "I8": np.dtype("i1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu), "F64": np.dtype("<f8"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The header's entry of one tensor; `begin` and `end` are byte offsets into the data."""

    dtype: str  # the format's name, such as "BF16"
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A memory-mapped safetensors file.

    `tensors` maps names to entries, in the header's order; `metadata` are the header's texts. The mapping lives as long
    as the object or any array taken from it.

    Raises `WeightsError`, naming file, tensor and value, for a file that is missing, truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size_bytes = file.seek(0, 2)
                if self.size_bytes < 8:
                    raise self._error(f"truncated: {self.size_bytes} bytes, less than the 8 of the header's length")
                self._mapping = FileMapping(file.fileno(), str(path))
        except FileNotFoundError:
            raise self._error("the file is missing") from None
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror or error})") from None
        if problem := pointer_problem(self._mapping[:64]):
            raise self._error(problem)
        header_bytes = int.from_bytes(self._mapping[:8], "little")
        if header_bytes > _LARGEST_HEADER_BYTES:
            raise self._error(f"a header of {header_bytes} bytes is more than the limit of {_LARGEST_HEADER_BYTES}")
        self._data_start = 8 + header_bytes
        if self._data_start > self.size_bytes:
            raise self._error(f"truncated: the header ends at byte {self._data_start}, the file at {self.size_bytes}")
        raw = self._mapping[8 : self._data_start]
        if (commas := raw.count(b",")) > _MOST_COMMAS:
            raise self._error(
                f"the header has {commas} commas, more than the limit of {_MOST_COMMAS} (200000 matrices): split the"
                " file"
            )
        self.tensors = self._parse_header(raw)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view of one tensor in the mapping (a copy only where its bytes are not aligned).

        Only tensors of a type in `_NUMPY`; the caller has checked the entry's dtype.
        """
        entry = self.tensors[name]
        dtype = _NUMPY[entry.dtype]
        start = self._data_start + entry.begin
        count = math.prod(entry.shape)
        array = np.frombuffer(self._mapping, dtype, count, start) if count else np.empty(0, dtype)
        if start % dtype.itemsize:
            array = array.copy()
        return array.reshape(entry.shape)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A copy of one tensor, read and not mapped: where the file has become shorter it raises `WeightsError`."""
        entry = self.tensors[name]
        copied = np.empty(entry.end - entry.begin, np.uint8)
        try:
            self._mapping.read_into(copied, self._data_start + entry.begin)
        except OSError as error:
            raise self._error(f"tensor {name!r}: {error.strerror or error}") from None
        found: np.ndarray[Any, Any] = copied.view(_NUMPY[entry.dtype])
        return found.reshape(entry.shape)

    def release(self, name: str) -> None:
        """Let go of the memory pages that only this tensor uses; reading it again reads the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        entry = self.tensors[name]
        begin = -(-(self._data_start + entry.begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self._data_start + entry.end) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _error(self, message: str) -> WeightsError:
        return WeightsError(f"{self.path}: {message}")

    def _parse_header(self, raw: bytes) -> dict[str, TensorEntry]:
        try:
            header = json.loads(raw, object_pairs_hook=_unique_keys)
        except _DuplicateKeyError as error:
            raise self._error(f"the header names {error.args[0]!r} twice") from None
        except (ValueError, RecursionError):
            raise self._error("the header is not JSON") from None
        if not isinstance(header, dict):
            raise self._error(f"the header must be a JSON object, not {type(header).__name__}")
        metadata = header.pop("__metadata__", None)
        self.metadata = (
            {key: text for key, text in metadata.items() if isinstance(text, str)} if isinstance(metadata, dict) else {}
        )
        tensors = {name: self._parse_entry(name, fields) for name, fields in header.items()}
        self._check_layout(tensors)
        return tensors

    def _parse_entry(self, name: str, fields: Any) -> TensorEntry:
        if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._error(
                f"tensor {name!r}: its entry must have dtype, shape and data_offsets, not {fields!r:.100}"
            )
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise self._error(f"tensor {name!r}: unknown dtype {dtype!r:.80}")
        if not _are_counts(shape) or len(shape) > _MOST_AXES:
            raise self._error(f"tensor {name!r}: shape must be at most {_MOST_AXES} sizes, not {shape!r:.100}")
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"tensor {name!r}: data_offsets must be [begin, end], not {offsets!r:.100}")
        begin, end = offsets
        data_bytes = self.size_bytes - self._data_start
        if end > data_bytes:
            raise self._error(f"tensor {name!r}: its data ends at byte {end} of {data_bytes}; the file is truncated")
        if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
            raise self._error(f"tensor {name!r}: {dtype} {shape} does not take the {end - begin} bytes it is given")
        return TensorEntry(dtype, tuple(shape), begin, end)

    def _check_layout(self, tensors: dict[str, TensorEntry]) -> None:
        """The data must be the tensors one after another: no overlap, no gap, nothing left."""
        position, before = 0, "the header"
        for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin < position:
                raise self._error(f"tensors {before!r} and {name!r} overlap at byte {entry.begin}")
            if entry.begin > position:
                raise self._error(f"{entry.begin - position} bytes before tensor {name!r} belong to no tensor")
            position, before = entry.end, name
        data_bytes = self.size_bytes - self._data_start
        if position != data_bytes:
            raise self._error(f"{data_bytes - position} bytes after the last tensor belong to no tensor")


def type_name(dtype: np.dtype[Any]) -> str | None:
    """The format's name of a type that `array` gives; None for others."""
    return next((name for name, known in _NUMPY.items() if known == dtype), None)


def write_tensors(
    path: Path, plan: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]], arrays: Iterable[np.ndarray[Any, Any]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:  # fmt: skip
    """A file of these tensors, by name, type and shape; `arrays` gives them one after another in this order."""
    names, position = {dtype: name for name, dtype in _NUMPY.items()}, 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    for name, dtype, shape in plan:
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for (_, dtype, shape), array in zip(plan, arrays, strict=True):
            assert (array.dtype, array.shape) == (dtype, shape)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


class _DuplicateKeyError(Exception):
    """A JSON object that holds one key twice."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return result


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 for value in values
    )
