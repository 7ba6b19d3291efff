"""Runs random small models of every family and compares each with Hugging Face transformers.

    python tools/comparing/fuzz_models.py --peer-python PYTHON [--seed N] [--num M] [--family qwen3 ...]
    python tools/comparing/fuzz_models.py --peer-python PYTHON --forward --num 60 --family qwen3_5
    python tools/comparing/fuzz_models.py --peer-python PYTHON --case FILE
    python tools/comparing/fuzz_models.py --peer-python PYTHON --num 20 --write-goldens tests/models/fuzzed

`PYTHON` has torch and transformers (`fuzzing/oracle.py` runs there, once for all models). Case `i` of seed `N` is
always the same model (`fuzzing/cases.py`), run on the cpu in whole steps and in tight ones (chunked prompts, few
blocks, so that prefixes are found and sequences preempted), and on one of the emulated devices. It compares

- the prompts' logits: max|a - b| / max|b| within 1e-4 in float32 (of weights that rounding moves by less: see
  MOST_CONDITION) and 2e-2 in bfloat16 and float16, or three times transformers' own error in that type if that is
  more; if rounding may choose other experts, only half of the rows, and nothing else;
- greedy tokens: equal in float32 (except ties); else, at the first difference, each among the other's five best; and
  the log probabilities up to it;
- the tokenizer's ids of texts: equal;
- the same requests alone, together and again, if the arithmetic is deterministic (cpu, or exact): tokens and the bits
  of log probabilities, greedy and sampled, in every run of the device.

With `--forward` forward passes alone run, in float32, on the cpu and on all emulated devices, for a few seconds a model
(`check_forward.py`). Gemma 4's prompts then have pictures.

It compares the hidden states or labels' scores of models that generate nothing: alone, in batches and through an
engine, within 1e-5 in float32.

Each failure is shrunk and printed as JSON for `--case`. The exit status is 1 if there was any.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from runtime.bench.peers.child_process import ChildProcess  # noqa: E402
from tools.comparing.fuzzing.cases import FORWARD, POOLED, Case, classes_of, draw_case, draw_forward, families  # noqa: E402
from tools.comparing.fuzzing.check import Findings, check  # noqa: E402
from tools.comparing.fuzzing.check_forward import check_forward  # noqa: E402

ORACLE = ROOT / "tools" / "comparing" / "fuzzing" / "oracle.py"
HANG_S = 600
"""A case that takes longer has failed."""
MAX_SHRINKS = 40
MOST_CONDITION, MOST_DRAWS = 2e-5, 12
"""The largest condition of a model in float32, and how many seeds of weights are tried for it. After a delta rule the
norm divides by outputs that may cancel, so with some weights rounding alone moves logits by more than the bound."""
NOT_KEPT = ("fields", "notes", "texts", "fuses_experts")
"""Names of goldens' weights, as they are written."""


class Oracle:
    """transformers in its own Python, and a folder for the models that it makes."""

    def __init__(self, python: str, script: Path = ORACLE) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-models-")
        self._peer = ChildProcess([python, str(script)], "transformers")

    def make_conditioned(self, case: Case) -> tuple[Path, dict[str, Any]]:
        """As `make`, with other weights, written to the case, where float32 cannot say what the logits are: those of
        the best condition of up to MOST_DRAWS."""
        folder, answer = self.make(case)
        first, conditions = case["weights"], [answer.get("condition", 0.0)]
        while conditions[-1] > MOST_CONDITION and len(conditions) < MOST_DRAWS:
            case["weights"] = first + len(conditions)
            folder, answer = self.make(case)
            conditions.append(answer["condition"])
        best = first + conditions.index(min(conditions))
        if case["weights"] != best:
            case["weights"] = best
            folder, answer = self.make(case)
        return folder, answer

    def make(self, case: Case) -> tuple[Path, dict[str, Any]]:
        """The model folder of a case, and the oracle's results."""
        folder = Path(self._folder.name) / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        config_class, architecture = classes_of(case["family"])
        request = {"config_class": config_class, "architecture": architecture, "folder": str(folder)}
        passed = ("fields", "dtype", "weights", "prompts", "num_new", "fuses_experts", "texts", "types", "pictures")
        request |= {name: case[name] for name in passed if name in case}
        answer = self._peer.ask("make", HANG_S, **request)
        if case.get("notes") and "refused" not in answer:
            add_notes(folder / "config.json", case["notes"])
        return folder, answer

    def close(self) -> None:
        self._peer.close()
        self._folder.cleanup()


