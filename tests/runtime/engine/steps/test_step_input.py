"""A step's value: sent and received again it runs the same; what an executor cannot do it refuses by name."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.engine.ranks.messages import DECODER, RunNext, RunStep, frame, step_message, told_step
from runtime.engine.steps.executor import Computation, DrawMasks, UnsupportedStepError
from runtime.engine.steps.step_input import (
    FeatureSpan,
    PromptLogprobs,
    RowLoad,
    StepInput,
    UncutSpan,
    decode,
    encode,
)
from tests.runtime.engine.fakes import each_loop, make_engine, request, run_to_end

__all__ = ["each_loop"]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two values are of one type and equal, down to the types of arrays."""
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bool((ours == theirs).all())
    if isinstance(ours, msgspec.Struct):
        return type(ours) is type(theirs) and all(
            same(getattr(ours, name), getattr(theirs, name)) for name in ours.__struct_fields__
        )
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def step_of(**fields: Any) -> StepInput:
    chunk = {"rows": [0, 3], "starts": [0, 7], "counts": [4, 1], "num_samples": [0, 1]}
    arrays = {name: np.array(values, np.int64) for name, values in chunk.items()}
    return StepInput(number=5, token_ids=np.array([1, 2, 3, 4, -1], np.int32), **arrays, **fields)  # type: ignore[arg-type]


def test_round_trip_of_every_field() -> None:
    load = RowLoad(
        row=3, seed=2**64 - 1, choice_index=2, num_prompt_tokens=9, last_token_id=4, numbers={"top_p": 0.1},
        prompt_ids=np.array([1, 2], np.int32), output_ids=np.empty(0, np.int32), allowed_ids=[3],
        bad_words=[[1, 2]], bias_ids=[1], bias_values=[-2.5], logprobs=0, has_masks=True,
    )  # fmt: skip
    step = step_of(
        mode="record", loads=[load], swap_out=[(1, 2)], copies=[(3, 4)],
        prompt_logprobs=[PromptLogprobs(1, np.array([5], np.int32), 3)], features=[FeatureSpan(0, 1, 2, 3)],
        rotary_positions=np.arange(15, dtype=np.int32).reshape(3, 5), bidirectional_spans=[UncutSpan(0, 2)],
    )  # fmt: skip
    assert same(step, decode(encode(step)))


@pytest.mark.parametrize("dtype", ["<f8", "|O", "<U3"])
def test_arrays_of_other_kinds_are_refused(dtype: str) -> None:
    fields = msgspec.msgpack.decode(encode(step_of()))
    fields["rows"][0] = dtype
    with pytest.raises((msgspec.ValidationError, ValueError)):
        decode(msgspec.msgpack.encode(fields))


class Sender:
    """Steps as they arrive that are sent. `way`: "whole", or as ranks are told of them."""

    def __init__(self, way: str) -> None:
        self.way, self.num_sent, self.num_next = way, 0, 0
        self._before: tuple[StepInput, StepInput] | tuple[None, None] = None, None  # as it was sent, and arrived

    def __call__(self, step: StepInput) -> StepInput:
        self.num_sent += 1
        if self.way == "whole":
            return decode(encode(step))
        sent, arrived = self._before
        message = DECODER.decode(frame(step_message(step, sent, has_masks=False))[4:])
        assert isinstance(message, RunStep | RunNext)
        self.num_next += isinstance(message, RunNext)
        self._before = _, found = step, told_step(message, arrived)
        assert same(step, found)
        return found


@pytest.mark.usefixtures("each_loop")
def test_steps_that_were_sent_run_the_same() -> None:
    """Preemption, chunks, penalties, bad words, log probabilities: an executor needs nothing but the value."""
    answers = []
    for way in ("", "whole", "to ranks"):
        engine, sender = make_engine(num_blocks=20, swap_space_bytes=1 << 12), Sender(way)
        if way:
            start = engine.executor.start
            engine.executor.start = lambda step, *more, start=start, sender=sender: start(sender(step), *more)  # type: ignore[method-assign]
        rng = random.Random(3)
        kinds: list[dict[str, Any]] = [
            {"frequency_penalty": 0.7, "temperature": 0.9, "seed": 1}, {"logprobs": 2, "n": 2},
            {"bad_words_token_ids": [[4], [5, 6]], "logit_bias": {7: 2.0}}, {"prompt_logprobs": 1},
            {"repetition_penalty": 1.4, "stop_token_ids": [3, 9], "min_tokens": 4},
        ]  # fmt: skip
        for i in range(10):
            prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 50))]
            engine.add(request(f"r{i}", prompt, max_tokens=rng.randrange(1, 30), **kinds[i % len(kinds)]))
        results = run_to_end(engine)
        assert engine.stats().num_preemptions > 0
        assert (sender.num_sent > 20) == bool(way)
        assert (sender.num_next > 5) == (way == "to ranks")
        answers.append(
            {
                name: [(o.index, o.new_token_ids, o.logprobs, o.prompt_logprobs, o.finish_reason) for o in each.outputs]
                for name, each in results.items()
            }
        )
        engine.close()
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_positions": np.zeros((3, 5), np.int32)}, "rotary_positions: FakeModel takes none"),
        ({"features": [FeatureSpan(0, 0, 0, 2)]}, "features: FakeModel takes none, got 1"),
        (
            {"bidirectional_spans": [UncutSpan(2, 3)]},
            "bidirectional_spans: the 3 tokens from 2 on are not of one chunk",
        ),
        ({"bidirectional_spans": [UncutSpan(4, 2)]}, "bidirectional_spans: the 2 tokens from 4 on"),
    ],
)
def test_what_the_model_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedStepError, match=message):
        make_engine().executor.start(step_of(**fields))


def test_a_rotary_offset_is_refused() -> None:
    load = RowLoad(row=0, seed=0, choice_index=0, num_prompt_tokens=1, last_token_id=1, numbers={}, rotary_offset=-3)
    with pytest.raises(UnsupportedStepError, match="rotary_offset"):
        make_engine().executor.start(step_of(loads=[load]))


def test_a_row_that_cannot_be_written_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    start = engine.executor.start

    def spoil(step: StepInput, masks: DrawMasks | None = None) -> Computation:
        for load in step.loads:
            if load.seed == 13:
                load.numbers = {}
        return start(step, masks)

    monkeypatch.setattr(engine.executor, "start", spoil)
    engine.add(request("good", [1, 2, 3], max_tokens=8))
    engine.add(request("bad", [1, 2, 3], max_tokens=8, seed=13))
    lone = make_engine()
    lone.add(request("good", [1, 2, 3], max_tokens=8))
    results = run_to_end(engine)
    assert (results["bad"].finish_reason(), results["bad"].token_ids()) == ("error", [])
    assert results["good"].token_ids() == run_to_end(lone)["good"].token_ids()
