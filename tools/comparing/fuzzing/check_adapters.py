"""The checks of `fuzz_adapters.py` on one case; run in a separate process, which a fault may break.

A model runs rows of all adapters in one batch, and each alone; an engine with fewer slots than adapters does so, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.adapter_changes import changes_of
from models.peft import read_adapter
from models.registry import declare, load_model
from runtime import LLM, LoRARequest, SamplingParams
from runtime.device.device import Device
from runtime.linear.adapter_pairs import Pair
from runtime.linear.low_rank import LowRankMaps
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor
from tests.models.driver import ModelDriver, mean_relative_error, relative_error, rotary_offset_of
from tools.comparing.fuzzing.cases import Case, has_choice
from tools.comparing.fuzzing.check import TOLERANCES, Findings
from tools.comparing.fuzzing.draw import Fields
from tools.comparing.fuzzing.errors import Array, median_error

IN_FLOAT32 = 2e-5
"""The largest relative error of logits in float32, if PEFT's own is not larger."""
OF_CODES = 0.1
"""The same, by the squares' means, where products read codes and round rows."""
Row = tuple[int, int]
"""A prompt's number, and its adapter's, -1 for none."""


def check_adapters(case: Case, folder: Path, adapters: list[dict[str, Any]], base_noise: float) -> Findings:
    """Checks every run of a case; `adapters` has PEFT's answer for each, whose folders lie beside the model's floats.
    `base_noise` is transformers' error of the model without one."""
    findings, served = Findings(), Path(case["served"])
    with np.load(folder / "adapted.npz") as stored:
        arrays = dict(stored)
    numbers = [number for number, answer in enumerate(adapters) if "refused" not in answer]
    for answer in adapters:
        said = answer.get("refused", "made")
        findings.covered[f"adapters {said}" if said == "made" else f"refused by PEFT: {said}"] += 1
    noise = max([base_noise, *(adapters[number]["noise"] for number in numbers)])
    wanted: dict[Row, Array] = {}
    for index in range(len(case["prompts"])):
        wanted[index, -1] = arrays[f"plain_{index}"]
        wanted |= {(index, number): arrays[f"adapter_{number}_logits_{index}"] for number in numbers}
    folders = {number: folder / f"adapter_{number}" for number in numbers}
    for run in case["runs"]:
        try:
            for failure in _run(case, run, served, folders, wanted, noise, findings):
                findings.failures.append(f"{run['device']} {run['dtype']}: {failure}")
        except Exception as error:  # any fault of the product is a finding
            findings.failures.append(f"{run['device']} {run['dtype']}: {type(error).__name__}: {str(error)[:600]}")
    findings.covered[f"{case['family']} {case['stored']}"] += 1
    return findings


def _run(
    case: Case, run: Fields, served: Path, folders: dict[int, Path], wanted: dict[Row, Array], noise: float,
    findings: Findings,
) -> Iterator[str]:  # fmt: skip
    prompts, device = case["prompts"], run["device"]
    maps = LowRankMaps(max(1, len(folders)), _largest_rank(case, folders))
    settings: Any = {"device": Device.parse(device), "exact": run["exact"], "dtype": run["dtype"]}
    model = load_model(served, addends=maps, max_model_len=case["max_model_len"], **settings)
    maps.allocate(LoadOptions(device=model.device, dtype=model.dtype, exact=run["exact"]))
    slots = {-1: -1}
    for slot, (number, folder) in enumerate(folders.items()):
        changes = changes_of(read_adapter(folder), maps, model, lambda: declare(served).source).pairs
        maps.check(changes)
        maps.write(slot, changes)
        slots[number] = slot
        findings.covered["pairs of low rank"] += sum(isinstance(change, Pair) for change in changes.values())
    rows = [(index, number) for index in range(len(prompts)) for number in (-1, *folders)]
    together = _logits(model, run, prompts, rows, slots)
    kind = f"{device.split(':')[0]} {run['dtype']}" + (" codes" if _has_codes(case, run) else "")
    for row, theirs in wanted.items():
        error, allowed = _error(case, run, together[row], theirs, noise)
        findings.worst[kind] = max(findings.worst.get(kind, 0.0), error)
        if not error <= allowed:
            yield f"logits of prompt {row[0]} with adapter {row[1]} differ by {error:.2e}, more than {allowed:.1e}"
    if device == "cpu" or run["exact"]:
        for row in rows:
            alone = _logits(model, run, prompts, [row], slots)[row]
            if not np.array_equal(alone, together[row]):
                yield f"prompt {row[0]} with adapter {row[1]} has other bits alone"
    yield from _engine_failures(case, run, served, folders, maps.rank, together)
    findings.covered[f"{device} {run['dtype']}"] += 1


def _has_codes(case: Case, run: Fields) -> bool:
    """Whether products read codes, and may round rows to integers."""
    return case["stored"] not in ("dense", "F16") and (run["dtype"] != "float32" or case["stored"].isupper())


