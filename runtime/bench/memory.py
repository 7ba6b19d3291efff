"""`bench memory`: memory of serving a model, over all processes, beyond its weights and KV cache.

Our own server is started on a folder of GPT-2's shape (`own_server`: the processes of server and engine, as in `xserv
serve`), and gets prompts that together fill most of the cache. From its start to the last token the whole process tree
is sampled; its peak must stay below weights + KV cache + `ALLOWANCE_BYTES`.

It counts the proportional set size (Linux): a page that several processes share counts once over all of them, pages of
mapped files included while they are resident.

A cold start compiles the kernels first, which takes memory too: with `is_cold` the server gets an empty cache folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.bench.environment import finished
from runtime.bench.load.samples import random_samples
from runtime.bench.load.serving import bench_serve
from runtime.bench.metrics import BenchmarkError
from runtime.bench.options import Load
from runtime.bench.peers.child_process import ChildProcess
from runtime.bench.peers.workloads import GPT2, Gpt2Shape, Group
from runtime.own_packages import python_module

ALLOWANCE_BYTES = 400_000_000
KV_CACHE_BYTES = 128 << 20
INTERVAL_S = 0.02
_PROC = Path("/proc")


def bench_memory(
    dtypes: Sequence[str],
    *,
    shape: Gpt2Shape | None = None,
    kv_cache_bytes: int = KV_CACHE_BYTES,
    num_prompts: int = 32,
    input_len: int = 64,
    output_len: int = 16,
    is_cold: bool = False,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Serves the model once for each type of weights, "float32", "bfloat16" or "int8".

    `results[i]` has `weight_bytes` and `kv_cache_bytes` by the engine, `limit_bytes`, `peak_bytes`,
    `above_bytes` (of the peak, beside weights and cache), `is_within`, and of the peak each process' `total`,
    `anonymous` and `file` bytes. `idle_bytes` is the memory after the load. Raises `BenchmarkError` if a request fails
    or the system does not report memory.
    """
    report: dict[str, Any] = {"is_cold": is_cold, "allowance_bytes": ALLOWANCE_BYTES, "results": []}
    for dtype in dtypes:
        say(f"{GPT2}, {dtype}: {'cold' if is_cold else 'warm'} start, load")
        with tempfile.TemporaryDirectory(prefix="xserv-memory-") as name:
            group = Group(GPT2, dtype, ())
            group.write(Path(name) / "model", shape or Gpt2Shape(), seed)
            arguments: dict[str, Any] = {
                "model": str(Path(name) / "model"),
                "device": "cpu",
                "dtype": group.stored_dtype,
                "kv_cache_bytes": kv_cache_bytes,
                **({"quantization": "int8"} if dtype == "int8" else {}),
            }
            environment = {**os.environ, "XDG_CACHE_HOME": str(Path(name) / "cache")} if is_cold else None
            samples = random_samples(num_prompts, input_len=input_len, output_len=output_len, vocab_size=97, seed=seed)
            report["results"].append({"dtype": dtype, **_serve_once(arguments, environment, samples, seed)})
    return finished(report)


def _serve_once(
    arguments: dict[str, Any], environment: dict[str, str] | None, samples: Sequence[Any], seed: int
) -> dict[str, Any]:
    command = [sys.executable, "-P", *python_module("runtime.bench.load.own_server")]
    with (
        ChildProcess(command, "our server", environment) as server,
        MemoryWatch(server.pid) as watch,
    ):
        started = server.ask("start", **arguments)
        address = f"http://127.0.0.1:{started['port']}"
        served = asyncio.run(bench_serve(address, Load(), samples, model=started["model"], seed=seed))
        if served["failed"]:
            raise BenchmarkError(f"{served['failed']} requests failed: {served['error_counts']}")
        idle = watch.sample()
    held = started["weight_bytes"] + started["kv_cache_bytes"]
    return {
        "weight_bytes": started["weight_bytes"],
        "kv_cache_bytes": started["kv_cache_bytes"],
        "limit_bytes": held + ALLOWANCE_BYTES,
        "peak_bytes": watch.peak.total,
        "above_bytes": watch.peak.total - held,
        "is_within": watch.peak.total <= held + ALLOWANCE_BYTES,
        "idle_bytes": idle.total,
        "processes": watch.peak.processes,
        "num_samples": watch.num_samples,
        "total_output_tokens": served["total_output_tokens"],
    }


def descendants(pid: int) -> list[int]:
    """The process and all of its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # "pid (name) state ppid ...": a name may hold spaces and brackets
                parent = int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def resident_bytes(pid: int) -> dict[str, int]:
    """`total` (the proportional set size), and of it `anonymous` memory and `file` pages; empty for an ended
    process."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return {}
    fields = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    if "Pss" not in fields:
        return {}  # a zombie
    names = {"total": "Pss", "anonymous": "Pss_Anon", "file": "Pss_File"}
    return {name: fields.get(key, 0) for name, key in names.items()}


@dataclass(slots=True)
class Sampled:
    """All processes at one moment, in the order in which they were started."""

    processes: list[dict[str, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(each["total"] for each in self.processes)


class MemoryWatch:
    """A thread that samples a process tree every `interval_s`, for the length of a `with`; `peak` is its largest
    sample.

    Raises BenchmarkError if the system does not report memory, and at the end without samples.
    """

    def __init__(self, pid: int, interval_s: float = INTERVAL_S) -> None:
        if not (_PROC / str(pid) / "smaps_rollup").exists():
            raise BenchmarkError(f"no /proc/{pid}/smaps_rollup: memory is measured on Linux, of a process that lives")
        self.peak = Sampled()
        self.num_samples = 0
        self._pid = pid
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def sample(self) -> Sampled:
        """A sample now, which also counts for the peak."""
        sampled = Sampled([found for pid in descendants(self._pid) if (found := resident_bytes(pid))])
        self.num_samples += bool(sampled.processes)
        if sampled.total > self.peak.total:
            self.peak = sampled
        return sampled

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.sample()

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None and self.num_samples == 0:
            raise BenchmarkError("the watched process had ended before it was looked at")
