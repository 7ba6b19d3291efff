"""`bench memory`: process trees whose sizes are known, and a tiny model that is really served."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.bench import memory
from runtime.bench.memory import MemoryWatch, bench_memory, descendants, resident_bytes
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.workloads import Gpt2Shape
from runtime.cli import app
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="memory is measured where /proc has smaps_rollup"
)

SHAPE = Gpt2Shape(hidden_size=32, num_layers=2, num_heads=2, vocab_size=97, max_positions=128)

HOLDER = """
import mmap, subprocess, sys, time
shared = mmap.mmap(-1, 32 << 20)
shared.write(b"x" * (32 << 20))
import os
if os.fork() == 0:
    shared[:1]
    total = sum(shared[place] for place in range(0, 32 << 20, 4096))
    own = bytearray(b"y") * (48 << 20)
    print("ready", flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_shared_pages_count_once() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            found = descendants(parent.pid)
            assert len(found) == 2
            assert found[0] == parent.pid
            with MemoryWatch(parent.pid, interval_s=0.005) as watch:
                wait_until(lambda: watch.num_samples >= 2)
            total = watch.peak.total
            assert 80 << 20 <= total <= 80 << 20 | 40 << 20  # 32 shared, 48 of the child's own, two interpreters
            assert len(watch.peak.processes) == 2
            assert all(each["total"] > each["file"] for each in watch.peak.processes)
        finally:
            for pid in reversed(descendants(parent.pid)):
                os.kill(pid, 9)


def test_processes_that_have_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pid = child.pid
    assert resident_bytes(pid) == {}
    with pytest.raises(BenchmarkError, match="no /proc/"):
        MemoryWatch(pid)


@pytest.mark.exhaustive
def test_a_model_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"shape": SHAPE, "kv_cache_bytes": 1 << 20, "num_prompts": 3, "input_len": 8, "output_len": 4}
    report = bench_memory(["float32"], **settings, say=lambda line: None)
    [result] = report["results"]
    assert result["total_output_tokens"] == 12
    assert 4 * 2 * 12 * 32 * 32 < result["weight_bytes"] < 1 << 20
    assert 0 < result["kv_cache_bytes"] <= 1 << 20
    assert result["limit_bytes"] == result["weight_bytes"] + result["kv_cache_bytes"] + 400_000_000
    assert result["peak_bytes"] == sum(each["total"] for each in result["processes"]) >= result["idle_bytes"] > 0
    assert len(result["processes"]) == 2  # the server's and the engine's
    assert result["is_within"] == (result["peak_bytes"] <= result["limit_bytes"])

    def fake(*_: object, **__: object) -> dict[str, object]:
        return {**report, "results": [{**result, "is_within": False}]}

    monkeypatch.setattr(memory, "bench_memory", fake)
    out = tmp_path / "memory.json"
    answered = CliRunner().invoke(app, ["bench", "memory", "--output-json", str(out), "--check"])
    assert answered.exit_code == 1
    assert "| missed |" in answered.stdout
    assert math.isfinite(json.loads(out.read_text())["results"][0]["above_bytes"])


@pytest.mark.exhaustive
def test_failed_requests_are_no_measurement() -> None:
    with pytest.raises(BenchmarkError):
        bench_memory(
            ["float32"], shape=SHAPE, kv_cache_bytes=1 << 20, num_prompts=2, input_len=120, output_len=20,
            say=lambda line: None,
        )  # fmt: skip
