"""An error in one request, or in one step, ends what it concerns and no more."""

from __future__ import annotations

import pytest

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.steps.step_input import RowLoad
from tests.runtime.engine.fakes import (
    Collected,
    FakeModel,
    collect,
    each_loop,
    greedy,
    make_engine,
    request,
    run_to_end,
)

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")


def test_a_failing_forward_ends_its_step_and_no_more(each_loop: bool) -> None:
    model = FakeModel()
    engine = make_engine(model=model, max_num_seqs=2)
    for name in "abcd":
        engine.add(request(name, [ord(name) % 50, 1], n=2 if name == "a" else 1, max_tokens=4))
    results: dict[str, Collected] = {}
    calls: list[object] = []

    def fail(batch: object) -> None:
        calls.append(batch)
        if len(calls) == 2:
            raise MemoryError("planted")

    model.before_forward = fail
    collect(engine.step(), results)
    outputs = engine.step()
    assert {(output.request_id, output.index, output.finish_reason) for output in outputs} == {
        ("a", 0, "error"),
        ("a", 1, "error"),
        ("b", 0, "error"),
    }
    assert all(output.error and "planted" not in output.error for output in outputs)
    engine.check_invariants()
    if not each_loop:  # else the next two have begun
        assert engine.pool.num_free == engine.pool.num_blocks
    assert [record.has_failed for record in engine.timeline] == [False, True]
    run_to_end(engine, results)
    for name in "cd":
        assert results[name].token_ids() == greedy([ord(name) % 50, 1], 4)
    assert engine.stats().num_errors == 3


def test_nan_logits_end_one_request() -> None:
    model = FakeModel()
    engine = make_engine(model=model)
    expected = greedy([1, 2, 3], 8)
    model.nan_after = 90
    engine.add(request("bad", [4, 90], max_tokens=8))
    engine.add(request("good", [1, 2, 3], max_tokens=8))
    results = run_to_end(engine)
    assert results["bad"].finish_reason() == "error"
    assert results["bad"].token_ids() == []
    assert results["good"].token_ids() == expected
    assert 90 not in expected


def test_a_request_that_cannot_be_loaded_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    original = engine.assembler.load_of

    def load(sequence: Sequence) -> RowLoad:
        if sequence.request.request_id == "bad":
            raise RuntimeError("planted")
        return original(sequence)

    monkeypatch.setattr(engine.assembler, "load_of", load)
    engine.add(request("good", [1, 2, 3], max_tokens=8))
    engine.add(request("bad", [1, 2, 3], max_tokens=8, n=3))
    results = run_to_end(engine)
    assert [results["bad"].finish_reason(index) for index in range(3)] == ["error"] * 3
    assert results["good"].token_ids() == greedy([1, 2, 3], 8)


def test_a_request_that_cannot_be_committed_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: Sequence, token_id: int) -> None:
        if self.request.request_id == "bad" and self.num_output_tokens == 2:
            raise RuntimeError("planted")
        original(self, token_id)

    original = Sequence.append
    monkeypatch.setattr(Sequence, "append", append)
    engine = make_engine()
    for name in ("bad", "good"):
        engine.add(request(name, [1, 2, 3], max_tokens=8))
    results = run_to_end(engine)
    assert (results["bad"].finish_reason(), len(results["bad"].token_ids())) == ("error", 2)
    assert results["good"].token_ids() == greedy([1, 2, 3], 8)


def test_invariant_checks_see_planted_faults() -> None:
    engine = make_engine()
    engine.add(request("x", [1] * 20, max_tokens=5))
    engine.add(request("y", [1] * 20, max_tokens=5))
    engine.step()
    x, y = engine.scheduler.running
    block = x.blocks[0][1]
    x.blocks[0][1] = y.blocks[0][0]
    with pytest.raises(AssertionError):
        engine.check_invariants()
    x.blocks[0][1] = block
    engine.check_invariants()
    engine.pool.allocate(1)
    with pytest.raises(AssertionError):
        engine.check_invariants()
