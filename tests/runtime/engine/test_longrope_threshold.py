"""Sequences that outgrow the length beyond which all tokens are rotated otherwise: what they say depends on their own
length alone, and real ones say what transformers' `generate` says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.registry import load_model
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.limits import resolve
from runtime.engine.make_engine import build_engine
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence
from tests.models.driver import logits_of, relative_error
from tests.models.folders import load_golden, write_model
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

SWITCH = 20

SETTINGS: dict[str, dict[str, Any]] = {
    "room": {},
    "recomputed": {"num_blocks": 18, "preemption": "recompute"},
    "swapped": {"num_blocks": 18, "preemption": "swap", "swap_space_bytes": 1 << 14},
    "small chunks": {"max_num_batched_tokens": 8, "prefill_chunk": 5},
    "no cache": {"enable_prefix_caching": False},
    **{style: {"batching": style} for style in ("orca", "prefill-first", "static")},
}


def serve(engine: Engine, rng: random.Random, drafts_each: int) -> dict[str, tuple[list[int], Collected]]:
    """Prompts and answers on both sides of the switch; some prompts begin alike, and answers are proposed in part."""
    prompts: dict[str, list[int]] = {}
    alike = [rng.randrange(90) for _ in range(60)]
    results: dict[str, Collected] = {}
    arriving = list(range(40))
    schedule = engine.scheduler.schedule

    def propose() -> Any:
        for sequence in engine.scheduler.running:
            prompt = prompts[sequence.request.request_id]
            answer = greedy(prompt, sequence.num_output_tokens + drafts_each, SWITCH)
            engine.scheduler.drafts[sequence] = answer[sequence.num_output_tokens :]
        return schedule()

    if drafts_each:
        engine.scheduler.schedule = propose  # type: ignore[method-assign]
    while arriving or engine.has_work:
        for i in [arriving.pop(0) for _ in range(min(len(arriving), rng.choice([0, 1, 3])))]:
            length = rng.choice((SWITCH - 1, SWITCH, SWITCH + 1, rng.randrange(1, 60)))
            prompt = alike[: rng.randrange(length)]
            prompts[f"r{i}"] = prompt = prompt + [rng.randrange(90) for _ in range(length - len(prompt))]
            params = {"max_tokens": rng.randrange(1, 40), "n": rng.choice((1, 1, 2)), "ignore_eos": True}
            engine.add(request(f"r{i}", prompt, **params))
        collect(engine.step(), results)
        engine.check_invariants()
    assert engine.pool.num_free == engine.pool.num_blocks
    return {name: (prompts[name], collected) for name, collected in results.items()}


@pytest.mark.parametrize("drafts_each", [0, 4])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.exhaustive_cases("-4", "plain loop")
def test_an_answer_depends_on_its_own_length_alone(each_loop: bool, settings: dict[str, Any], drafts_each: int) -> None:
    engine = make_engine(FakeModel(SWITCH), **settings)
    num_crossed = 0
    for prompt, answered in serve(engine, random.Random(len(settings)), drafts_each).values():
        for index in {output.index for output in answered.outputs}:
            answer = answered.token_ids(index)
            assert answer == greedy(prompt, len(answer), SWITCH)
            num_crossed += len(prompt) <= SWITCH < len(prompt) + len(answer) - 1
    assert num_crossed > 10
    if "num_blocks" in settings:
        assert engine.scheduler.num_preemptions > 0
        assert bool(engine.scheduler.num_swaps) == (settings["preemption"] == "swap")


def test_what_was_swapped_out_within_the_switch_is_lost_beyond() -> None:
    """A victim's proposals are accepted after it was swapped out: now its tokens are more than the switch."""
    config = EngineConfig(block_size=8, num_blocks=7, preemption="swap", swap_space_bytes=8)
    limits = resolve(
        config, max_position_embeddings=56, bytes_per_block=1, available_bytes=7, longrope_threshold=SWITCH
    )
    host_pool = HostPool(limits.num_host_blocks)
    pool = BlockPool(limits.num_blocks, limits.block_size, host_pool=host_pool)
    scheduler = Scheduler(limits, pool)
    first, victim = (sequence_of(number, length) for number, length in ((0, 23), (1, 18)))
    for sequence in (first, victim):
        scheduler.add(sequence)
    step = scheduler.schedule()
    scheduler.commit(step)
    for sequence in (first, victim):
        sequence.append(1)
    others = pool.allocate(1)
    scheduler.drafts[victim] = [1, 1, 1]
    step = scheduler.schedule()
    assert [(chunk.start, chunk.num_tokens) for chunk in step.chunks] == [(23, 1), (18, 2)]  # a proposal up to the 20th
    following = scheduler.schedule()  # needs a block
    assert following.preempted == [(victim, "swap")]
    scheduler.commit(step, {victim: 2})
    for sequence in (first, victim, victim):
        sequence.append(1)
    scheduler.commit(following)
    first.append(1)
    assert (victim.num_computed, victim.num_tokens, host_pool.num_free) == (19, 21, 5)
    pool.release(others)
    scheduler.finish(first)
    step = scheduler.schedule()
    assert [(chunk.sequence, chunk.start, chunk.num_tokens) for chunk in step.chunks] == [(victim, 0, 21)]
    assert (victim.rotary_offset, host_pool.num_free, step.swap_in) == (SWITCH, 8, [])
    scheduler.check_invariants()


