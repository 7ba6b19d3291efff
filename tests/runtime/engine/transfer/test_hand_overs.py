"""A request that another engine continues gets the answer of one engine, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.kv.kinds import State
from tests.runtime.engine.storing_engine import SETTINGS, make_requests
from tests.runtime.engine.test_stored_prefixes import write_case
from tests.runtime.engine.transfer.handing import handed_over, joined_engine, run, said


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_the_answer_is_that_of_one_engine(
    case: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)
    model, own = write_case(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    alone = build_engine(model, **{**settings, "max_num_seqs": 1, "enable_prefix_caching": False})
    requests = make_requests(1, 40, alone.info.vocab_size)
    known = said(run(alone, requests), requests)
    alone.close()
    with (
        joined_engine(model, scheme, **settings, max_num_batched_tokens=16) as first,
        joined_engine(model, scheme, **settings) as second,
    ):
        assert said(handed_over(first, second, requests, scheme), requests) == known
        assert first.hand_overs is not None
        assert second.hand_overs is not None
        counters = first.hand_overs.counters, second.hand_overs.counters
        assert counters[0].dropped == counters[1].lost == 0
        assert counters[1].arrived > 10
        stored = second.scheduler.stored
        assert stored is not None
        assert stored.num_restored > 100
        for engine in (first, second):
            assert engine.pool.num_free == engine.pool.num_blocks
            assert engine.hand_overs.arrivals.num_open == 0


@pytest.mark.parametrize("case", ["full", "windows", "states"])
@pytest.mark.parametrize("length", [5, 16, 61, 64])
def test_nothing_of_the_prompt_is_computed_again(
    case: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)
    model, own = write_case(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    asked = EngineRequest(
        request_id="x",
        prompt_token_ids=[(7 * i) % 53 for i in range(length)],
        params=SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
    )
    with (
        joined_engine(model, **settings, max_num_batched_tokens=16) as first,
        joined_engine(model, **settings) as second,
    ):
        outputs = handed_over(first, second, [asked], "unix")["x"]
        assert [len(each.new_token_ids) for each in outputs] == [1] * 9
        stored = second.scheduler.stored
        assert stored is not None
        assert stored.num_restored == length
        assert second.stats().iteration_tokens == 8
