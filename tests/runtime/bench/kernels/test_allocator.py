"""`bench allocator`: what it reports, that it verifies before it times, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime.bench.kernels import allocator as bench
from runtime.bench.metrics import BenchmarkError
from runtime.cli import app
from runtime.device.allocator import Allocator, DeviceBlock
from runtime.device.gpu import Gpu
from tests.runtime.device.emulated import new_gpu

SMALL: dict[str, Any] = {
    "num_operations": 300, "num_driver_operations": 20, "max_bytes": 16 << 20, "num_rounds": 2,
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = new_gpu()
    monkeypatch.setattr(Gpu, "of", lambda device: gpu)
    return gpu


def test_report(gpu: Gpu) -> None:
    report = bench.bench_allocator("emulated", **SMALL)
    assert report["driver_calls_in_timed_rounds"] == 0
    assert report["allocator_us"] > 0
    assert report["driver_us"] > 0
    assert report["ratio"] == pytest.approx(report["driver_us"] / report["allocator_us"])
    assert len(report["allocator_us_rounds"]) == len(report["driver_us_rounds"]) == 2
    assert report["peak_allocated_bytes"] <= report["reserved_bytes"]
    assert (
        report["environment"]["device"] == "emulated:sm_90a:0" or report["environment"]["device"] == "emulated:sm_90a"
    )
    assert gpu.allocator.statistics.allocated_bytes == 0


def test_requests_stay_within_their_limit() -> None:
    requests = bench.random_requests(5000, 8 << 20, 3)
    assert requests == bench.random_requests(5000, 8 << 20, 3)
    held: dict[int, int] = {}
    for slot, size in requests:
        if size:
            assert slot not in held
            held[slot] = size
        else:
            del held[slot]
        assert sum(held.values()) <= 8 << 20
    assert held == {}


def test_an_allocator_that_is_wrong_is_not_timed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Allocator.allocate

    def overlapping(self: Allocator, size: int, stream: Any = None) -> DeviceBlock:
        block = original(self, size, stream)
        block.address = (1 << 40) + size
        return block

    monkeypatch.setattr(Allocator, "allocate", overlapping)
    monkeypatch.setattr(bench, "_time", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(BenchmarkError, match="overlap"):
        bench.bench_allocator("emulated", **{**SMALL, "num_operations": 2000})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], "measures a GPU's memory"),
        (["--device", "emulated", "--num-operations", "0"], "--num-operations 0 must be at least 1"),
        (["--device", "emulated", "--num-rounds", "0"], "--num-rounds 0 must be at least 1"),
        (["--device", "emulated", "--max-bytes", "5"], "--max-bytes 5 must be at least"),
        (["--device", "tpu"], "'tpu' is not one of"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "allocator", *arguments])
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.stderr.split())


def test_the_command(gpu: Gpu) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    result = CliRunner().invoke(app, ["bench", "allocator", "--device", "emulated", "--json", *flags])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["num_operations"] == 300
    result = CliRunner().invoke(app, ["bench", "allocator", "--device", "emulated", *flags])
    assert "caching allocator (us an operation)" in result.stdout
