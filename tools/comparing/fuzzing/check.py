"""The checks of `fuzz_models.py` on one case; run in a separate process, which a fault may break.

It compares the prompts' logits, greedy tokens and their log probabilities with transformers, and runs of the same
requests alone, together and again with each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime import LLM, SamplingParams
from runtime.text.load import load_tokenizer
from tools.comparing.fuzzing.cases import POOLED, Case, has_choice
from tools.comparing.fuzzing.check_pooled import pooled_failures
from tools.comparing.fuzzing.draw import Fields
from tools.comparing.fuzzing.errors import Array, median_error, relative_error

Answer = tuple[list[int], list[float], list[list[int]]]  # token ids, log probabilities, the best ids at each position

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
POOLED_TOLERANCE = 1e-5
"""In float32, of models that generate nothing."""
MOST_ALLOWED = 0.1
"""Allowed where tokens choose experts: the error, elsewhere limited to three times transformers' own, may be another
choice of expert."""
NUM_TOP = 5


@dataclass
class Findings:
    """The problems found, and the coverage, so that a run shows that it has tested something."""

    failures: list[str] = field(default_factory=list)
    covered: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # relative error of logits

    def add(self, other: Findings) -> None:
        self.covered += other.covered
        for name, error in other.worst.items():
            self.worst[name] = max(self.worst.get(name, 0.0), error)


def check(case: Case, folder: Path, noise: float, token_ids: list[list[int]] | None = None) -> Findings:
    """Checks every run of a case over the oracle's folder; `noise` is transformers' error in the case's type, and
    `token_ids` its ids of the case's texts."""
    with np.load(folder / "oracle.npz") as stored:
        arrays = dict(stored)
    is_pooled = case["family"] in POOLED
    of_type = POOLED_TOLERANCE if is_pooled and case["dtype"] == "float32" else TOLERANCES[case["dtype"]]
    tolerance = max(of_type, 3 * noise)  # each is one sample: ours were 0.6 to 2.4 times theirs
    seen: dict[str, list[Answer]] = {}
    findings = Findings()
    findings.worst[f"transformers {case['dtype']}"] = noise
    if token_ids:
        findings.failures += _tokenizer_failures(folder, case["texts"], token_ids)
    for run in case["runs"]:
        device = run["device"]
        try:
            if is_pooled:
                found = _pooled_run(case, run, folder, arrays, tolerance, findings)
            else:
                found = _run(case, run, folder, arrays, tolerance, seen, findings)
            for failure in found:
                findings.failures.append(f"{device}: {failure}")
        except Exception as error:  # any fault of the product is a finding
            if "is not supported; supported are" in str(error):
                findings.covered[f"{case['family']}: not supported"] += 1
                return findings
            findings.failures.append(f"{device}: {type(error).__name__}: {str(error)[:600]}")
    findings.covered[case["family"]] += 1
    return findings


def _tokenizer_failures(folder: Path, texts: list[str], token_ids: list[list[int]]) -> Iterator[str]:
    try:
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        ours = [list(tokenizer.encode(text)) for text in texts]
    except Exception as error:  # any fault of the product is a finding
        yield f"tokenizer: {type(error).__name__}: {error}"
        return
    for text, mine, other in zip(texts, ours, token_ids, strict=True):
        if mine != other:
            yield f"{text!r} becomes {mine}, not {other}"


