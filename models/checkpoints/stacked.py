"""Maps that a checkpoint stores as one tensor: each becomes a tensor of its own.

A layout names each expert's maps, `experts.3.gate_proj.weight [N, K]`. gpt-oss stores those of a layer together,
`experts.gate_up_proj [E, K, 2 N]`, inputs first, columns of gate and up by turns; Qwen3-VL-MoE, those of gate before
those of up. transformers 5 writes the latter outputs first, `[E, 2 N, K]`, and can save any family's experts so: the
shape shows which it is. A square stack has the order of its layer's other stack: at most one of them is square.

GPT-NeoX and InternLM 2 store queries, keys and values together, the rows of each head of keys between those of its
queries and its values. Any family's may stand one after another in `qkv_proj`, and an expert's in `gate_up_proj`, as
llama.cpp's converter writes them if asked to. A stack's name may have `.weight` at its end, or lack it.

The maker notes what may be stored together, for both kinds of files; `take_apart` alone undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from models.checkpoints.stored_tensor import Array, StoredTensor
from runtime.linear.quantized import QuantizedMatrix

Order = Literal["by_turns", "in_runs", "outputs_first"]
"""How a stack's columns belong to several tensors: each in its turn, or all of one before the next one's. The latter
may be rows alone, "outputs_first", as in GraniteMoE."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor that holds a tensor of each expert, or several.

    Attributes:
        shape: experts first; the shared dimension last, or second with "outputs_first".
        under: the tensors' names up to the expert's number.
        parts: the rest of the names, in order.
        order: how the tensors lie in the stack.
        is_usual: as for `RowStack`.
    """

    shape: tuple[int, ...]
    under: str
    parts: tuple[str, ...]
    order: Order
    is_usual: bool = True

    @property
    def turned_shape(self) -> tuple[int, ...]:
        """The shape if the shared dimension stands second. Biases have one shape."""
        if self.order == "outputs_first":
            return self.shape
        experts, *inputs, outputs = self.shape
        return experts, outputs, *inputs

    def names(self) -> Iterator[tuple[str, int, slice]]:
        """Each tensor's name, expert, and columns, or rows where the stack is turned."""
        count, width = len(self.parts), self.shape[1 if self.order == "outputs_first" else -1]
        for expert in range(self.shape[0]):
            for place, part in enumerate(self.parts):
                columns = slice(place * width // count, (place + 1) * width // count)
                if self.order == "by_turns":
                    columns = slice(place, width, count)
                yield f"{self.under}.{expert}.{part}", expert, columns

    @property
    def part_names(self) -> list[str]:
        """Names of the tensors that it holds."""
        return [name for name, _, _ in self.names()]

    def take(self, stored: StoredTensor, is_turned: bool) -> Iterator[tuple[str, StoredTensor]]:
        """The tensors that it holds, by name."""
        _, *rest, width = stored.shape
        is_turned = is_turned or self.order == "outputs_first"
        if is_turned:
            width, *rest = rest[0], width
        for name, expert, columns in self.names():
            first, end, step = columns.indices(width)
            rows = slice(expert * width + first, expert * width + end, step)  # of a quantised stack
            cut = partial(_rows_of_expert if is_turned else _columns_of_expert, expert, columns)
            shape = (len(range(first, end, step)), *rest)
            yield name, StackedTensor(stored, name, shape, rows, cut, is_first=expert == 0 == columns.start)


@dataclass(frozen=True, slots=True)
class RowStack:
    """A tensor whose rows come in equal groups; each part has a fixed number of rows in each group.

    Attributes:
        shape: of the tensor.
        part_names: whole names of the tensors that it holds.
        sizes: how many rows of a group each has.
        is_usual: whether it is named where both it and its parts are missing.
    """

    shape: tuple[int, ...]
    part_names: tuple[str, ...]
    sizes: tuple[int, ...]
    is_usual: bool = True
    under: str = ""

    @property
    def turned_shape(self) -> tuple[int, ...]:
        """The same shape: rows have one orientation."""
        return self.shape

    def take(self, stored: StoredTensor, is_turned: bool) -> Iterator[tuple[str, StoredTensor]]:
        """The tensors that it holds, by name."""
        for place, (name, mine) in enumerate(self.rows()):
            shape = (len(mine), *stored.shape[1:])
            yield name, StackedTensor(stored, name, shape, mine, partial(_rows_of, mine), is_first=not place)

    def rows(self) -> Iterator[tuple[str, Array]]:
        """The name of each tensor that it holds, and the places of its rows."""
        rows, first = np.arange(self.shape[0]).reshape(-1, sum(self.sizes)), 0
        for name, size in zip(self.part_names, self.sizes, strict=True):
            yield name, rows[:, first : first + size].reshape(-1)
            first += size


def _rows_of_expert(expert: int, rows: slice, stack: Array) -> Array:
    turned: Array = stack[expert][rows]
    return turned


def _columns_of_expert(expert: int, columns: slice, stack: Array) -> Array:
    found: Array = stack[expert][..., columns]
    return found.T


def _rows_of(rows: Array, stack: Array) -> Array:
    copied: Array = stack[rows]
    return copied


def take_apart(
    found: dict[str, StoredTensor], stacks: Mapping[str, Stack | RowStack], shapes: dict[str, tuple[int, ...]],
    label: str,
) -> list[str]:  # fmt: skip
    """Replaces the stored stacks by their tensors; returns the problems found.

    Tensors of a stack that is wrong, or missing whole from the file `label`, leave `shapes`: they are not missing, too.
    """
    problems = []
    for name in stacks:
        other = name.removesuffix(".weight") if name.endswith(".weight") else f"{name}.weight"
        if other in found and other not in shapes and other not in stacks and name not in found:
            found[name] = found.pop(other)
    shapes_of = [(stack, found[name].shape) for name, stack in stacks.items() if name in found]
    turned = {stack.under for stack, shape in shapes_of if shape == stack.turned_shape != stack.shape}
    missing = []
    for name, stack in stacks.items():
        stored = found.pop(name, None)
        if stored is None:
            missing.append((name, stack))
            continue
        where = f"{stored.file}: tensor {stored.name!r}"
        said = []
        has_inputs = len(stack.shape) == 3
        is_turned = has_inputs and stored.shape == stack.turned_shape and stack.under in turned
        if not is_turned and stored.shape != stack.shape:
            either = f" or {list(stack.turned_shape)}" if stack.turned_shape != stack.shape else ""
            said.append(f"{where} is {list(stored.shape)}, but the config asks for {list(stack.shape)}{either}")
        elif (
            isinstance(stack, Stack)
            and has_inputs
            and stored.quantized is not None
            and stored.quantized.shape[1]
            != (stack.turned_shape[2] if is_turned or stack.order == "outputs_first" else stack.shape[1])
        ):
            said.append(f"{where} is quantised along its outputs: it must be {list(stack.turned_shape)}")
        if stored.dtype is None:
            said.append(f"{where} is {stored.type_name}, not F32, F16 or BF16")
        for part in stack.part_names:
            if part in found:
                problems.append(f"{found[part].file}: tensor {found[part].name!r} is stored in {stored.name!r}, too")
            if said:
                del shapes[part]
        if not said:
            found.update(stack.take(stored, is_turned))
        problems += said
    for name, stack in missing:
        if stack.is_usual and not any(part in found or part not in shapes for part in stack.part_names):
            problems.append(f"{label}: tensor {name!r} {list(stack.shape)} is missing, and each part of it, too")
            for part in stack.part_names:
                del shapes[part]
    return problems


class StackedTensor(StoredTensor):
    """A part of a stack: `rows` of it where it is quantised or in blocks, else what `cut` makes of its floats."""

    def __init__(
        self, stack: StoredTensor, name: str, shape: tuple[int, ...], rows: slice | Array,
        cut: Callable[[Array], Array], *, is_first: bool,
    ) -> None:  # fmt: skip
        self.file, self.name, self.dtype, self.type_name = stack.file, name, stack.dtype, stack.type_name
        self.shape = shape
        self.size_bytes = stack.size_bytes * math.prod(shape) // math.prod(stack.shape)
        if isinstance(rows, np.ndarray):
            self.block_format = stack.block_format
        if stack.quantized is not None:
            layout = stack.quantized
            is_cut = isinstance(rows, slice)
            self.quantized = replace(layout, shape=(shape[0], shape[1])) if is_cut else layout.picked(shape[0])
        self._stack, self._rows, self._cut, self._is_first = stack, rows, cut, is_first

    def array(self) -> Array:
        """The elements, as a view where they are stored so."""
        if self.quantized is not None and isinstance(self._rows, slice):
            assert self.dtype is not None
            return self.matrix().dequantise(self.dtype)
        return self._cut(self._stack.array())

    def blocks(self) -> Array:
        """The bytes of the rows, copied."""
        blocks: Array = self._stack.blocks()[self._rows]
        return blocks

    def order(self) -> Array | None:
        """The stack's."""
        return self._stack.order()

    def matrix(self) -> QuantizedMatrix:
        """Views of the stack's arrays, or rows with a scale for each, or one for all."""
        stack = self._stack.matrix()
        return stack.cut(self._rows) if isinstance(self._rows, slice) else stack.pick(self._rows)

    def check(self) -> None:
        """Checks the whole stack, once."""
        if self._is_first:
            self._stack.check()

    def release(self) -> None:
        """Releases the whole stack."""
        self._stack.release()
