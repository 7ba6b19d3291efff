"""The stored tensors of a model, and the strict check that they fit it.

Two steps, both before any weight is touched: `weight_files.open_checkpoint` maps the files; `Checkpoint.fit` checks
names, shapes and types against what the config asks for, and lists every offender.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.safetensors_file import SafetensorsFile
from models.checkpoints.stacked import RowStack, Stack, take_apart
from models.checkpoints.stored_tensor import StoredTensor
from models.errors import WeightsError
from runtime.dtype import DType, bfloat16, float16, float32
from tokenizer.warn import warn_once

FLOATS = {dtype.safetensors: dtype for dtype in (float32, float16, bfloat16)} | {"F64": float32}
"""The types of weights by their names in safetensors; F64 is rounded when it is read."""
FLOAT8 = ("F8_E4M3", "F8_E5M2")
_COMPARED_BYTES = 16 << 20

_WRAPPERS = re.compile(
    r"^(module\.|base_model\.model\.|_orig_mod\.|_fsdp_wrapped_module\.)+"
    r"|(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\."
)
"""Parts of names that wrappers of a model leave in files."""

_OTHER_MODULES = re.compile(r"(model\.)?(v_head|value_head|visual|vision_tower|vision_model|multi_modal_projector)\.")
_LANGUAGE_MODEL = "model.language_model."
_OF_TEXT_MODELS = {
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", _LANGUAGE_MODEL: "model.",
}  # fmt: skip
"""Beginnings of names where a text model's weights are stored as a part of a model of pictures and text."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors that a model consists of.

    `shapes` has a shape for every name. `prefix` starts the names of all but the output head, in some
    checkpoints and not in others. Stored tensors that match `harmless` are buffers that the model can
    compute, and are passed over. `copies` maps names that may be stored besides, or instead of, the one
    that they must equal (a tied output head). `stacks` are the tensors that may be stored instead of those that they
    hold. `renames`: prefixes that other files use, and their names here; one that begins with a dot may stand anywhere.
    """

    shapes: Mapping[str, tuple[int, ...]]
    prefix: str
    harmless: re.Pattern[str]
    copies: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, Stack | RowStack] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)


class Checkpoint:
    """The stored tensors of a model, by name. Holds the memory mappings; drop it to release them."""

    def __init__(self, place: Path, label: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.place = place
        self.label = label  # the file that an error about a missing tensor names
        self.tensors = dict(tensors)  # by stored name, then by the layout's

    def fit(self, layout: TensorLayout) -> None:
        """Check that exactly the layout's tensors are stored, in the right shapes and in float types.

        Raises `WeightsError`, naming file and tensor of all that are missing, left over, misshapen or
        wrong-typed.
        """
        found = self._names_of(layout)
        shapes = dict(layout.shapes)
        problems = take_apart(found, layout.stacks, shapes, self.label)
        for copy, original in layout.copies.items():
            if copy in found:
                shapes[copy] = layout.shapes[original]
        for name, stored in list(found.items()):
            if name not in shapes and (0 in stored.shape or _is_bias_of_zeros(name, found)):
                del found[name]
            elif name not in shapes:
                is_adapter = ".lora_" in name
                why = " of an adapter that is not merged (peft: `merge_and_unload`)" if is_adapter else ""
                problems.append(f"{stored.file}: tensor {stored.name!r}{why} is left over")
        for name, shape in shapes.items():
            if name not in found:
                if not any(original == name and copy in found for copy, original in layout.copies.items()):
                    problems.append(f"{self.label}: tensor {name!r} {list(shape)} is missing")
                continue
            stored = found[name]
            stored.widen(shape)
            where = f"{stored.file}: tensor {stored.name!r}"
            if stored.shape != shape:
                problems.append(f"{where} is {list(stored.shape)}, but the config asks for {list(shape)}")
            if stored.dtype is None:
                problems.append(f"{where} is {stored.type_name}, not F32, F16 or BF16")
        self.tensors = found
        if not problems:
            problems = self._settle_copies(layout)
        if problems:
            one = len(problems) == 1
            count = "1 tensor does" if one else f"{len(problems)} tensors do"
            raise WeightsError(f"{self.place}: {count} not fit the config:", problems)

    def read_float8(self) -> None:
        """Reads float8 numbers as bfloat16, which holds each: a config without quantization says that they have no
        scales."""
        for stored in self.tensors.values():
            if stored.type_name in FLOAT8:
                stored.dtype = bfloat16

    def ties_otherwise(self, layout: TensorLayout, heads: Collection[str]) -> bool:
        """Whether the files contradict the layout's tying of its output head, one of `heads`: a tied head differs from
        its table, or an untied one is not stored. Call it before `fit`."""
        found = self._names_of(layout)
        if not layout.copies:
            return not any(head in found for head in heads)
        pairs = [(found.get(copy), found.get(original)) for copy, original in layout.copies.items()]
        is_other = False
        for head, table in pairs:
            if head is not None and table is not None and head.shape == table.shape:
                is_other |= not are_equal(head.array(), table.array())
                head.release()
                table.release()
        return is_other

    def __getitem__(self, name: str) -> StoredTensor:
        return self.tensors[name]

    def dtype(self, name: str) -> DType:
        dtype = self.tensors[name].dtype
        assert dtype is not None, f"{name} does not fit"
        return dtype

    def check_numbers(self) -> None:
        """Raises `WeightsError` for every tensor whose scales, zeros or groups cannot be; reads these."""
        problems = []
        for stored in self.tensors.values():
            try:
                stored.check()
            except WeightsError as error:
                problems.append(str(error))
        if problems:
            count = "1 tensor has" if len(problems) == 1 else f"{len(problems)} tensors have"
            raise WeightsError(f"{self.place}: {count} numbers that cannot be:", problems)

    def bytes_by_format(self) -> dict[str, int]:
        """Bytes of the tensors in their files, by the type that these name; the largest share first."""
        found = Counter[str]()
        for stored in self.tensors.values():
            found[stored.type_name] += stored.size_bytes
        return dict(found.most_common())

    def main_dtype(self) -> DType:
        """The type in which most elements are stored; before `fit` those of harmless buffers count, too."""
        counts: dict[DType, int] = {}
        for stored in self.tensors.values():
            if stored.dtype is not None:
                counts[stored.dtype] = counts.get(stored.dtype, 0) + math.prod(stored.shape)
        return max(counts, key=lambda dtype: counts[dtype], default=float32)

    def is_in_blocks(self) -> bool:
        """Whether most elements are blocks of fewer than 16 bits each, with no other type than float32: ggml's."""
        sizes = [(math.prod(each.shape), each.size_bytes, each) for each in self.tensors.values()]
        in_blocks = [n for n, size, each in sizes if size < 2 * n and each.dtype is float32 and each.quantized is None]
        return 2 * sum(in_blocks) > sum(count for count, _, _ in sizes)

    def _names_of(self, layout: TensorLayout) -> dict[str, StoredTensor]:
        """The stored tensors by the layout's names, less harmless buffers and modules of other models."""
        beginnings = {old: new for old, new in layout.renames.items() if not old.startswith(".")}
        parts = {old: new for old, new in layout.renames.items() if old not in beginnings}
        has_own_beginnings = bool(beginnings)
        is_text = layout.prefix == "model." and not any(name.startswith(_LANGUAGE_MODEL) for name in layout.shapes)
        if is_text and not has_own_beginnings:
            beginnings = _OF_TEXT_MODELS
        bare_names = self._bare_names(layout, beginnings)
        adds_prefix = has_own_beginnings and any(new.startswith(layout.prefix) for new in beginnings.values())
        is_prefixed = adds_prefix or any(stored.startswith(layout.prefix) for stored in bare_names)
        found = {}
        for stored, tensor in bare_names.items():
            for part, now in parts.items():
                stored = stored.replace(part, now, 1)
            has_own_name = is_prefixed or stored in layout.shapes or stored in layout.copies
            name = stored if has_own_name else layout.prefix + stored
            if name in layout.shapes or not layout.harmless.fullmatch(name):
                found[name] = tensor
        return found

    def _bare_names(self, layout: TensorLayout, beginnings: Mapping[str, str]) -> dict[str, StoredTensor]:
        """The stored tensors as a plain model of this layout calls them. Warns of what is unusual."""
        found: dict[str, StoredTensor] = {}
        wrapped: dict[str, str] = {}
        passed_over: list[str] = []
        has_adapter = any(".lora_" in name for name in self.tensors)
        for in_file, tensor in self.tensors.items():
            name = in_file if has_adapter else _WRAPPERS.sub("", in_file)
            if name in self.tensors:
                name = in_file
            elif name != in_file:
                wrapped[in_file] = name
            old = next((old for old in beginnings if name.startswith(old)), None)
            name = name if old is None else beginnings[old] + name[len(old) :]
            if (other := _OTHER_MODULES.match(name)) and not any(one.startswith(other[0]) for one in layout.shapes):
                passed_over.append(in_file)
            else:
                found[name] = tensor
        for in_file, name in [*wrapped.items()][:1]:
            warn_once(
                f"{self.place}: {len(wrapped)} names of tensors have parts of a wrapper (torch.compile, FSDP, PEFT"
                f" ...): {in_file!r} is read as {name!r}, others likewise"
            )
        for in_file in passed_over[:1]:
            warn_once(
                f"{self.place}: {len(passed_over)} tensors, such as {in_file!r}, are of a module that this architecture"
                " does not have (a picture tower, a value head ...); they are not read, as in transformers"
            )
        return found

    def _settle_copies(self, layout: TensorLayout) -> list[str]:
        problems = []
        for copy, original in layout.copies.items():
            stored = self.tensors.pop(copy, None)
            if stored is None:
                continue
            kept = self.tensors.setdefault(original, stored)
            if kept is stored:
                continue
            if not are_equal(stored.array(), kept.array()):
                problems.append(
                    f"{stored.file}: tensor {stored.name!r} differs from {kept.name!r}, but the config ties them"
                    " (tie_word_embeddings)"
                )
            stored.release()
            kept.release()
        return problems


