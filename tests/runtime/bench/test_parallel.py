"""`bench parallel`: the same tokens in each layout, and who waits."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.bench.metrics import BenchmarkError
from runtime.bench.parallel import Layout, as_lines, bench_parallel, small_model
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
        assert len(lines) == 1 + len(rows)
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
