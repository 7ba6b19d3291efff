"""Several draws of a sequence share its lists, and draw what each draws with lists of its own."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from runtime.engine.logits.processing import RowProcessors
from runtime.engine.steps.sampler import SamplingRows, shared_lists
from runtime.engine.steps.step_input import RowLoad
from runtime.sampling_table import COLUMNS
from runtime.tensor.tensor import Tensor

VOCAB = 300
NEUTRAL = {name: column.neutral for name, column in COLUMNS.items()}


def loaded(rng: np.random.Generator) -> SamplingRows:
    """Rows with penalties, with a bias and ids that min_tokens forbids, with bad words, and with none of these."""
    rows = SamplingRows(6, VOCAB, RowProcessors(()))
    for row, temperature in enumerate((0.9, 0.0, 1.3, 0.0, 1.0, 0.7)):
        load = RowLoad(
            row=row, seed=7 + row, choice_index=row % 2, num_prompt_tokens=9, last_token_id=3,
            numbers=NEUTRAL | {"temperature": temperature},
        )  # fmt: skip
        if row in (0, 1, 4):
            load.numbers = load.numbers | {"repetition_penalty": 1.4, "frequency_penalty": 1.0}
            load.prompt_ids = np.unique(rng.integers(0, VOCAB, 9).astype(np.int32))
        if row in (2, 3, 4):
            load.bias_ids, load.bias_values = [4, 9], [1.5, -3.0]
            load.min_tokens, load.end_ids = 11, [4, 0, 1]
        if row in (3, 5):
            load.bad_words = [[5], [2, 6], [2, 3, 7]]
        load.output_ids = np.array([2, 3] * 6, np.int32)
        rows.load(load)
    return rows


def in_blocks(counts: list[int], start: int) -> tuple[np.ndarray, np.ndarray]:
    """Row ``i`` draws ``counts[i]`` times, from position ``start + i`` on."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.concatenate([start + row + np.arange(count) for row, count in enumerate(counts)])


@pytest.mark.parametrize("device", ["cpu", "emulated:sm_80", "emulated:sm_90a"])
def test_a_block_of_draws_is_each_draw_alone(device: str) -> None:
    rng = np.random.default_rng(3)
    sampling = loaded(rng)
    rows, positions = in_blocks([4, 1, 5, 8, 6, 2], 7)
    proposals = rng.integers(0, 8, len(rows)).astype(np.int32)
    sampling.write_outputs(rows, positions, proposals)
    logits = (rng.standard_normal((len(rows), VOCAB)) * 0.3).astype(np.float32)
    logits[:, :8] += 9.0  # so that what the lists name decides
    on_device = Tensor.from_numpy(logits).to(device)
    together = ops.sample(on_device, sampling.gather(rows, positions))
    each = [slice(i, i + 1) for i in range(len(rows))]
    alone = [ops.sample(on_device[i], sampling.gather(rows[i], positions[i])) for i in each]
    assert together.ok.all()
    assert together.token_ids.tolist() == [int(sampled.token_ids[0]) for sampled in alone]


def test_no_list_is_copied_for_a_draw() -> None:
    sampling = loaded(np.random.default_rng(4))
    rows, positions = in_blocks([5, 5, 5], 8)
    sampling.write_outputs(rows, positions, np.arange(15, dtype=np.int32))
    arrays = sampling.gather(rows, positions)
    assert arrays.output_ids.size == 12 + 13  # row 2 has no penalties
    assert arrays.output_ids[8:12].tolist() == [0, 1, 2, 3]
    assert arrays.output_start.tolist() == [0] * 5 + [12] * 5 + [25] * 5
    assert (arrays.output_end - arrays.output_start).tolist() == [8, 9, 10, 11, 12, 9, 10, 11, 12, 13, *[0] * 5]
    assert arrays.bias_ids.tolist() == [4, 9, 4, 0, 1]
    assert (arrays.bias_end - arrays.bias_start)[10:].tolist() == [5, 2, 2, 2, 2]  # from position 10 on, min_tokens 11


def test_lists_are_shared_by_neighbours_of_one_owner_alone() -> None:
    ids = np.arange(10, dtype=np.int32)
    lists = [ids[:2], ids[:4], ids[:3], ids[5:7], ids[:2], ids[:1], ids[:1]]
    shared, start, end = shared_lists([1, 1, 1, 2, 1, None, None], lists)
    assert shared.tolist() == [0, 1, 2, 3, 5, 6, 0, 1, 0, 0]
    assert start.tolist() == [0, 0, 0, 4, 6, 8, 9]
    assert [shared[first:last].tolist() for first, last in zip(start, end)] == [each.tolist() for each in lists]