def _run(
    case: Case,
    run: Fields,
    folder: Path,
    arrays: dict[str, Array],
    tolerance: float,
    seen: dict[str, list[Answer]],
    findings: Findings,
) -> Iterator[str]:
    prompts, device, dtype = case["prompts"], run["device"], case["dtype"]
    greedy, drawn = _params(case)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    may_part = dtype != "float32" and has_choice(config)  # a token with another expert differs arbitrarily
    if may_part:
        tolerance = min(tolerance, MOST_ALLOWED)

    def compared(answer: Answer, index: int) -> str | None:
        logits = arrays[f"logits_{index}"][len(prompts[index]) - 1 :]
        return differs(answer, arrays[f"greedy_{index}"].tolist(), logits, tolerance, dtype)

    with LLM(folder, skip_tokenizer_init=True, compile_ahead=False, max_model_len=case["max_model_len"], **run) as llm:
        for index, prompt in enumerate(prompts):
            theirs = arrays[f"logits_{index}"][: len(prompt)]
            error = (median_error if may_part else relative_error)(llm.logits(prompt), theirs)
            kind = f"{device.split(':')[0]} {dtype}"
            findings.worst[kind] = max(findings.worst.get(kind, 0.0), error)
            if not error <= tolerance:
                yield f"logits of prompt {index} differ by {error:.2e}, more than {tolerance:.1e}"
        alone = [_generate(llm, [prompt], greedy)[0] for prompt in prompts]
        together = _generate(llm, prompts, greedy)
        sampled = [_generate(llm, [prompt], drawn)[0] for prompt in prompts]
        sampled_together = _generate(llm, prompts, drawn)
        stats = llm.client.stats()
    findings.covered[device] += 1
    findings.covered["preemptions"] += stats.num_preemptions
    for way, answers in (("alone", alone), ("together", together)):
        for index, answer in enumerate(answers):
            if not may_part and (said := compared(answer, index)):
                yield f"{way}, prompt {index}: {said}"
    if device == "cpu" or run.get("exact"):
        mode = f"{device} exact" if run.get("exact") else device  # each sums in its own order
        expected = seen.setdefault(mode, alone + sampled)
        for way, got in (("alone", alone + sampled), ("together", together + sampled_together)):
            for index, (ours, other) in enumerate(zip(got, expected, strict=True)):
                if ours[:2] != other[:2]:
                    kind = "greedy" if index < len(prompts) else "drawn"
                    yield f"{kind} {way}, prompt {index % len(prompts)}: {ours[:2]} instead of {other[:2]}"


def _pooled_run(
    case: Case, run: Fields, folder: Path, arrays: dict[str, Array], tolerance: float, findings: Findings
) -> Iterator[str]:
    dtype, kind = case["dtype"], f"{run['device'].split(':')[0]} {case['dtype']}"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if dtype != "float32" and has_choice(config):
        findings.covered[f"{dtype} with experts: not compared"] += 1
        return

    def note(error: float) -> None:
        findings.worst[kind] = max(findings.worst.get(kind, 0.0), error)

    yield from pooled_failures(case, run, folder, arrays, tolerance, note)
    findings.covered[run["device"]] += 1


def _params(case: Case) -> tuple[SamplingParams, SamplingParams]:
    common: dict[str, Any] = {"max_tokens": case["num_new"], "ignore_eos": True, "logprobs": NUM_TOP}
    drawn = {"temperature": 1.2, "seed": case["weights"], "top_k": 20, "top_p": 0.95, "frequency_penalty": 0.3}
    common["detokenize"] = False
    return SamplingParams(temperature=0.0, **common), SamplingParams(**drawn, **common)


def _generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    """For each prompt: token ids, log probabilities, and the most probable ids at each position."""
    answers: list[Answer] = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        choice = output.outputs[0]
        if choice.finish_reason != "length":
            raise RuntimeError(f"ended with {choice.finish_reason!r}: {choice.error}")
        assert choice.logprobs is not None
        chosen = [entry[token] for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        top = [[token for token, one in entry.items() if one.rank <= NUM_TOP] for entry in choice.logprobs]
        answers.append((list(choice.token_ids), [one.logprob for one in chosen], top))
    return answers


def differs(answer: Answer, theirs: list[int], logits: Array, tolerance: float, dtype: str) -> str | None:
    """The problem of a greedy continuation compared with theirs, which has `logits [tokens, vocabulary]`."""
    ours, logprobs, top = answer
    allowed = 2 * tolerance * float(np.abs(logits).max())
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        row = logits[at].astype(np.float64)
        if mine != other:
            if dtype == "float32" and row[other] - row[mine] > allowed / 10:
                return f"token {at} is {mine}, not {other}, which is better by {row[other] - row[mine]:.2e}"
            if mine not in np.argsort(row)[-NUM_TOP:] or other not in top[at]:
                return f"token {at} is {mine}, theirs {other}: one is not among the other's five best"
            return None
        exact = row[mine] - row.max() - np.log(np.exp(row - row.max()).sum())
        if not abs(logprobs[at] - exact) <= allowed:
            return f"log probability of token {at} is {logprobs[at]:.6f}, not {exact:.6f}"
    return None
