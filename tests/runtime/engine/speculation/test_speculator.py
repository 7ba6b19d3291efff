"""How many proposals are tried, and what becomes of drafters that fail."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.evidence import DRAFTED_S, WIDTHS, Ended, StepTimes
from runtime.engine.speculation.ngram import NgramDrafter
from runtime.engine.speculation.speculator import Speculator
from runtime.engine.steps import sampling_results
from tests.runtime.engine.fakes import VOCAB_SIZE, make_engine, request, run_to_end, said_by_engine
from tests.runtime.engine.speculation.test_ngram import grow, sequence
from tests.waiting import TIMEOUT_S


class Scripted:
    """Proposes whatever it is told to."""

    name = "scripted"

    def __init__(self, propose: Callable[[Sequence, int], Any]) -> None:
        self._propose = propose
        self.num_asked = 0

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        self.num_asked += 1
        return self._propose(sequence, most)  # type: ignore[no-any-return]

    def end(self, sequence: Sequence) -> None:
        pass


def decoding(num: int = 1) -> list[Sequence]:
    """Sequences that wait for their next token."""
    made = []
    for _ in range(num):
        one = sequence([1, 2, 3])
        grow(one, [4])
        one.num_computed = 3
        made.append(one)
    return made


def sevens(one: Sequence, most: int) -> tuple[Ids, int]:
    return np.full(most, 7, np.int32), 3


def ask(one: Speculator, running: Iterable[Sequence]) -> dict[Sequence, list[int]]:
    """As the engine asks before each step: nothing, of one that rests."""
    return one.plan(running)


def teach(times: StepTimes, num_sequences: int, seconds: Callable[[int], float]) -> None:
    for drafts in (0, *WIDTHS):
        for _ in range(4):
            times.observe(num_sequences, drafts, seconds(drafts))


def settle(one: Speculator, running: list[Sequence], kept: Callable[[int], int], steps: int = 60) -> list[int]:
    """The widths that are tried while each sequence keeps `kept(proposed)` of its proposals."""
    widths = []
    for number in range(steps):
        drafts = ask(one, running)
        counts = {each: len(ids) for each, ids in drafts.items()}
        widths.append(sum(counts.values()))
        # Not one step after the other, so that this test's times are not taken for a step's.
        one.policy.observe(Ended(2 * number, counts, {s: 1 + kept(counts.get(s, 0)) for s in running}, is_pure=False))
    return widths


def test_all_are_tried_where_they_cost_nothing_and_none_where_they_never_hold() -> None:
    running = decoding()
    good = Speculator(Scripted(sevens), 7, VOCAB_SIZE)
    teach(good.policy.times, 1, lambda drafts: 1.0 + 0.02 * drafts)
    assert settle(good, running, lambda proposed: proposed, steps=64)[-30:].count(7) >= 26
    bad = Speculator(Scripted(sevens), 7, VOCAB_SIZE)
    teach(bad.policy.times, 1, lambda drafts: 1.0 + 0.1 * drafts)
    widths = settle(bad, running, lambda proposed: 0, steps=400)
    assert sum(widths[20:]) <= 0.02 * 380 / 0.1, "trying costs less than two in a hundred"


def test_the_best_width_is_found() -> None:
    """Steps of 8 rows are cheap, the ninth costs a second tile: 7 proposals, however well they do."""
    one = Speculator(Scripted(sevens), 16, VOCAB_SIZE)
    teach(one.policy.times, 1, lambda drafts: 1.2 if 0 < drafts <= 7 else 1.0 if not drafts else 3.0)
    assert set(settle(one, decoding(), lambda proposed: proposed)[-9:]) <= {7, 0}, "0: pauses"
    halved = Speculator(Scripted(sevens), 7, VOCAB_SIZE)
    teach(halved.policy.times, 1, lambda drafts: 1.0 + 0.2 * drafts)
    assert settle(halved, decoding(), lambda proposed: min(proposed, 1))[-1] <= 2


def test_nothing_is_tried_before_a_plain_step_is_known() -> None:
    one = Speculator(Scripted(sevens), 7, VOCAB_SIZE)
    assert one.plan(decoding()) == {}
    assert Speculator(Scripted(sevens), 7, VOCAB_SIZE, fixed=True).plan(decoding())


def test_looking_is_rare_where_it_does_not_pay() -> None:
    """A look takes as long as a fifth of a step, and nothing comes of it."""

    def slow(one: Sequence, most: int) -> tuple[Ids, int]:
        time.sleep(2e-3)
        return np.full(most, 7, np.int32), 3

    drafter = Scripted(slow)
    one = Speculator(drafter, 7, VOCAB_SIZE)
    teach(one.policy.times, 8, lambda drafts: 0.01 + 0.01 * drafts)
    settle(one, decoding(8), lambda proposed: 0, steps=1000)
    assert drafter.num_asked <= 8 * 11, "naps grow by half each, to some 400 steps"


def test_times_between_and_beyond() -> None:
    times = StepTimes()
    assert times.curve(2) == []
    for drafts, seconds in ((0, 1.0), (4, 2.0), (8, 3.0)):
        times.observe(2, drafts, 100.0)  # the first of a shape tells nothing
        times.observe(2, drafts, seconds)
    curve = times.curve(2)
    assert curve[0] == 1.0
    places = [1 + WIDTHS.index(width) for width in (2, 4, 6, 8)]
    assert [curve[at] for at in places] == [1.25 + DRAFTED_S / 2, 1.5, 1.75, 2.0], "half of it is in doubt"
    assert curve[1 + WIDTHS.index(16)] == 2.0 + 8 * 0.0625, "half of what the four before cost"
    for drafts, seconds in ((4, 2.0), (8, 3.0)) * 20:
        times.observe(2, drafts, seconds)
    assert [times.curve(2)[at] for at in places] == pytest.approx([1.5, 2.0, 2.5, 3.0], abs=0.02)


def test_what_trying_costs_by_itself_is_no_cost_of_tokens() -> None:
    """Any proposal makes a step twice as long, and more of them hardly longer."""
    times = StepTimes()
    for drafts, seconds in ((0, 1.0), (2, 2.1), (4, 2.2)) * 20:
        times.observe(4, drafts, seconds)
    assert times.curve(4)[1 + WIDTHS.index(28)] == pytest.approx(2.2 + 24 * 0.025, abs=0.02)


@pytest.mark.parametrize(
    ("rubbish", "said"),
    [
        (lambda one, most: 1 / 0, "failed"),
        (lambda one, most: (np.array([VOCAB_SIZE], np.int32), 0), "outside the vocabulary"),
        (lambda one, most: (np.array([-1], np.int32), 0), "outside the vocabulary"),
        (lambda one, most: (np.zeros(most + 1, np.int32), 0), "no array of at most"),
        (lambda one, most: (np.zeros((1, 1), np.int32), 0), "no array of at most"),
        (lambda one, most: ([1, 2], 0), "no array of at most"),
        (lambda one, most: (np.zeros(1, np.int64), 0), "no array of at most"),
        (lambda one, most: None, "failed"),
        (lambda one, most: (itertools.count(), 0), "no array of at most"),
        (lambda one, most: (np.arange(100_000, dtype=np.int32), 0), "no array of at most"),
        (lambda one, most: (np.zeros(1), 0), "no array of at most"),
        (lambda one, most: (np.array(["a"]), 0), "no array of at most"),
        (lambda one, most: (np.zeros(1, np.int32), float("nan")), "failed"),
        (lambda one, most: (np.zeros(1, np.int32), "sure"), "failed"),
        (lambda one, most: (np.zeros(1, np.int32),), "failed"),
        (lambda one, most: time.sleep(0.5) or (np.zeros(1, np.int32), 0), "took more than"),
    ],
)
def test_a_bad_drafter_is_turned_off_once_and_changes_nothing(
    rubbish: Callable[[Sequence, int], Any],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, engine = make_engine(), make_engine()
    hang_s = 0.4 if said == "took more than" else TIMEOUT_S
    one = Speculator(Scripted(rubbish), 7, VOCAB_SIZE, fixed=True, hang_s=hang_s)
    engine.use(one)
    answers = []
    for each in (plain, engine):
        for i in range(3):
            each.add(request(f"r{i}", [i, 5, 6], max_tokens=20))
        answers.append({name: got.token_ids() for name, got in run_to_end(each).items()})
    assert answers[0] == answers[1]
    assert not one.is_on
    (line,) = said_by_engine(caplog)
    assert "scripted" in line
    assert said in line


@pytest.mark.parametrize(
    ("fault", "said"),
    [("prepare fails", "failed"), ("prepare hangs", "took more than"), ("end fails", "failed")],
)
def test_a_bad_drafter_of_batches_is_turned_off_once_and_changes_nothing(
    fault: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first call is sound, and computes the prompts for as long as it likes."""

    class Bad(Scripted):
        num_calls = 0

        def prepare(self, asked: list[tuple[Sequence, int]]) -> None:
            self.num_calls += 1
            if fault == "prepare fails" and self.num_calls > 1:
                raise OSError("planted")
            if fault == "prepare hangs":
                time.sleep(0.35 * len(asked))

        def end(self, sequence: Sequence) -> None:
            if fault == "end fails":
                raise KeyError("planted")

    plain, engine = make_engine(), make_engine()
    drafter = Bad(sevens)
    one = Speculator(drafter, 7, VOCAB_SIZE, fixed=True, hang_s=0.3 if fault == "prepare hangs" else TIMEOUT_S)
    engine.use(one)
    answers = []
    for each in (plain, engine):
        for i in range(3):
            each.add(request(f"r{i}", [i, 5, 6], max_tokens=20))
        answers.append({name: got.token_ids() for name, got in run_to_end(each).items()})
    assert answers[0] == answers[1]
    assert not one.is_on
    assert drafter.num_calls == 2 or fault == "end fails"
    (line,) = said_by_engine(caplog)
    assert "scripted" in line
    assert said in line


