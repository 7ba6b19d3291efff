"""The host's rows of `bench peers`: mapping a safetensors file, and packing compared with copying."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.weight_files import open_checkpoint
from runtime import ops
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.goals import host_row
from runtime.tensor.tensor import Tensor


def bench_load(folder: Path, num_rounds: int) -> dict[str, Any]:
    """Milliseconds until every tensor of the folder's checkpoint is a view, with the file's pages cached.

    Each round opens and checks the file anew and takes a view of each tensor; none of the data is touched.
    """
    file = folder / "model.safetensors"
    _read_whole(file)
    seconds = []
    num_tensors = 0
    for _ in range(num_rounds):
        start = time.perf_counter()
        checkpoint = open_checkpoint(folder)
        views = [checkpoint.array(name) for name in checkpoint.names()]
        seconds.append(time.perf_counter() - start)
        num_tensors = len(views)
        if sum(view.nbytes for view in views) + (1 << 20) < file.stat().st_size:
            raise BenchmarkError(f"the views of {file.name} hold less than the file")
    size = file.stat().st_size
    milliseconds = 1e3 * statistics.median(seconds)
    said = f"{size / 1e6:.0f} MB, {num_tensors} tensors"
    return host_row("load", milliseconds, said=said, file_bytes=size, num_tensors=num_tensors)


def bench_pack(folder: Path, num_rounds: int) -> dict[str, Any]:
    """The time of packing every matrix of the folder's checkpoint into panels, as a multiple of copying the same bytes.

    Both read the mapped file, whose pages are cached but not mapped when they begin, and write new memory; a tensor's
    source and result are released before the next. `resident_mapped_bytes` is the resident part of the file in this
    process after packing.
    """
    _read_whole(folder / "model.safetensors")
    packing: list[float] = []
    copying: list[float] = []
    num_bytes = 0
    resident_bytes: int | None = None
    for _ in range(1 + num_rounds):
        for seconds, make in ((packing, _pack), (copying, np.copy)):
            checkpoint = open_checkpoint(folder)
            spent = 0.0
            num_bytes = 0
            for name in checkpoint.names():
                array = checkpoint.array(name)
                if array.ndim == 2:
                    array = array.T if ".c_" in name else array  # GPT-2 stores its maps as [in, out]
                    start = time.perf_counter()
                    made = make(array)
                    spent += time.perf_counter() - start
                    num_bytes += array.nbytes
                    del array, made
                    checkpoint.release(name)
            if make is _pack:
                resident_bytes = mapped_bytes(folder / "model.safetensors")
            seconds.append(spent)
    pack_s, copy_s = (statistics.median(values[1:]) for values in (packing, copying))  # the first round warms up
    return host_row(
        "pack",
        pack_s / copy_s,
        said=f"{pack_s:.3f} s, copying {copy_s:.3f} s, {num_bytes / 1e6:.0f} MB",
        pack_s=pack_s,
        copy_s=copy_s,
        matrix_bytes=num_bytes,
        resident_mapped_bytes=resident_bytes,
    )


def mapped_bytes(path: Path) -> int | None:
    """Bytes of a mapped file that are resident in this process (Linux; None elsewhere)."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    resident, is_within = 0, False
    for line in smaps.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_within = line.endswith(str(path.resolve()))
        elif is_within and words[0] == "Rss:":
            resident += int(words[1]) * 1024
    return resident


def _pack(array: np.ndarray[Any, Any]) -> Any:
    return ops.prepare_linear(Tensor.from_numpy(array))


def _read_whole(path: Path) -> None:
    """Reads the file once, so that its pages are cached."""
    with path.open("rb") as file:
        while os.read(file.fileno(), 16 << 20):
            pass
