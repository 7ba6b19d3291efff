"""Statistics of measurements, and their checks.

A benchmark first verifies the work that it times and raises `BenchmarkError` if the check fails; numbers that are not
finite are never reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from runtime.errors import XservError

T = TypeVar("T")
Key = TypeVar("Key")
TIE_TOLERANCE = 1e-3
"""Two tokens whose logits lie this close may change places when the batch, and with it the order of the
additions, changes."""


class BenchmarkError(XservError):
    """A failed check: nothing is reported."""


def percentiles_of(values: Sequence[float], percentiles: Iterable[float]) -> dict[str, float]:
    """`{"50": ..., "99": ...}`, interpolated linearly (numpy's default), in the unit of the values."""
    wanted = list(percentiles)
    found = np.percentile(np.asarray(values, np.float64), wanted)
    return {f"{q:g}": float(value) for q, value in zip(wanted, found)}


def summarize(name: str, values_s: Sequence[float], percentiles: Iterable[float] = (99.0,)) -> dict[str, float]:
    """Seconds in, milliseconds out, under vLLM's keys: `mean_X_ms`, `median_X_ms`, `std_X_ms`, `p99_X_ms`.

    `std` is the population's. Without a single value (no request had a second token, say) every entry is 0.0,
    as in vLLM.
    """
    values = np.asarray(values_s if len(values_s) else [0.0], np.float64) * 1e3
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        **{f"p{q}_{name}_ms": value for q, value in percentiles_of(values.tolist(), percentiles).items()},
    }


def time_per_output_token_s(latency_s: float, ttft_s: float, output_len: int) -> float | None:
    """(latency − TTFT) / (output_len − 1) in seconds; None for a single token."""
    return (latency_s - ttft_s) / (output_len - 1) if output_len > 1 else None


def interleaved(works: Mapping[Key, Callable[[], T]], num_rounds: int, *, warm_ups: int = 0) -> dict[Key, list[T]]:
    """The results of each work, one a round. All take turns, and the first rotates; warm-up rounds are not kept."""
    names, found = list(works), {name: list[T]() for name in works}
    for number in range(warm_ups + num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            result = works[name]()
            if number >= warm_ups:
                found[name].append(result)
    return found


def timed(work: Callable[..., object], *arguments: Any, repeats: int = 1) -> Callable[[], float]:
    """A function that gives the seconds of one call, the mean of some in a row."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            result = work(*arguments)
        seconds = (time.perf_counter() - start) / repeats
        del result  # its memory is freed outside the time
        return seconds

    return run


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def check_finite(report: Mapping[str, Any], path: str = "") -> None:
    """Raises `BenchmarkError` naming the first number in a report that is NaN or infinite.

    `request_rate` may be infinite: it is a setting (all requests at once), written as the string "inf".
    """
    for key, value in report.items():
        _check_value(value, f"{path}{key}")


def _check_value(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        check_finite(value, f"{where}.")
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_value(each, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BenchmarkError(f"{where} is {value}: the measurement is broken")


def check_outputs(token_ids: Sequence[Sequence[int]], expected_len: int, vocab_size: int, what: str) -> None:
    """Every output has exactly `expected_len` tokens, each an id of the vocabulary; else `BenchmarkError`."""
    for index, tokens in enumerate(token_ids):
        if len(tokens) != expected_len:
            raise BenchmarkError(f"{what}: request {index} gave {len(tokens)} tokens, not {expected_len}")
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise BenchmarkError(f"{what}: request {index} gave token {token}, not in [0, {vocab_size})")


def check_same_greedy(
    what: str,
    prompts: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    logits_of: Callable[[list[int]], np.ndarray],
    tolerance: float = TIE_TOLERANCE,
) -> int:
    """Raises `BenchmarkError` unless each output equals the expected one up to a tie; returns their count.

    At the first token that differs, both tokens' logits must be within `tolerance` of the largest; after it the outputs
    diverge and are not compared. `logits_of(token_ids)` is float32 `[num_tokens, vocab]`, called only for a difference.
    """
    num_ties = 0
    for index, (prompt, tokens, wanted) in enumerate(zip(prompts, got, expected, strict=True)):
        if len(tokens) != len(wanted):
            raise BenchmarkError(f"{what}: request {index} gave {len(tokens)} tokens, not {len(wanted)}")
        for position, (token, other) in enumerate(zip(tokens, wanted)):
            if token == other:
                continue
            row = np.asarray(logits_of([*prompt, *wanted[:position]]))[-1]
            behind = float(row.max() - min(row[token], row[other]))
            if not behind <= tolerance:
                raise BenchmarkError(
                    f"{what}: request {index} gave token {token} instead of {other} at position "
                    f"{position}, and one of them lies {behind:.2g} below the largest logit"
                )
            num_ties += 1
            break
    return num_ties