def sequence_of(number: int, num_prompt_tokens: int) -> Sequence:
    prompt = np.full(num_prompt_tokens, number, np.int32)
    made = Request(str(number), prompt, SamplingParams(), max_tokens=30, arrival_s=0.0)
    made.number = number
    made.sequences = [Sequence(made, 0)]
    return made.sequences[0]


def test_all_is_computed_once_more_where_a_sequence_crosses(each_loop: bool) -> None:
    model = FakeModel(SWITCH)
    engine = make_engine(model)
    engine.add(request("a", range(15), max_tokens=SWITCH - 15 + 1))  # the last token drawn is the first beyond
    schedule = engine.scheduler.schedule

    def check() -> Any:
        step = schedule()
        assert not engine.scheduler.waiting
        return step

    engine.scheduler.schedule = check  # type: ignore[method-assign]
    run_to_end(engine)
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    assert model.num_computed_tokens == SWITCH
    engine.add(request("b", range(30, 45), max_tokens=12))
    run_to_end(engine)
    assert model.num_computed_tokens == SWITCH + SWITCH + (15 + 12 - 1)
    assert engine.scheduler.num_preemptions == 0


def test_prefixes_are_found_by_sequences_that_are_rotated_alike() -> None:
    engine = make_engine(FakeModel(SWITCH))
    prompt = list(range(40))
    found = []
    for name, length in (("long", 40), ("short", 18), ("short again", 18), ("long again", 40)):
        engine.add(request(name, prompt[:length], max_tokens=1))
        (output,) = run_to_end(engine)[name].outputs
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 17, 39]


def test_no_switch_where_no_sequence_is_longer() -> None:
    assert make_engine(FakeModel(SWITCH), max_model_len=SWITCH).limits.longrope_threshold is None
    assert make_engine(FakeModel(SWITCH), max_model_len=SWITCH + 1).limits.longrope_threshold == SWITCH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"), load_golden("phi3_longrope_crossing"))


@pytest.mark.parametrize("device", ["cpu", "emulated:sm_80"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 4, "exact": True}], ids=["default", "chunks"])
@pytest.mark.exhaustive_cases("chunks-emulated")
def test_answers_are_transformers(folder: Path, device: str, settings: dict[str, Any]) -> None:
    golden = load_golden("phi3_longrope_crossing")
    engine = build_engine(folder, device=device, max_model_len=64, block_size=8, num_blocks=24, seed=0, **settings)
    expected = golden.greedy_ids["float32"]
    for name in ("first", "with its prefixes", "with its graphs"):
        engine.add(request(name, golden.prompt_ids, eos=(), max_tokens=len(expected)))
        assert run_to_end(engine)[name].token_ids() == expected
    assert engine.stats().num_graph_steps > 0
    engine.close()


def test_logits_beside_the_steps_are_those_of_the_length(folder: Path) -> None:
    engine, model = build_engine(folder, max_model_len=64, block_size=8, seed=0), load_model(folder)
    assert model.longrope_threshold == 16
    for length in (15, 16, 17, 40):
        ids = (np.arange(length) * 7 % 60).tolist()
        assert relative_error(engine.logits(ids), logits_of(model, ids)) < 1e-5
    engine.close()
