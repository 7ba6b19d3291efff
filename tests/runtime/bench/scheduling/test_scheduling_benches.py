"""The benches of scheduling: their arithmetic with times made up, and each one once on a tiny model; step records
as spans and as a Chrome trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.bench.metrics import BenchmarkError
from runtime.bench.options import StallsOptions
from runtime.bench.peers.workloads import Gpt2Shape, write_gpt2_folder
from runtime.bench.scheduling import stalls as stalls_module
from runtime.bench.scheduling.prediction import poisson_trace, step_times
from runtime.bench.scheduling.schedule import Span, chrome_trace, spans_of, styles_named
from runtime.bench.scheduling.stalls import measure_budget
from runtime.cli import app
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.scheduling.step_model import TERMS, StepFeatures
from runtime.engine.timeline import ChunkKey, StepRecord
from tests.runtime.bench import running

SHAPE = Gpt2Shape(hidden_size=32, num_layers=1, num_heads=2, vocab_size=97, max_positions=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-gpt2")
    write_gpt2_folder(path, SHAPE, seed=1)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return build_engine(folder, device="cpu", seed=0)


def bench(folder: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    return running.bench(*arguments, "--device", "cpu", "--model", str(folder), status=status)


class MadeUpSteps:
    """A bare step of 10 ms, 0.1 ms a prompt token beside it."""

    def __init__(self, *arguments: Any) -> None: ...

    def bare_step(self) -> float:
        return 0.010

    def step_beside(self, chunk: int) -> float:
        return 0.010 + 1e-4 * chunk

    def close(self) -> None: ...


def budget(engine: Engine, tpot_ratio: float) -> dict[str, Any]:
    options = StallsOptions(tpot_ratio=tpot_ratio, num_decodes=4, context_len=8, prompt_len=250, num_rounds=3)
    return measure_budget(engine, options)


@pytest.mark.parametrize(
    ("ratio", "chunk"), [(2.03, 96), (2.04, 104), (2.05, 104), (1.09, 9), (50.0, 250)]
)  # up to 103, 104, 9 and any number of tokens, found to an eighth; and the prompt has 250
def test_budget_is_the_largest_that_keeps_the_target(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ratio: float, chunk: int
) -> None:
    monkeypatch.setattr(stalls_module, "_Measurement", MadeUpSteps)
    report = budget(engine, ratio)
    assert report["max_num_batched_tokens"] == 4 + chunk
    sizes = [size["chunk"] for size in report["sizes"]]
    assert sizes == sorted(sizes)
    assert chunk in sizes
    for size in report["sizes"]:
        assert size["step_ms"] == pytest.approx(10 + 0.1 * size["chunk"])
        assert size["keeps_target"] == (size["chunk"] <= chunk)


def test_a_budget_that_cannot_be_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls_module, "_Measurement", MadeUpSteps)
    with pytest.raises(BenchmarkError, match=r"9\.000 ms cannot be kept: 4 decodes at context 8 alone take 10\.000"):
        budget(engine, 0.9)
    with pytest.raises(BenchmarkError, match=r"no room for a prompt: one of its tokens .* takes 10\.100 ms"):
        budget(engine, 1.005)
    with pytest.raises(BenchmarkError, match="cannot be kept"):
        budget(engine, math.nan)
    with pytest.raises(BenchmarkError, match="do not fit"):
        measure_budget(engine, StallsOptions(num_decodes=4, context_len=8, prompt_len=9999, num_rounds=1))


def test_budget_measured(folder: Path) -> None:
    report = bench(
        folder, *("stalls", "--tpot-ratio", "60000", "--num-decodes", "2", "--context-len", "9", "--prompt-len", "40"),
        *("--num-usual-steps", "2", "--num-rounds", "2", "--max-num-batched-tokens", "34", "--max-model-len", "100"),
    )  # fmt: skip
    measured = report["budget_measurement"]
    assert report["budget"] == measured["max_num_batched_tokens"] == 34
    assert [size["chunk"] for size in measured["sizes"]] == [1, 2, 4, 8, 16, 32]
    assert measured["bare_decode_ms"] > 0.0


def test_schedule(folder: Path, tmp_path: Path) -> None:
    plot, trace, out = (tmp_path / name for name in ("styles.svg", "trace.json", "report.json"))
    report = bench(
        folder, *("schedule", "--num-decodes", "2", "--decode-len", "12", "--prompt-len", "70", "--num-prompts", "2"),
        *("--first-s", "0.01", "--gap-s", "0.01", "--num-rounds", "1", "--max-num-batched-tokens", "32"),
        *("--plot", str(plot), "--trace", str(trace), "--output-json", str(out)),
    )  # fmt: skip
    assert json.loads(out.read_text()) == report
    styles = ["stall-free", "staged", "prefill-first", "orca", "static"]
    assert [result["style"] for result in report["results"]] == styles
    assert (report["num_requests"], report["num_prompt_tokens"], report["num_output_tokens"]) == (4, 172, 26)
    for result in report["results"]:
        assert 0.0 < result["p50_tpot_ms"] <= result["p99_gap_ms"] <= result["worst_stall_ms"]
        assert 0.0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"]
        assert result["same_tokens"] >= 0.5
    text = "".join(element.text or "" for element in ElementTree.fromstring(plot.read_text()).iter())
    assert all(text.count(style) == 4 for style in styles)
    chunks = {}
    for style in styles:
        events = json.loads((tmp_path / f"trace.{style}.json").read_text())["traceEvents"]
        chunks[style] = [event["args"]["tokens"] for event in events if event["name"] == "prefill"]
        assert sum(chunks[style]) == 172
    assert max(chunks["stall-free"]) <= 32
    assert max(chunks["prefill-first"]) == 70


def test_schedule_replays_a_recorded_trace(folder: Path, tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:{10 + second}.0000000,{20 + second},5" for second in range(6)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    arguments = ("schedule", "--replay", str(path), "--num-requests", "4", "--rate", "1000", "--styles", "orca")
    trace = tmp_path / "one.json"
    report = bench(folder, *arguments, "--num-rounds", "1", "--trace", str(trace))
    assert (report["trace"], report["num_requests"], report["num_prompt_tokens"]) == ("t", 4, 86)
    assert report["last_arrival_s"] == pytest.approx(0.003)
    assert trace.exists()


def test_styles() -> None:
    [staged] = styles_named("staged", budget=512, longest_prompt=4000)
    assert staged.settings["prefill_chunk_stages"] == (512, 128, 4, 2000)
    for wrong in ("stall-free,quick", "orca,orca", ""):
        with pytest.raises(BenchmarkError, match="at most once of stall-free, staged"):
            styles_named(wrong, budget=512, longest_prompt=4000)


def test_stalls(folder: Path) -> None:
    report = bench(
        folder, *("stalls", "--budget", "24", "--num-decodes", "2", "--context-len", "8", "--prompt-len", "100"),
        *("--num-usual-steps", "3", "--max-model-len", "200"),
    )  # fmt: skip
    free, first = report["results"]["stall-free"], report["results"]["prefill-first"]
    assert report["budget"] == 24
    assert free["num_gaps"] == 5  # 22 of 100 tokens a step beside two decodes
    assert first["num_gaps"] == 1
    for result in (free, first):
        assert result["p99_ratio"] == pytest.approx(result["p99_gap_ms"] / result["usual_tpot_ms"])
        assert result["p50_gap_ms"] <= result["p99_gap_ms"] <= result["max_gap_ms"] <= 1e3 * result["ttft_s"]


def test_speculation(folder: Path) -> None:
    """The bench itself holds the tokens of all ways against each other."""
    report = bench(
        folder, *("speculation", "--batches", "1,3", "--rates", "0.5,1", "--output-len", "24", "--num-rounds", "2"),
        "--max-model-len", "100",
    )  # fmt: skip
    assert [(row["num_sequences"], row["rate"]) for row in report["rows"]] == [(1, 0.5), (1, 1.0), (3, 0.5), (3, 1.0)]
    for row in report["rows"]:
        speeds = row["tokens_per_s"]
        assert set(speeds) == {"off", "off again", "chosen", "1 fixed", "3 fixed", "7 fixed"}
        assert row["speedup"] == row["speedups"]["chosen"] > 0.0
        assert row["speedups"]["off"] == 1.0
        assert row["of_best_fixed"] > 0.0
        assert 0.0 < row["of_curve"] <= row["speedup"]
        assert row["rate"] < 1.0 or row["num_accepted_tokens"] == row["num_draft_tokens"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--batches", "0"), ("--batches", "100000"), ("--rates", "1.5"), ("--output-len", "1"), ("--rates", "x")],
)
def test_speculation_names_a_wrong_option(folder: Path, option: str, value: str) -> None:
    done = CliRunner().invoke(
        app, ["bench", "speculation", "--model", str(folder), "--max-model-len", "100", option, value]
    )
    assert done.exit_code == (2 if value == "x" else 1)
    assert option.removeprefix("--") in done.stderr
    assert value in done.stderr


def test_simulation(folder: Path) -> None:
    """One pair on a busy machine says nothing of the error: the status has to follow from it, one way or the other."""
    arguments = ("simulation", "--prompt-len", "20", "--output-len", "6", "--num-requests", "6", "--num-pairs", "1")
    report = bench(folder, *arguments, "--most-error", "1e9")
    [pair] = report["pairs"]
    for name in ("median_ttft_s", "output_throughput", "median_tpot_s"):
        error = pair["predicted"][name] / pair["measured"][name] - 1.0
        assert pair[f"{name}_error"] == pytest.approx(error)
        assert report[f"{name}_error"] == pytest.approx(abs(error))
    assert set(report["step_model"]) == set(TERMS)
    assert report["layer_windows"] == [None] * len(report["layer_windows"]) != []
    assert report["fit"]["num_steps"] >= 16
    bench(folder, *arguments, "--most-error", "-1", "--rate", "100", status=1)


def test_step_times_last_until_the_next_step_unless_there_was_a_pause() -> None:
    records = [
        record(0, 1.0, 1.5, ("a", 4, 0, 4)),
        record(1, 1.75, 2.0, ("a", 4, 4, 1)),  # goes on with A: 0.25 s were spent on handing out
        record(2, 9.0, 9.5, ("b", 3, 0, 3)),  # nobody of before: a pause
    ]
    features, seconds = step_times(records)
    assert seconds == [0.75, 0.25, 0.5]
    assert features == [StepFeatures(4, 1, 10, 0), StepFeatures(1, 1, 0, 5), StepFeatures(3, 1, 6, 0)]


def test_poisson_trace() -> None:
    trace = poisson_trace(400, prompt_len=100, output_len=20, max_len=150, seed=0)
    assert trace.requests[0].arrival_s == 0.0
    assert trace.requests[-1].arrival_s == pytest.approx(400, rel=0.2)
    assert trace.longest <= 150
    lengths = sorted(request.output_len for request in trace.requests)
    assert lengths[200] == pytest.approx(20, abs=3)
    assert trace == poisson_trace(400, prompt_len=100, output_len=20, max_len=150, seed=0)


def record(number: int, start_s: float, end_s: float, *chunks: tuple[str, int, int, int]) -> StepRecord:
    """Chunks as (request, prompt tokens, start, number of tokens)."""
    made = StepRecord(number, start_s)
    made.end_s = end_s
    made.num_running, made.num_waiting, made.num_free_blocks = len(chunks), 1, 7
    made.schedule_s, made.run_s = 0.001, 0.5
    keys = [ChunkKey(request_id, 0, num_prompt, 0.0) for request_id, num_prompt, _, _ in chunks]
    starts, counts = (np.array([chunk[place] for chunk in chunks], np.int64) for place in (2, 3))
    made.set_chunks(keys, starts, counts)
    return made


def story() -> list[StepRecord]:
    """A prompt of 6 in chunks of 4 and 2, then a decode; B comes, pushes A out, and A computes again."""
    records = [
        record(0, 10.0, 11.0, ("a", 6, 0, 4)),
        record(1, 11.0, 12.0, ("a", 6, 4, 2)),
        record(2, 12.0, 13.0, ("a", 6, 6, 1), ("b", 3, 0, 3)),
        record(3, 13.0, 14.0, ("b", 3, 3, 1)),
        record(4, 14.0, 16.0, ("a", 6, 0, 7)),
    ]
    records[3].preempted = [("a", 0, "recompute")]
    return records


def test_spans() -> None:
    assert spans_of(story(), {"a": 9.5, "b": 11.5}) == [
        Span("a", 0, "queued", 9.5, 10.0, 0),
        Span("a", 0, "prefill", 10.0, 11.0, 4),
        Span("a", 0, "prefill", 11.0, 12.0, 2),
        Span("a", 0, "decode", 12.0, 13.0, 1),
        Span("b", 0, "queued", 11.5, 12.0, 0),
        Span("b", 0, "prefill", 12.0, 13.0, 3),
        Span("b", 0, "decode", 13.0, 14.0, 1),
        Span("a", 0, "preempted", 13.0, 14.0, 0),
        Span("a", 0, "prefill", 14.0, 16.0, 7),
    ]
    assert not [span for span in spans_of(story(), {}) if span.kind == "queued"]


def test_chrome_trace() -> None:
    trace = chrome_trace(story(), {"a": 9.5, "b": 11.5})
    events = trace["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {(1, 0): "steps", (2, 0): "a", (2, 1): "b"}
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [(step["name"], step["ts"], step["dur"]) for step in steps][2] == ("step 2", 2.5e6, 1e6)
    assert steps[2]["args"] == {
        "sequences": 2, "tokens": 4, "schedule_us": 1000.0, "prepare_us": 0.0, "run_us": 5e5, "commit_us": 0.0,
    }  # fmt: skip
    preempted = [event for event in events if event["name"] == "preempted"]
    assert [(event["tid"], event["ts"], event["dur"]) for event in preempted] == [(0, 3.5e6, 1e6)]
    counters = [event["args"] for event in events if event["ph"] == "C" and event["ts"] == 0.5e6]
    assert counters == [{"running": 1, "waiting": 1}, {"free": 7}]
    assert chrome_trace([], {})["traceEvents"]
