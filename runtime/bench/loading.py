"""`bench loading`: how fast weights come from their files to a GPU, out of the disk and out of the page cache."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.checkpoints.hub import resolve_model
from runtime.bench.environment import describe_machine
from runtime.bench.metrics import BenchmarkError, check_finite
from runtime.device.device import Device
from runtime.device.file_mapping import FileMapping
from runtime.device.gpu import Gpu
from runtime.device.pinned import PinnedBlock
from runtime.device.upload import upload_pieces

PART_BYTES = 256 << 20
"""As much as a large matrix has is copied at a time."""
SOURCES = ("disk", "page cache")
MAPPED = "mapped, 1 thread"

Way = Callable[[Gpu, int, Path, int, int], None]
"""``(gpu, address, file, offset, size)``: copies a part of a file to the device."""


def bench_loading(model: str | None, device: str, *, num_readers: Sequence[int], num_rounds: int) -> dict[str, Any]:
    """Copies the model's safetensors to the device, part by part over the same memory: by one thread that touches the
    mapped files, and by so many that read them; each way, from each source, in turns.

    Before anything is timed each way's bytes are read back and compared. Raises BenchmarkError for numbers that make no
    sense, a device that is no GPU, a model without safetensors.
    """
    if num_rounds < 1 or not num_readers or min(num_readers) < 1:
        raise BenchmarkError("--num-rounds and --num-readers must be at least 1")
    if Device.parse(device).kind == "cpu":
        raise BenchmarkError("bench loading measures copies to a GPU: --device cuda or --device emulated")
    files = sorted(resolve_model(model).glob("*.safetensors"))
    if not files:
        raise BenchmarkError(f"--model {model}: its folder has no safetensors")
    gpu, size = Gpu.of(device), sum(file.stat().st_size for file in files)
    block = gpu.allocate(min(PART_BYTES, max(file.stat().st_size for file in files)))
    ways: dict[str, Way] = {MAPPED: _touch}
    ways |= {f"read, {count} threads": partial(_read, num_readers=count) for count in num_readers}
    for way in ways.values():
        _verify(gpu, block.address, files, way)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(num_rounds):
        for source in SOURCES:
            for name, way in ways.items():
                _prepare(files, source)
                start = time.perf_counter()
                for part in _parts(files):
                    way(gpu, block.address, *part)
                gpu.synchronize()
                seconds.setdefault((source, name), []).append(time.perf_counter() - start)
    results = [
        {"source": source, "way": name, "gb_per_s": size / 1e9 / statistics.median(times)}
        for (source, name), times in seconds.items()
    ]
    report = {
        "size_bytes": size,
        "num_rounds": num_rounds,
        "results": results,
        "environment": describe_machine() | {"device": device},
    }
    check_finite(report)
    return report


def _parts(files: Sequence[Path]) -> Iterator[tuple[Path, int, int]]:
    """File, offset and size."""
    for file in files:
        size = file.stat().st_size
        for offset in range(0, size, PART_BYTES):
            yield file, offset, min(PART_BYTES, size - offset)


def _touch(gpu: Gpu, address: int, file: Path, offset: int, size: int) -> None:
    """Through a mapping that `Gpu.write` does not know to be a file's."""
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    gpu.write(address, np.frombuffer(mapping, np.uint8, size, offset))


def _read(gpu: Gpu, address: int, file: Path, offset: int, size: int, *, num_readers: int) -> None:
    def copy(start: int, piece: PinnedBlock) -> None:
        gpu.upload(address + start, piece, stream=gpu.stream)

    with file.open("rb") as opened:
        mapping = FileMapping(opened.fileno(), str(file))

    def fill(target: NDArray[np.uint8], start: int) -> None:
        mapping.read_into(target, offset + start)

    upload_pieces(size, fill, copy, gpu.pinned, gpu.stream, num_readers)


def _verify(gpu: Gpu, address: int, files: Sequence[Path], way: Way) -> None:
    for file, offset, size in _parts(files):
        gpu.fill(address, 0, size)
        way(gpu, address, file, offset, size)
        found = np.empty(size, np.uint8)
        gpu.read(address, found)
        with file.open("rb") as opened:
            opened.seek(offset)
            if found.tobytes() != opened.read(size):
                raise BenchmarkError(f"{file.name}: what came to the device are not the file's bytes")


def _prepare(files: Sequence[Path], source: str) -> None:
    """Empties the page cache of the files, or fills it."""
    for file in files:
        with file.open("rb") as opened:
            if source == "disk":
                os.fsync(opened.fileno())  # what has not been written yet would stay
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(1 << 24):
                    pass
