"""The sides of `bench peers`: this engine in this process, and peers in processes of their own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime.bench.environment import usable_cores
from runtime.bench.load.burst import run_burst
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.child_process import ChildProcess
from runtime.bench.peers.workloads import GGUF, Workload
from runtime.llm import LLM

OURS = "xserv"


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """An engine to compare with, and its installation.

    venv      folder of its Python in a checkout
    packages  to install there by pip
    dtypes    its loader's names of the weights' types; unsupported types are absent
    """

    name: str
    script: Path
    venv: str
    packages: str
    dtypes: dict[str, str]

    def python(self, given: Path | None, root: Path) -> Path:
        """The given Python, or that of `venv` in the checkout; `BenchmarkError` names the packages to install."""
        python = given or root / self.venv / "bin" / "python"
        if python.exists():
            return python
        option = "--peer-python" if self.name == TRANSFORMERS.name else "--llama-python"
        raise BenchmarkError(
            f"no Python for {self.name} at {python}: make one with `python3 -m venv {self.venv} && "
            f"{self.venv}/bin/pip install {self.packages}`, or name another with {option}"
        )


TRANSFORMERS = PeerEngine(
    "transformers",
    Path(__file__).with_name("peer_transformers.py"),
    ".venv-reference",
    "torch transformers numpy",
    {"float32": "float32", "bfloat16": "bfloat16"},
)
LLAMA = PeerEngine(
    "llama.cpp",
    Path(__file__).with_name("peer_llama.py"),
    ".venv-llama",
    "llama-cpp-python gguf numpy",
    {"float32": "float32", "bfloat16": "bfloat16", "int8": "q8_0", GGUF: GGUF},
)
PEER_ENGINES = (TRANSFORMERS, LLAMA)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a workload by one side; times in seconds since submission of the prompts.

    decode_tokens, decode_s  tokens sampled after every prompt had its first, and their time
    ttft_s, latency_s        medians over the requests
    """

    token_ids: list[list[int]]
    wall_s: float
    decode_tokens: int
    decode_s: float
    ttft_s: float
    latency_s: float

    def rate(self, workload: Workload) -> float:
        """Tokens per second of the workload's measured phase."""
        if workload.measure == "decode":
            return self.decode_tokens / self.decode_s
        per_prompt = workload.prompt_len if workload.measure == "prefill" else workload.new_tokens
        return workload.num_prompts * per_prompt / self.wall_s


class Side(Protocol):
    """A side that can run a workload and report its CPU time."""

    name: str

    def run(self, prompts: list[list[int]], workload: Workload) -> Sample:
        """Greedy tokens of every prompt, end of sequence ignored."""

    def processor_s(self) -> float:
        """The side's CPU time so far."""


class OurSide:
    """This engine through its client: scheduler, paged cache and sampler included."""

    name = OURS

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def run(self, prompts: list[list[int]], workload: Workload) -> Sample:
        burst = run_burst(self.llm.client, prompts, workload.new_tokens)
        begin = max(record.token_times_s[0] for record in burst.records)
        later = sum(time_s > begin for record in burst.records for time_s in record.token_times_s)
        return Sample(
            token_ids=burst.token_ids,
            wall_s=burst.wall_s,
            decode_tokens=later,
            decode_s=burst.end_s - begin,
            ttft_s=statistics.median(record.ttft_s for record in burst.records),
            latency_s=statistics.median(record.latency_s for record in burst.records),
        )

    def processor_s(self) -> float:
        return time.process_time()


class PeerSide:
    """A peer that has loaded the same folder, or GGUF file.

    `variant` is its current setting; `logits_error` the error of its logits relative to ours, max|a - b| / max|b|.
    """

    def __init__(self, engine: PeerEngine, child: ChildProcess, folder: Path, model: Path, dtype: str) -> None:
        self.name = engine.name
        self._child = child
        self._folder = folder
        reply = child.ask("load", folder=str(model), threads=usable_cores(), dtype=engine.dtypes[dtype])
        del reply["processor_s"]
        self.variants: list[str] = reply.pop("variants")
        self.versions = {**reply, "dtype": engine.dtypes[dtype]}
        self.variant = self.variants[0]
        self.logits_error = 0.0

    def run(self, prompts: list[list[int]], workload: Workload) -> Sample:
        reply = self._child.ask("generate", prompts=prompts, new_tokens=workload.new_tokens, variant=self.variant)
        return Sample(
            token_ids=reply["token_ids"],
            wall_s=reply["total_s"],
            decode_tokens=workload.num_prompts * (workload.new_tokens - 1),
            decode_s=reply["decode_s"],
            ttft_s=reply["prefill_s"],
            latency_s=reply["total_s"],
        )

    def processor_s(self) -> float:
        return float(self._child.ask("clock")["processor_s"])

    def choose_variant(self, prompts: list[list[int]], workload: Workload) -> None:
        """Chooses the peer's fastest variant: by one run each, then another of the best two.

        The runs also warm it up.
        """
        best = dict.fromkeys(self.variants, 0.0)

        def by_rate() -> list[str]:
            return sorted(best, key=lambda variant: best[variant], reverse=True)

        def try_out(variants: Sequence[str]) -> None:
            for self.variant in variants:
                best[self.variant] = max(best[self.variant], self.run(prompts, workload).rate(workload))

        self.run(prompts, workload)
        try_out(self.variants)
        try_out(by_rate()[:2])
        self.variant = by_rate()[0]

    def logits(self, token_ids: list[int]) -> np.ndarray[Any, Any]:
        """Float32 `[num_tokens, vocab]`."""
        path = self._child.ask("logits", token_ids=token_ids, path=str(self._folder / "logits.npy"))["path"]
        return np.asarray(np.load(path))
