"""The models of `test_goldens` on emulated GPUs: the same code, the real kernels.

float32 within 1e-4 of transformers' logits with the same greedy continuation; bfloat16, where activations are rounded
too, within 2e-2, and where its continuation diverges each token is among the other's five best. A row that rounding
sends to another expert, as good as the one that it leaves, has other logits: few may.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.base import Model
from models.registry import load_model
from numba_kernels.cuda.attention import flash_hopper, planning
from numba_kernels.cuda.specialisation import Launch
from runtime.dtype import bfloat16, float32
from tests.models import states_in_bfloat16
from tests.models.driver import ModelDriver, greedy, logits_of, relative_error
from tests.models.folders import CASES, Golden, load_golden, write_model
from tests.models.routes import recorded_routes, rows_routed_alike

DEVICE, OTHER_DEVICE = "emulated:sm_80", "emulated:sm_90a"
BLACKWELL = "emulated:sm_100a", "emulated:sm_120a"

BFLOAT16_LOSS = {
    "gemma2_odd": 0.0303, "lfm2_odd": 0.0276, "qwen3_5_moe_odd": 0.0267, "qwen3_next_odd": 0.0451,
    "qwen3_5_odd": 0.0656, "mistral4_odd": 0.0326,
}  # fmt: skip
"""Error of transformers' own bfloat16 logits beside its float32 logits where it is above 2e-2; ours may be as large.
Qwen3.5's is its mean over seeds: at the golden's own seed it is 0.0284, and ours 0.0332, though ours is the smaller one
over 24 (`test_bfloat16_over_seeds`); the golden's prompt was chosen for little noise. Mistral 4's is its largest over
these seeds: at the golden's own it is 0.0184 and ours 0.031, over all 0.0214 and ours 0.0198 on average."""


def some(cases: list[str], *each_time: tuple[str, str]) -> list[object]:
    """All cases on all devices, of which some are run each time."""
    others = [(device, case) for device in (DEVICE, OTHER_DEVICE, *BLACKWELL) for case in cases]
    for one in each_time:
        others.remove(one)
    return [*each_time, *(pytest.param(*other, marks=pytest.mark.exhaustive) for other in others)]


def load_on(
    folder: Path, golden: Golden, device: str, stored_as: str, dtype: str = "auto", *, exact: bool = False
) -> Model:
    """The model on a device; its folder is written once for all."""
    if not (folder / "config.json").exists():
        write_model(folder, golden, stored_as)
    return load_model(folder, device=device, dtype=dtype, exact=exact)


@pytest.mark.emulator
@pytest.mark.parametrize(("device", "case"), some(CASES, (DEVICE, "gpt2_gelu_new")))
@pytest.mark.exhaustive
def test_float32(tmp_path: Path, device: str, case: str) -> None:
    golden = load_golden(case)
    expected = golden.logits["float32"]
    model = load_on(tmp_path, golden, device, "F32")
    assert model.dtype is float32
    logits = logits_of(model, golden.prompt_ids)
    assert relative_error(logits, expected) <= 1e-4
    np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))
    chosen, _ = greedy(model, golden.prompt_ids, len(golden.greedy_ids["float32"]), seed=1, in_groups=True)
    assert chosen == golden.greedy_ids["float32"]


@pytest.mark.emulator
@pytest.mark.parametrize(("device", "case"), some(CASES, (OTHER_DEVICE, "llama_default")))
def test_bfloat16(tmp_path: Path, device: str, case: str) -> None:
    golden = load_golden(case)
    expected, continuation = golden.logits["bfloat16"], golden.greedy_ids["bfloat16"]
    model = load_on(tmp_path, golden, device, "BF16")
    assert model.dtype is bfloat16
    with recorded_routes() as ours:
        logits = logits_of(model, golden.prompt_ids)
    rows: Any = slice(None)
    if ours:
        with recorded_routes() as theirs:
            logits_of(load_model(tmp_path, dtype="float32"), golden.prompt_ids)
        rows = rows_routed_alike(ours, theirs, len(logits), tolerance=2e-2)
        assert rows.mean() >= 0.9
    assert relative_error(logits[rows], expected[rows]) <= BFLOAT16_LOSS.get(case, 2e-2)
    chosen, logits = greedy(model, golden.prompt_ids, len(continuation))
    at = next((i for i, (a, b) in enumerate(zip(chosen, continuation, strict=True)) if a != b), None)
    if at is not None:
        assert continuation[at] in np.argsort(logits[at])[-5:]
        on_cpu = load_model(tmp_path, dtype="float32")
        reference = logits_of(on_cpu, golden.prompt_ids + continuation[:at])[-1]
        assert chosen[at] in np.argsort(reference)[-5:]


