"""Step-time models: the fit against coefficients that made the times, the roofline against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.step_model import (
    LEAST_STEPS,
    TERMS,
    LinearStepModel,
    StepFeatures,
    features_of,
    fit,
    non_negative_least_squares,
    window_shares,
)


def test_features() -> None:
    # A decode at position 9 sees 10 tokens; three tokens from position 5 see 6 + 7 + 8.
    assert features_of([(9, 1), (5, 3), (0, 1)]) == StepFeatures(
        tokens=5, sequences=3, prefill_pairs=21, decode_context=11
    )
    assert features_of([]) == StepFeatures(0, 0, 0, 0)


def test_layers_with_a_window_see_its_tokens_alone() -> None:
    windows = (None, 4, 7, 4, None, 1)
    shares = window_shares(windows)
    assert shares == ((1, 1 / 6), (4, 2 / 6), (7, 1 / 6))
    assert window_shares((None, None)) == ()
    chunks = [(9, 1), (5, 3), (0, 1), (0, 12), (2, 2), (3, 1), (30, 40)]
    pairs = context = 0.0
    for window in windows:
        for start, count in chunks:
            seen = sum(min(position + 1, window or position + 1) for position in range(start, start + count))
            pairs += 0 if count == 1 else seen
            context += seen if count == 1 else 0
    found = features_of(chunks, shares)
    assert found[:2] == (60, 7)
    assert found[2:] == (pytest.approx(pairs / 6), pytest.approx(context / 6))


def random_steps(count: int) -> list[StepFeatures]:
    generator = np.random.default_rng(0)
    steps = []
    for _ in range(count):
        decodes = [(int(start), 1) for start in generator.integers(0, 2000, generator.integers(0, 40))]
        prefill = [(int(generator.integers(0, 1000)), int(generator.integers(2, 500)))] * int(generator.integers(0, 3))
        steps.append(features_of([*decodes, *prefill] or [(0, 1)]))
    return steps


def test_fit_finds_the_coefficients_that_made_the_times() -> None:
    truth = LinearStepModel((1e-3, 2e-5, 3e-5, 0.0, 1e-4, 5e-5, 1e-8, 2e-8))
    steps = random_steps(300)
    found = fit(steps, [truth.seconds(step) for step in steps])
    assert found.model.coefficients == pytest.approx(truth.coefficients, rel=1e-4, abs=1e-9)
    assert found.num_steps == 300
    assert found.relative_error < 1e-6
    assert abs(found.total_error) < 1e-6


def test_fit_keeps_the_total_under_noise_and_no_term_negative() -> None:
    truth = LinearStepModel((2e-3, 0.0, 3e-5, 1e-3, 0.0, 0.0, 1e-8, 2e-8))
    steps = random_steps(400)
    noise = np.random.default_rng(1).uniform(0.7, 1.3, len(steps))
    found = fit(steps, [float(truth.seconds(step) * factor) for step, factor in zip(steps, noise)])
    assert min(found.model.coefficients) >= 0.0
    assert abs(found.total_error) < 0.03
    probe = features_of([(500, 1)] * 10 + [(0, 256)])
    assert found.model.seconds(probe) == pytest.approx(truth.seconds(probe), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_non_negative_least_squares_is_optimal(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no gradient descends from zero, none is left where x > 0."""
    generator = np.random.default_rng(seed)
    a, b = generator.normal(size=(30, 6)), generator.normal(size=30)
    x = non_negative_least_squares(a, b)
    gradient = a.T @ (a @ x - b)
    assert (x >= 0.0).all()
    assert (gradient > -1e-9).all()
    assert np.abs(gradient[x > 0.0]).max(initial=0.0) < 1e-9
    assert 0 < (x > 0.0).sum() < 6


def test_what_cannot_be_fitted_is_refused() -> None:
    steps = random_steps(LEAST_STEPS)
    with pytest.raises(BenchmarkError, match="at least"):
        fit(steps[:-1], [1.0] * (LEAST_STEPS - 1))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BenchmarkError, match="positive"):
            fit(steps, [bad] + [1.0] * (LEAST_STEPS - 1))


def test_json() -> None:
    model = LinearStepModel(tuple(float(number) for number in range(len(TERMS))))
    assert LinearStepModel.from_json(model.as_json()) == model
    for name, value in (("constant", -1.0), ("tokens", float("nan")), ("tokens", True), ("tokens", "1")):
        with pytest.raises(BenchmarkError, match=name):
            LinearStepModel.from_json({**model.as_json(), name: value})
    with pytest.raises(BenchmarkError, match="exactly the terms"):
        LinearStepModel.from_json({"constant": 1.0})
