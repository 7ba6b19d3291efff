"""The whole engine under random load, both loops: arrivals, cancellations, pauses, shared prefixes, a pool and a swap
space far too small, a model that fails now and then. After each step all invariants hold and no page has changed that
should not; every answer is that of a lone run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.device.gpu import Gpu
from runtime.dtype import float32
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.speculator import Speculator
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.tensor.tensor import Tensor
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.fakes import Collected, collect, request, run_to_end
from tests.runtime.engine.pages import PageChecker, slot_sums

NEAR_TIE = 1e-3


def templates(rng: random.Random, count: int, vocab_size: int, max_model_len: int) -> list[EngineRequest]:
    """Requests of many kinds whose prompts share beginnings; each can be served again and again."""
    stems = [[rng.randrange(3, vocab_size) for _ in range(max_model_len // 3)] for _ in range(3)]
    kinds: list[dict[str, object]] = [
        {},
        {},
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"repetition_penalty": 1.2},
        {"logit_bias": {4: 2.0, 5: -3.0}},
        {"stop_token_ids": list(range(3, vocab_size, 6)), "min_tokens": 2},
        {"n": 2},
    ]
    made = []
    for i in range(count):
        stem = rng.choice(stems)
        tail = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, max_model_len // 8))]
        prompt = stem[: rng.randrange(len(stem))] + tail
        most, kind = rng.randrange(1, max_model_len // 2), rng.choice(kinds)
        params: dict[str, object] = {"max_tokens": max(most, 2 if "min_tokens" in kind else 1), **kind}
        if i % 2 or "n" in params:
            params |= {"temperature": rng.uniform(0.5, 1.2), "seed": rng.randrange(2**40)}
        made.append(request(f"template{i}", prompt, eos=(2,), **params))
    return made


class Answers:
    """What each template's lone run answers; computed once, without prefix cache."""

    def __init__(self, lone: Engine) -> None:
        self.lone = lone
        self._results: dict[str, Collected] = {}

    def of(self, template: EngineRequest) -> Collected:
        if template.request_id not in self._results:
            self.lone.add(template)
            self._results[template.request_id] = run_to_end(self.lone)[template.request_id]
        return self._results[template.request_id]

    def check(self, template: EngineRequest, ours: Collected) -> None:
        """All tokens that came are the lone run's, but after a near tie."""
        theirs = self.of(template)
        for index in range(template.params.n):
            if not ours.of(index):
                continue  # ended before its prompt was computed
            tokens, expected = ours.token_ids(index), theirs.token_ids(index)
            ended = ours.finish_reason(index) in ("stop", "length")
            if tokens == (expected if ended else expected[: len(tokens)]):
                if ended:
                    assert ours.finish_reason(index) == theirs.finish_reason(index)
                continue
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), None)
            assert at is not None, f"{template.request_id} has {len(tokens)} tokens, not {len(expected)}"
            assert template.params.temperature == 0.0, f"{template.request_id} draws another token {at}"
            logits = self.lone.logits([*template.prompt_token_ids, *expected[:at]])[-1]
            second, best = np.sort(logits)[-2:]
            assert best - second <= NEAR_TIE, f"{template.request_id} parts at token {at}"


class Guesses:
    """A drafter that knows the lone runs' answers, and errs: agreements of all lengths come."""

    name = "guesses"

    def __init__(self, answers: Answers, of_template: dict[str, EngineRequest], vocab_size: int) -> None:
        self._answers, self._of_template, self._vocab_size = answers, of_template, vocab_size
        self._rng = random.Random(4)

    def propose(self, sequence: Sequence, most: int) -> tuple[NDArray[np.int32], int]:
        known = self._answers.of(self._of_template[sequence.request.request_id]).token_ids(sequence.index)
        drafts = known[sequence.num_output_tokens :][: self._rng.randrange(most + 1)]
        drafts += [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randrange(3))]
        return np.array(drafts[:most], np.int32), 0

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class Failing:
    """The model of an engine, which fails now and then after it has written its pages; not while a graph is recorded,
    which would have to do without from then on."""

    def __init__(self, engine: Engine, rng: random.Random, rate: float) -> None:
        model = engine.executor.model
        forward, record_graph = model.forward, engine.executor.record
        self.num_failures = 0
        is_recording = False

        def record() -> None:
            nonlocal is_recording
            is_recording = True
            record_graph()
            is_recording = False

        engine.executor.record = record  # type: ignore[method-assign]

        def fail(batch: object, kv_cache: KVCache) -> Tensor:
            hidden = forward(batch, kv_cache)  # type: ignore[arg-type]
            if not is_recording and rng.random() < rate:
                self.num_failures += 1
                raise MemoryError("planted")
            return hidden

        model.forward = fail  # type: ignore[method-assign]


