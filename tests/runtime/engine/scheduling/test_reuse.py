"""What a sequence takes over instead of computing it."""

from __future__ import annotations

import pytest

from runtime.engine.messages import PrefixMiss
from runtime.kv.kinds import FULL, AnyKind, State, Window, has_states
from tests.runtime.engine.scheduler_cases import add, chunks_of, first_chunk, make_driver, run

PROMPT = [0, 1, 2, 3, 3, 2, 1, 0, 1, 1]


def test_a_prompt_is_found_again_but_for_its_last_token() -> None:
    driver = make_driver()
    assert first_chunk(driver, PROMPT) == (0, 10)
    assert first_chunk(driver, PROMPT) == (9, 1)
    assert first_chunk(driver, PROMPT[:8]) == (7, 1)
    assert first_chunk(driver, PROMPT[:5] + [0, 0]) == (5, 2)
    assert driver.pool.counters.hit_tokens == 9 + 7 + 5
    assert driver.pool.counters.queried_tokens == 10 + 10 + 8 + 7


def test_salts_share_nothing() -> None:
    driver = make_driver()
    assert first_chunk(driver, PROMPT, cache_salt="a") == (0, 10)
    assert first_chunk(driver, PROMPT, cache_salt="b") == (0, 10)
    assert first_chunk(driver, PROMPT) == (0, 10)
    assert first_chunk(driver, PROMPT, cache_salt="a") == (9, 1)


def test_without_prefix_caching_nothing_is_found() -> None:
    driver = make_driver(enable_prefix_caching=False)
    assert first_chunk(driver, PROMPT) == first_chunk(driver, PROMPT) == (0, 10)


@pytest.mark.parametrize(
    ("fields", "settings", "chunks", "miss"),
    [
        ({}, {}, [(0, 0, 8), (0, 8, 2)], PrefixMiss("unseen", 0, 0)),
        ({"prompt_logprobs": 0}, {}, [(0, 0, 8), (0, 8, 2)], PrefixMiss("prompt_logprobs", 0, 0)),
        ({}, {"enable_prefix_caching": False}, [(0, 0, 10), (0, 10, 1)], None),
    ],
)
def test_states_cut_prompts_only_where_somebody_can_find_them(
    fields: dict[str, int], settings: dict[str, bool], chunks: list[tuple[int, int, int]], miss: PrefixMiss | None
) -> None:
    """And a prompt that needs log probabilities says that this is why nothing was looked up."""
    driver = make_driver(cache_kinds=(FULL, State()), **settings)
    request = driver.add(PROMPT, max_tokens=2, **fields)
    assert request is not None
    assert [chunk for step in run(driver, 2) for chunk in chunks_of(step)] == chunks
    assert request.sequences[0].miss == miss
    driver.drain()


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, Window(6)), (FULL, State()), (State(),)])
def test_a_miss_names_the_first_token_that_differs(kinds: tuple[AnyKind, ...]) -> None:
    """And what the cache has there, if the request may show it, of its own salt alone."""
    driver = make_driver(cache_kinds=kinds, num_blocks=64)
    first_prompt = [1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0, 1, 3, 3]
    for salt in ("a", "b"):
        driver.add(
            first_prompt if salt == "a" else [1, 2, 3, 0, 1, 3, *first_prompt[6:]], max_tokens=1, cache_salt=salt
        )
        run(driver)
    prompt = [1, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0, 0]

    def differs(salt: str | None, *, is_shown: bool = True) -> tuple[int, list[int]]:
        request = driver.add(prompt, max_tokens=1, cache_salt=salt)
        assert request is not None
        request.shows_difference = is_shown
        run(driver)
        (sequence,) = request.sequences
        assert sequence.miss is not None
        assert sequence.miss.reason in ("unseen", "no_checkpoint" if has_states(kinds) else "unseen")
        return sequence.miss.first_difference, sequence.cached_ids[:3]

    assert differs("a", is_shown=False) == (6, [])
    prompt[6] = 1
    assert differs("a") in ((6, [0, 0, 0]), (6, [3, 3, 2])), "of one of the two prompts before"
    prompt[5] = 0
    assert differs("b") == (5, [3, 3, 3])
    assert differs(None) == (0, []), "nobody's"
    driver.drain()


