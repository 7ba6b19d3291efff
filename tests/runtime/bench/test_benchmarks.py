"""Every benchmark, by the command line, on a tiny random GPT-2: all keys, finite numbers, sums that add up.

No times are asserted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.bench.load import burst
from runtime.bench.metrics import BenchmarkError
from runtime.bench.options import StreamingOptions
from runtime.bench.peers.workloads import Gpt2Shape, write_gpt2_folder
from runtime.cli import app
from runtime.llm import LLM
from tests.runtime.bench.running import bench

SHAPE = Gpt2Shape(hidden_size=32, num_layers=2, num_heads=2, vocab_size=97, max_positions=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-gpt2")
    write_gpt2_folder(path, SHAPE, seed=1)
    return path


def check_environment(report: dict[str, Any]) -> None:
    environment = report["environment"]
    assert environment["model"].startswith("tiny-gpt2")
    assert (environment["dtype"], environment["device"]) == ("float32", "cpu")
    assert environment["num_threads"] >= 1
    assert {"cpu", "num_cores", "python", "numpy", "numba", "date"} <= environment.keys()


def test_streaming(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "streaming.json"
    report = bench(
        *("streaming", "--model", str(folder), "--num-requests", "6", "--prompt-len", "4", "--max-tokens", "3"),
        *("--num-rounds", "3", "--output-json", str(out)),
    )
    assert json.loads(out.read_text()) == report
    assert len(report["wall_times_s"]) == 3
    assert report["duration"] == sorted(report["wall_times_s"])[1]
    assert report["completion_throughput"] == pytest.approx(18 / report["duration"])
    assert report["submit_wall_ms"] >= report["mean_add_request_ms"] * 6 * 0.5
    for name in ("add_request", "ttft", "tpot", "e2el"):
        for kind in ("mean", "median", "std", "p50", "p99"):
            assert f"{kind}_{name}_ms" in report
    assert report["p50_ttft_ms"] <= report["p99_ttft_ms"] <= report["p99_e2el_ms"]
    assert report["lone_ttft_ms"] > 0
    assert report["ttft_ratio"] > 0
    assert set(report["latency_percentiles_ms"]) == {"10", "25", "50", "75", "90", "99"}
    check_environment(report)


def test_serve_starts_our_own_server(folder: Path, tmp_path: Path) -> None:
    report = bench(
        *("serve", "--model", str(folder), "--num-prompts", "5", "--random-input-len", "6"),
        *("--random-output-len", "4", "--request-rate", "200", "--max-concurrency", "3"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "serve.json"),
    )
    assert json.loads((tmp_path / "serve.json").read_text()) == report
    assert (report["completed"], report["failed"], report["max_concurrency"]) == (5, 0, 3)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (30, 20)
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p99"):
            assert f"{kind}_{name}_ms" in report
    check_environment(report)


def test_reports_for_people(folder: Path) -> None:
    arguments = ["bench", "streaming", "--model", str(folder), "--prompt-len", "5", "--max-tokens", "3"]
    result = CliRunner().invoke(app, [*arguments, "--num-requests", "2", "--num-rounds", "1"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "completion throughput (tokens/s):" in result.stdout
    assert "float32  cpu" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["streaming", "--prompt-len", "60", "--max-tokens", "9"], "4 tokens, not 9"),  # 64 positions
        (["streaming", "--num-rounds", "0"], "--num-rounds"),
        (["streaming", "--prompt-len", "0"], "at least 1"),
        (["streaming", "--max-tokens", "0"], "max_tokens"),
    ],
)
def test_what_is_not_whole_is_not_timed(folder: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments, "--model", str(folder)])
    assert result.exit_code != 0
    assert result.stdout == ""
    assert words in result.stderr


def test_wrong_tokens_are_not_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_burst, bursts = burst.run_burst, []

    def faulty_burst(*arguments: Any, **options: Any) -> Any:
        made = run_burst(*arguments, **options)
        if len(made.records) == 3:  # else the lone request
            bursts.append(made)
        if len(bursts) == 3:
            made.records[1].token_ids[2] = (made.records[1].token_ids[2] + 1) % SHAPE.vocab_size
        return made

    monkeypatch.setattr(burst, "run_burst", faulty_burst)
    with LLM(folder) as llm, pytest.raises(BenchmarkError, match=r"request 1 gave token .* at position 2"):
        burst.bench_streaming(llm, StreamingOptions(num_requests=3, prompt_len=4, max_tokens=4, num_rounds=2))


def test_gpt2_folder_is_seeded_and_loads(folder: Path, tmp_path: Path) -> None:
    write_gpt2_folder(tmp_path, SHAPE, seed=1)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with LLM(folder) as llm:
        logits = llm.logits([1, 2, 3])
    assert logits.shape == (3, 97)
    assert np.isfinite(logits).all()
