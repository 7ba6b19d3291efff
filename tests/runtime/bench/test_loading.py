"""`bench loading`: each way from each source, after its bytes were compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.bench import loading as bench
from runtime.bench.metrics import BenchmarkError
from runtime.device.file_mapping import FileMapping
from runtime.device.upload import PIECE_BYTES

pytestmark = pytest.mark.emulator


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, size in enumerate((2 * PIECE_BYTES + 100, 1000)):
        numbers = np.random.default_rng(number).integers(0, 256, size, np.uint8)
        (tmp_path / f"model-{number}.safetensors").write_bytes(numbers.tobytes())
    return tmp_path


def test_each_way_from_each_source(folder: Path) -> None:
    report = bench.bench_loading(str(folder), "emulated", num_readers=(1, 3), num_rounds=1)
    ways = (bench.MAPPED, "read, 1 threads", "read, 3 threads")
    assert [(row["source"], row["way"]) for row in report["results"]] == [
        (source, way) for source in ("disk", "page cache") for way in ways
    ]
    assert all(row["gb_per_s"] > 0 for row in report["results"])
    assert report["size_bytes"] == 2 * PIECE_BYTES + 1100


def test_wrong_bytes_are_not_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_into(self: FileMapping, target: np.ndarray, offset: int) -> None:
        target[:] = 0

    monkeypatch.setattr(FileMapping, "read_into", read_into)
    with pytest.raises(BenchmarkError, match=r"model-0.safetensors: what came to the device"):
        bench.bench_loading(str(folder), "emulated", num_readers=(4,), num_rounds=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_rounds": 0}, "--num-rounds"), ({"num_readers": ()}, "--num-readers"), ({"num_readers": (0,)}, "readers"),
        ({"device": "cpu"}, "--device cuda"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense(folder: Path, options: dict, words: str) -> None:
    arguments = {"device": "emulated", "num_readers": (1,), "num_rounds": 1} | options
    with pytest.raises(BenchmarkError, match=words):
        bench.bench_loading(str(folder), arguments.pop("device"), **arguments)
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(BenchmarkError, match="has no safetensors"):
        bench.bench_loading(str(folder), "emulated", num_readers=(1,), num_rounds=1)
