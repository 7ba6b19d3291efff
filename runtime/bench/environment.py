"""The environment of a measurement, recorded in every report, and other processes' use of the machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime.bench.metrics import check_finite
from runtime.engine.messages import EngineInfo

_STAT = Path("/proc/stat")


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, versions and the time."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": processor_name(),
        "num_cores": usable_cores(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
    }


def describe_engine(info: EngineInfo) -> dict[str, Any]:
    """The model and the settings that change its speed, and the machine."""
    return {
        "model": info.model_name,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "device": info.device,
        "num_threads": NUM_THREADS,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        **describe_machine(),
    }


def finished(report: Mapping[str, Any], info: EngineInfo | None = None) -> dict[str, Any]:
    """The report with its environment, of the engine or only the machine. Raises `BenchmarkError` if a number is not
    finite."""
    whole = {**report, "environment": describe_machine() if info is None else describe_engine(info)}
    check_finite(whole)
    return whole


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def processor_name() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Disturbance:
    """Watches other processes' load from its creation until `share`.

    Counts the processor time of the whole machine (Linux' `/proc/stat`, in ticks of 10 ms, so that less than a fifth of
    a second is imprecise) less that of the measured processes.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy_s = _busy_s()
        self._own_s = time.process_time()

    def share(self, peer_s: float) -> float | None:
        """Processor time of others, as a share of all cores' time; `peer_s` is that of a helper process of ours. None
        if the system does not report it.
        """
        wall = time.perf_counter() - self._start
        busy = _busy_s()
        if self._busy_s is None or busy is None:
            return None
        others = busy - self._busy_s - (time.process_time() - self._own_s) - peer_s
        return max(0.0, others) / (wall * (os.cpu_count() or 1))


def _busy_s() -> float | None:
    """Busy seconds of all cores together since boot."""
    if not _STAT.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, _STAT.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
