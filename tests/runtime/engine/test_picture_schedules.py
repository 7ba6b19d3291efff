"""Gemma 4 with pictures gets the bits of lone runs without a cache, whatever becomes of their requests: chunks that may
not cut a picture, prefixes found before and behind pictures, draft tokens of an assistant and of look-ups kept and
dropped, victims swapped and computed again, cancelled requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest, ImageItem
from runtime.engine.sampling_params import SamplingParams
from tests.models.drafters.assistant_cases import write_assistant_for
from tests.models.vision.cases import IMAGE
from tests.models.vision.chat_model import write_chat_model
from tests.runtime.engine.fakes import collect
from tests.runtime.engine.test_hybrids import Found, run

LENGTH, ROUND = 96, 20
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 6, "block_size": 8, "seed": 0,
    "max_num_batched_tokens": 76,
}  # fmt: skip


def schedules(drafter: Path, few: int) -> list[dict[str, Any]]:
    own, swap = {"speculation": f"mtp:{drafter}"}, {"preemption": "swap", "swap_space_bytes": 1 << 24}
    return [
        {**own, **swap, "num_blocks": few},
        {**own, "num_blocks": few, "preemption": "recompute", "prefill_chunk": 5},
        {**own, **swap, "num_blocks": few + 4, "overlap": "on"},
        {"speculation": "ngram", **swap, "num_blocks": few, "decode_graphs": "off"},
        {"speculation": "off", "num_blocks": few + 10, "overlap": "on", "prefill_chunk": 7},
    ]


def make_requests(rng: random.Random, count: int, engine: Engine) -> list[EngineRequest]:
    """Prompts of text and pictures, of which a few recur, that share beginnings; each wants log probabilities."""
    support = engine.info.images
    assert support is not None
    merge = support.rule.merge_size

    def part(number: int) -> list[tuple[int, int, int]] | list[int]:
        """Words, or the rows and columns of a picture's tokens."""
        own = random.Random(number)
        if number % 3:
            return [own.randrange(3, 80) for _ in range(own.randrange(1, 9))]
        return [(number, *own.choice(((2, 3), (1, 4), (3, 3), (1, 1))))]

    made = []
    for index in range(count):
        ids, items = list[int](), list[ImageItem]()
        for number in [rng.choice((0, 1, 3)), *(rng.randrange(12) for _ in range(rng.randrange(1, 4)))]:
            for each in part(number):
                if isinstance(each, int):
                    ids.append(each)
                    continue
                seed, rows, columns = each
                size = rows * columns * merge**2 * support.patch_bytes
                items.append(
                    ImageItem(
                        digest=bytes([seed]) * 16, first_token=len(ids), rows=rows * merge, columns=columns * merge,
                        patches=np.random.RandomState(seed).bytes(size),
                    )
                )  # fmt: skip
                ids += [IMAGE] * (rows * columns)
        params = SamplingParams(
            max_tokens=rng.randrange(1, 32), temperature=rng.choice((0.0, 0.0, 0.8)), seed=rng.randrange(2**30),
            logprobs=2, n=rng.choice((1, 1, 2)), ignore_eos=True,
        )  # fmt: skip
        name = f"r{index}"
        made.append(EngineRequest(request_id=name, prompt_token_ids=ids, params=params, images=tuple(items)))
    return made


@pytest.mark.parametrize(
    ("first", "num_rounds"),
    [(0, 1), *(pytest.param(first, 15, marks=pytest.mark.exhaustive) for first in range(100, 200, 25))],
)
@pytest.mark.parametrize(("case", "few"), [("gemma4_whole", 30), ("gemma4_causal", 16), ("gemma4_unified", 30)])
@pytest.mark.exhaustive_cases("unified")
def test_no_schedule_changes_a_bit(case: str, few: int, first: int, num_rounds: int, tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "model", case)
    drafter = write_assistant_for(tmp_path / "drafter", folder)
    lone: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 1, "enable_prefix_caching": False, "speculation": "off"}
    alone = build_engine(folder, **{**SETTINGS, **lone})
    engines = [build_engine(folder, **{**SETTINGS, **settings}) for settings in schedules(drafter, few)]
    for number in range(num_rounds):
        rng = random.Random(first + number)
        requests = make_requests(rng, ROUND, alone)
        known = run(alone, requests)
        for place, engine in enumerate(engines):
            if engine.speculator is not None:
                engine.speculator.tries_all()
            if number % 2:  # beginnings of answers, and then all of them
                check_cancelled(engine, rng, requests, known)
            assert run(engine, requests) == known, (number, place)
    stats = [engine.stats() for engine in engines]
    assert min(each.prefix_cache_hits for each in stats) > 0
    assert sum(each.num_preemptions for each in stats) > 0 or (case, num_rounds) == ("gemma4_causal", 1)
    assert min(each.num_draft_tokens for each in stats[:3]) > 50
    for engine in (alone, *engines):
        engine.close()


def check_cancelled(engine: Engine, rng: random.Random, requests: list[EngineRequest], known: Found) -> None:
    """All requests come twice, under another name, and the first of each is cancelled at some step."""
    for name in "ab":
        for each in requests:
            engine.add(msgspec.structs.replace(each, request_id=f"{name}{each.request_id}"))
    left, results, step = [f"a{each.request_id}" for each in requests], dict[str, Any](), 0
    rng.shuffle(left)
    while engine.has_work:
        collect(engine.step(), results)
        if left and step % 3 == 0:
            engine.cancel(left.pop())
        engine.check_invariants()
        step += 1
    assert engine.pool.num_free == engine.pool.num_blocks
    for (name, index), (ids, _) in known.items():
        for twin in "ab":
            outputs = results[twin + name].of(index) if twin + name in results else []
            found = [token_id for output in outputs for token_id in output.new_token_ids]
            assert found == ids[: len(found)]
            assert twin == "a" or len(found) == len(ids)
