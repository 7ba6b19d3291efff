"""Fair shares of tenants: the counters' rules by hand, shares of a scheduler under load, bounds on any load."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest

from runtime.engine.scheduling import policy as policies
from runtime.engine.scheduling.policy import FairShares
from runtime.engine.scheduling.sequence import Sequence
from tests.runtime.engine.fakes import Collected, collect, greedy, make_engine, request, run_to_end
from tests.runtime.engine.scheduler_cases import add, make_driver, run
from tests.runtime.engine.scheduler_driver import Driver


def driver(**settings: Any) -> Driver:
    """Room for all but rows: two sequences run at once."""
    usual: dict[str, Any] = {"scheduling_policy": "fair", "max_num_seqs": 2, "max_num_batched_tokens": 64}
    return make_driver(**usual | {"num_blocks": 160, "max_model_len": 64, "max_waiting": 10_000} | settings)


@pytest.fixture(autouse=True)
def little_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "BURST_STEPS", 0.25)


def fair(played: Driver) -> FairShares:
    assert isinstance(played.scheduler.policy, FairShares)
    return played.scheduler.policy


def ask(played: Driver, tenant: str, num_prompt_tokens: int = 8, max_tokens: int = 4, **fields: Any) -> Sequence:
    return add(played, num_prompt_tokens, max_tokens, tenant=tenant, **fields)


def counter(played: Driver, tenant: str) -> float:
    return fair(played)._tenants[tenant].counter


def starts_of(played: Driver) -> list[str]:
    """The tenants of the requests that start, in order, until nothing waits."""
    order: list[str] = []
    seen: set[Sequence] = set()
    while played.scheduler.has_work:
        played.step()
        for sequence in sorted(played.scheduler.running, key=lambda each: each.last_step):
            if sequence not in seen:
                seen.add(sequence)
                order.append(sequence.request.tenant or "")
    return order


def test_costs_are_charged() -> None:
    played = driver(max_num_seqs=1)
    ask(played, "a", num_prompt_tokens=9, max_tokens=5)
    starts_of(played)
    assert counter(played, "a") == 9 + 5 * 2.0
    prompt = [1, 2, 3, 0, 1, 2, 3, 3, 2]
    for _ in range(2):
        played.add(prompt, tenant="b", max_tokens=1)
        starts_of(played)
    # b came after a had left the queue, and is lifted to a's counter less 16; 8 tokens of its second prompt were cached
    assert counter(played, "b") == pytest.approx(3 + (9 + 2.0) + (1 + 8 * 0.1 + 2.0))


def test_a_weight_divides_costs() -> None:
    played = driver(max_num_seqs=1)
    ask(played, "a", num_prompt_tokens=9, max_tokens=5, tenant_weight=4.0)
    starts_of(played)
    assert counter(played, "a") == (9 + 5 * 2.0) / 4.0


def test_the_tenant_with_the_least_counter_starts_first() -> None:
    """Ten requests of one tenant came before two of another, which do not wait for them."""
    played = driver(max_num_seqs=1)
    for _ in range(10):
        ask(played, "flood")
    for _ in range(2):
        ask(played, "other")
    assert starts_of(played)[:4] == ["flood", "other", "flood", "other"]


def test_idle_time_is_no_credit() -> None:
    """A tenant that comes back gets no more than its half, though it had nothing for long."""
    played = driver(max_num_seqs=1)
    ask(played, "idle")
    for _ in range(100):
        ask(played, "busy")
    while len(played.scheduler.waiting) > 40:
        played.step()
    assert counter(played, "busy") > 10 * counter(played, "idle")
    for _ in range(20):
        ask(played, "idle")
    assert abs(counter(played, "busy") - counter(played, "idle")) <= 32
    found = Counter(starts_of(played)[:20])
    assert abs(found["busy"] - found["idle"]) <= 3, found


def test_shares_follow_weights() -> None:
    played = driver(max_num_seqs=4)
    for _ in range(60):
        ask(played, "one")
        ask(played, "three", tenant_weight=3.0)
    found = Counter(starts_of(played)[:60])
    assert found["three"] == pytest.approx(3 * found["one"], rel=0.15), found


def test_without_names_salts_are_tenants() -> None:
    played = driver(max_num_seqs=1)
    for salt in ("x", "x", "x", "y"):
        played.add([1, 2, 3], cache_salt=salt, max_tokens=2)
    played.add([1, 2, 3], max_tokens=2)
    assert starts_of(played)[:3] in (["x", "y", ""], ["x", "", "y"])


def test_the_greatest_tenant_is_preempted() -> None:
    """Not the latest request, which is another's."""
    played = driver(num_blocks=16, max_num_seqs=4, preemption="recompute")
    requests = [ask(played, "flood", 12, 30), ask(played, "flood", 12, 30)]
    run(played, 4)
    requests.append(ask(played, "other", 8, 20))
    while not played.scheduler.num_preemptions:
        played.step()
    assert [each.request.tenant for each in played.scheduler.waiting] == ["flood"]
    assert requests[0] in played.scheduler.running, "the first in order is kept"
    starts_of(played)
    played.scheduler.check_invariants()


