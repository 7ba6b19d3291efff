"""`bench pictures` on small sizes: what it reports, and that it refuses what it cannot time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from runtime.bench.metrics import BenchmarkError
from runtime.bench.pictures import decoding
from runtime.bench.pictures.bench_pictures import bench_pictures, lines_of
from runtime.bench.pictures.engine import bench_gaps, bench_reuse
from runtime.bench.pictures.tower import bench_tower
from runtime.llm import LLM
from tests.models.vision.chat_model import write_chat_model


def test_decoding_reports_each_part_and_refuses_other_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    file = decoding.drawn_jpeg(200, 120)
    rule = decoding.RULES["Qwen3-VL"]
    found = decoding._of_rule(file, rule, 2)
    parts = found["processor_ms"]
    assert list(parts) == ["decode", "resize and cut", "digest", "together"]
    assert all(value["median"] >= value["least"] >= 0 for value in parts.values())
    assert found["by_process_ms"]["least"] > 0
    made = decoding.make_patches

    def wrong(*arguments: Any) -> Any:
        patches = made(*arguments)
        patches.pixels[0, 0] ^= 1
        return patches

    monkeypatch.setattr(decoding, "make_patches", wrong)
    with pytest.raises(BenchmarkError, match="Pillow"):
        decoding._of_rule(file, rule, 2)


def test_a_tower_and_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tiny model, whose picture has as many pixels as the rule takes."""
    folder = str(write_chat_model(tmp_path / "vl"))
    config = json.loads((tmp_path / "vl" / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1024
    (tmp_path / "vl" / "config.json").write_text(json.dumps(config))
    found = bench_tower(folder, 8, 3)
    assert found["num_tokens"] == 16
    assert found["share"] > 0
    rows = {64: [(36, 108), (36, 36), (36, 52), (52, 36)] * 3, 16: [(144, 144), (144, 40)] * 3}
    flops = sum(2 * num * a * b for num, shapes in rows.items() for a, b in shapes)
    assert found["gflop_of_products"] == round(flops / 1e9, 1)
    monkeypatch.setattr("runtime.bench.pictures.engine.IMAGE_TOKEN", 90)
    monkeypatch.setattr("runtime.bench.pictures.engine.Asker.new_first", lambda self: int(self._rng.integers(8, 80)))
    options: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "max_model_len": 1024, "compile_ahead": False}
    with LLM(folder, use_tqdm_on_load=False, **options) as llm:
        reuse = bench_reuse(llm, 64, 2)
        assert reuse["cold_s"] > 0
        gaps = bench_gaps(llm, 64, 30, 1)
        assert gaps["num_pictures"] >= 2
        assert 0 < gaps["num_gaps"]["while_encoding"] < gaps["num_gaps"]["beside_pictures"]
        assert gaps["alone_ms"]["p99"] >= gaps["alone_ms"]["p50"] > 0


def test_what_cannot_be_timed() -> None:
    given: dict[str, Any] = {"side": 64, "tower_layers": 1, "text_layers": 4, "num_rounds": 1, "report_progress": print}
    for fields, words in (
        ({"parts": ["towers"]}, "towers"), ({"side": 100}, "side = 100"), ({"side": 4096}, "side = 4096"),
        ({"tower_layers": 25}, "tower_layers = 25"), ({"text_layers": 3}, "text_layers = 3"),
    ):  # fmt: skip
        with pytest.raises(BenchmarkError, match=words):
            bench_pictures(**{"parts": ["tower"], **given, **fields})


def test_lines_are_those_of_the_parts_that_ran() -> None:
    assert lines_of({}) == {}
    tower = {"tower_s": 1.0, "products_gflop_per_s": 2.0, "share": np.float64(0.5)}
    assert list(lines_of({"tower": tower}).values()) == [1.0, 2.0, 0.5]
