"""Maps of all experts that a checkpoint stores as one tensor: each becomes a tensor of its own.

A layout names every expert's maps, `experts.3.gate_proj.weight [N, K]`. gpt-oss stores those of a layer together,
`experts.gate_up_proj [E, K, 2 N]`, inputs first, columns of gate and up by turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from models.stored_tensor import Array, StoredTensor
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor that holds one tensor, or several by turns, of each expert.

    Attributes:
        shape: with the experts first, and last what the tensors share by turns.
        under: what the tensors' names begin with, before the expert's number.
        parts: how they go on, in the order of turns.
    """

    shape: tuple[int, ...]
    under: str
    parts: tuple[str, ...]

    def names(self) -> Iterator[tuple[str, int, int]]:
        """Each tensor's name, expert and turn."""
        for expert in range(self.shape[0]):
            for turn, part in enumerate(self.parts):
                yield f"{self.under}.{expert}.{part}", expert, turn


def take_apart(
    found: dict[str, StoredTensor], stacks: Mapping[str, Stack], shapes: dict[str, tuple[int, ...]], label: str
) -> list[str]:
    """Replaces the stacks among the stored tensors by what they hold; returns what is wrong with them.

    Tensors of a stack that is wrong, or missing whole from the file `label`, leave `shapes`: they are not missing, too.
    """
    problems = []
    for name, stack in stacks.items():
        stored = found.pop(name, None)
        if stored is None:
            if not any(part in found for part, _, _ in stack.names()):
                problems.append(f"{label}: tensor {name!r} {list(stack.shape)} is missing")
                for part, _, _ in stack.names():
                    del shapes[part]
            continue
        where = f"{stored.file}: tensor {stored.name!r}"
        said = []
        if stored.shape != stack.shape:
            said.append(f"{where} is {list(stored.shape)}, but the config asks for {list(stack.shape)}")
        if stored.dtype is None:
            said.append(f"{where} is {stored.type_name}, not F32, F16 or BF16")
        for part, expert, turn in stack.names():
            if part in found:
                problems.append(f"{found[part].file}: tensor {found[part].name!r} is stored in {stored.name!r}, too")
            if said:
                del shapes[part]
            else:
                found[part] = StackedTensor(stored, part, expert, turn, len(stack.parts))
        problems += said
    return problems


class StackedTensor:
    """One of a stack's tensors; see `models.stored_tensor.StoredTensor`."""

    block_format: str | None = None

    def __init__(self, stack: StoredTensor, name: str, expert: int, turn: int, turns: int) -> None:
        self.file, self.name, self.dtype, self.type_name = stack.file, name, stack.dtype, stack.type_name
        experts, *rest, width = stack.shape
        self.shape: tuple[int, ...] = (width // turns, *rest)
        self.size_bytes = stack.size_bytes // (experts * turns)
        self.quantized: QuantizedLayout | None = None
        if stack.quantized is not None:
            self.quantized = replace(stack.quantized, shape=(self.shape[0], self.shape[1]))
        self._stack, self._expert, self._turn, self._turns = stack, expert, turn, turns
        self._rows = slice(expert * width + turn, (expert + 1) * width, turns)  # of a quantised stack

    def array(self) -> Array:
        """The elements, as a view where they are stored so."""
        if self.quantized is not None:
            assert self.dtype is not None
            return self.matrix().dequantise(self.dtype)
        array: Array = self._stack.array()[self._expert, ..., self._turn :: self._turns]
        return array.T

    def blocks(self) -> Array:
        """There are none."""
        raise AssertionError(f"{self.name} is not stored in blocks")

    def matrix(self) -> QuantizedMatrix:
        """Views of the stack's arrays."""
        return self._stack.matrix().cut(self._rows)

    def check(self) -> None:
        """The first one checks the stack."""
        if self._expert == self._turn == 0:
            self._stack.check()

    def release(self) -> None:
        """Of the whole stack."""
        self._stack.release()