@pytest.mark.parametrize("missing", ["rows", "blocks"])
def test_a_light_tenant_is_not_kept_waiting(missing: str) -> None:
    """Rows and blocks are taken by a flood: one sequence of it gives way, and in two steps the other has started."""
    settings = {"max_num_seqs": 2} if missing == "rows" else {"num_blocks": 14, "max_num_seqs": 8, "max_model_len": 40}
    played = driver(**settings)
    for _ in range(6):
        ask(played, "flood", 16, 20)
    run(played, 4)
    assert {each.request.tenant for each in played.scheduler.running} == {"flood"}
    light = ask(played, "light", 8, 4)
    run(played, 3)
    assert light in played.scheduler.running
    assert 1 <= played.scheduler.num_preemptions <= 2
    ask(played, "flood", 16, 20)
    starts_of(played)


def test_a_light_tenant_goes_before_a_prompt_that_has_begun() -> None:
    played = driver(max_num_seqs=8, max_num_batched_tokens=16)
    for _ in range(4):
        ask(played, "flood", 60, 4)
    run(played)
    light = ask(played, "light", 12, 4)
    (step,) = run(played)
    assert [(each.sequence.request.tenant, each.num_tokens) for each in step.chunks] == [("light", 12), ("flood", 4)]
    assert light.num_output_tokens == 1
    heavy = ask(played, "flood", 3, 4)
    (step,) = run(played)
    assert heavy not in [each.sequence for each in step.chunks]


def test_what_is_computed_again_is_not_charged() -> None:
    played = driver(num_blocks=10, max_num_seqs=4, preemption="recompute")
    for _ in range(3):
        ask(played, "a", 8, 20)
    starts_of(played)
    assert played.scheduler.num_preemptions > 0
    assert counter(played, "a") == 3 * (8 + 20 * 2.0)


def test_idle_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "MOST_TENANTS", 8)
    played = driver(max_num_seqs=1)
    for number in range(50):
        ask(played, f"tenant {number}", max_tokens=1)
        if number % 3 == 0:
            starts_of(played)
    assert len(fair(played)._tenants) <= 8
    starts_of(played)
    assert not fair(played)._waiting


@pytest.mark.parametrize("seed", range(6))
def test_shares_of_backlogged_tenants_differ_by_a_bound(seed: int) -> None:
    """Whatever requests ask, the services of tenants who wait all the time differ by no more than the paper's bound,
    twice the largest of a prompt and of all that run at once (theorem 4.4)."""
    rng = random.Random(seed)
    played = driver(max_num_seqs=rng.choice((1, 2, 5)), max_num_batched_tokens=rng.choice((8, 32, 64)))
    tenants = ["a", "b", "c"]
    asked: dict[str, int] = {}
    for index, tenant in enumerate(tenants):
        longest = (4, 16, 40)[index]
        for _ in range(150):
            ask(played, tenant, rng.randrange(1, longest), rng.randrange(1, 12))
        asked[tenant] = longest
    most_running = played.limits.max_num_seqs * 64 * 2.0
    served: dict[str, float] = defaultdict(float)
    while all(fair(played)._tenants[tenant].waiting for tenant in tenants):
        played.step()
        counters = {tenant: counter(played, tenant) for tenant in tenants}
        assert max(counters.values()) - min(counters.values()) <= 2 * max(40.0, most_running)
        served = counters
    assert min(served.values()) > 500, "too short a run to tell"


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_answers_do_not_depend_on_the_policy(overlap: str) -> None:
    """An engine whose blocks are too few, with a flood: what is preempted for others goes on where it was."""
    rng = random.Random(7)
    engine = make_engine(
        scheduling_policy="fair", overlap=overlap, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=8,
        max_model_len=40, preemption="recompute",
    )  # fmt: skip
    prompts = {f"{tenant}{number}": [rng.randrange(3, 50) for _ in range(rng.randrange(3, 14))]
               for number in range(12) for tenant in ("flood", "light")}  # fmt: skip
    for name, prompt in prompts.items():
        if name.startswith("flood"):
            engine.add(msgspec.structs.replace(request(name, prompt, eos=(), max_tokens=12), tenant="flood"))
    results: dict[str, Collected] = {}
    for name, prompt in prompts.items():
        for _ in range(4):
            collect(engine.step(), results)
            engine.check_invariants()
        if name.startswith("light"):
            engine.add(msgspec.structs.replace(request(name, prompt, eos=(), max_tokens=5), tenant="light"))
    run_to_end(engine, results)
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert results[name].token_ids() == greedy(prompt, 12 if name.startswith("flood") else 5), name
