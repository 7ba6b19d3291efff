"""The simulator's command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import models.demo
from runtime.bench.scheduling.roofline import PRESETS, find_config
from runtime.engine.scheduling.step_model import TERMS
from tools import simulate

CONFIG = str(Path(models.demo.__file__).parent)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [f"2023-11-16 18:15:{second:02}.0000000,{20 + 10 * second},5" for second in range(10)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert simulate.main([*arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_roofline(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    report = run(capsys, trace, "--config", CONFIG, "--overhead-ms", "10", "--output-json", str(out))
    assert json.loads(out.read_text()) == report
    assert (report["num_requests"], report["num_steps"], report["max_model_len"]) == (10, 50, 115)
    assert report["ttft_s"]["p50"] == pytest.approx(0.01, rel=0.05)
    assert report["tpot_s"]["p50"] == pytest.approx(0.01, rel=0.05)


# Parameters as their makers give them, in thousands of millions; of tied ones, without the second matrix.
SIZES = {
    "qwen3-0.6b": 0.596, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76,
    "llama-3.2-1b": 1.236, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "mistral-7b": 7.25,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_as_many_parameters_as_the_models(name: str) -> None:
    config = find_config(name.upper())
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    num_tables = 1 if PRESETS[name]["tie_word_embeddings"] else 2
    count = config.num_layers * per_layer + num_tables * config.vocab_size * config.hidden_size
    assert count / 1e9 == pytest.approx(SIZES[name], rel=0.003)


def test_a_preset_is_simulated(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, trace, "--config", "qwen3-8b", "--gpu", "h200")
    assert report["num_requests"] == 10
    assert report["tpot_s"]["p50"] > 0.003  # 16 GB at 4.8 TB/s


def test_ranks_and_stages(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Four GPUs take the same requests as two replicas, on four ranks, in four stages, and two by two."""
    arguments = (trace, "--config", "qwen3-32b", "--rate", "1000")
    reports = {
        (ranks, stages): run(
            capsys, *arguments, "--tensor-parallel-size", str(ranks), "--pipeline-parallel-size", str(stages)
        )
        for ranks, stages in ((1, 1), (4, 1), (1, 4), (2, 2))
    }
    assert {shape: report["gpus"] for shape, report in reports.items()} == {
        (1, 1): 1, (4, 1): 4, (1, 4): 4, (2, 2): 4
    }  # fmt: skip
    tpot = {shape: report["tpot_s"]["p50"] for shape, report in reports.items()}
    assert tpot[4, 1] < tpot[2, 2] < tpot[1, 1]  # a token waits for all stages
    assert 0.25 * tpot[1, 1] < tpot[4, 1] < 0.5 * tpot[1, 1]
    assert len(reports[2, 2]["idle_share_by_stage"]) == 2
    assert "idle_share_by_stage" not in reports[4, 1]
    slow = run(capsys, *arguments, "--tensor-parallel-size", "4", "--link", "1000,1")
    assert slow["tpot_s"]["p50"] > 0.128  # two sums of a millisecond in each of 64 layers
    far = run(capsys, *arguments, "--pipeline-parallel-size", "2", "--stage-link", "5000,1")
    near = run(capsys, *arguments, "--pipeline-parallel-size", "2")
    assert far["tpot_s"]["p50"] > near["tpot_s"]["p50"] + 0.004