def fuzz(
    engine: Engine, answers: Answers, *, num_steps: int, seed: int, failure_rate: float, arrival_rate: float = 0.25,
    speculates: bool = False,
) -> PageChecker:  # fmt: skip
    rng = random.Random(seed)
    made = templates(random.Random(1), 40, engine.info.vocab_size, engine.limits.max_model_len)
    failing = Failing(engine, random.Random(seed), failure_rate)
    pages = PageChecker(engine)
    results: dict[str, Collected] = {}
    of_template: dict[str, EngineRequest] = {}
    if speculates:
        for template in made:
            answers.of(template)  # beforehand: a drafter that takes long is turned off
        drafter = Guesses(answers, of_template, engine.info.vocab_size)
        engine.use(Speculator(drafter, 5, engine.info.vocab_size, fixed=True))
    is_ending = False

    def happen() -> list[EngineOutput]:
        """What users may do at any time."""
        if not is_ending:
            while rng.random() < arrival_rate and len(engine.scheduler.waiting) < 8:
                template = rng.choice(made)
                name = f"r{len(of_template)}"
                of_template[name] = template
                engine.add(msgspec.structs.replace(template, request_id=name, priority=rng.choice([0, 0, -1, 3])))
        if engine.requests and not is_ending and rng.random() < 0.06:
            rng.choice([engine.pause, engine.resume])(rng.choice(list(engine.requests)))
        if engine.requests and rng.random() < 0.03:
            return engine.cancel(rng.choice(list(engine.requests)), rng.choice([None, None, 0, 1]))
        return []

    for _ in range(num_steps):
        collect(happen(), results)
        collect(engine.step(happen), results)
        engine.check_invariants()
        pages.check()
    is_ending = True
    for name in engine.requests:
        engine.resume(name)
    while engine.has_work:
        collect(engine.step(happen), results)
        engine.check_invariants()
        pages.check()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.requests
    reasons = set()
    for name, template in of_template.items():
        answers.check(template, results[name])
        reasons |= {results[name].finish_reason(index) for index in range(template.params.n) if results[name].of(index)}
    expected = {"length", "abort"} | ({"error"} if failing.num_failures else set())
    assert expected <= reasons <= {"stop", *expected}
    return pages


@pytest.fixture(scope="module")
def demo_answers() -> Answers:
    return Answers(build_engine(max_model_len=96, max_num_seqs=2, block_size=8, seed=0, **LONE))


