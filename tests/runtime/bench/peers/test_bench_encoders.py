"""`bench encoders` on a tiny shape: its report, its goals, and what it refuses to time."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.bench_encoders import bench_encoders
from runtime.bench.peers.cpu_limits import CpuLimits, LimitMeter
from runtime.bench.peers.encoders import SHAPES, TEXTS, Texts, judge, markdown

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 200,
    "max_position_embeddings": 64,
}  # fmt: skip
TINY = replace(SHAPES["minilm-l6"], config={**SHAPES["minilm-l6"].config, **SIZES})
FEW = Texts("few", "3 texts", (5, 17, 64), {"float32": 1.1, "int8": 3.0})
LIMITS = CpuLimits(1, 1e9, 1e9, None, 4e9)


def test_ours_alone() -> None:
    report = bench_encoders(
        {}, ["tiny"], ["float32", "int8"], [FEW], num_rounds=2, serves=False, shapes={"tiny": TINY},
        meter=LimitMeter(lambda: LIMITS), say=lambda line: None,
    )  # fmt: skip
    for row, dtype in zip(report["results"], ("float32", "int8"), strict=True):
        assert (row["model"], row["dtype"], row["texts"], row["ratio"]) == ("tiny", dtype, "3 texts", None)
        assert len(row["sides"]["xserv"]["rounds_s"]) == 2
        assert row["share_of_limit"] * row["times_limit"] == pytest.approx(1.0)
        assert not row["is_met"], "without a peer a ratio is not met"
    assert "| tiny | float32 | 3 texts |" in markdown(report)


def test_least_time() -> None:
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 64)
    attended = 4 * 32 * 2 * (5 * 5 + 64 * 64)
    assert TINY.least_s(LIMITS, "float32", (5, 64)) == pytest.approx((2 * weights * 69 + attended) / 1e9)
    assert TINY.least_s(LIMITS, "int8", (5, 64)) == pytest.approx(2 * weights * 69 / 4e9 + attended / 1e9)
    assert TINY.least_s(replace(LIMITS, read_bytes_per_s=1e6), "int8", (5,)) == pytest.approx(weights / 1e6)


@pytest.mark.parametrize(
    ("ratio", "share", "is_met"), [(1.2, 0.7, True), (1.0, 0.9, False), (1.2, 0.6, False), (None, 0.9, False)]
)
def test_goals(ratio: float | None, share: float, is_met: bool) -> None:
    row: dict[str, Any] = {"ratio": ratio, "share_of_limit": share, "times_limit": 1 / share}
    judge(FEW, "float32", row)
    assert row["is_met"] is is_met


def test_one_text_is_held_to_the_limit() -> None:
    for times, is_met in ((1.4, True), (1.6, False), (float("nan"), False)):
        row: dict[str, Any] = {"ratio": None, "share_of_limit": 1 / times, "times_limit": times}
        judge(TEXTS[0], "float32", row)
        assert row["is_met"] is is_met


def test_a_peer_with_other_vectors_is_not_timed(tmp_path: Path) -> None:
    """A script in place of a peer's Python, which answers with vectors of another model."""
    np.save(tmp_path / "other.npy", np.eye(3, 32, dtype=np.float32))
    script = tmp_path / "python"
    script.write_text(
        f"""#!{sys.executable}
import json, shutil, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "embed":
        shutil.copy({str(tmp_path / "other.npy")!r}, asked["path"])
    answer = {{"variants": ["one"], "threads": 1, "wall_s": 1.0, "used_s": 1.0, "processor_s": 1.0}}
    print(json.dumps(answer), flush=True)
"""
    )
    script.chmod(0o755)
    with pytest.raises(BenchmarkError, match=r"llama\.cpp's vectors differ from ours"):
        bench_encoders(
            {"llama.cpp": script}, ["tiny"], ["float32"], [FEW], num_rounds=1, serves=False, shapes={"tiny": TINY},
            meter=LimitMeter(lambda: LIMITS), say=lambda line: None,
        )  # fmt: skip
