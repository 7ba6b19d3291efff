"""What every step leaves behind, under both loops; and the counters of prefix cache and swap space."""

from __future__ import annotations

import itertools

import pytest

from runtime.engine.engine import Engine
from runtime.engine.messages import PrefixMiss
from runtime.engine.timeline import ChunkRecord
from tests.runtime.engine.fakes import FakeModel, each_loop, make_engine, request, run_to_end

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")

BLOCK_BYTES = 8 * 17 * 4  # of the fake model: keys of 8 tokens, values padded to 16


def test_a_request_is_seen_from_prefill_to_its_last_decode() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    engine.add(request("x", range(20), max_tokens=4))
    run_to_end(engine)
    records = list(engine.timeline)
    assert [record.number for record in records] == [0, 1, 2, 3, 4]
    assert [record.chunks for record in records] == [
        [ChunkRecord("x", 0, 0, 16, "prefill")],
        [ChunkRecord("x", 0, 16, 4, "prefill")],
        [ChunkRecord("x", 0, 20, 1, "decode")],
        [ChunkRecord("x", 0, 21, 1, "decode")],
        [ChunkRecord("x", 0, 22, 1, "decode")],
    ]
    assert [record.num_tokens for record in records] == [16, 4, 1, 1, 1]
    assert (records[0].num_waiting, records[0].num_running) == (1, 0)
    assert (records[3].num_waiting, records[3].num_running) == (0, 1)
    assert records[3].num_free_blocks == 64 - 3
    assert not any(record.has_failed or record.preempted for record in records)


def test_the_first_view_of_a_request_tells_why_it_missed() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    for name, last in (("x", 1), ("y", 2)):
        engine.add(request(name, [*range(16), *[last] * 12], max_tokens=2))
        run_to_end(engine)
    misses = [(view.request_id, view.start, view.miss) for each in engine.timeline for view in each.chunk_views]
    assert misses == [
        ("x", 0, PrefixMiss("unseen", 0, 0)),
        ("x", 16, None),
        ("x", 28, None),
        ("y", 16, PrefixMiss("unseen", 16, 16)),
        ("y", 28, None),
    ]


def test_times_add_up_and_steps_do_not_overlap(each_loop: bool) -> None:
    engine = make_engine()
    for name in "abc":
        engine.add(request(name, [1, 2, 3], max_tokens=10, n=2))
    run_to_end(engine)
    records = list(engine.timeline)
    for record in records:
        parts = record.run_s + record.commit_s + (0 if each_loop else record.schedule_s + record.prepare_s)
        assert min(record.schedule_s, record.prepare_s, record.run_s, record.commit_s) > 0
        assert parts <= record.end_s - record.start_s + 1e-6
        assert record.host_s == pytest.approx(record.schedule_s + record.prepare_s + record.commit_s)
    for before, after in itertools.pairwise(records):
        assert before.start_s <= before.end_s <= after.start_s


def tiny_engine(**settings: object) -> Engine:
    engine = make_engine(num_blocks=16, max_num_seqs=6, **settings)  # type: ignore[arg-type]
    for i in range(6):
        engine.add(request(f"r{i}", [i, 1, 2], max_tokens=60))
    return engine


def test_preemptions_and_moved_blocks_are_recorded_and_counted() -> None:
    engine = tiny_engine(preemption="swap", swap_space_bytes=12 * BLOCK_BYTES)
    run_to_end(engine)
    stats, records = engine.stats(), list(engine.timeline)
    preempted = [each for record in records for each in record.preempted]
    assert stats.num_preemptions == len(preempted) > 0
    assert stats.num_swaps == sum(way == "swap" for _, _, way in preempted) > 0
    assert {(name[0], index) for name, index, _ in preempted} == {("r", 0)}
    assert stats.swapped_out_blocks == sum(record.swapped_out for record in records) > 0
    assert stats.swapped_in_blocks == sum(record.swapped_in for record in records) > 0
    assert stats.num_host_blocks == stats.num_free_host_blocks == 12
    assert not engine.scheduler.costs.prefers_swap(0, 1), "the cost model knows that moving a block takes time"


def test_recomputation_is_prefill() -> None:
    engine = tiny_engine(preemption="recompute", enable_prefix_caching=False)
    run_to_end(engine)
    again = [
        chunk
        for record in engine.timeline
        for chunk in record.chunks
        if chunk.kind == "prefill" and chunk.start + chunk.num_tokens > 3
    ]
    assert again, "somebody computed output tokens again"
    assert all(chunk.num_tokens > 1 for chunk in again)


def test_the_prefix_cache_is_counted() -> None:
    engine = make_engine()
    prompt = list(range(40))
    cached = []
    for _ in range(2):
        engine.add(request("x", prompt, max_tokens=3, n=2))
        outputs = run_to_end(engine)["x"].outputs
        told = [(output.index, output.num_cached_tokens) for output in outputs if output.num_cached_tokens is not None]
        assert len(told) == 2, "once a choice"
        cached.append(dict(told))
    assert cached == [{0: 0, 1: 39}, {0: 39, 1: 39}]
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (4 * 40, 3 * 39)
    assert stats.num_cached_blocks > 0
    assert stats.num_free_blocks == 64


def test_copies_are_recorded() -> None:
    engine = make_engine()
    engine.add(request("x", range(20), max_tokens=3, n=3))
    run_to_end(engine)
    assert sum(record.copied for record in engine.timeline) == 2, "the prompt's partial block, for each other choice"


def test_a_failed_step_is_marked() -> None:
    model = FakeModel()
    engine = make_engine(model=model)
    model.before_forward = lambda batch: (_ for _ in ()).throw(MemoryError("planted"))
    engine.add(request("x", [1, 2], max_tokens=3))
    run_to_end(engine)
    (record,) = engine.timeline
    assert record.has_failed
    assert record.chunks == [ChunkRecord("x", 0, 0, 2, "prefill")]


def test_the_oldest_records_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.open_steps.TIMELINE_STEPS", 5)
    engine = make_engine()
    engine.add(request("x", [1], max_tokens=9))
    run_to_end(engine)
    assert [record.number for record in engine.timeline] == [4, 5, 6, 7, 8]
