"""Proposals that are kept with a probability: what comes has the wanted distribution."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from runtime.errors import InvalidArgumentError

NUM_DRAWS = 1_000_000


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """In standard deviations above its mean."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "what cannot come has come"
    wanted = expected > 0
    freedom = np.count_nonzero(wanted) - 1
    value = ((counts[wanted] - expected[wanted]) ** 2 / expected[wanted]).sum()
    return float((value - freedom) / np.sqrt(2 * max(1, freedom)))


def distribution(rng: np.random.Generator, vocab: int, num_zeros: int = 0) -> np.ndarray:
    values = rng.exponential(size=vocab) ** 2
    values[rng.permutation(vocab)[:num_zeros]] = 0.0
    return (values / values.sum()).astype(np.float32)


CASES = {
    "near": lambda rng: (p := distribution(rng, 16), (0.8 * p + 0.2 * distribution(rng, 16)).astype(np.float32)),
    "far": lambda rng: (distribution(rng, 16), distribution(rng, 16)),
    "p is filtered": lambda rng: (distribution(rng, 16, 11), distribution(rng, 16)),
    "both are filtered, apart": lambda rng: (
        np.array([0.5, 0.5, 0, 0], np.float32),
        np.array([0, 0, 0.25, 0.75], np.float32),
    ),
    "q is certain": lambda rng: (distribution(rng, 16), np.eye(16, dtype=np.float32)[3]),
    "equal": lambda rng: ((p := distribution(rng, 16)), p),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_have_the_wanted_distribution(name: str) -> None:
    """A million draws of the first token, each behind a proposal that was drawn from q."""
    rng = np.random.default_rng(5)
    p, q = CASES[name](rng)
    drafts = rng.choice(len(q), NUM_DRAWS, p=q.astype(np.float64) / q.sum(dtype=np.float64)).astype(np.int32)
    kept = np.zeros(NUM_DRAWS, np.int32)
    tokens = np.zeros(NUM_DRAWS, np.int32)
    size = 100_000
    for start in range(0, NUM_DRAWS, size):
        part = slice(start, start + size)
        kept[part], tokens[part] = ops.keep_proposals(
            np.broadcast_to(p, (size, len(p))).copy(), np.broadcast_to(q, (size, len(q))).copy(), drafts[part],
            np.ones(size, np.int32), rng.integers(0, 2**63, size).astype(np.uint64), np.zeros(size, np.int32),
            np.arange(size, dtype=np.int32),
        )  # fmt: skip
    assert (tokens[kept == 1] == -1).all()
    assert (tokens[kept == 0] != drafts[kept == 0]).all()
    tokens = np.where(kept == 1, drafts, tokens)
    assert abs(chi_square(np.bincount(tokens, minlength=len(p)), p.astype(np.float64) / p.sum(dtype=np.float64))) < 5
    rate = np.minimum(p, q).sum()
    assert abs(kept.mean() - rate) < 5 * np.sqrt(max(rate * (1 - rate), 1e-6) / NUM_DRAWS)


def test_a_chain_of_proposals_has_the_wanted_joint_distribution() -> None:
    """Two tokens, the second's distributions depending on the first; where the first is not kept, the second is drawn
    behind it in a step of its own, with the same seed."""
    rng, vocab, num = np.random.default_rng(6), 5, 200_000
    first_p, first_q = distribution(rng, vocab), distribution(rng, vocab)
    later_p = np.stack([distribution(rng, vocab) for _ in range(vocab)])
    later_q = np.stack([distribution(rng, vocab) for _ in range(vocab)])

    def draw(of: np.ndarray) -> np.ndarray:
        return (of.cumsum(-1) > rng.random((len(of), 1)) * of.sum(-1, keepdims=True)).argmax(-1).astype(np.int32)

    seeds, choices = np.arange(num, dtype=np.uint64), np.zeros(num, np.int32)
    one = draw(np.broadcast_to(first_q, (num, vocab)))
    two = draw(later_q[one])
    wanted = np.stack([np.broadcast_to(first_p, (num, vocab)), later_p[one]], 1).reshape(-1, vocab)
    proposed = np.stack([np.broadcast_to(first_q, (num, vocab)), later_q[one]], 1).reshape(-1, vocab)
    drafts, positions = np.stack([one, two], 1).reshape(-1), np.tile(np.arange(2, dtype=np.int32), num)
    kept, instead = ops.keep_proposals(wanted, proposed, drafts, np.full(num, 2, np.int32), seeds, choices, positions)
    assert set(kept.tolist()) == {0, 1, 2}
    first = np.where(kept >= 1, one, instead)
    again = kept == 0
    drafts = draw(later_q[first[again]])
    counts = np.ones(len(drafts), np.int32)
    kept_later, instead_later = ops.keep_proposals(
        later_p[first[again]], later_q[first[again]], drafts, counts, seeds[again], choices[again], counts
    )
    second = np.where(kept == 2, two, instead)
    second[again] = np.where(kept_later == 1, drafts, instead_later)
    joint = (first_p[:, None] * later_p).astype(np.float64)
    counted = np.bincount(first * vocab + second, minlength=vocab * vocab)
    assert abs(chi_square(counted, joint.reshape(-1) / joint.sum())) < 5


def test_nothing_can_be_drawn() -> None:
    zeros, some = np.zeros((1, 4), np.float32), np.full((1, 4), 0.25, np.float32)
    one = np.ones(1, np.int32)
    kept, instead = ops.keep_proposals(zeros, some, one, one, np.zeros(1, np.uint64), one, one)
    assert (kept.tolist(), instead.tolist()) == ([0], [-1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wanted", np.zeros((2, 4), np.float64)), ("proposed", np.zeros((1, 4), np.float32)),
        ("drafts", np.array([1, 4], np.int32)), ("counts", np.array([1, 2], np.int32)),
        ("seeds", np.zeros(2, np.int64)), ("positions", np.zeros(3, np.int32)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name: str, value: np.ndarray) -> None:
    given = {
        "wanted": np.zeros((2, 4), np.float32), "proposed": np.zeros((2, 4), np.float32),
        "drafts": np.zeros(2, np.int32), "counts": np.ones(2, np.int32), "seeds": np.zeros(2, np.uint64),
        "choices": np.zeros(2, np.int32), "positions": np.zeros(2, np.int32),
    }  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=name):
        ops.keep_proposals(**{**given, name: value})
