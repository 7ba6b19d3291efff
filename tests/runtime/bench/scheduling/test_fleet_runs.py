"""The compiled simulator of fleets has the real scheduler's times, and every request and token once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from runtime.bench.load.traces import Trace, TraceRequest
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.fleet_runs import Deployment, FleetRun, ServedModel, TracePrompts, run_fleet
from runtime.bench.scheduling.roofline import Link
from runtime.bench.scheduling.simulation import simulate
from runtime.engine.config import EngineConfig
from runtime.engine.limits import EngineLimits, resolve
from runtime.engine.scheduling.step_model import LinearStepModel, StepFeatures
from runtime.parallel.roles import AutoRoles, EngineLoad, OpenAnswers, Roles, StaticRoles

STEPS = LinearStepModel((4e-3, 1e-5, 1e-5, 1e-4, 5e-5, 1e-5, 5e-6, 2e-6, 1e-8, 4e-7))
MODEL = ServedModel("m", STEPS, (0, 0.0), 4, 400, 16, 8, 1000.0)


def trace(num_requests: int, seed: int = 0, hash_len: int = 0, most_output: int = 40) -> Trace:
    """Random requests; with ``hash_len`` conversations, whose turns continue each other."""
    generator = np.random.default_rng(seed)
    times = np.cumsum(generator.exponential(0.03, num_requests))
    found, turns = [], [0] * 5
    for number, time in enumerate(times.tolist()):
        length, output = int(generator.integers(1, 400)), int(generator.integers(1, most_output))
        ids: tuple[int, ...] = ()
        if hash_len:
            talk = int(generator.integers(5))
            turns[talk] = turns[talk] % 12 + int(generator.integers(1, 4))
            length = turns[talk] * hash_len + int(generator.integers(1, hash_len))
            ids = (*(1000 * talk + place for place in range(turns[talk])), 100_000 + number)
        found.append(TraceRequest(time, length, output, ids))
    return Trace("random", tuple(found), hash_block_len=hash_len or 512)


def limits(num_blocks: int, budget: int, block_size: int = 16) -> EngineLimits:
    config = EngineConfig(
        block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=8, max_model_len=800
    )
    return resolve(config, max_position_embeddings=800, bytes_per_block=1, available_bytes=num_blocks)


def run(requests: Trace, deployment: Deployment, rate: float = 1.0, model: ServedModel = MODEL) -> FleetRun:
    done = run_fleet(TracePrompts(requests), model, deployment, rate)
    assert done is not None
    return done


@pytest.mark.parametrize(("num_blocks", "budget", "rate"), [(400, 64, 1.0), (400, 64, 0.2), (400, 512, 2.0)])
def test_times_are_those_of_the_scheduler(num_blocks: int, budget: int, rate: float) -> None:
    requests = trace(150)
    real = simulate(requests.scaled(rate=rate), limits(num_blocks, budget), STEPS)
    ours = run(requests, Deployment((budget,)), rate)
    assert real.report()["num_preemptions"] == ours.num_preemptions == 0
    assert real.report()["num_steps"] == ours.engines["num_steps"].sum()
    for name, attribute in (("first", "first_token_s"), ("last", "last_token_s")):
        times = [getattr(request.sequences[0], attribute) for request in real.requests]
        assert ours.requests[name].tolist() == pytest.approx(times, rel=1e-9)


@pytest.mark.parametrize("most_saved_s", [0.0, 0.002])
@pytest.mark.parametrize("step_s", [0.0045, 0.006])  # the first is shorter than many steps of decodes alone
def test_steps_are_limited_as_by_the_scheduler(step_s: float, most_saved_s: float) -> None:
    requests = trace(150, seed=5).scaled(rate=0.7)
    real = simulate(requests, limits(400, 64), STEPS, step_s=step_s, most_saved_s=most_saved_s)
    ours = run(requests, Deployment((64,), follows=Limited(step_s, 64, most_saved_s)))
    free = run(requests, Deployment((64,)))
    assert real.report()["num_steps"] == ours.engines["num_steps"].sum()
    assert ours.engines["num_steps"].sum() > free.engines["num_steps"].sum()
    for name, attribute in (("first", "first_token_s"), ("last", "last_token_s")):
        times = [getattr(request.sequences[0], attribute) for request in real.requests]
        assert ours.requests[name].tolist() == pytest.approx(times, rel=1e-9)


def test_times_are_near_those_of_the_scheduler_when_requests_are_preempted() -> None:
    requests = trace(150, seed=1, most_output=300)
    real = simulate(requests.scaled(rate=4.0), limits(60, 64), STEPS)
    ours = run(requests, Deployment((64,)), 4.0, replace(MODEL, num_pages=60))
    assert real.report()["num_preemptions"] > 5
    assert ours.num_preemptions > 5
    assert ours.requests["last"].max() == pytest.approx(
        real.report()["duration_s"] + requests.requests[0].arrival_s, rel=0.1
    )


def test_times_of_shared_prefixes_are_those_of_the_scheduler_and_its_router() -> None:
    requests = trace(150, hash_len=16)
    real = simulate(requests, limits(400, 64), STEPS, num_replicas=2)
    ours = run(requests, Deployment((64, 64)))
    assert ours.requests["num_hit"].sum() > 0.3 * ours.requests["num_prompt"].sum()
    assert real.router.num_routed == pytest.approx(ours.router.num_routed, abs=8)
    means = [np.mean(real.ttfts_s), np.mean(ours.ttfts_s)]
    assert means[1] == pytest.approx(means[0], rel=0.05)


@pytest.mark.parametrize("hash_len", [0, 16])
@pytest.mark.parametrize("num_pages", [400, 60])
@pytest.mark.parametrize("kind", ["chunked", "static", "stays", "random"])
def test_every_request_ends_and_every_token_counts_once(kind: str, num_pages: int, hash_len: int) -> None:
    requests = trace(120, seed=2, hash_len=hash_len)
    kinds: dict[str, Roles | None] = {
        "chunked": None,
        "static": StaticRoles(2, 3),
        "stays": Stays(),
        "random": Anywhere(),
    }
    roles = kinds[kind]
    deployment = Deployment((64, 32, 128), roles, link=Link(1e-3, 1e6), is_layerwise=kind == "random")
    done = run(requests, deployment, 3.0, replace(MODEL, num_pages=num_pages))
    lives = done.requests
    assert (lives["first"] > lives["arrival"]).all()
    assert (lives["last"] >= lives["first"]).all()
    assert (lives["produced"] == lives["num_output"]).all()
    again = lives["num_preemptions"] == 0
    assert (lives["num_computed"][again] + lives["num_hit"][again] >= lives["num_prompt"][again]).all()
    if kind != "static" and not hash_len:
        assert (lives["num_computed"][again] == lives["num_prompt"][again]).all()
    decoded = done.engines["decode_tokens"].sum()
    assert decoded + len(lives) + lives["num_preemptions"].sum() >= lives["num_output"].sum()
    if not done.num_preemptions:
        assert decoded + len(lives) == lives["num_output"].sum()
        assert done.engines["num_tokens"].sum() == decoded + lives["num_computed"].sum()
    for name in ("num_private", "num_running", "num_decodes", "context", "num_waiting"):
        assert not done.engines[name].any(), name
    assert (done.engines["num_present"] == done.engines["num_unused"]).all()
    assert done.router.loads() == [0, 0, 0]
    assert {load.num_decodes for load in done.router.engine_loads([True] * 3)} == {0}
    if kind == "static":
        assert not done.engines["decode_tokens"][:2].any()
        assert lives["num_moved"].sum() > 0


def test_roles_under_which_every_request_stays_are_no_roles() -> None:
    requests = trace(150, seed=3)
    both: Sequence[Roles | None] = (None, Stays())
    chunked, stays = (run(requests, Deployment((64, 64), roles)) for roles in both)
    assert stays.requests["num_moved"].sum() == 0
    one, other = (run(requests, Deployment((64,), roles)) for roles in both)
    assert (one.requests["first"] == other.requests["first"]).all()
    assert (one.requests["last"] == other.requests["last"]).all()
    assert np.mean(stays.tpots_s) == pytest.approx(np.mean(chunked.tpots_s), rel=0.3)


def test_a_hand_over_by_hand() -> None:
    """A prompt of 10 tokens, an answer of 2; steps of 1 s and 0.1 s a token; a link of 2 s, and 10 bytes a second."""
    model = replace(MODEL, steps=LinearStepModel((1.0, 0.0, 0.1, *[0.0] * 7)), token_bytes=4.0)
    request = Trace("one", (TraceRequest(0.0, 10, 2),))
    for is_layerwise, seconds in (
        (False, 4.0),
        (True, 3.0),
    ):  # layer by layer: 2 s while computing, half of a layer of 4 left
        done = run(
            request,
            Deployment((64, 64), StaticRoles(1, 2), link=Link(2.0, 10.0), is_layerwise=is_layerwise),
            1.0,
            model,
        )
        first = 2.0
        sent = 4.0 if not is_layerwise else 2.0
        assert done.requests["first"][0] == pytest.approx(first)
        assert done.requests["num_moved"][0] == 10
        assert done.requests["last"][0] == pytest.approx(first + 2.0 + sent + 1.1)
        assert seconds


def test_engines_of_either_role_keep_the_steps_of_the_target() -> None:
    requests = trace(150, seed=4)
    roles = AutoRoles(1, step_seconds, 1.0, 0.006, rows=8)
    limited, free = run(requests, Deployment((512,), roles, roles), 1.0), run(requests, Deployment((512,)), 1.0)
    # Means of answers, no single steps: those without prompts save time for one with them.
    limited_s, free_s = (np.percentile(each.tpots_s, 97.0) for each in (limited, free))
    assert limited_s <= 0.006 * 1.05
    assert free_s > 0.006 * 1.1


def step_seconds(tokens: int, sequences: int, pairs: float, context: float) -> float:
    return STEPS.seconds(StepFeatures(tokens, sequences, pairs, context))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="does not fit 20 pages"):
        run(trace(20), Deployment((64,)), 1.0, replace(MODEL, num_pages=20))


class Limited(AutoRoles):
    """An engine whose steps are limited from the beginning."""

    def __init__(self, step_s: float, budget: int, most_saved_s: float) -> None:
        super().__init__(1, None, 1.0, step_s)
        self.limit_s, self.budgets, self.most_saved_s = step_s, [budget], most_saved_s


class Stays:
    """Every engine does both."""

    def prompt_costs(self, loads: Sequence[EngineLoad], num_new: Sequence[int]) -> list[float]:
        return [load.num_prompt + 10.0 * load.num_decodes for load in loads]

    def decode_engine(self, loads: Sequence[EngineLoad], engine: int) -> int:
        return engine

    def ended(self, num_prompt: int, num_computed: int, num_output: int, others: OpenAnswers) -> None:
        """Nothing follows."""


class Anywhere(Stays):
    """Answers are written anywhere."""

    def decode_engine(self, loads: Sequence[EngineLoad], engine: int) -> int:
        return (sum(load.num_context for load in loads) + engine) % len(loads)
