"""The request's fields for scheduling; ids, lengths and parameters are tested with the engine."""

from __future__ import annotations

import math

import pytest

from runtime.engine.admission import prepare
from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request
from tests.runtime.engine.scheduler_cases import make_driver


def prepared(policy: str, **fields: object) -> Request:
    request = EngineRequest(request_id="x", prompt_token_ids=[1, 2], params=SamplingParams(), **fields)  # type: ignore[arg-type]
    return prepare(request, make_driver(scheduling_policy=policy).info)


def test_fields_reach_the_scheduler() -> None:
    request = prepared("deadline", ttft_target_s=2, tpot_target_s=0.25, cache_salt="tenant")
    assert (request.ttft_target_s, request.tpot_target_s, request.cache_salt) == (2, 0.25, "tenant")
    assert prepared("priority", priority=-3).priority == -3
    assert prepared("fcfs").priority == 0


@pytest.mark.parametrize(
    ("policy", "fields", "words"),
    [
        ("fcfs", {"priority": 1}, "the fcfs policy takes no priority, got 1"),
        ("deadline", {"priority": -1}, "the deadline policy takes no priority, got -1"),
        ("fcfs", {"ttft_target_s": 1.0}, "the fcfs policy takes no ttft_target_s, got 1.0"),
        ("priority", {"tpot_target_s": 1.0}, "the priority policy takes no tpot_target_s, got 1.0"),
        ("priority", {"priority": 0.5}, "priority must be an integer, got 0.5"),
        ("deadline", {"ttft_target_s": 0.0}, "ttft_target_s must be a positive number of seconds, got 0.0"),
        ("deadline", {"tpot_target_s": math.nan}, "tpot_target_s must be a positive number of seconds, got nan"),
        ("deadline", {"tpot_target_s": "1"}, "tpot_target_s must be a positive number of seconds, got '1'"),
        ("priority", {"cache_salt": ""}, "cache_salt must be a string, not empty"),
        ("priority", {"cache_salt": 7}, "cache_salt must be a string, not empty"),
    ],
)
def test_what_the_policy_would_ignore_is_refused(policy: str, fields: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        prepared(policy, **fields)
    assert caught.value.param in fields
