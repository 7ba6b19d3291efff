"""The layout of steps, mostly of decodes with drafts, whose unchanged parts are kept, beside one made token by token;
and what is written to a recording's inputs."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from runtime.batch import STEP_FIELDS
from runtime.dtype import float32
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.inputs import SamplingShape, Shape, StepMemory
from runtime.engine.steps.layout import StepLayout
from runtime.engine.steps.persistent_batch import LaidOut, PersistentBatch
from runtime.engine.steps.recorder_cpu import CpuRecorder
from runtime.engine.steps.step_input import LAST_TOKEN, StepInput
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from tests.runtime.engine.steps import test_several_draws

LISTS = ("prompt_ids", "output_ids", "bias_ids", "bias_values")


def check_layout(rows: PersistentBatch, step: StepInput, laid_out: LaidOut) -> None:
    """Tokens, positions, slots and draws, one token after another."""
    layout, samples, sampling, broken = laid_out
    arrays, token, sample = layout.arrays, 0, 0
    for chunk, row in enumerate(step.rows.tolist()):
        start, count, num_samples = (int(each[chunk]) for each in (step.starts, step.counts, step.num_samples))
        assert arrays["query_start"][chunk : chunk + 2].tolist() == [token, token + count]
        assert arrays["seq_lens"][chunk] == start + count
        for position in range(start, start + count):
            given = step.token_ids[token]
            assert arrays["token_ids"][token] == (rows.last_tokens[row] if given == LAST_TOKEN else given)
            assert arrays["positions"][token] == position + rows.rotary_offsets[row]
            for group in range(rows.tables.num_groups):
                block, at = divmod(position, 8)
                slot = rows.tables.table[group, row, block] * 8 + at
                assert arrays["slot_mappings"][group, token] == slot
                assert arrays["block_tables"][group, chunk, block] == rows.tables.table[group, row, block]
            token += 1
        for following in range(token - num_samples, token):
            assert (samples.rows[sample], samples.tokens[sample]) == (row, following)
            assert arrays["logits_indices"][sample] == following
            position = start + count - (token - following) + 1 - rows.sampling.num_prompt_tokens[row]
            assert samples.positions[sample] == sampling.position[sample] == position
            if samples.proposals is not None and following + 1 < token:
                assert samples.proposals[sample] == step.token_ids[following + 1]
            sample += 1
    assert (token, sample) == (layout.num_tokens, layout.num_logits)
    assert (layout.max_query_len, layout.max_seq_len) == (step.counts.max(), arrays["seq_lens"].max())
    assert layout.fields.keys() == arrays.keys() - {"adapters", "logits_adapters"}
    for name, field in layout.fields.items():
        assert arrays[name].dtype == field.dtype, name
    anew, expected_broken = rows.sampling.gather_sound(samples.rows, samples.positions)
    assert broken == expected_broken
    for each in fields(sampling):
        mine, theirs = getattr(sampling, each.name), getattr(anew, each.name)
        if each.name not in LISTS:
            assert getattr(mine, "dtype", None) == getattr(theirs, "dtype", None), each.name
            np.testing.assert_array_equal(mine, theirs, err_msg=each.name)


def test_a_step_is_laid_out_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With penalties, biases, bad words, prefixes and preemption: whoever comes and goes."""
    lay_out, compared = PersistentBatch.lay_out, []

    def checked(self: PersistentBatch, step: StepInput) -> LaidOut:
        made = lay_out(self, step)
        check_layout(self, step, made)
        if step.draws_everywhere:
            compared.append(step.num_seqs)
        return made

    monkeypatch.setattr(PersistentBatch, "lay_out", checked)
    plain, _ = test_several_draws.serve(None, overlap="off")
    for max_num_seqs, num_blocks in ((8, 64), (3, 64), (8, 24)):
        test_several_draws.serve(plain, overlap="off", max_num_seqs=max_num_seqs, num_blocks=num_blocks)
    assert len(compared) > 20
    assert max(compared) == 8


def test_what_was_written_before_is_written_again_where_something_else_was() -> None:
    """Two recordings' inputs in turns, and draws that share some of their columns: always as if all were written."""
    rng = random.Random(1)
    limits = EngineLimits(
        max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, block_size=8, num_blocks=100, max_waiting=10
    )
    recorder = CpuRecorder()
    kv_cache = KVCache(KVCacheSpec.uniform(1, 1, 8, 8, float32, recorder.device), 1)
    shapes = [Shape(6, 6, 6, 1, 64, SamplingShape(6, room, True, False)) for room in (4, 2)]
    memory, other = (StepMemory(recorder, limits, kv_cache, shapes[0]) for _ in range(2))
    known = [SamplingArrays.neutral(count) for count in (2, 3, 3, 5)]
    for number, each in enumerate(known):
        each.seed[:], each.choice_index[:], each.temperature[:] = number + 1, number, 0.5 * number
    known[2].seed = known[1].seed
    batch_slots = [memory.inputs(shape) for shape in shapes]
    for turn in range(60):
        inputs, samples = rng.choice(batch_slots), rng.choice(known)
        count = samples.num_rows
        samples.position = np.full(count, turn, np.int32)
        arrays: dict[str, Any] = {
            name: np.full((1,) * field.by_group + (count + (field.per == "start"),), turn, field.dtype)
            for name, field in STEP_FIELDS.items()
        }
        arrays["query_start"], arrays["block_tables"] = np.arange(count + 1), np.full((1, count, 8), turn, np.int32)
        layout = StepLayout(arrays, 1, 64)
        memory.write(inputs, layout, samples)
        expected = other.inputs(shapes[batch_slots.index(inputs)])
        other.write(expected, layout, samples)
        lists = {name for name, _, size in SAMPLING_FIELDS if size == "any"}
        for name in inputs.arrays.keys() - lists:
            np.testing.assert_array_equal(inputs.arrays[name], expected.arrays[name], err_msg=name)
        assert (inputs.arrays["slot_mappings"][:, count:] == -1).all()
