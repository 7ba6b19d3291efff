"""The parameters of a step's samples, in arrays that a recorded step reads, so that it samples, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from runtime.sampling_table import COLUMNS, PENALTIES
from runtime.tensor.tensor import Tensor

Take: TypeAlias = Callable[[Any, tuple[int, ...]], NDArray[Any]]
"""Returns an array of a type and shape."""

_NAMES = tuple(name for name, _, _ in SAMPLING_FIELDS)
_ARE_BY_DRAW = tuple(size == "n" for _, _, size in SAMPLING_FIELDS)
_SEED_AT = _NAMES.index("seed")
_SEED = SAMPLING_FIELDS[_SEED_AT][1]


class Computed(NamedTuple):
    """The results of a model's forward pass, and the samples of a recorded step.

    hidden  [num_tokens, hidden_size]; None on a stage that another one follows, since later passes overwrite what it
            has sent
    logits  [num_draws, vocab_size], or None if not needed
    drawn   [2 n + 1] int32, as `ops.draw` writes it, n at least the step's draws; None if nothing was sampled
    kept    [num_tokens, hidden_size] after each kept layer
    """

    hidden: Tensor | None
    logits: Tensor | None
    drawn: Tensor | None = None
    kept: tuple[Tensor, ...] = ()


class DrawShape(NamedTuple):
    """The fixed properties of a recording of draws.

    num_draws      draws
    room           ids that each list may have
    has_penalties  of some draw
    """

    num_draws: int
    room: int
    has_penalties: bool


def room_for(draws: SamplingArrays) -> int:
    """The number of ids in the longest of its lists."""
    return max(len(draws.prompt_ids), len(draws.output_ids), len(draws.bias_ids))


def shape_of(draws: SamplingArrays, num_draws: int) -> DrawShape:
    """For at least ``num_draws``; room for ids is 0 or a power of two, at least 256."""
    longest = room_for(draws)
    room = max(256, 1 << (longest - 1).bit_length()) if longest else 1
    has_penalties = any((getattr(draws, name) != neutral).any() for name, neutral in PENALTIES.items())
    return DrawShape(num_draws, room, has_penalties)


def draw_arrays(shape: DrawShape, take: Take) -> list[NDArray[Any]]:
    """Arrays for such draws, in field order. Seeds are int64, since tensors have no uint64."""
    return [
        take(np.int64 if dtype is _SEED else dtype, (shape.num_draws if size == "n" else shape.room,))
        for _, dtype, size in SAMPLING_FIELDS
    ]


class WrittenDraws:
    """The latest contents of arrays of draws, to skip writing them again: steps with drafts mostly have the parameters
    of the previous step. Arrays that were given are not changed afterwards."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] | None = None
        self._given: list[NDArray[Any] | None] = [None] * len(SAMPLING_FIELDS)

    def write(self, arrays: list[NDArray[Any]], draws: SamplingArrays) -> None:
        """Write the draws; the rest is padding: greedy, without anything else. If ``arrays`` are not those of the last
        call, all is written."""
        before = self._given
        if arrays is not self._arrays:
            self._arrays = arrays
            before[:] = [None] * len(before)
        count, num_draws = draws.num_rows, len(arrays[0])
        for i, name in enumerate(_NAMES):
            given = getattr(draws, name)
            if given is before[i]:
                continue
            before[i], array = given, arrays[i]
            if _ARE_BY_DRAW[i]:
                array[:count] = given if i != _SEED_AT else given.view(np.int64)
                if num_draws > count:
                    array[count:] = COLUMNS[name].neutral if name in COLUMNS else 0
            elif len(given):
                array[: len(given)] = given


def read_drawn(drawn: Tensor, count: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The ids of the first ``count`` draws, and whether each is valid. Waits for the device. Raises LaunchError if it
    failed, InvalidArgumentError if an id was outside the vocabulary."""
    num_draws = drawn.shape[0] // 2
    if drawn.device.kind == "cpu":  # its kernels check ids themselves
        results = drawn.array
    else:
        results = drawn.to("cpu").array
        if results[2 * num_draws]:
            ops.check_ids(drawn.device)
    return results[:count].copy(), results[num_draws : num_draws + count] == 0
