"""A folder's safetensors, one file or several with an index, and the strict check that they fit a model.

Two steps, both before any weight is touched: `open_checkpoint` maps the files and checks them against the
index; `Checkpoint.fit` checks names, shapes and types against what the config asks for. Each lists every
offender.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import ConfigError, ModelLoadError, WeightsError
from models.json_fields import read_json_object
from models.other_formats import remedy
from models.safetensors_file import SafetensorsFile
from runtime.dtype import DType, bfloat16, float16, float32

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {dtype.safetensors: dtype for dtype in (float32, float16, bfloat16)}
_COMPARED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors that a model consists of.

    `shapes` has a shape for every name. `prefix` starts the names of all but the output head, in some
    checkpoints and not in others. Stored tensors that match `harmless` are buffers that the model can
    compute, and are passed over. `copies` maps names that may be stored besides, or instead of, the one
    that they must equal (a tied output head).
    """

    shapes: Mapping[str, tuple[int, ...]]
    prefix: str
    harmless: re.Pattern[str]
    copies: Mapping[str, str] = field(default_factory=dict)


class Checkpoint:
    """The stored tensors of a model folder, by name. Holds the memory mappings; drop it to release them."""

    def __init__(self, folder: Path, label: str, files: Mapping[str, SafetensorsFile]) -> None:
        self.folder = folder
        self._label = label  # the file that should name a missing tensor
        self._files = files  # by stored tensor name
        self._stored_names = {name: name for name in files}  # by the layout's name

    def fit(self, layout: TensorLayout) -> None:
        """Check that exactly the layout's tensors are stored, in the right shapes and in float types.

        Raises `WeightsError`, naming file and tensor of all that are missing, left over, misshapen or
        wrong-typed.
        """
        problems = []
        found = self._names_of(layout)
        shapes = dict(layout.shapes)
        for copy, original in layout.copies.items():
            if copy in found:
                shapes[copy] = layout.shapes[original]
        for name, stored in found.items():
            if name not in shapes:
                problems.append(f"{self._files[stored].path.name}: tensor {stored!r} is left over")
        for name, shape in shapes.items():
            if name not in found:
                if not any(original == name and copy in found for copy, original in layout.copies.items()):
                    problems.append(f"{self._label}: tensor {name!r} {list(shape)} is missing")
                continue
            stored = found[name]
            entry, file = self._files[stored].tensors[stored], self._files[stored].path.name
            if entry.shape != shape:
                problems.append(
                    f"{file}: tensor {stored!r} is {list(entry.shape)}, but the config asks for {list(shape)}"
                )
            if entry.dtype not in _DTYPES:
                problems.append(f"{file}: tensor {stored!r} is {entry.dtype}, not F32, F16 or BF16")
        self._stored_names = found
        if not problems:
            problems = self._settle_copies(layout)
        if problems:
            one = len(problems) == 1
            count = "1 tensor does" if one else f"{len(problems)} tensors do"
            raise WeightsError(f"{self.folder}: {count} not fit the config:", problems)

    def names(self) -> list[str]:
        """The names of all tensors: as the layout calls them after `fit`, as the files do before."""
        return list(self._stored_names)

    def dtype(self, name: str) -> DType:
        stored = self._stored_names[name]
        return _DTYPES[self._files[stored].tensors[stored].dtype]

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view of the mapped file."""
        stored = self._stored_names[name]
        return self._files[stored].array(stored)

    def release(self, name: str) -> None:
        stored = self._stored_names[name]
        self._files[stored].release(stored)

    def main_dtype(self) -> DType:
        """The type in which most elements are stored."""
        counts: dict[DType, int] = {}
        for name, stored in self._stored_names.items():
            dtype = self.dtype(name)
            counts[dtype] = counts.get(dtype, 0) + math.prod(self._files[stored].tensors[stored].shape)
        return max(counts, key=lambda dtype: counts[dtype])

    def _names_of(self, layout: TensorLayout) -> dict[str, str]:
        """The layout's names of the stored tensors, less harmless buffers."""
        is_prefixed = any(stored.startswith(layout.prefix) for stored in self._files)
        names = {}
        for stored in self._files:
            has_own_name = is_prefixed or stored in layout.shapes or stored in layout.copies
            name = stored if has_own_name else layout.prefix + stored
            if not layout.harmless.fullmatch(name):
                names[name] = stored
        return names

    def _settle_copies(self, layout: TensorLayout) -> list[str]:
        problems = []
        for copy, original in layout.copies.items():
            stored = self._stored_names.pop(copy, None)
            if stored is None:
                continue
            if original not in self._stored_names:
                self._stored_names[original] = stored
                continue
            if not _are_equal(self._files[stored].array(stored), self.array(original)):
                problems.append(
                    f"{self._files[stored].path.name}: tensor {stored!r} differs from "
                    f"{self._stored_names[original]!r}, but the config ties them (tie_word_embeddings)"
                )
            self._files[stored].release(stored)
            self.release(original)
        return problems


def open_checkpoint(folder: Path) -> Checkpoint:
    """Map the safetensors of a model folder: `model.safetensors`, or the shards that the index names.

    Raises `ModelLoadError` where there are none, and `WeightsError` or `ConfigError` for a malformed file
    or index, a missing shard, a shard outside the folder, a tensor stored twice, and a tensor that is not
    where the index places it.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        file = SafetensorsFile(single)
        return Checkpoint(folder, SINGLE_FILE, dict.fromkeys(file.tensors, file))
    if index.is_file():
        return _open_shards(folder, index)
    raise ModelLoadError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; {remedy(folder)}")


def _open_shards(folder: Path, index: Path) -> Checkpoint:
    placed = read_json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ConfigError(f"{index}: weight_map must be an object of tensor names and file names")
    for name, shard in placed.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ConfigError(
                f"{index}: weight_map places {name!r} in {shard!r:.200}, which is no file name of this folder"
            )
    shards = sorted(set(placed.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        problems = [f"{shard}: the file is missing" for shard in missing]
        raise WeightsError(f"{folder}: shards named in {INDEX_FILE} are missing:", problems)

    files: dict[str, SafetensorsFile] = {}
    problems = []
    for shard in shards:
        file = SafetensorsFile(folder / shard)
        for name in file.tensors:
            if name in files:
                problems.append(f"{shard}: tensor {name!r} is stored in {files[name].path.name} already")
            elif name not in placed:
                problems.append(f"{shard}: tensor {name!r} is not in {INDEX_FILE}")
            elif placed[name] != shard:
                problems.append(f"{shard}: tensor {name!r} should be in {placed[name]}, says {INDEX_FILE}")
            files.setdefault(name, file)
    problems += [
        f"{placed[name]}: tensor {name!r} is missing, {INDEX_FILE} places it here"
        for name in placed
        if name not in files
    ]
    if problems:
        raise WeightsError(f"{folder}: {INDEX_FILE} and its shards contradict each other:", problems)
    return Checkpoint(folder, INDEX_FILE, files)


def _is_plain_name(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\:\0")


def _are_equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Bit for bit, a piece at a time: both are mapped files."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    a, b = left.reshape(-1).view(np.uint8), right.reshape(-1).view(np.uint8)
    return all(
        np.array_equal(a[start : start + _COMPARED_BYTES], b[start : start + _COMPARED_BYTES])
        for start in range(0, a.size, _COMPARED_BYTES)
    )
