"""What is proposed out of what was said before: the same as looking at every place, one by one."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.ngram_lookup import LEAST_MATCH, MOST_PLACES
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.speculation.drafter import SUREST
from runtime.engine.speculation.ngram import (
    BREAK,
    MOST_KEPT_TOKENS,
    MOST_TENANTS,
    Lookup,
    NgramDrafter,
    SuffixDrafter,
    Text,
)


def one_by_one(tokens: list[int], ending: list[int], most: int) -> tuple[list[int], int]:
    """Every place is looked at. ``tokens`` may have breaks."""
    best, place = 0, -1
    near = [p for p in range(len(tokens) - 1) if ending and tokens[p] == ending[-1]][-MOST_PLACES:]
    for p in near:
        depth = 0
        while depth < min(SUREST, len(ending)) and p >= depth and tokens[p - depth] == ending[-1 - depth]:
            depth += 1
        if depth >= max(best, LEAST_MATCH) and tokens[p + 1] != BREAK:
            best, place = depth, p
    if place < 0:
        return [], 0
    behind = (tokens[place + 1 :] * most)[:most]
    return behind[: behind.index(BREAK)] if BREAK in behind else behind, best


def array(ids: list[int]) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def ids_of_any_size(rng: random.Random) -> int:
    """How many different ids a text has: few, so that much agrees, or so many that an index grows."""
    return rng.choice([2, 3, 9, 5000])


def test_a_text_that_grows_is_searched_as_if_place_by_place() -> None:
    rng = random.Random(0)
    num_found = 0
    for _ in range(40):
        size = ids_of_any_size(rng)
        tokens = [rng.randrange(size) for _ in range(rng.choice([1, 2, 3, 20, 700]))]
        text = Text(array(tokens))
        lookup = Lookup(text, text)
        for _ in range(rng.choice([5, 60])):
            most = rng.randrange(1, 9)
            found, depth = lookup(most)
            assert (found.tolist(), depth) == one_by_one(tokens, tokens[-SUREST:], most)
            num_found += depth > 0
            more = [rng.randrange(size) for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 300]))]
            if rng.random() < 0.3 and len(tokens) > 5:
                more += tokens[2:30]
            tokens += more
            if len(more) == 1:
                text.append(more[0])
            else:
                text.extend(array(more))
    assert num_found > 300


def test_another_text_is_searched_where_it_agrees_for_longer() -> None:
    """Its oldest tokens are forgotten, now and then out of the array, too."""
    rng = random.Random(1)
    num_own = num_others = 0
    for _ in range(40):
        size = ids_of_any_size(rng)
        own = [rng.randrange(size) for _ in range(rng.randrange(1, 40))]
        begin = rng.randrange(len(own))
        text, other = Text(array(own), start=begin), Text(array([]))
        others: list[int] = []
        lookup, kept = Lookup(text, text), rng.choice([3, 50, 400])
        for _ in range(40):
            answer = [*rng.choices(own, k=3), *own[-rng.randrange(1, 20) :], *(rng.randrange(size) for _ in range(9))]
            others = [*others, *answer, BREAK]
            other.extend(array(answer))
            other.append(BREAK)
            other.keep(max(0, len(other) - kept))
            if len(other) > 600:
                other.forget(len(other) - kept)
            fresh = others[-kept:] if rng.random() < 0.8 else own
            more = fresh[(at := rng.randrange(len(fresh))) : at + rng.randrange(20)]
            more = [*more[: more.index(BREAK)]] if BREAK in more else more
            own = [*own, *more]
            text.extend(array(more))
            most, ending = rng.randrange(1, 9), own[max(begin, len(own) - SUREST) :]
            wanted = one_by_one(own[begin:], ending, most)
            if wanted[1] < SUREST and (there := one_by_one(others[-kept:], ending, most))[1] > wanted[1]:
                wanted, num_others = there, num_others + 1
            elif wanted[1]:
                num_own += 1
            found, depth = lookup(most, other)
            assert (found.tolist(), depth) == wanted
            assert lookup.place == -1 or depth
    assert num_own > 200
    assert num_others > 200


def sequence(prompt: list[int], salt: str | None = None) -> Sequence:
    params, ids = SamplingParams(max_tokens=1000), np.array(prompt, np.int32)
    request = Request("x", ids, params, max_tokens=1000, arrival_s=0.0, cache_salt=salt)
    return Sequence(request, 0)


def grow(one: Sequence, ids: list[int]) -> None:
    for token_id in ids:
        one.num_pending += 1
        one.append(token_id)


def test_a_text_grows_with_its_sequence() -> None:
    drafter, one = NgramDrafter(), sequence([1, 2, 3, 4, 5, 1, 2])
    assert drafter.propose(one, 3)[0].tolist() == [3, 4, 5]
    grow(one, [9, 8, 7, 4, 5])
    assert drafter.propose(one, 3)[0].tolist() == [1, 2, 9]
    grow(one, [6] * 700)
    ids, confidence = drafter.propose(one, 5)
    assert (ids.tolist(), confidence) == ([6] * 5, SUREST)
    drafter.end(one)


def test_answers_of_the_same_tenant_are_remembered() -> None:
    drafter = SuffixDrafter()
    first = sequence([1], "a")
    grow(first, [10, 11, 12, 13, 14])
    drafter.end(first)
    assert drafter.propose(sequence([7, 11, 12], "a"), 7)[0].tolist() == [13, 14], "no further than the answer went"
    assert not len(drafter.propose(sequence([7, 11, 12], "b"), 7)[0])
    assert not len(drafter.propose(sequence([7, 11, 12]), 7)[0])


def test_what_is_remembered_is_bounded() -> None:
    drafter = SuffixDrafter()
    for number in range(MOST_TENANTS + 3):
        one = sequence([1], str(number))
        grow(one, [10, 11, 12])
        drafter.end(one)
    assert not len(drafter.propose(sequence([10, 11], "0"), 1)[0])
    assert drafter.propose(sequence([10, 11], "9"), 1)[0].tolist() == [12]
    for number in range(3 * MOST_KEPT_TOKENS // 1000):
        one = sequence([1], "9")
        grow(one, [20 + number % 7] * 1000)
        drafter.end(one)
    assert not len(drafter.propose(sequence([10, 11], "9"), 1)[0]), "long ago"
    latest = drafter.propose(sequence([24, 24], "9"), 2)[0]
    assert latest.tolist() == [24], "up to the end of that answer"
