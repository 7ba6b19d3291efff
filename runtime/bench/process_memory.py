"""What a process and its descendants hold in memory, sampled while they work (Linux).

Counted is the proportional set size: a page that several processes share counts once over all of them, pages of mapped
files included while they are resident.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from runtime.bench.metrics import BenchmarkError

_PROC = Path("/proc")
INTERVAL_S = 0.02


def descendants(pid: int) -> list[int]:
    """The process and all that it started, directly or not, as far as they live."""
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
    """`total` (the proportional set size), and of it `anonymous` memory and `file` pages; empty for a process that has
    ended."""
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

    Raises BenchmarkError where the system does not tell, and at the end when nothing was seen.
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
        """As it is now; also taken into account for the peak."""
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
