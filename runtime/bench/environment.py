"""What a number was measured on and with: recorded in every report."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine.messages import EngineInfo


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
    import numba

    return {
        "model": info.model_name,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "device": info.device,
        "num_threads": int(numba.get_num_threads()),
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        **describe_machine(),
    }


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
