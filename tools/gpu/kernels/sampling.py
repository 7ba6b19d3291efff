"""Sampling on the device: the same tokens as on the cpu, and its time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from runtime import ops
from runtime.bench.kernels.cases import Array
from runtime.device.device import Device
from runtime.dtype import int32
from runtime.sampling_arrays import SAMPLING_FIELDS, SamplingArrays
from runtime.tensor.tensor import Tensor
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result

VOCABULARY = 151_936
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
}


def _vocabulary(options: Options) -> int:
    return 1000 if options.is_quick else VOCABULARY


def _inputs(vocabulary: int, rows: int, kind: Mapping[str, float]) -> tuple[Array, SamplingArrays]:
    """Logits like a model's, and parameters."""
    generator = np.random.default_rng(rows)
    logits = generator.standard_normal((rows, vocabulary), dtype=np.float32) * np.float32(3)
    params = SamplingArrays.neutral(rows)
    for name, value in kind.items():
        getattr(params, name)[:] = value
    params.seed[:] = np.arange(rows, dtype=np.uint64)
    return logits, params


def correctness(options: Options) -> Iterator[Case]:
    """A few rows of each kind against the cpu's sampled tokens."""
    for name, kind in KINDS.items():
        for rows in (3,) if options.is_quick else (1, 33):
            yield Case(f"{name}, {rows} rows", functools.partial(_check, options, rows, kind))


def _check(options: Options, rows: int, kind: Mapping[str, float]) -> Result:
    logits, params = _inputs(_vocabulary(options), rows, kind)
    tensor = Tensor.from_numpy(logits)
    found = ops.sample(tensor.to(options.device), params)
    expected = ops.sample(tensor, params)
    if not (np.array_equal(found.token_ids, expected.token_ids) and found.ok.all()):
        wrong = np.flatnonzero((found.token_ids != expected.token_ids) | ~found.ok)
        raise AssertionError(
            f"{len(wrong)} of {rows} rows drew others, row {wrong[0]}: {found.token_ids[wrong[0]]}, "
            f"not {expected.token_ids[wrong[0]]}"
        )
    return {"rows": rows}


def speed(options: Options) -> Iterator[Case]:
    """Times a decode step's sampling, with parameters on the device."""
    for rows in (2,) if options.is_quick else (1, 32, 256):
        for name, kind in KINDS.items():
            yield Case(f"{name}, {rows} rows", functools.partial(_time, options, rows, kind))


def _time(options: Options, rows: int, kind: Mapping[str, float]) -> Result:
    array, params = _inputs(_vocabulary(options), rows, kind)
    logits = Tensor.from_numpy(array).to(options.device)
    device = logits.device
    fields = [_field(getattr(params, name), device) for name, _, _ in SAMPLING_FIELDS]
    results = Tensor.empty((2 * rows + 1,), int32, device)

    def sample() -> None:
        ops.sample_into(logits, fields, results, has_penalties=False)

    sample()
    drawn: Any = results.to("cpu").array
    expected = ops.sample(logits, params)
    if not np.array_equal(drawn[:rows], expected.token_ids):
        raise AssertionError("a queued draw gives other tokens than one that is waited for")
    times = stopwatch_of(options).times({"ours": sample})
    return {"logits_bytes": array.nbytes, "times": {name: each.as_json() for name, each in times.items()}}


def _field(array: Array, device: Device) -> Tensor:
    return Tensor.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array).to(device)