def test_fitted_model_and_scaling(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.json"
    terms = {**dict.fromkeys(TERMS, 0.0), "sequences": 0.5}
    model.write_text(json.dumps({"step_model": terms, "layer_windows": [None]}))
    arguments = (trace, "--step-model", str(model), "--num-blocks", "64", "--num-requests", "4")
    assert run(capsys, *arguments)["ttft_s"]["max"] > 1.0  # one a second, half a second for each of 5 tokens
    slow = run(capsys, *arguments, "--rate", "0.1", "--replicas", "2", "--routing-policy", "least-load")
    assert slow["ttft_s"]["max"] == pytest.approx(0.5, rel=0.01)
    assert slow["num_requests"] == 4
    assert run(capsys, *arguments, "--length", "0.5")["num_steps"] < run(capsys, *arguments)["num_steps"]
    rounded = tmp_path / "rounded.csv"  # two at a time, two seconds apart: spread, one each second
    rows = [f"2023-11-16 18:15:{second:02}.0000000,20,1" for second in (0, 0, 2, 2, 4)]
    rounded.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    rounded_arguments = (str(rounded), *arguments[1:5])
    assert run(capsys, *rounded_arguments)["num_steps"] == 3
    assert run(capsys, *rounded_arguments, "--spread")["num_steps"] == 5


def test_windows_make_steps_shorter_and_give_up_blocks(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers of 5 tokens behind prompts of 20 to 110, at a second for a token of decode context."""
    model = tmp_path / "model.json"
    report: dict[str, Any] = {"step_model": {**dict.fromkeys(TERMS, 0.0), "decode_context": 1.0}}
    arguments = (trace, "--step-model", str(model), "--block-size", "8", "--max-num-batched-tokens", "16")
    durations = {}
    for windows in ([None, None], [None, 8], [8, 8]):
        model.write_text(json.dumps({**report, "layer_windows": windows}))
        durations[str(windows)] = run(capsys, *arguments, "--num-blocks", "900", "--rate", "1e-3")["tpot_s"]["mean"]
    full, half, all_windows = durations.values()
    assert all_windows == pytest.approx(8.0)
    assert full > 20.0
    assert half == pytest.approx((full + all_windows) / 2)
    few = (*arguments, "--num-blocks", "16", "--rate", "1e6")
    together = run(capsys, *few)["num_steps"]
    model.write_text(json.dumps({**report, "layer_windows": [None]}))
    assert run(capsys, *few)["num_steps"] > 1.2 * together  # of the long prompts the blocks hold one


@pytest.mark.parametrize("windows", [[], [0], [True], 8, None, ["8"]])
def test_layer_windows_are_checked(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], windows: Any
) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"step_model": dict.fromkeys(TERMS, 1.0), "layer_windows": windows}))
    assert simulate.main([trace, "--step-model", str(model), "--num-blocks", "64"]) == 2
    assert "layer_windows" in capsys.readouterr().err


def test_for_people(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([trace, "--config", CONFIG]) == 0
    text = capsys.readouterr().out
    assert "TTFT (ms)" in text
    assert "num_preemptions" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--step-model FILE, or --config"),
        (["--config", "qwen9-8b"], "none of qwen3-0.6b, qwen3-4b, qwen3-8b"),
        (["--config", CONFIG, "--num-blocks", "2"], "KV cache"),
        (["--config", CONFIG, "--rate", "0"], "positive"),
        (["--config", CONFIG, "--replicas", "0"], "0 replicas"),
        (["--config", "/nowhere"], "no such folder"),
        (["--config", "llama-3.1-70b"], "139.0 GB of weights leave no room for a block in 90% of a GPU's 141 GB"),
        (["--config", CONFIG, "--tensor-parallel-size", "0"], "0 ranks and 1 stages"),
        (["--config", CONFIG, "--pipeline-parallel-size", "99"], "cannot be split over 99 stages"),
        (["--config", CONFIG, "--tensor-parallel-size", "2", "--link", "smoke"], "must be nvlink4"),
        (["--step-model", "x.json", "--tensor-parallel-size", "2"], "neither ranks nor stages"),
    ],
)
def test_errors_are_one_line(trace: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([trace, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_settings_reach_the_scheduler(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps({**dict.fromkeys(TERMS, 0.0), "constant": 1.0, "tokens": 0.1}))
    arguments = (trace, "--step-model", str(model), "--num-blocks", "64", "--rate", "100", "--max-num-seqs", "10")
    chunks = run(capsys, *arguments, "--prefill-chunk", "10")
    whole = run(capsys, *arguments, "--batching", "prefill-first", "--scheduling-policy", "fcfs")
    assert chunks["num_steps"] > whole["num_steps"]
    assert (whole["batching"], whole["scheduling_policy"]) == ("prefill-first", "fcfs")
    staged = run(capsys, *arguments, "--prefill-chunk-stages", "64,32,2,64")
    assert whole["num_steps"] < staged["num_steps"] < chunks["num_steps"]
    pair = tmp_path / "pair.csv"  # two answers that together outgrow five blocks of four tokens
    pair.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + 2 * "2023-11-16 18:15:10.0000000,4,12\n")
    tight = (str(pair), "--step-model", str(model), "--num-blocks", "5", "--block-size", "4", "--swap-blocks", "8")
    swaps = (*tight, "--preemption", "swap", "--no-enable-prefix-caching", "--victim", "shortest-remaining")
    quick, slow = (run(capsys, *swaps, "--block-transfer-ms", text) for text in ("0", "1e6"))
    assert quick["num_swaps"] == slow["num_swaps"] > 0
    assert slow["duration_s"] > quick["duration_s"] + 1000.0
    assert run(capsys, *tight, "--preemption", "recompute")["num_swaps"] == 0
    with pytest.raises(SystemExit):
        simulate.main([trace, "--prefill-chunk-stages", "64,32"])