@pytest.mark.parametrize(
    "device", ["cpu", *(pytest.param(each, marks=pytest.mark.emulator) for each in (DEVICE, OTHER_DEVICE))]
)
@pytest.mark.parametrize("case", states_in_bfloat16.CASES)
@pytest.mark.exhaustive_cases("emulated", "qwen3_5_odd", "lfm2_odd", "granite_hybrid_odd")
def test_bfloat16_over_seeds(tmp_path: Path, case: str, device: str) -> None:
    """The error of one seed is drawn by lot where a gated norm divides by a head's result, which may be near 0. Over
    many seeds of the weights ours is no larger than transformers' own; both are beside float32 arithmetic, without rows
    that rounding sends to other experts."""
    golden, errors = load_golden(case), json.loads(states_in_bfloat16.ERRORS.read_text(encoding="utf-8"))[case]
    ours = []
    for index in range(states_in_bfloat16.NUM_SEEDS):
        drawn, folder = replace(golden, seed=states_in_bfloat16.seed_of(case, index)), tmp_path / str(index)
        with recorded_routes() as theirs:
            exact = logits_of(load_on(folder, drawn, "cpu", "BF16", "float32"), golden.prompt_ids)
        with recorded_routes() as own:
            found = logits_of(load_on(folder, drawn, device, "BF16"), golden.prompt_ids)
        rows = rows_routed_alike(own, theirs, len(found), tolerance=6e-2)  # of the noisiest seed
        ours.append(relative_error(found[rows], exact[rows]))
    assert len(errors) == len(ours)
    assert np.log(ours).mean() <= np.log(errors).mean()  # NaN fails, too


@pytest.mark.emulator
@pytest.mark.parametrize(("device", "case"), some(["gemma3_odd", "qwen3_tied_gqa4"], (DEVICE, "qwen3_tied_gqa4")))
@pytest.mark.parametrize(
    ("stored", "name", "tolerance"),
    [pytest.param("F32", "float32", 1e-4, marks=pytest.mark.exhaustive), ("BF16", "bfloat16", 2e-2)],
)
@pytest.mark.exhaustive
def test_exact_mode(tmp_path: Path, device: str, case: str, stored: str, name: str, tolerance: float) -> None:
    """Sums in segments, within the same tolerances, and the same bits in any chunks."""
    golden = load_golden(case)
    ids = golden.prompt_ids
    model = load_on(tmp_path, golden, device, stored, exact=True)
    logits = logits_of(model, ids, exact=True)
    assert relative_error(logits, golden.logits[name]) <= tolerance
    chunks = [3, 1, len(ids) - 4]
    np.testing.assert_array_equal(logits_of(model, ids, chunks, block_size=8, exact=True), logits)


@pytest.mark.emulator
@pytest.mark.exhaustive  # the engine's tests on GPUs do it each time
@pytest.mark.parametrize(("device", "case"), some(CASES[::5], (DEVICE, CASES[0])))
def test_chunks_and_batches(tmp_path: Path, device: str, case: str) -> None:
    golden = load_golden(case)
    model = load_on(tmp_path, golden, device, "F32")
    ids, expected = golden.prompt_ids, golden.logits["float32"]
    assert relative_error(logits_of(model, ids, [1, 3, len(ids) - 4], block_size=8), expected) <= 1e-4
    driver = ModelDriver(model, 3, block_size=8, seed=3)
    driver.step({1: ids[::-1][:5]})
    first = driver.step({0: ids[:7], 1: ids[::-1][5:6], 2: ids})
    second = driver.step({1: ids[::-1][6:], 0: ids[7:]})
    assert relative_error(first[2], expected) <= 1e-4
    assert relative_error(np.concatenate([first[0], second[0]]), expected) <= 1e-4


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["qwen3_tied_gqa4", "mistral_window"])
def test_hopper_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """These prompts are short: the tier takes them all the same."""
    plans = []

    def recorded(*arguments: Any, **sizes: Any) -> Launch:
        plans.append(plan(*arguments, **sizes))
        return plans[-1]

    plan = flash_hopper.plan
    monkeypatch.setattr(flash_hopper, "plan", recorded)
    monkeypatch.setattr(planning, "_HOPPER_ROWS", 0)
    golden = load_golden(case)
    model = load_on(tmp_path, golden, "emulated:sm_90a", "BF16")
    ids, expected = golden.prompt_ids, golden.logits["bfloat16"]
    assert relative_error(logits_of(model, ids), expected) <= 2e-2
    assert relative_error(logits_of(model, ids, [len(ids) - 9, 9], block_size=8), expected) <= 2e-2
    assert len(plans) > 1
