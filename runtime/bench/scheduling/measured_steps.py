"""Models as the simulator serves them, with step times fitted to measured steps of a committed file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.fleet_runs import ServedModel
from runtime.engine.scheduling.step_model import LinearStepModel, StepFeatures, fit

MEMORY_SHARE = 0.9
"""A device's share of memory for weights and KV cache together."""

_LEAST_STEPS = 8


def read_models(path: Path, max_num_seqs: int = 256, page: int = 16) -> dict[str, tuple[ServedModel, dict[str, Any]]]:
    """By name: each model of the file, and how well its step times are fitted: the median and the largest relative
    error of the steps, and the error at steps that are not fitted (``check``). Raises ``BenchmarkError``."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["models"]
        return {name: _read(name, each, max_num_seqs, page) for name, each in values.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path}: not a file of measured steps: {error!r}") from None


def _read(name: str, values: dict[str, Any], max_num_seqs: int, page: int) -> tuple[ServedModel, dict[str, Any]]:
    if "fitted" in values:
        fitted = values["fitted"]
        steps = LinearStepModel.from_json(fitted["step_model"])
        errors = {"num_steps": fitted["num_steps"], "median_error": fitted["median_relative_error"]}
    else:
        features = [_features(each) for each in values["steps"]]
        seconds = [each["ms"] / 1e3 for each in values["steps"]]
        steps = _fitted(features, seconds, values.get("given"))
        apart = [abs(steps.seconds(each) / time - 1.0) for each, time in zip(features, seconds)]
        checks = [steps.seconds(_features(each)) * 1e3 / each["ms"] - 1.0 for each in values["check"]]
        errors = {
            "num_steps": len(seconds), "median_error": statistics.median(apart), "largest_error": max(apart),
            "error_beside": checks,
        }  # fmt: skip
    free = MEMORY_SHARE * values["memory_bytes"] - values["weight_bytes"] - max_num_seqs * values["sequence_bytes"]
    window = (values["window"] or 0, values["window_share"])
    model = ServedModel(
        name, steps, window, values["num_layers"], int(free // (page * values["token_bytes"])), page, max_num_seqs,
        values["token_bytes"], values["sequence_bytes"], values["eager"]["ms"] / 1e3 if "eager" in values else 0.0,
    )  # fmt: skip
    return model, errors


def _fitted(
    features: Sequence[StepFeatures], seconds: Sequence[float], given: dict[str, Any] | None
) -> LinearStepModel:
    """The fit; with ``given`` the seconds of a pair and of a token of context are these."""
    if given is None:
        return fit(features, seconds, _LEAST_STEPS).model
    per_pair, per_context = given["prefill_pairs"], given["decode_context"]
    rest = [time - per_pair * each.prefill_pairs - per_context * each.decode_context
            for time, each in zip(seconds, features)]  # fmt: skip
    found = fit([each._replace(prefill_pairs=0.0, decode_context=0.0) for each in features], rest, _LEAST_STEPS).model
    return LinearStepModel((*found.coefficients[:-2], per_pair, per_context))


def _features(values: dict[str, Any]) -> StepFeatures:
    return StepFeatures(*(values[name] for name in StepFeatures._fields))
