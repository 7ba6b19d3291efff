"""Models with experts in the engine: NaN stays in its request, and no schedule changes an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.bench.scheduling.exact import bench_exact, engine_maker
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from tests.models.folders import golden_tensors, load_golden, write_model, write_safetensors
from tests.runtime.engine.fakes import request, run_to_end
from tests.runtime.engine.test_fuzz import LONE, TINY, Answers, fuzz

ROUTED = ["qwen3_moe_odd", "gpt_oss_odd", "glm4_moe_groups"]
POISON = 50  # the token whose row of the table is NaN


@pytest.mark.parametrize(
    ("device", "case"),
    [
        *(("cpu", case) for case in ROUTED),
        *(
            pytest.param("emulated:sm_90a", case, marks=[pytest.mark.emulator, pytest.mark.exhaustive])
            for case in ROUTED
        ),
    ],
)
def test_nan_in_the_router_ends_one_request(tmp_path: Path, device: str, case: str) -> None:
    golden = load_golden(case)
    folder, tensors = write_model(tmp_path, golden), golden_tensors(golden)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    write_safetensors(folder / "model.safetensors", tensors)
    prompts = {f"good{index}": [3 + index, 20, 41, 7 + index][: index + 1] for index in range(4)}
    bias = {POISON: -100.0}  # nobody draws it

    def built() -> Engine:
        return build_engine(
            folder, device=device, dtype="float32", max_model_len=64, block_size=8, num_blocks=40, exact=True,
        )  # fmt: skip

    lone = built()
    expected = {}
    for name, prompt in prompts.items():
        lone.add(request(name, prompt, eos=(), max_tokens=6, logit_bias=bias))
        expected[name] = run_to_end(lone)[name].token_ids()
    engine = built()
    engine.add(request("bad at once", [4, POISON, 6], eos=(), max_tokens=6, logit_bias=bias))
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, eos=(), max_tokens=6, logit_bias=bias))
    engine.add(request("bad later", [9, 8, 7], eos=(), max_tokens=6, logit_bias={POISON: 100.0}))
    results = run_to_end(engine)
    assert (results["bad at once"].finish_reason(), results["bad at once"].token_ids()) == ("error", [])
    assert (results["bad later"].finish_reason(), results["bad later"].token_ids()) == ("error", [POISON])
    for name, tokens in expected.items():
        assert len(tokens) == 6
        assert results[name].token_ids() == tokens
    engine.check_invariants()
    engine.add(request("after", prompts["good3"], eos=(), max_tokens=6, logit_bias=bias))  # over blocks that held NaN
    assert run_to_end(engine)["after"].token_ids() == expected["good3"]


@pytest.mark.parametrize(
    "case",
    [pytest.param("qwen2_moe_shared", marks=pytest.mark.exhaustive), "gpt_oss_odd",
     pytest.param("deepseek_v2_groups", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_no_schedule_changes_a_bit(tmp_path: Path, case: str) -> None:
    arguments = {"model": write_model(tmp_path, load_golden(case)), "device": "cpu", "dtype": "float32", "seed": 0}
    make = engine_maker(arguments, exact=True)
    report = bench_exact(make, make, num_requests=40, num_rounds=0, max_model_len=64)
    assert [(row["name"], row["first"]) for row in report["schedules"] if row["num_different"]] == []
    assert report["is_exact"]


@pytest.mark.parametrize(
    ("device", "num_steps"),
    [
        ("cpu", 250),
        pytest.param("emulated:sm_90a", 40, marks=[pytest.mark.emulator, pytest.mark.exhaustive]),
        pytest.param("emulated:sm_80", 200, marks=[pytest.mark.emulator, pytest.mark.exhaustive]),
    ],
)
@pytest.mark.parametrize("case", ["qwen3_moe_odd", pytest.param("deepseek_v3_odd", marks=pytest.mark.exhaustive)])
def test_preemption_swaps_and_faults(tmp_path: Path, device: str, num_steps: int, case: str) -> None:
    folder = write_model(tmp_path, load_golden(case))
    lone = build_engine(folder, device="cpu", dtype="float32", **{**TINY, **LONE})
    engine = build_engine(
        folder, device=device, dtype="float32", **TINY, exact=True, preemption="swap",
        swap_space_bytes=16 * lone.executor.kv_cache.spec.block_bytes[0],
    )  # fmt: skip
    fuzz(engine, Answers(lone), num_steps=num_steps, seed=5, failure_rate=0.01)
    stats = engine.stats()
    assert stats.num_swaps > 0
    assert stats.num_preemptions > 0