class SafetensorsTensor(StoredTensor):
    """One tensor of a safetensors file; see `StoredTensor`."""

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        entry = file.tensors[name]
        self.file, self.name, self.shape, self.type_name = file.path.name, name, entry.shape, entry.dtype
        self.dtype, self.size_bytes = FLOATS.get(entry.dtype), entry.end - entry.begin
        self._file = file

    def array(self) -> np.ndarray[Any, Any]:
        """A read-only view of the mapped file."""
        return as_read(self, self._file.array(self.name))

    def release(self) -> None:
        self._file.release(self.name)


def as_read(stored: StoredTensor, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A file's array in the type that the tensor is read as, if it is read as floats."""
    return array if stored.dtype is None else array.astype(stored.dtype.numpy, copy=False)


def _is_bias_of_zeros(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is a bias that export tools add to every matrix, needed or not."""
    stem, _, part = name.rpartition(".")
    weight = tensors.get(f"{stem}.weight")
    if part != "bias" or weight is None:
        return False
    stored = tensors[name]
    return stored.dtype is not None and stored.shape == weight.shape[:1] and not stored.array().any()


def are_equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Bit for bit, a piece at a time: both are mapped files."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    a, b = left.reshape(-1).view(np.uint8), right.reshape(-1).view(np.uint8)
    return all(
        np.array_equal(a[start : start + _COMPARED_BYTES], b[start : start + _COMPARED_BYTES])
        for start in range(0, a.size, _COMPARED_BYTES)
    )