class Checker:
    """Checks cases in a process that is replaced after each failure: a fault of an emulated device persists."""

    def __init__(
        self, oracle: Oracle, check: Callable[..., Findings] = check, passed: Sequence[str] = ("noise", "token_ids")
    ) -> None:
        """``check`` gets a case, its folder, and these entries of the oracle's answer."""
        self._oracle, self._check, self._passed = oracle, check, passed
        self._pool: ProcessPoolExecutor | None = None
        self.total = Findings()
        self.largest = 0.0  # relative error of logits in the latest case

    def check(self, case: Case) -> list[str]:
        """The problems of a case."""
        drawn = case["weights"]
        folder, answer = self._oracle.make_conditioned(case)
        self.total.covered["other weights, for their condition"] += case["weights"] != drawn
        if "refused" in answer:
            self.total.covered[f"refused by transformers: {answer['refused']}"] += 1
            return []
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=quiet)
        try:
            made = [answer[name] for name in self._passed]
            findings = self._pool.submit(self._check, case, folder, *made).result(HANG_S)
        except BrokenProcessPool:
            findings = Findings([f"the process died: {case['runs']}"])
        except TimeoutError:
            findings = Findings([f"no answer for {HANG_S} s"])
        self.largest = max(findings.worst.values(), default=float("nan"))
        self.total.add(findings)
        if findings.failures:
            self.close()
        return findings.failures

    def close(self) -> None:
        if self._pool is not None:
            for process in multiprocessing.active_children():
                process.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def add_notes(path: Path, notes: dict[str, Any]) -> None:
    """Adds harmless fields to a config.json and its nested configs."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for inner in (config, *(value for name, value in config.items() if name.endswith("_config") and value)):
        inner.update({name: value for name, value in notes.items() if name not in inner})
    path.write_text(json.dumps(config), encoding="utf-8")


def quiet() -> None:
    """Silences logs and traces of threads, which repeat the findings."""
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda arguments: None


def smaller(case: Case) -> Iterator[Case]:
    """The case reduced by one element."""
    for index in range(len(case["runs"])):
        if len(case["runs"]) > 1:
            yield {**case, "runs": case["runs"][:index] + case["runs"][index + 1 :]}
    for index in range(len(case["prompts"])):
        if len(case["prompts"]) > 1 and "pictures" not in case:
            kept: dict[str, Any] = {
                name: case[name][:index] + case[name][index + 1 :] for name in ("prompts", "types") if name in case
            }
            yield {**case, **kept}
    if case["num_new"] > 1:
        yield {**case, "num_new": 1}
    if case["dtype"] != "float32":
        yield {**case, "dtype": "float32"}
    for name in ("notes", "texts", "fuses_experts"):
        if case.get(name):
            yield {each: value for each, value in case.items() if each != name}
    if "text_config" in case["fields"]:
        return
    fields = case["fields"]
    layers = "n_layer" if "n_layer" in fields else "num_hidden_layers"
    if fields.get(layers, 1) > 1 and "layer_types" not in fields and "no_rope_layers" not in fields:
        yield {**case, "fields": {**fields, layers: 1}}
    for name, value in fields.items():
        if value is True:
            yield {**case, "fields": {**fields, name: False}}
        if name in ("sliding_window", "n_inner", "attn_logit_softcapping", "final_logit_softcapping") and value:
            yield {**case, "fields": {**fields, name: None}}
    if fields.get("rope_parameters", {}).get("rope_type", "default") != "default":
        yield {**case, "fields": {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}}
    for index, run in enumerate(case["runs"]):
        for name in run:
            if name not in ("device", "block_size", "num_blocks", "preemption"):
                changed = copy.deepcopy(case)
                del changed["runs"][index][name]
                if name == "swap_space_bytes":
                    del changed["runs"][index]["preemption"]
                yield changed


def shrunk(checker: Checker, case: Case) -> Case:
    """A smaller case that also fails."""
    tries = 0
    while True:
        for candidate in smaller(case):
            tries += 1
            if tries > MAX_SHRINKS:
                return case
            if checker.check(candidate):
                case = candidate
                break
        else:
            return case


def write_goldens(oracle: Oracle, folder: Path, seed: int, num: int, families: list[str], devices: list[str]) -> None:
    """Writes `cases.json` and `oracle.npz`: small cases that `tests/models/test_fuzzed.py` runs without the oracle."""
    kept: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for index in itertools.count():
        if len(kept) == num:
            break
        case = draw_case(random.Random(f"{seed}:{index}"), families[len(kept) % len(families)], devices, is_small=True)
        made, answer = oracle.make_conditioned(case)
        if "refused" in answer:
            continue
        config = json.loads((made / "config.json").read_text(encoding="utf-8"))
        with np.load(made / "oracle.npz") as stored:
            arrays |= {f"{len(kept)}_{name}": array for name, array in stored.items()}
        kept.append({"case": {name: case[name] for name in case if name not in NOT_KEPT}, "config": config, **answer})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n", encoding="utf-8")
    np.savez_compressed(folder / "oracle.npz", **arrays)


def drawn(options: argparse.Namespace) -> Iterator[Case]:
    """The cases of a command line."""
    if options.case:
        yield json.loads(options.case.read_text(encoding="utf-8"))
        return
    if options.every_save:
        for family, dtype, fuses in itertools.product(options.family, ("float32", "bfloat16"), (False, True)):
            case = draw_case(random.Random(f"{options.seed}:{family}:{dtype}"), family, [], is_small=True)
            fields = case["fields"]
            if not fuses or any("expert" in name for name in {*fields, *fields.get("text_config", {})}):
                yield {**case, "dtype": dtype, "fuses_experts": fuses}
        return
    for index in range(options.first, options.first + options.num):
        rng = random.Random(f"{options.seed}:{index}")
        if options.forward:
            yield draw_forward(rng, options.family[index % len(options.family)], ["cpu", *options.device])
            continue
        devices = options.device if rng.random() < options.emulated_share else []
        case = draw_case(rng, options.family[index % len(options.family)], devices)
        yield {**case, "dtype": options.dtype} if options.dtype else case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True, help="a Python with torch and transformers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=20, help="models")
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument("--family", nargs="*", choices=[*families(), *POOLED])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of all models")
    parser.add_argument("--device", nargs="*", default=["emulated:sm_80", "emulated:sm_90a"])
    parser.add_argument("--emulated-share", type=float, default=0.4, help="of models that run on a device, too")
    parser.add_argument("--forward", action="store_true", help="forward passes alone, of each model on all devices")
    parser.add_argument("--every-save", action="store_true", help="each family in both types and layouts of experts")
    parser.add_argument("--case", type=Path, help="run this case instead")
    parser.add_argument("--write-goldens", type=Path, help="keep small cases and their answers in this folder")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they were drawn")
    options = parser.parse_args()
    options.family = options.family or (FORWARD if options.forward else families())
    if options.forward and (others := {*options.family} - {*FORWARD}):
        parser.error(f"--forward does not run {', '.join(sorted(others))}")
    oracle = Oracle(options.peer_python)
    if options.write_goldens:
        write_goldens(oracle, options.write_goldens, options.seed, options.num, options.family, options.device)
        oracle.close()
        return 0
    checker = Checker(oracle, check_forward, ("noise",)) if options.forward else Checker(oracle)
    return run(checker, oracle, drawn(options), None if options.no_shrink else shrunk, options.first)


def run(
    checker: Checker, oracle: Oracle, cases: Iterable[Case], shrink: Callable[[Checker, Case], Case] | None,
    first: int = 0,
) -> int:  # fmt: skip
    """Checks cases, whose numbers begin with `first`, and prints what it finds. Returns 1 if any failed, else 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    num_failed, start = 0, time.monotonic()
    try:
        for index, case in enumerate(cases, first):
            began = time.monotonic()
            said = checker.check(case)
            devices = ", ".join(each["device"] for each in case["runs"])
            took = f"{time.monotonic() - began:.1f} s, {checker.largest:.0e}" + (", FAILED" if said else "")
            kind = case.get("stored", case["dtype"])
            print(f"{index} {case['family']} {kind} on {devices}: {took}", flush=True)
            if said:
                num_failed += 1
                print("\n".join(f"    {each}" for each in said), flush=True)
                if shrink is not None:
                    case = shrink(checker, case)
                    print("\n".join(f"    smaller: {each}" for each in checker.check(case)))
                print(f"    {json.dumps(case)}", flush=True)
    finally:
        checker.close()
        oracle.close()
    worst = {name: f"{error:.1e}" for name, error in checker.total.worst.items()}
    print(f"{num_failed} failed in {time.monotonic() - start:.0f} s; largest errors {worst}")
    print("\n".join(f"{count:7} {what}" for what, count in sorted(checker.total.covered.items())))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
