"""ik_llama.cpp as a side of `bench peers`: what its own `llama-bench` and `llama-batched-bench` say of a GGUF file.

Both are started anew for every run, outside the time that they tell, and warm up first. They tell times, not tokens, so
that nothing says whether their answers are right.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.bench.environment import usable_cores
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.child_process import PeerDiedError, how_it_ended
from runtime.bench.peers.rounds import Peer, Sample
from runtime.bench.peers.workloads import Workload

NAME = "ik_llama.cpp"
SINGLE, BATCHED = "llama-bench", "llama-batched-bench"
VARIANTS = {
    "flash": ("-fa", "1"),
    "plain": ("-fa", "0"),
    "flash, repacked": ("-fa", "1", "-rtr"),
    "plain, repacked": ("-fa", "0", "-rtr"),
}
"""Attention, and whether weights are repacked while loading; `llama-bench` takes "-rtr" with a number."""
TIMEOUT_S = 600.0


def check_folder(folder: Path) -> None:
    """Raises `BenchmarkError` if one of the programs is not in the folder."""
    for program in (SINGLE, BATCHED):
        if not (folder / program).is_file():
            raise BenchmarkError(f"--ik-llama {folder}: {program} of ik_llama.cpp is not there")


@dataclass
class IkLlama(Peer):
    """Its programs in `folder` on one GGUF file."""

    folder: Path
    model: Path
    threads: int = field(default_factory=usable_cores)
    name: str = NAME
    variants: list[str] = field(default_factory=lambda: list(VARIANTS))
    variant: str = "flash"

    def __post_init__(self) -> None:
        self._before_s = _processor_of_children_s()

    def versions(self) -> dict[str, Any]:
        """The build, and what it says of the processor."""
        [said] = self._single("-p", "1", "-n", "0")
        return {"build": said["build_commit"], "processor": said["cpu_info"], "threads": self.threads}

    def run(self, prompts: list[list[int]], workload: Workload) -> Sample:
        """Its own prompts of that number and length; of one prompt either the prompt or the answer is timed."""
        count, length, later = len(prompts), len(prompts[0]), workload.new_tokens - 1
        if count == 1 and workload.measure == "prefill":
            prompt_s, decode_s = self._single("-p", str(length), "-n", "0")[0]["avg_ns"] / 1e9, 0.0
        elif count == 1 and workload.measure == "decode":
            prompt_s, decode_s = 0.0, self._single("-p", "0", "-n", str(later))[0]["avg_ns"] / 1e9
        else:
            prompt_s, decode_s = self._batched(count, length, later)
        return Sample([], prompt_s + decode_s, count * later, decode_s, prompt_s, prompt_s + decode_s)

    def processor_s(self) -> float:
        return _processor_of_children_s() - self._before_s

    def _single(self, *sizes: str) -> list[dict[str, Any]]:
        options = list(VARIANTS[self.variant])
        if "-rtr" in options:
            options.append("1")
        said, _ = self._start(SINGLE, *sizes, "-r", "1", "-o", "json", *options)
        found: list[dict[str, Any]] = json.loads(said[said.index("[\n") :])
        return found

    def _batched(self, count: int, length: int, later: int) -> tuple[float, float]:
        """Seconds of all prompts, and of all later tokens."""
        sizes = ("-npp", str(length), "-ntg", str(later), "-npl", str(count), "-c", str(count * (length + later)))
        said = "\n".join(self._start(BATCHED, *sizes, *VARIANTS[self.variant]))
        rows = re.findall(r"^\|([\d.| ]+)\|\s*$", said, re.MULTILINE)
        if len(rows) != 1:
            raise BenchmarkError(f"{NAME}'s {BATCHED} told no row of numbers: {said.strip()[-200:]!r}")
        _, _, _, _, _, prompt_rate, _, later_rate, *_ = map(float, rows[0].split("|"))  # its seconds have 3 decimals
        return count * length / prompt_rate, count * later / later_rate

    def _start(self, program: str, *options: str) -> tuple[str, str]:
        """Its output and its log. Raises `PeerDiedError` if it fails, and `BenchmarkError` if it takes too long."""
        files = str((self.folder / program).absolute()), "-m", str(self.model.absolute())
        command = [*files, "-t", str(self.threads), *options]
        try:
            with tempfile.TemporaryDirectory(prefix="xserv-peers-") as own:  # they write a log where they run
                done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False, cwd=own)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"{NAME}'s {program} took more than {TIMEOUT_S:g} s") from None
        if done.returncode != 0:
            raise PeerDiedError(NAME, how_it_ended(program, done.returncode, done.stderr))
        return done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def _processor_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