def _error(case: Case, run: Fields, ours: Array, theirs: Array, noise: float) -> tuple[float, float]:
    """The error of rows, and the largest that is allowed."""
    may_part = run["dtype"] != "float32" and has_choice(case["fields"].get("text_config", case["fields"]))
    if _has_codes(case, run):
        return mean_relative_error(ours, theirs), OF_CODES * (3 if may_part else 1)
    if run["dtype"] == "float32":
        return relative_error(ours, theirs), max(IN_FLOAT32, 3 * noise)
    own = max(TOLERANCES[run["dtype"]], 3 * noise)
    return (median_error if may_part else relative_error)(ours, theirs), own


def _largest_rank(case: Case, folders: dict[int, Path]) -> int:
    """The largest of all adapters; a map that was retrained whole has the smaller of its sides."""
    found = [1]
    for folder in folders.values():
        adapter = read_adapter(folder)
        found += [len(pair.down) for pair in adapter.pairs.values()]
        found += [
            min(array.shape)
            for name, array in adapter.saved.items()
            if array.ndim == 2 and not name.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight"))
        ]
    return max(found)


def _logits(
    model: Any, run: Fields, prompts: list[list[int]], rows: list[Row], slots: dict[int, int]
) -> dict[Row, Array]:
    """The logits of prompts with adapters in one batch, each in two steps if it has more than one token."""
    found: dict[Row, list[Array]] = {row: [] for row in rows}
    state: dict[str, list[int]] = {}

    def complete(batch: Any, first: int) -> None:
        counts, adapters = state["counts"], state["adapters"]
        batch.adapters = Tensor.from_numpy(np.repeat(np.array(adapters, np.int32), counts)).to(model.device)

    longest = max(len(prompt) for prompt in prompts)
    offset = rotary_offset_of(model, longest)
    driver = ModelDriver(
        model, len(rows), complete=complete, rotary_offset=offset, exact=run["exact"], max_tokens=max(32, longest)
    )
    for step in range(2):
        chunks: dict[int, Sequence[int]] = {}
        for place, (index, _) in enumerate(rows):
            half = (len(prompts[index]) + 1) // 2
            part = prompts[index][:half] if step == 0 else prompts[index][half:]
            if part:
                chunks[place] = part
        if not chunks:
            continue
        state = {"counts": [len(part) for part in chunks.values()], "adapters": [slots[rows[at][1]] for at in chunks]}
        for place, logits in driver.step(chunks).items():
            found[rows[place]].append(logits)
    return {row: np.concatenate(parts) for row, parts in found.items()}


def _engine_failures(
    case: Case, run: Fields, served: Path, folders: dict[int, Path], rank: int, logits: dict[Row, Array]
) -> Iterator[str]:
    """Greedy answers alone and together, and their first tokens' log probabilities by the model's logits."""
    requests = {number: LoRARequest(str(number), number + 1, str(folder)) for number, folder in folders.items()}
    rows = list(logits)
    params = SamplingParams(temperature=0.0, max_tokens=case["num_new"], ignore_eos=True, logprobs=0, detokenize=False)
    options = {"enable_lora": True, "max_loras": max(1, len(folders) - 1), "max_lora_rank": rank, **run}

    def answers(llm: LLM, wanted: list[Row]) -> list[tuple[list[int], list[float]]]:
        found = []
        prompts = [case["prompts"][index] for index, _ in wanted]
        adapters = [requests.get(number) for _, number in wanted]
        for output in llm.generate(prompts, params, use_tqdm=False, lora_request=adapters):
            choice = output.outputs[0]
            if choice.finish_reason != "length":
                raise RuntimeError(f"ended with {choice.finish_reason!r}: {choice.error}")
            assert choice.logprobs is not None
            ids = list(choice.token_ids)
            found.append((ids, [entry[token].logprob for entry, token in zip(choice.logprobs, ids, strict=True)]))
        return found

    with LLM(
        served, skip_tokenizer_init=True, compile_ahead=False, max_model_len=case["max_model_len"], **options
    ) as llm:
        alone = [answers(llm, [row])[0] for row in rows]
        together = answers(llm, rows)
    has_same_bits = run["device"] == "cpu" or run["exact"]
    for row, one, other in zip(rows, alone, together, strict=True):
        if has_same_bits and one != other:
            yield f"prompt {row[0]} with adapter {row[1]} is answered {one} alone, {other} together"
        last = logits[row][-1].astype(np.float64)
        token, logprob = one[0][0], one[1][0]
        expected = last[token] - last.max() - np.log(np.exp(last - last.max()).sum())
        allowed = (1e-4 if run["dtype"] == "float32" else 3e-2) * max(1.0, float(np.abs(last).max()))
        if not abs(expected - logprob) <= allowed:
            yield f"the engine's log probability of prompt {row[0]} with adapter {row[1]} is {logprob}, not {expected}"
