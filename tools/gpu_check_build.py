"""Compiles before anything is timed: each of the engine's kernels, those of the check's models, and the cpu's (tests
compare with them), by all cores.

Each worker is a process, since Numba compiles one kernel at a time: `python -m tools.gpu_check_build ARCH WHAT`, where
WHAT is a share of the list ("3/14"), a model's name or "cpu". Of two that want one kernel one makes it (`KernelCache`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu_check_models import MODELS, TINY

QUICK_STEP = 48
"""Of the list, quick takes one kernel in this many."""

QUICK_MODELS = ("qwen3-8b",)
CPU = "cpu"


def build(arch: str, *, is_ptx: bool, is_quick: bool, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """{worker: {"kernels", "compiled", "seconds"}}, of the cpu's {"seconds"}; `report` is given it as it grows.

    Raises AssertionError with the end of what a worker printed, once all have ended.
    """
    models = QUICK_MODELS if is_quick else tuple(MODELS)
    cores = len(os.sched_getaffinity(0))
    shares = 1 if is_quick else max(1, cores - len(models) - 1)
    waiting = [CPU, *models, *(f"{number}/{shares}" for number in range(shares))]
    options = [*(["ptx"] if is_ptx else []), *(["quick"] if is_quick else [])]
    running: dict[str, subprocess.Popen[bytes]] = {}
    done: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < cores:
                name = waiting.pop(0)
                command = [sys.executable, "-m", "tools.gpu_check_build", arch, name, *options]
                with _log(folder, name).open("w") as log:
                    running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                text = _log(folder, name).read_text(errors="replace")
                if running.pop(name).returncode:
                    failed.append(f"{name}: {text.strip()[-1500:]}")
                else:
                    done[name] = json.loads(text.splitlines()[-1])
                report(done)
            time.sleep(0.1)
    if failed:
        raise AssertionError(f"{len(failed)} workers failed; {failed[0]}")
    return done


def _log(folder: str, name: str) -> Path:
    return Path(folder) / name.replace("/", " of ")


def main(arguments: list[str]) -> int:
    """A worker's: prints JSON as its last line."""
    arch, name, *options = arguments
    start = time.perf_counter()
    if name == CPU:
        _run_on_cpu()
        print(json.dumps({"seconds": round(time.perf_counter() - start, 1)}))
        return 0
    wanted = _of_model(name, arch, "quick" in options) if name in MODELS else _share(name, arch, "quick" in options)
    from runtime.device.kernel_cache import KernelCache

    cache = KernelCache()
    for specialisation in wanted:
        cache.get(specialisation, arch, is_ptx="ptx" in options)
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"kernels": len(wanted), "compiled": cache.num_compiled, "seconds": seconds}))
    return 0


def _run_on_cpu() -> None:
    """The bundled model answers once, as the tests ask it: what that compiles is kept on disk."""
    from runtime.engine.sampling_params import SamplingParams
    from runtime.llm import LLM

    with LLM(device="cpu", dtype="float32", max_model_len=256, kv_cache_bytes=1 << 24) as llm:
        llm.generate(["1 + 1 ="], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
        llm.logits(list(range(1, 101)))


def _share(name: str, arch: str, is_quick: bool) -> list[Any]:
    from numba_kernels.cuda.registry import specialisations
    from runtime.device.kernel_cache import is_meant_for

    number, shares = map(int, name.split("/"))
    known = [each for each in specialisations() if is_meant_for(each, arch)]
    return (known[::QUICK_STEP] if is_quick else known)[number::shares]


def _of_model(name: str, arch: str, is_quick: bool) -> list[Any]:
    from runtime.commands.model_kernels import kernels_of_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps((TINY if is_quick else MODELS)[name]))
        return kernels_of_model(folder, arch, "bfloat16")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