def test_a_state_that_draft_tokens_continue_is_not_recorded_again() -> None:
    """The page of the state at the prompt's end has those after kept draft tokens, too."""
    driver = make_driver(cache_kinds=(FULL, State()), pending_tokens=3)
    request = driver.add(PROMPT[:9], max_tokens=8)
    assert request is not None
    (sequence,) = request.sequences
    run(driver)
    driver.scheduler.drafts[sequence] = [0, 1, 2]
    assert [chunks_of(step) for step in run(driver)] == [[(0, 8, 4)]]
    assert sequence.state_ends[0] == range(9, 13)  # the driver kept all
    step = driver.scheduler.schedule()  # they count as committed
    driver.abort(sequence)
    driver.scheduler.extend(step)
    assert first_chunk(driver, [*PROMPT[:9], 0, 1, 2, 3, 3])[0] == 9


def test_a_chat_goes_on_from_its_answer() -> None:
    driver = make_driver()
    request = driver.add(PROMPT, max_tokens=7)
    assert request is not None
    (sequence,) = request.sequences
    driver.drain()
    answer = sequence.output_ids.tolist()
    assert first_chunk(driver, [*PROMPT, *answer, 2, 2]) == (16, 3)  # the answer's last token was never computed


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    driver = make_driver()
    assert first_chunk(driver, PROMPT) == (0, 10)
    assert first_chunk(driver, PROMPT, prompt_logprobs=0) == (0, 10)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_choices_share_full_blocks_and_copy_the_last(enable_prefix_caching: bool) -> None:
    driver = make_driver(enable_prefix_caching=enable_prefix_caching)
    request = driver.add(PROMPT, n=3, max_tokens=4)
    assert request is not None
    first, second = run(driver, 2)
    assert chunks_of(first) == [(0, 0, 10)]
    assert chunks_of(second) == [(0, 10, 1), (0, 9, 1), (0, 9, 1)]
    tables = [sequence.blocks[0] for sequence in request.sequences]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert second.copies == [(tables[0][2], tables[1][2]), (tables[0][2], tables[2][2])]
    driver.drain()


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    driver = make_driver(num_blocks=4, max_model_len=16, num_host_blocks=16)
    assert first_chunk(driver, PROMPT) == (0, 10)
    assert first_chunk(driver, [3] * 14) == (0, 14)
    request = driver.add(PROMPT, max_tokens=1)
    assert request is not None
    (step,) = run(driver)
    assert len(step.swap_in) == 2
    assert chunks_of(step) == [(2, 8, 2)]


def test_a_full_pool_does_not_wait_for_the_copy_it_would_make() -> None:
    """One request that needs every block cannot keep the source of a copy, too."""
    driver = make_driver(num_blocks=3, max_model_len=12)
    assert first_chunk(driver, PROMPT[:6]) == (0, 6)
    assert first_chunk(driver, PROMPT[:5] + [0, 0, 0, 0, 0])[0] in (4, 5)


def test_a_full_pool_starts_from_the_state_before_the_copy_it_would_make() -> None:
    driver = make_driver(num_blocks=6, max_model_len=16, cache_kinds=(FULL, State()))
    driver.add(PROMPT, max_tokens=2)
    driver.drain()
    driver.add([*PROMPT, 2, 2, 2, 2], max_tokens=1)
    assert chunks_of(run(driver)[0]) == [(1, 8, 4)]


def test_states_are_the_last_groups() -> None:
    with pytest.raises(AssertionError, match="a group of states is the first"):
        make_driver(cache_kinds=(State(), FULL))


def test_cached_tokens_are_counted_once() -> None:
    driver = make_driver()
    assert first_chunk(driver, PROMPT) == (0, 10)
    sequence = add(driver, 10)
    assert sequence.num_cached_tokens is None
    run(driver)
    assert sequence.num_cached_tokens == 0
    request = driver.add(PROMPT)
    assert request is not None
    run(driver)
    assert request.sequences[0].num_cached_tokens == 9


def test_an_abort_before_the_copy_was_made_leaves_nothing_to_find() -> None:
    """The plan's copy is dropped, so the target block must not be found later."""
    driver = make_driver()
    assert first_chunk(driver, PROMPT[:6], cache_salt="a") == (0, 6)
    request = driver.add(PROMPT[:5] + [0, 1], cache_salt="a")
    assert request is not None
    step = driver.scheduler.schedule()
    assert step.copies
    assert chunks_of(step) == [(1, 5, 2)]
    driver.scheduler.finish(request.sequences[0])
    assert not step.copies
    driver.scheduler.extend(step)
    assert not step.has_work
    driver.scheduler.check_invariants()
    driver.open.clear()
    assert first_chunk(driver, PROMPT[:5] + [0, 2], cache_salt="a") == (5, 2)
