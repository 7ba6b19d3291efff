"""What is proposed out of what was said before: the same as looking at every place, one by one."""

from __future__ import annotations

import random

import numpy as np

from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.speculation.drafter import SUREST
from runtime.engine.speculation.ngram import (
    LEAST_MATCH,
    MOST_KEPT_TOKENS,
    MOST_TENANTS,
    NgramDrafter,
    SuffixDrafter,
    continuation,
)


def one_by_one(tokens: list[int], ending: list[int], most: int) -> tuple[list[int], int]:
    best, place = 0, -1
    for p in range(len(tokens) - 1):
        depth = 0
        while depth < min(SUREST, len(ending)) and p >= depth and tokens[p - depth] == ending[-1 - depth]:
            depth += 1
        if depth >= max(best, LEAST_MATCH):
            best, place = depth, p
    if place < 0:
        return [], 0
    behind = tokens[place + 1 :]
    return (behind * most)[:most], best


def test_continuations() -> None:
    rng = random.Random(0)
    num_found = 0
    for _ in range(2000):
        alphabet = rng.choice([2, 3, 9])
        tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(60))]
        ending = tokens[-SUREST:] if rng.random() < 0.5 else [rng.randrange(3) for _ in range(rng.randrange(20))]
        most = rng.randrange(1, 9)
        found, depth = continuation(np.array(tokens, np.int32), np.array(ending, np.int32), most)
        assert (found.tolist(), depth) == one_by_one(tokens, ending, most)
        num_found += depth > 0
    assert num_found > 500


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
    ids, sureness = drafter.propose(one, 5)
    assert (ids.tolist(), sureness) == ([6] * 5, SUREST)
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
