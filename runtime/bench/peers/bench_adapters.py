"""`bench adapters`: what LoRA adapters cost decodes of ours, llama.cpp and peft, on the same weights, in turns.

A model of Qwen3-0.6B's shape and eight adapters of rank 16 on all its linear maps, all of seeded random numbers, are
loaded by every side: ours with and without `enable_lora`, llama.cpp with the adapters as GGUF, transformers with peft.
Sides that are compared read the same stored weights: bfloat16's folder, or a GGUF file of q4_0; int4 and fp8, made of
the folder, are ours alone. First the log probabilities of a prompt with an adapter are compared, which differ by the
rounding of activations alone. Then decodes are timed in rounds, all sides and cases in turns, the first one rotating;
`more` is the median of the rounds' times beside the same side's without an adapter. In a batch of several adapters peft
takes each row's by name; llama.cpp, which has one for all sequences of a context, has a context for each.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from models.registry import declare
from runtime.bench.environment import finished, usable_cores
from runtime.bench.load.samples import random_prompts
from runtime.bench.metrics import BenchmarkError, interleaved, markdown_table
from runtime.bench.peers.child_process import ChildProcess
from runtime.bench.peers.rounds import LLAMA, OURS, PEER_ENGINES, OurSide, PeerSide, gguf_path
from runtime.bench.peers.workloads import QWEN3, Workload, write_qwen3_folder
from runtime.bench.scheduling.roofline import PRESETS
from runtime.engine.messages import AdapterRef
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM, LoRARequest

NUM_ADAPTERS, RANK = 8, 16
PLAIN = f"{OURS} without --enable-lora"
FILE = "q4_0"
"""The type whose weights all sides read from one GGUF file, which llama.cpp's Python writes."""
DTYPES = ("bfloat16", FILE, "int4", "fp8")
TOLERANCE = 0.1  # the largest difference of log probabilities
LEAST_CHANGE = 10.0  # an adapter's least change of some log probability, in errors: one that is left out is noticed
GOALS = {"bfloat16": 0.05, FILE: 0.10, "int4": 0.10, "fp8": 0.10}
MOST_OF_EIGHT, MOST_OF_BASE = 0.10, 0.01


class Case(NamedTuple):
    """`sequences` at once, with so many adapters among them."""

    sequences: int
    adapters: int

    @property
    def workload(self) -> Workload:
        """Short answers of short prompts, whose time is not measured."""
        prompt, tokens = (16, 25) if self.sequences == 1 else (4, 7)
        return Workload(str(self), str(self), self.sequences, prompt, tokens, "decode", QWEN3)

    def ids(self) -> list[int]:
        """The number of each sequence's adapter; empty for a case without adapters."""
        return [number % self.adapters for number in range(self.sequences)] if self.adapters else []


CASES = (Case(1, 0), Case(1, 1), Case(32, 0), Case(32, 1), Case(32, 8))
Side = Callable[[Case, list[list[int]]], float]
"""Seconds of a step of the case."""


def write_adapters(model: Path, folder: Path, seed: int) -> list[Path]:
    """Adapters in PEFT's form for all maps of a Qwen3, in bfloat16."""
    generator, found = np.random.default_rng(seed), []
    maps = {
        name.removesuffix(".weight"): stored.shape
        for name, stored in declare(model, load_format="dummy", device="cpu").source.tensors.items()
        if name.endswith("_proj.weight")
    }
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0,
        "bias": "none", "base_model_name_or_path": str(model), "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in maps}),
    }  # fmt: skip
    for number in range(NUM_ADAPTERS):
        tensors = {}
        for name, (height, depth) in maps.items():
            down = generator.standard_normal((RANK, depth), np.float32) * np.float32(depth**-0.5)
            up = generator.standard_normal((height, RANK), np.float32) * np.float32(0.05)
            for side, values in (("A", down), ("B", up)):
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = values.astype(ml_dtypes.bfloat16)
        path = folder / f"adapter-{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        found.append(path)
    return found