LONE: dict[str, Any] = {"enable_prefix_caching": False, "num_blocks": 32, "overlap": "off"}
TINY: dict[str, Any] = {
    "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 40, "block_size": 8, "num_blocks": 18, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({"overlap": "on", "preemption": "swap", "swap_space_bytes": 20}, 500),
        pytest.param(
            {"overlap": "on", "preemption": "recompute", "victim": "least-recently-used"}, 500,
            marks=pytest.mark.exhaustive,
        ),
        ({"overlap": "off", "preemption": "auto", "swap_space_bytes": 9}, 500),
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("settings2")
def test_hundreds_of_steps_of_the_demo_model(settings: dict[str, Any], num_steps: int, demo_answers: Answers) -> None:
    """`swap_space_bytes` counts blocks here."""
    block_bytes = demo_answers.lone.executor.kv_cache.spec.block_bytes[0]
    settings = {**settings, "swap_space_bytes": settings.get("swap_space_bytes", 0) * block_bytes}
    engine = build_engine(**TINY, **settings)
    pages = fuzz(engine, demo_answers, num_steps=num_steps, seed=3, failure_rate=0.01)
    stats = engine.stats()
    assert stats.num_preemptions > num_steps / 50
    assert stats.prefix_cache_hits > 0.1 * stats.prefix_cache_queries
    if settings["swap_space_bytes"]:
        assert stats.num_swaps > 0
        assert stats.swapped_in_blocks > 0
    assert pages.num_compared > 50 * num_steps


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": "on", "preemption": "swap", "swap_space_bytes": 20},
        {"overlap": "off", "preemption": "auto", "swap_space_bytes": 9},
    ],
)
def test_steps_with_proposals(settings: dict[str, Any], demo_answers: Answers) -> None:
    """`swap_space_bytes` counts blocks here."""
    block_bytes = demo_answers.lone.executor.kv_cache.spec.block_bytes[0]
    engine = build_engine(**TINY, **{**settings, "swap_space_bytes": settings["swap_space_bytes"] * block_bytes})
    fuzz(engine, demo_answers, num_steps=250, seed=6, failure_rate=0.01, speculates=True)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swaps > 0
    assert stats.prefix_cache_hits > 0
    assert 200 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.emulator
@pytest.mark.parametrize("num_steps", [90, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_steps_on_the_emulated_gpu(tmp_path: Path, num_steps: int) -> None:
    """Its lone runs are the cpu's. Exact, for a sequence that comes back may find its blocks computed by another, and
    without exactness those may differ in the last bits."""
    folder = write_model(tmp_path, load_golden("qwen3_tied_gqa4"))
    lone = build_engine(folder, device="cpu", dtype="float32", **{**TINY, **LONE})
    answers = Answers(lone)
    engine = build_engine(
        folder,
        device="emulated:sm_80",
        dtype="float32",
        **{**TINY, "num_blocks": 14},  # so few that it has to preempt in so few steps
        exact=True,
        preemption="swap",
        swap_space_bytes=16 * lone.executor.kv_cache.spec.block_bytes[0],
    )
    assert engine.overlaps
    pages = fuzz(engine, answers, num_steps=num_steps, seed=5, failure_rate=0.01)
    stats = engine.stats()
    assert stats.num_swaps > 0
    assert stats.num_graph_steps > num_steps // 4
    assert stats.prefix_cache_hits > 0
    assert pages.num_compared > 50 * num_steps
    Gpu.of("emulated:sm_80").allocator.check_integrity()


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_page_written_by_a_stranger_is_found(overlap: Literal["on", "off"]) -> None:
    engine = build_engine(**TINY, overlap=overlap)
    for name in ("one", "two"):
        engine.add(request(name, range(3, 30), max_tokens=30))
    pages = PageChecker(engine)
    for _ in range(4):
        engine.step()
        pages.check()
    victim = engine.requests["two"].sequences[0]
    position = victim.num_computed - 3
    keys = engine.executor.kv_cache.layer(3)[0].array  # [num_blocks, num_kv_heads, head_dim, block_size]
    lane = keys[victim.blocks[0][position // 8], 1, 17, position % 8 : position % 8 + 1]
    before = lane.copy()
    lane.view(f"u{lane.itemsize}")[0] ^= 1  # the last bit of one number
    with pytest.raises(AssertionError, match=rf"request two, choice 0: the pages of positions \[{position}\]"):
        pages.check()
    lane[:] = before
    pages.check()
    engine.cancel_all()
    engine.close()


def test_slot_sums_see_every_byte_of_a_slot_and_no_other() -> None:
    kv_cache = KVCache(KVCacheSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=3, block_size=8, dtype=float32), 4)
    before = slot_sums(kv_cache)
    for layer in range(2):
        for which, index in ((0, (3, 1, 2, 5)), (1, (3, 1, 5, 2))):
            kv_cache.layer(layer)[which].array[index] = 1.0
            changed = np.flatnonzero(slot_sums(kv_cache) != before)
            assert changed.tolist() == [3 * 8 + 5]
            kv_cache.layer(layer)[which].array[index] = 0.0
    assert np.array_equal(slot_sums(kv_cache), before)
