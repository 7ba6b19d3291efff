"""A model on several emulated GPUs, each in a process: transformers' tokens, one rank's bits in exact mode, no orphan.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine
from runtime.engine.ranks.executor import ParallelExecutor
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.executor import ExecutorLostError
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.ranks.test_tensor_parallel import PROMPTS, request_of, run

pytestmark = pytest.mark.emulator

DEVICE = "emulated:sm_90a"
exhaustive = pytest.mark.exhaustive


def engine_of(folder: Path | None, num_ranks: int, **settings: Any) -> Engine:
    settings = {"device": DEVICE, "max_model_len": 64, "num_blocks": 16, "seed": 0, **settings}
    return build_engine(folder, tensor_parallel_size=num_ranks, **settings)


def greedy(folder: Path, ids: list[int], count: int, num_ranks: int, **settings: Any) -> list[int]:
    engine = engine_of(folder, num_ranks, dtype="float32", **settings)
    try:
        engine.add(request_of("a", ids, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)))
        return [token for output in run(engine) for token in output.new_token_ids]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ("qwen2_tied", 2),
        *(pytest.param(case, 2, marks=exhaustive) for case in ("mistral_window", "qwen2_window", "qwen3_layer_types")),
        pytest.param("mistral_wide_window", 4, marks=exhaustive),
    ],
)
def test_families_on_emulated_ranks(case: str, num_ranks: int, tmp_path: Path) -> None:
    golden = load_golden(case)
    expected = golden.greedy_ids["float32"][:12]
    folder = write_model(tmp_path, golden)
    assert greedy(folder, list(golden.prompt_ids), len(expected), num_ranks) == expected


SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)


def answers(folder: Path | None, num_ranks: int, params: SamplingParams, **settings: Any) -> list[Any]:
    found: dict[str, list[Any]] = {}
    engine = engine_of(folder, num_ranks, **settings)
    try:
        for number, ids in enumerate(PROMPTS):
            engine.add(request_of(str(number), ids, params))
        for output in run(engine):
            found.setdefault(output.request_id, []).append((output.new_token_ids, repr(output.logprobs)))
    finally:
        engine.close()
    return [found[str(number)] for number in range(len(PROMPTS))]


@exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_blocks": 9, "max_num_seqs": 4, "swap_space_bytes": 1 << 20},
        {"overlap": "off", "max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"speculation": "ngram"},
        {"decode_graphs": "off"},
    ],
    ids=str,
)
def test_exact_mode_has_the_same_bits_on_any_number_of_ranks(settings: dict[str, Any]) -> None:
    alone = answers(None, 1, SAMPLED, exact=True, **settings)
    for num_ranks in (2,) if settings else (2, 4):
        assert answers(None, num_ranks, SAMPLED, exact=True, **settings) == alone


@exhaustive
@pytest.mark.parametrize("what", ["killed", "stopped", "fails in a layer", "is out of memory"])
def test_what_ends_one_rank_ends_all_and_names_it(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of the others."""
    engine = engine_of(write_model(tmp_path, load_golden("qwen2_tied")), 2)
    executor = engine.executor
    assert isinstance(executor, ParallelExecutor)
    [pid] = executor.ranks.pids
    try:
        engine.add(request_of("a", [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)))
        for _ in range(3):
            engine.step()
        if what == "stopped":
            os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
        else:
            os.kill(pid, signal.SIGKILL)
            begun = time.monotonic()
            with pytest.raises(ExecutorLostError, match="rank 1"):
                run(engine)
        assert time.monotonic() - begun < 5
    finally:
        engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_devices_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="tensor_parallel_size must be at most"):
        build_engine(None, device=DEVICE, tensor_parallel_size=65)