def test_counters() -> None:
    engine = make_engine()
    engine.use(Speculator(NgramDrafter(), 4, VOCAB_SIZE, fixed=True))
    engine.add(request("x", [1, 2, 3] * 8, max_tokens=60, logit_bias={1: 50.0}))
    run_to_end(engine)
    stats = engine.stats()
    assert stats.num_steps < 30
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens <= 4 * stats.num_drafts
    assert stats.num_accepted_tokens == sum(stats.accepted_by_position)
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)


def test_mirostat_with_drafts_draws_what_it_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample of a step depends on the one before it; wrong drafts follow right ones."""
    follow, num_followed = sampling_results.follow_mirostat, 0

    def counted(*arguments: Any) -> None:
        nonlocal num_followed
        num_followed += 1
        follow(*arguments)

    monkeypatch.setattr(sampling_results, "follow_mirostat", counted)
    plain, engine = make_engine(), make_engine()
    engine.use(Speculator(NgramDrafter(), 4, VOCAB_SIZE, fixed=True))
    answers = []
    for each in (plain, engine):
        for seed in range(4):
            own = {"mirostat": 2, "mirostat_tau": 0.8, "mirostat_eta": 0.7, "temperature": 1.0, "seed": seed}
            each.add(request(f"r{seed}", [1, 2, 3] * 8, max_tokens=60, logit_bias={1: 9.0, 2: 9.0}, **own))
        answers.append({name: got.token_ids() for name, got in run_to_end(each).items()})
    assert answers[0] == answers[1]
    assert num_followed > 0
    assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_draft_tokens
