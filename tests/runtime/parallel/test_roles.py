"""Roles: who computes a prompt, who writes its answer, and the router's books when a request moves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.errors import InvalidArgumentError
from runtime.parallel.prefix_index import PromptDigests
from runtime.parallel.roles import AutoRoles, EngineLoad, OpenAnswers, StaticRoles
from runtime.parallel.routing import Router
from tests.runtime.parallel.test_routing import SECRET, info, request

IDLE = EngineLoad(0, 0, 0)


def test_static_roles_keep_prompts_and_decodes_apart() -> None:
    roles = StaticRoles(2, 4)
    loads = [EngineLoad(100, 0, 0), EngineLoad(10, 0, 0), EngineLoad(0, 5, 500), EngineLoad(0, 1, 900)]
    assert roles.prompt_costs(loads, [5, 50, 0, 0]) == [105.0, 60.0, np.inf, np.inf]
    assert roles.decode_engine(loads, 1) == 2  # fewer tokens of context


def test_engines_that_are_not_ready_leave_their_work_to_the_others() -> None:
    roles = StaticRoles(1, 3)
    gone = EngineLoad(0, 0, 0, is_ready=False)
    assert roles.prompt_costs([gone, IDLE, IDLE], [9, 9, 8]) == [np.inf, 9.0, 8.0]
    assert roles.decode_engine([IDLE, gone, gone], 0) == 0
    assert roles.decode_engine([IDLE, gone, IDLE], 0) == 2


@pytest.mark.parametrize("num_prefill", [0, 3, 4])
def test_a_split_without_one_of_the_roles_is_refused(num_prefill: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{num_prefill} of 3 engines"):
        StaticRoles(num_prefill, 3)


def test_the_books_are_balanced_when_requests_move() -> None:
    generator = random.Random(0)
    router = Router("prefix-aware", 4, PromptDigests.of_info(info(), SECRET), roles=StaticRoles(2, 4))
    ready = [True] * 4
    open_routes = []
    for number in range(300):
        asked = request([generator.randrange(9) for _ in range(generator.randrange(1, 30))], n=generator.choice([1, 3]))
        route = router.choose(asked, router.digests_of(asked), ready)
        assert route.engine < 2
        router.drawn(route, 1)
        if number % 5:
            assert router.hand_over(route, ready) == route.engine >= 2
        open_routes.append(route)
        if generator.random() < 0.7:
            ended = open_routes.pop(generator.randrange(len(open_routes)))
            while ended.num_open:
                router.ended(ended)
    assert sum(router.num_routed) == 300
    assert sum(router.num_continued) == 240
    for route in open_routes:
        while route.num_open:
            router.ended(route)
    assert router.loads() == [0] * 4
    assert router.engine_loads(ready) == [IDLE] * 4
    assert len(router.expected) == 0


def test_the_prompt_goes_where_its_prefix_is_if_that_costs_less() -> None:
    router = Router("prefix-aware", 3, PromptDigests.of_info(info(), SECRET), roles=StaticRoles(2, 3))
    first = request(list(range(100)))
    home = router.choose(first, router.digests_of(first), [True] * 3)
    other = request(list(range(1000, 1010)))
    assert router.choose(other, router.digests_of(other), [True] * 3).engine != home.engine
    again = request([*range(100), 7])
    assert router.choose(again, router.digests_of(again), [True] * 3).engine == home.engine


def weights_first(tokens: int, sequences: int, pairs: float, context: float) -> float:
    """4 ms for the weights, 20 us a token, 30 ns a token of context."""
    return 4e-3 + 2e-5 * tokens + 3e-8 * context


def learned(num_engines: int, step_s: float, num_prompt: int = 1000, num_output: int = 200) -> AutoRoles:
    roles = AutoRoles(num_engines, weights_first, 0.5, step_s)
    for _ in range(1000):
        roles.ended(num_prompt, num_prompt, num_output, OpenAnswers(0, 0))
    return roles


def test_engines_do_both_unless_steps_must_be_short() -> None:
    """A step of 50 ms has room for prompts beside all decodes; one of 6 ms, of which the weights take 4, has not."""
    assert learned(4, 0.05).num_prefill == 0
    short = learned(4, 0.006)
    assert 0 < short.num_prefill < 4
    assert short.limit_s < 0.006
    assert learned(4, 0.006, num_prompt=4000, num_output=20).num_prefill >= short.num_prefill


def test_steps_that_exceed_the_target_are_paid_by_others() -> None:
    """With 10 ms at least, a step with prompts exceeds 8 ms: steps of decodes alone, of 5 ms, save the time for it."""

    def eager(tokens: int, sequences: int, pairs: float, context: float) -> float:
        return max(weights_first(tokens, sequences, pairs, context), 10e-3 if pairs else 0.0)

    roles = AutoRoles(2, eager, 3.0, 8e-3)
    for _ in range(1000):
        roles.ended(1000, 1000, 1000, OpenAnswers(0, 0))
    assert roles.num_prefill == 0
    assert 2e-3 < roles.most_saved_s < 60e-3
    assert roles.limit_s < 8e-3


def test_answers_that_go_on_count_at_first() -> None:
    """Only short answers have ended: engines are not chosen as if all were short."""
    plain, told = (AutoRoles(8, weights_first, 0.5, 0.006) for _ in range(2))
    for _ in range(64):
        plain.ended(1000, 1000, 20, OpenAnswers(0, 0))
        told.ended(1000, 1000, 20, OpenAnswers(500, 50_000))
    assert told.num_prefill < plain.num_prefill


def test_steps_may_be_short() -> None:
    assert AutoRoles(2, weights_first, 0.5, 0.05, max_chunk=64).budgets == [64, 64]


def test_answers_stay_where_every_engine_does_both() -> None:
    roles = learned(3, 0.05)
    loads = [EngineLoad(0, 9, 9000), EngineLoad(0, 1, 1000), IDLE]
    assert [roles.decode_engine(loads, engine) for engine in range(3)] == [0, 1, 2]
    full = [EngineLoad(0, 300, 300_000), EngineLoad(0, 1, 1000), IDLE]
    assert roles.decode_engine(full, 0) == 2


def test_answers_move_to_engines_of_answers_until_these_are_full() -> None:
    roles = learned(4, 0.006)
    count = roles.num_prefill
    loads = [EngineLoad(0, 1, 1000)] * count + [EngineLoad(0, 3, 3000)] * (4 - count)
    assert roles.decode_engine(loads, 0) == count
    full = [EngineLoad(0, 1, 1000)] * count + [EngineLoad(0, 300, 300_000)] * (4 - count)
    assert roles.decode_engine(full, 0) == 0


def test_answers_go_where_decodes_take_the_least_time() -> None:
    """Two answers after long prompts take more time of a step than five after short ones."""
    roles = learned(4, 0.006)
    others = [EngineLoad(0, 2, 40_000), EngineLoad(0, 5, 5000)]
    loads = [EngineLoad(0, 9, 9000)] * 2 + others
    assert 1 <= roles.num_prefill <= 2
    assert roles.decode_engine(loads, 0) == 3
    assert roles.decode_engine([*loads[:2], others[0]._replace(num_context=2000), others[1]], 0) == 2


def test_engines_of_answers_have_room_for_those_that_come_by_chance() -> None:
    """Prompts of very different lengths make steps of decodes vary: fewer requests are predicted than of equal ones,
    and more of the engines write answers."""
    equal, varied = learned(8, 0.006, num_output=400), AutoRoles(8, weights_first, 0.5, 0.006)
    for number in range(1000):
        num_prompt = 10_000 if number % 20 == 0 else 526  # 1,000 in the mean
        varied.ended(num_prompt, 1000, 400, OpenAnswers(0, 0))
    assert varied.means.prompt == pytest.approx(1000, rel=0.2)
    assert 0 < varied.num_prefill <= equal.num_prefill
    table = equal._table(equal.limit_s, 256, equal._steps())
    assert varied._rate(4, table)[0] < equal._rate(4, table)[0]


def test_requests_that_come_in_crowds_have_more_engines_for_answers() -> None:
    """As many answers are open in the mean, but now few and now many."""
    even, crowds = (AutoRoles(8, weights_first, 0.5, 0.006) for _ in range(2))
    for number in range(4000):
        even.ended(1000, 1000, 400, OpenAnswers(100 + number % 2 * 20, 0))
        crowds.ended(1000, 1000, 400, OpenAnswers(170 if number // 50 % 2 else 50, 0))
    assert even.means.dispersion == pytest.approx(1.0, abs=0.1)
    assert crowds.means.dispersion == pytest.approx(60**2 / 110, rel=0.1)
    growing = AutoRoles(8, weights_first, 0.5, 0.006)
    for number in range(200):
        growing.ended(1000, 1000, 400, OpenAnswers(2 * number + 2, 0))  # no crowd: the first ones have not ended yet
    assert growing.means.dispersion == 1.0
    assert 0 < crowds.num_prefill < even.num_prefill
    table = even._table(even.limit_s, 256, even._steps())
    assert crowds._rate(4, table)[0] < even._rate(4, table)[0]


def test_decodes_that_make_steps_longer_vary_more() -> None:
    """50 decodes on each of 4 engines, which take half of the steps' time: their number varies by the root of 50 / 4
    times 2. 8 % of the requests may see more than 1.405 times that, 7.0 decodes or 0.351 ms more."""
    roles = learned(8, 0.006, num_output=400)
    for limit_s, fits in ((5.34e-3, False), (5.36e-3, True)):
        row = np.array([[50.0, 0.0, 5e-3, 2e-5, 5e-5, limit_s, 0.0]])
        assert (roles._rate(4, row)[0] > 0.0) is fits


@pytest.mark.parametrize("num_engines", [1, 7])
@pytest.mark.parametrize("lost", [0.02, 0.08])
def test_as_many_prompts_are_planned_for_as_may_wait(num_engines: int, lost: float) -> None:
    roles = learned(8, 0.006)
    times = np.array([0.001, 0.1, 0.45, 0.6])
    found = roles._use(num_engines, times, lost)
    rate = 2.0 * num_engines * (0.5 - times) / times
    late = found ** np.sqrt(2.0 * (num_engines + 1)) * np.exp(-rate * (1.0 - found))
    assert late[:3] == pytest.approx(lost, rel=1e-3)  # variation is 0: all prompts are alike
    assert found[3] == 0.5  # it is late in any case
    assert 0.0 < found[2] < found[1] < found[0] < 1.0


def test_prompts_that_are_too_long_for_the_target_leave_less_for_queues() -> None:
    plain, long = AutoRoles(4, weights_first, 0.5, 0.006), AutoRoles(4, weights_first, 0.5, 0.006)
    for number in range(1000):
        plain.ended(1000, 1000, 200, OpenAnswers(0, 0))
        long.ended(1000, 30_000 if number % 20 == 0 else 1000, 200, OpenAnswers(0, 0))
    assert (plain._too_long, long._too_long) == (0.0, pytest.approx(0.05, abs=0.01))


def test_times_that_are_learned_later_choose_the_same_roles() -> None:
    roles = AutoRoles(4, None, 0.5, 0.006)
    assert (roles.num_prefill, roles.limit_s, roles.budgets) == (0, 0.0, [2048] * 4)
    loads = [EngineLoad(0, 90, 9000), EngineLoad(700, 1, 1000), IDLE, IDLE]
    assert [roles.decode_engine(loads, engine) for engine in range(4)] == [0, 1, 2, 3]
    assert np.argmin(roles.prompt_costs(loads[:2], [500, 500])) == 1  # by tokens left, of prompts and answers
    for _ in range(1000):
        roles.ended(1000, 1000, 200, OpenAnswers(0, 0))
    roles.learn(weights_first)
    known = learned(4, 0.006)
    assert (roles.num_prefill, roles.budgets) == (known.num_prefill, known.budgets)


def test_a_prompt_goes_where_its_first_token_comes_first() -> None:
    roles = learned(3, 0.05)
    loads = [EngineLoad(5000, 0, 0), EngineLoad(1000, 200, 220_000), EngineLoad(1000, 0, 0)]
    costs = roles.prompt_costs(loads, [100, 1000, 1000])
    assert costs[2] < costs[1] < costs[0]  # decodes take time of each step
    gone = [load._replace(is_ready=False) for load in loads[2:]]
    assert np.isinf(roles.prompt_costs([*loads[:2], *gone], [1, 1, 1])[2])
