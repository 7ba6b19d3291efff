"""Steps of decodes with proposals are laid out from what was made before: the same as any step is laid out."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from runtime.engine.steps.draw_inputs import DrawShape, WrittenDraws, draw_arrays
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.engine.steps.ragged import Layout
from runtime.engine.steps.step_input import StepInput
from runtime.engine.steps.verification import Draws, Verifications
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from tests.runtime.engine.steps import test_several_draws


def assert_same(one: Any, other: Any) -> None:
    """Fields of two dataclasses, arrays by their content and type."""
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray) and field.name not in ("prompt_ids", "output_ids", "bias_ids", "bias_values"):
            assert mine.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        elif not isinstance(mine, np.ndarray):
            assert mine == theirs, field.name


def test_a_step_is_laid_out_as_any_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With penalties, biases, bad words, prefixes and preemption: whoever comes and goes."""
    executors: dict[int, LocalExecutor] = {}
    lay_out, start = Verifications.lay_out, LocalExecutor._start
    compared = []

    def noted(self: LocalExecutor, step: StepInput, *rest: Any) -> Any:
        executors[id(self._verifications)] = self
        return start(self, step, *rest)

    def both(self: Verifications, step: StepInput) -> tuple[Layout, Draws, SamplingArrays, list[int]]:
        made = lay_out(self, step)
        for mine, theirs in zip(made, executors[id(self)]._lay_out(step)):
            if isinstance(mine, list):
                assert mine == theirs
            else:
                assert_same(mine, theirs)
        compared.append(step.num_seqs)
        return made

    monkeypatch.setattr(LocalExecutor, "_start", noted)
    monkeypatch.setattr(Verifications, "lay_out", both)
    plain, _ = test_several_draws.serve(None, overlap="off")
    for max_num_seqs, num_blocks in ((8, 64), (3, 64), (8, 24)):
        test_several_draws.serve(plain, overlap="off", max_num_seqs=max_num_seqs, num_blocks=num_blocks)
    assert len(compared) > 20
    assert max(compared) == 8


def test_what_was_written_before_is_written_again_where_something_else_was() -> None:
    """Two arrays in turns, and draws that share some of their columns: always as if all were written."""
    rng = random.Random(1)
    known = [SamplingArrays.neutral(count) for count in (2, 3, 3, 5)]
    for number, each in enumerate(known):
        each.seed[:], each.choice_index[:], each.temperature[:] = number + 1, number, 0.5 * number
    known[2].seed = known[1].seed
    places = [draw_arrays(DrawShape(6, 4, True), lambda dtype, size: np.zeros(size, dtype)) for _ in range(2)]
    written = WrittenDraws()
    for turn in range(60):
        arrays, draws = rng.choice(places), rng.choice(known)
        draws.position = np.full(draws.num_rows, turn, np.int32)
        written.write(arrays, draws)
        expected = draw_arrays(DrawShape(6, 4, True), lambda dtype, size: np.zeros(size, dtype))
        WrittenDraws().write(expected, draws)
        for mine, theirs, (name, _, size) in zip(arrays, expected, SAMPLING_FIELDS, strict=True):
            if size == "n":
                np.testing.assert_array_equal(mine, theirs, err_msg=name)