class Adapted:
    """Ours with adapters, each loaded."""

    def __init__(self, llm: LLM, adapters: Sequence[Path], clock: str) -> None:
        self._llm, self._side = llm, OurSide(llm, clock)
        self._requests = [LoRARequest(path.name, number + 1, str(path)) for number, path in enumerate(adapters)]
        self._refs = [
            AdapterRef.of(path.name, str(path), llm.client.load_adapter(path.name, str(path)).result())
            for path in adapters
        ]

    def seconds(self, case: Case, prompts: list[list[int]]) -> float:
        """See `Side`."""
        adapters = [self._refs[each] for each in case.ids()] or None
        return case.sequences / self._side.run(prompts, case.workload, adapters).rate(case.workload)

    def log_probabilities(self, prompt: list[int], adapter: int | None) -> NDArray[np.float32]:
        """Log probabilities of the prompt's tokens after the first."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        asked = None if adapter is None else self._requests[adapter]
        [found] = self._llm.generate([{"prompt_token_ids": prompt}], params, lora_request=asked, use_tqdm=False)
        assert found.prompt_logprobs is not None
        each = zip(prompt[1:], found.prompt_logprobs[1:], strict=True)
        return np.array([entry[token].logprob for token, entry in each if entry is not None], np.float32)


def _of_logits(logits: NDArray[np.float32], prompt: list[int]) -> NDArray[np.float32]:
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide[np.arange(len(prompt) - 1), prompt[1:]].astype(np.float32)


def compare(ours: Adapted, peer: PeerSide, prompt: list[int]) -> float:
    """The largest difference of log probabilities, with an adapter and without. Raises `BenchmarkError` if it is too
    large, or if the adapter changes too little."""
    error, base = 0.0, ours.log_probabilities(prompt, None)
    for adapter in (None, 0, NUM_ADAPTERS - 1):
        mine, theirs = ours.log_probabilities(prompt, adapter), _of_logits(peer.logits(prompt, adapter), prompt)
        error = max(error, float(np.abs(mine - theirs).max()))
        if not error <= TOLERANCE:
            dtype = peer.versions["dtype"]
            raise BenchmarkError(f"{peer.name}'s log probabilities differ by {error:.2g}, adapter {adapter}, {dtype}")
        if adapter is not None and not np.abs(mine - base).max() >= LEAST_CHANGE * error:
            raise BenchmarkError(f"adapter {adapter} changes log probabilities by less than {LEAST_CHANGE:g} errors")
    return error


def bench_adapters(
    pythons: Mapping[str, Path], dtypes: Sequence[str] = DTYPES, *, num_rounds: int = 9, clock: str = "wall",
    config: Mapping[str, Any] = PRESETS[QWEN3], cases: Sequence[Case] = CASES, seed: int = 0,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:  # fmt: skip
    """`results[i]` has a case of a side: `rounds_s`, their median `step_s`, and `more`, the share by which a step is
    longer than the same side's without an adapter. Ours without an adapter is compared with PLAIN.

    pythons  each peer's Python, by the engine's name; a peer without one is left out
    clock    "processor" takes each side's processor time; on one core alone
    """
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    if FILE in dtypes and LLAMA.name not in pythons:
        raise BenchmarkError(f"{FILE} needs llama.cpp's Python, which writes the file")
    if clock != "wall" and usable_cores() != 1:
        raise BenchmarkError(f"--clock {clock} needs one core, not {usable_cores()}: `taskset -c 0 xserv bench ...`")
    report: dict[str, Any] = {
        "clock": clock, "rank": RANK, "num_rounds": num_rounds, "peers": {}, "loads_ms": {}, "results": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="xserv-adapters-") as name:
        folder = Path(name)
        model = folder / "model"
        say("writing the model and its adapters")
        write_qwen3_folder(model, config, seed)
        adapters = write_adapters(model, folder, seed)
        prompts = {
            case: random_prompts(case.sequences, case.workload.prompt_len, config["vocab_size"] - 1, seed)
            for case in cases
        }
        for dtype in dtypes:
            say(f"{dtype}: loading")
            start = time.perf_counter()
            with contextlib.ExitStack() as stack:
                sides = _opened(stack, pythons, model, adapters, dtype, clock, report)
                works: dict[tuple[str, Case], Callable[[], float]] = {
                    (side, case): partial(run, case, prompts[case])
                    for case in cases
                    for side, run in sides.items()
                    if side != PLAIN or case.adapters == 0
                }
                say(f"{dtype}: timing")
                found = interleaved(works, num_rounds, warm_ups=1)
            report["results"] += _rows(dtype, found)
            say(f"{dtype}: loading with one slot")
            report["loads_ms"][dtype] = time_loads(_given(model, dtype), adapters, num_rounds, say)
            say(f"{dtype}: done after {time.perf_counter() - start:.0f} s")
    return finished(report)


def time_loads(
    given: Mapping[str, Any], adapters: Sequence[Path], num_rounds: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Median milliseconds until an adapter lies in a slot: from the host's memory, where it was read before, and from
    files in the page cache, checked against the model. The former is what an answer of one token takes longer than with
    the adapter in its slot."""
    params = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True)
    with LLM(**given, enable_lora=True, max_loras=1, max_cpu_loras=len(adapters), max_lora_rank=RANK) as llm:
        asked = [LoRARequest(path.name, number + 1, str(path)) for number, path in enumerate(adapters)]

        def answered(number: int, token: int) -> float:
            start = time.perf_counter()
            prompt: Any = {"prompt_token_ids": [token // 200 + 1, token % 200 + 1, 7]}  # shares no page with another
            llm.generate([prompt], params, lora_request=asked[number], use_tqdm=False)
            return time.perf_counter() - start

        for number in range(len(adapters)):
            answered(number, 1)
        say("timing loads")
        reads, writes = [], []
        for turn in range(num_rounds * len(adapters)):
            number = turn % len(adapters)
            start = time.perf_counter()
            llm.client.load_adapter(asked[number].lora_name, asked[number].lora_path).result()
            reads.append(time.perf_counter() - start)
            writes.append(answered(number, 2 * turn + 2) - answered(number, 2 * turn + 3))
    read, write = statistics.median(reads) * 1e3, statistics.median(writes) * 1e3
    return {"from_host_memory": write, "from_files": read + write, "most_from_files": max(reads) * 1e3 + write}


def _given(model: Path, dtype: str) -> dict[str, Any]:
    """The settings of our side."""
    given: dict[str, Any] = {
        "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64, "kv_cache_bytes": 512 << 20,
    }  # fmt: skip
    if dtype == FILE:  # whose blocks stay as they are
        return {**given, "model": str(gguf_path(model, dtype))}
    return {**given, "model": str(model), "quantization": dtype if dtype in ("int4", "fp8") else "none"}


def _opened(
    stack: contextlib.ExitStack, pythons: Mapping[str, Path], model: Path, adapters: Sequence[Path], dtype: str,
    clock: str, report: dict[str, Any],
) -> dict[str, Side]:  # fmt: skip
    """The sides by name. Compares each peer with ours first."""
    peers = []
    for engine in PEER_ENGINES:
        if engine.name in pythons and dtype in engine.dtypes:
            child = stack.enter_context(ChildProcess([str(pythons[engine.name]), str(engine.script)], engine.name))
            peers.append(PeerSide(engine, child, model, model, dtype, clock, adapters))
    given = _given(model, dtype)
    plain = OurSide(stack.enter_context(LLM(**given)), clock)
    llm = stack.enter_context(LLM(**given, enable_lora=True, max_loras=NUM_ADAPTERS, max_lora_rank=RANK))
    ours = Adapted(llm, adapters, clock)

    def without(case: Case, prompts: list[list[int]]) -> float:
        return case.sequences / plain.run(prompts, case.workload).rate(case.workload)

    def of_peer(peer: PeerSide, case: Case, prompts: list[list[int]]) -> float:
        return case.sequences / peer.run(prompts, case.workload, case.ids()).rate(case.workload)

    sides: dict[str, Side] = {PLAIN: without, OURS: ours.seconds}
    prompt = random_prompts(1, 24, llm.client.info.vocab_size - 1, 1)[0]
    for peer in peers:
        told = {**peer.versions, "log_probability_error": compare(ours, peer, prompt)}
        report["peers"].setdefault(peer.name, {})[dtype] = told
        sides[peer.name] = partial(of_peer, peer)
    return sides


def _rows(dtype: str, found: Mapping[tuple[str, Case], Sequence[float]]) -> Iterable[dict[str, Any]]:
    for (side, case), seconds in found.items():
        base = found[PLAIN if side == OURS and case.adapters == 0 else side, Case(case.sequences, 0)]
        more = statistics.median(a / b for a, b in zip(seconds, base, strict=True)) - 1
        row = {
            "dtype": dtype, "side": side, "sequences": case.sequences, "adapters": case.adapters,
            "step_s": statistics.median(seconds), "more": more, "more_of_best": min(seconds) / min(base) - 1,
            "rounds_s": list(seconds),
        }  # fmt: skip
        if side == OURS and (goal := _most(dtype, case)) is not None:
            row.update(most=goal, is_met=more <= goal)
        yield row


def _most(dtype: str, case: Case) -> float | None:
    if case.adapters == 0:
        return MOST_OF_BASE
    if case.adapters == NUM_ADAPTERS:
        return MOST_OF_EIGHT
    return GOALS[dtype] if case.sequences == 1 else None


def markdown(report: Mapping[str, Any]) -> str:
    """The results as a table, and the loads; `bench_adapters` tells of `more`."""
    rows = []
    for row in report["results"]:
        most = f"≤ {row['most']:.0%}, {'met' if row['is_met'] else 'missed'}" if "most" in row else "–"
        cells = [row["dtype"], row["side"], str(row["sequences"]), str(row["adapters"])]
        rows.append([*cells, f"{row['step_s'] * 1e3:.2f}", f"{row['more']:.1%}", f"{row['more_of_best']:.1%}", most])
    head = ("weights", "side", "sequences", "adapters", "ms a step", "more", "of the best rounds", "goal")
    loads = "".join(
        f"\n{dtype}: an adapter is in its slot {found['from_host_memory']:.0f} ms from host memory, "
        f"{found['from_files']:.0f} ms from files\n"
        for dtype, found in report["loads_ms"].items()
    )
    return markdown_table(head, rows) + loads
