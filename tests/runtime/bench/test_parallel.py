"""`bench parallel`: the same tokens in each layout, and who waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.bench.load.traces import read_trace
from runtime.bench.metrics import BenchmarkError
from runtime.bench.parallel import Layout, as_lines, bench_parallel, small_model
from runtime.bench.parallel_replay import as_lines as replay_lines
from runtime.bench.parallel_replay import bench_replay
from runtime.errors import InvalidArgumentError


@pytest.mark.exhaustive
def test_each_layout_gives_the_same_tokens_and_says_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"num_prompts": 2, "input_len": 40, "num_decodes": 4, "output_len": 6, "num_rounds": 1}
    layouts = [each for text in ("1", "2", "1x2") for each in Layout.parse(text)]
    with small_model() as model:
        report = bench_parallel({**model, "device": "cpu", "max_model_len": 64}, layouts=layouts, **sizes)
        rows = [(each["layout"], each["work"], len(each["idle"])) for each in report["results"]]
        assert rows == [
            (name, work, ranks)
            for name, ranks in (("1 x 1", 0), ("2 x 1, 1 open", 2), ("2 x 1, 2 open", 2), ("1 x 2", 2))
            for work in ("prompts", "decodes")
        ]
        assert all(0.0 <= share < 1.0 for each in report["results"] for share in each["idle"])
        lines = as_lines(report)
        assert len(lines) == 1 + len(rows) + 4
        assert [each["layout"] for each in report["stages"]] == 2 * ["2 x 1, 1 open"] + 2 * ["2 x 1, 2 open"]
        for each in report["stages"]:
            assert sum(each["by_time"]) == sum(each["layers"]) == 8
            assert all(second > 0.0 for second in each["seconds"])
        assert "%" not in lines[1]
        assert lines[3].count("%") == 2
        seeds = iter([0, 0, 1, 1])  # the second layout is asked for other prompts
        monkeypatch.setattr(
            "runtime.bench.parallel.random_prompts", lambda count, *_, seed: [[5 + next(seeds)] * 8] * count
        )
        with pytest.raises(BenchmarkError, match="other tokens than"):
            bench_parallel({**model, "device": "cpu", "max_model_len": 64}, layouts=layouts[1:3], **sizes)


@pytest.mark.parametrize("text", ["", "0", "2x", "2x2x2", "a", "-1"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a shape is"):
        Layout.parse(text)


@pytest.mark.exhaustive
def test_a_trace_is_replayed_in_each_layout_and_by_several_engines(tmp_path: Path) -> None:
    """A conversation of three turns twice over: the tokens are the same, and what turns share is found."""
    trace = tmp_path / "chats.jsonl"
    trace.write_text(
        "".join(
            json.dumps(
                {"timestamp": 50 * turn, "input_length": 512 * (turn // 2 + 1), "output_length": 24,
                 "hash_ids": [10 * (turn % 2) + number for number in range(turn // 2 + 1)]}
            ) + "\n"
            for turn in range(6)
        )
    )  # fmt: skip
    requests = read_trace(trace).scaled(length=0.125)
    layouts = [each for text in ("1", "2", "1x2") for each in Layout.parse(text) if each.open_steps is None]
    policies: Any = ["round-robin", "prefix-aware"]
    with small_model() as model:
        arguments = {**model, "device": "cpu", "max_model_len": 256, "exact": True}
        report = bench_replay(arguments, requests, layouts=layouts, policies=policies, num_rounds=1)
        rows = {row["name"]: row for row in report["results"]}
        assert list(rows) == ["1 x 1", "2 x 1, 2 open", "1 x 2", "2 engines, round-robin", "2 engines, prefix-aware"]
        assert all(row["same_tokens"] == 1.0 for row in rows.values())
        assert all(row["requests_per_s"] > 0 and row["p50_ttft_ms"] <= row["p99_ttft_ms"] for row in rows.values())
        assert [len(row["idle"]) for row in rows.values()] == [0, 2, 2, 0, 0]
        assert len(replay_lines(report)) == 7
        with pytest.raises(BenchmarkError, match="exceeds max_model_len=64"):
            bench_replay({**arguments, "max_model_len": 64}, requests, layouts=layouts[:1])
