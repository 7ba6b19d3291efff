"""Models with recurrent states, or layers that share pages, get the bits of lone runs without a cache, whatever becomes
of their requests: chunks of odd lengths, prefixes found, draft tokens kept and dropped, victims swapped and computed
again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.speculation.ngram import SuffixDrafter
from runtime.engine.speculation.speculator import Speculator
from runtime.kv.kinds import State
from tests.models.drafters.assistant_cases import TARGETS as ASSISTANTS
from tests.models.drafters.assistant_cases import write_assistant, write_copies, write_wide
from tests.models.drafters.mtp_cases import CASES, write_with_prediction
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.fakes import run_to_end
from tests.runtime.engine.test_fuzz import templates
from tools.comparing.compare_speculation import Answer, Guesses

LENGTH, ROUND = 90, 40
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 8, "block_size": 8, "seed": 0,
}  # fmt: skip
FEW: dict[str, Any] = {"num_blocks": 40, "speculation": "suffix"}
SCHEDULES: tuple[dict[str, Any], ...] = (
    {**FEW, "preemption": "swap", "swap_space_bytes": 1 << 24},
    {**FEW, "preemption": "recompute", "max_num_batched_tokens": 13},
    {**FEW, "preemption": "swap", "swap_space_bytes": 1 << 20, "overlap": "on", "max_num_batched_tokens": 29},
    {"num_blocks": 400, "speculation": "suffix", "decode_graphs": "off"},
    {**FEW, "speculation": "off", "overlap": "on"},
)


def with_assistant(drafter: Path) -> list[dict[str, Any]]:
    """Schedules with Gemma 4's assistant in that folder."""
    own = {**FEW, "speculation": f"mtp:{drafter}"}
    return [{**own, "preemption": "swap", "swap_space_bytes": 1 << 24}, {**own, "overlap": "on", "num_blocks": 30}]


Found = dict[tuple[str, int], tuple[list[int], list[Any]]]
"""By request and choice: ids, and the bits of their log probabilities."""


def run(engine: Engine, requests: list[EngineRequest]) -> Found:
    for each in requests:
        engine.add(each)
    results, found = run_to_end(engine), Found()
    for each in requests:
        for index in range(each.params.n):
            outputs = results[each.request_id].of(index)
            ids = [token_id for output in outputs for token_id in output.new_token_ids]
            found[each.request_id, index] = ids, [one for output in outputs for one in output.logprobs or ()]
    return found


@pytest.mark.parametrize(
    ("first", "num_requests"),
    [(0, 24), *(pytest.param(first, 1_000, marks=pytest.mark.exhaustive) for first in range(0, 10_000, 1_000))],
)
@pytest.mark.parametrize(
    "case", ["qwen3_5_odd", "granite_hybrid_odd", "gemma4_inputs_odd", "gemma4_wide", "keys", "groups"]
)
@pytest.mark.exhaustive_cases("granite", "gemma4_wide", "keys", "groups")
def test_no_schedule_changes_a_bit(
    case: str, first: int, num_requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round has a schedule, whose engine and cache live through all of them; the drafters are look-ups, guesses
    of the known answer, and the model's prediction layer or
    assistant."""
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)  # more states than pages of tokens
    schedules, dummies = list(SCHEDULES), {"load_format": "dummy"} if case == "gemma4_wide" else {}
    if dummies:
        folder, drafter = write_wide(tmp_path)
        schedules += with_assistant(drafter)
    elif case in CASES:
        folder = write_with_prediction(tmp_path, case)
        schedules.append({**FEW, "speculation": "mtp", "preemption": "recompute"})
    elif case in ASSISTANTS:
        folder, drafter = write_copies(tmp_path, case, share=1.5)
        schedules += with_assistant(drafter)
    else:
        folder = write_model(tmp_path / "model", load_golden(case))
        schedules += with_assistant(write_assistant(tmp_path / "drafter", "inputs")) if "gemma4" in case else []
    lone: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 1, "enable_prefix_caching": False, "speculation": "off"}
    alone = build_engine(folder, **{**SETTINGS, **lone, **dummies})
    engines = [build_engine(folder, **{**SETTINGS, **settings, **dummies}) for settings in schedules]
    vocab_size, count = alone.info.vocab_size, min(ROUND, num_requests)
    known = Found()
    for number in range(max(len(engines), num_requests // count)):
        place = number % len(engines)
        if place == 0:
            requests = make_requests(random.Random(first + number), count, vocab_size)
            known = run(alone, requests)
        engine = engines[place]
        if engine.speculator is not None and engine.speculator.wanted is None:
            answers = {key: Answer(ids=list(ids)) for key, (ids, _) in known.items()}
            drafter = SuffixDrafter() if number % 4 == 1 else Guesses(answers, vocab_size, number)
            engine.use(Speculator(drafter, 7, vocab_size, fixed=True))
        elif engine.speculator is not None:
            engine.speculator.tries_all()
        assert run(engine, requests) == known, (number, schedules[place])
    stats = [engine.stats() for engine in engines]
    assert min(each.prefix_cache_hits for each in stats) > 0
    assert min(sum(each.num_preemptions for each in stats), sum(each.num_swaps for each in stats)) > 0
    for engine in (alone, *engines):
        engine.close()


def make_requests(rng: random.Random, count: int, vocab_size: int) -> list[EngineRequest]:
    """Many kinds, whose prompts share beginnings; each wants log probabilities."""
    made = templates(rng, count, vocab_size, LENGTH)
    return [msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, logprobs=2)) for each in made]
