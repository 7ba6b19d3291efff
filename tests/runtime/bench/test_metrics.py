"""Closed forms for the benchmark's numbers, and its refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runtime.bench.load.samples import random_prompts, varied_lengths
from runtime.bench.metrics import (
    BenchmarkError,
    check_finite,
    check_outputs,
    check_same_greedy,
    percentiles_of,
    summarize,
    time_per_output_token_s,
)


def test_percentiles_interpolate() -> None:
    assert percentiles_of([1.0, 2.0, 3.0, 4.0, 5.0], (0, 50, 75, 90, 100)) == pytest.approx(
        {"0": 1.0, "50": 3.0, "75": 4.0, "90": 4.6, "100": 5.0}
    )


def test_summary_is_in_milliseconds_under_the_known_keys() -> None:
    assert summarize("ttft", [0.001, 0.003], (50, 99.9)) == pytest.approx(
        {
            "mean_ttft_ms": 2.0,
            "median_ttft_ms": 2.0,
            "std_ttft_ms": 1.0,
            "p50_ttft_ms": 2.0,
            "p99.9_ttft_ms": 2.998,
        }
    )
    assert set(summarize("itl", []).values()) == {0.0}


def test_tpot_leaves_the_first_token_out() -> None:
    assert time_per_output_token_s(1.0, 0.2, 5) == pytest.approx(0.2)
    assert time_per_output_token_s(1.0, 1.0, 1) is None


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(number: float) -> None:
    with pytest.raises(BenchmarkError, match=r"a\.b"):
        check_finite({"a": {"b": [1.0, number]}, "name": "x"})
    check_finite({"a": {"b": [1.0, 2.0]}, "name": "x"})


def test_outputs_are_checked() -> None:
    check_outputs([[1, 2], [0, 9]], 2, 10, "x")
    with pytest.raises(BenchmarkError, match="request 1 gave 1 tokens, not 2"):
        check_outputs([[1, 2], [0]], 2, 10, "x")
    with pytest.raises(BenchmarkError, match="token 10"):
        check_outputs([[1, 10]], 2, 10, "x")


def test_greedy_runs_may_differ_by_a_tie_alone() -> None:
    def logits_of(token_ids: list[int]) -> np.ndarray:
        row = np.array([0.0, 1.0, 1.0 - 5e-4, 0.5], np.float32)
        return np.tile(row, (len(token_ids), 1))

    assert check_same_greedy("x", [[0]], [[1, 1]], [[1, 1]], logits_of) == 0
    assert check_same_greedy("x", [[0]], [[1, 2]], [[1, 1]], logits_of) == 1
    with pytest.raises(BenchmarkError, match="token 3 instead of 1 at position 1"):
        check_same_greedy("x", [[0]], [[1, 3]], [[1, 1]], logits_of)
    with pytest.raises(BenchmarkError, match="1 tokens, not 2"):
        check_same_greedy("x", [[0]], [[1]], [[1, 1]], logits_of)


def test_greedy_check_refuses_nan() -> None:
    def nan_logits(token_ids: list[int]) -> np.ndarray:
        return np.full((len(token_ids), 4), np.nan, np.float32)

    with pytest.raises(BenchmarkError):
        check_same_greedy("x", [[0]], [[1]], [[2]], nan_logits)


def test_prompts_are_distinct_and_reproducible() -> None:
    prompts = random_prompts(32, 4, 100, seed=3)
    assert prompts == random_prompts(32, 4, 100, seed=3) != random_prompts(32, 4, 100, seed=4)
    assert len({tuple(prompt) for prompt in prompts}) == 32
    assert {len(prompt) for prompt in prompts} == {4}
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)
    with pytest.raises(BenchmarkError, match="larger vocabulary"):
        random_prompts(9, 1, 10, seed=0)
    with pytest.raises(BenchmarkError, match="at least 1"):
        random_prompts(1, 0, 10, seed=0)


def test_varied_lengths() -> None:
    assert varied_lengths(3, 10, 0.0, seed=0) == [10, 10, 10]
    lengths = varied_lengths(500, 10, 0.5, seed=0)
    assert (min(lengths), max(lengths)) == (5, 15)
    with pytest.raises(BenchmarkError, match=r"\[0, 1\)"):
        varied_lengths(3, 10, 1.0, seed=0)
