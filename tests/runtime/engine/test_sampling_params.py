"""Every field of SamplingParams: default, limits, wrong types, and the way through JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from models.configuration.generation_config import recommended_sampling
from runtime.engine.admission import prepare
from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import RequestOutputKind, SamplingParams
from runtime.engine.scheduling.sequence import Request
from tests.runtime.engine.scheduler_cases import make_driver


def test_defaults_are_vllms() -> None:
    assert msgspec.to_builtins(SamplingParams()) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "top_n_sigma": 0.0,
        "typical_p": 1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "samplers": None,
        "temperature_last": False,
        "dry_sequence_breakers": None,
        "dry_breakers": None,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "truncate_prompt_tokens": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "logprob_token_ids": None,
        "bad_words": None,
        "bad_words_token_ids": None,
        "grammar": None,
        "reasoning_budget": None,
        "structured_outputs": None,
        "output_kind": RequestOutputKind.CUMULATIVE.value,
        "extra_args": None,
    }


FIELDS_AND_BAD_VALUES = {
    "n": [0, -1, 129, 10**9, 1.5, True, None, "1", math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan, math.inf, "0", None, True],
    "frequency_penalty": [-2.1, 2.1, math.nan, -math.inf, "0", None, False],
    "repetition_penalty": [0.0, -1.0, math.nan, math.inf, "1", None],
    "temperature": [-0.1, math.nan, math.inf, "1", None, True],
    "top_p": [0.0, 1.1, -1, math.nan, None],
    "top_k": [-2, 1.5, 2**31, True, None, math.nan],
    "min_p": [-0.1, 1.1, math.nan, None],
    "top_n_sigma": [-1.1, 10001.0, math.nan, None, "1"],
    "typical_p": [0.0, -0.1, 1.1, math.nan, None],
    "xtc_probability": [-0.1, 1.1, math.nan, None],
    "xtc_threshold": [-0.1, 1.1, math.nan, None],
    "dynatemp_range": [-0.1, 10001.0, math.inf, None],
    "dynatemp_exponent": [-0.1, math.nan, math.inf, None],
    "mirostat": [-1, 1, 3, 2.0, True, None],
    "mirostat_tau": [-0.1, math.nan, 10001.0, None],
    "mirostat_eta": [-0.1, math.nan, 10001.0, None],
    "dry_multiplier": [-0.1, math.nan, 10001.0, None],
    "dry_base": [0.99, math.nan, 10001.0, None],
    "dry_allowed_length": [-1, 1.5, 2**31, None],
    "dry_penalty_last_n": [-2, 1.5, 2**31, None],
    "samplers": ["top_k", [1], 5, ["nonsense"], ["top_k", "top-k"], ["top_k", "dry"], ["dry", "penalties"]],
    "temperature_last": [0, 1, None, "true"],
    "dry_sequence_breakers": ["a", [1], [""], ["x" * 41], ["\u00e9" * 21], ["a"] * 65],
    "dry_breakers": [[1], {"token_ids": [1]}, 5],
    "seed": [2**63, -(2**63) - 1, 1.0, True, "1"],
    "stop": ["", [""], 5, [5], ["a"] * 65, ["x" * 1025], b"a"],
    "stop_token_ids": [5, [1.5], ["a"], [True], "ab"],
    "ignore_eos": [0, 1, None, "true"],
    "max_tokens": [0, -2, 1.5, True, math.nan, 2**31],
    "min_tokens": [-1, 17, None, 0.5, True],
    "logprobs": [-1, 21, True, 1.0],
    "prompt_logprobs": [-1, 21, True, 1.0],
    "detokenize": [0, None],
    "skip_special_tokens": [1, None],
    "include_stop_str_in_output": [1, None],
    "truncate_prompt_tokens": [0, -2, 1.5, True, "1"],
    "bad_words_token_ids": ["a", [1], [[]], [["a"]], [[True]], [[1] * 65], [[1]] * 257],
    "bad_words": ["a", [1], 5, [None], ["a"] * 257],
    "grammar": ["a", {"kind": "regex", "text": "a"}, 1],
    "reasoning_budget": ["a", {"num_tokens": 1}, 1],
    "structured_outputs": ["a", {"regex": "a"}, 1],
    "output_kind": ["DELTA", 0, None],
    "logit_bias": [
        [1],
        {"a": 1},
        {1: "a"},
        {1: 100.5},
        {1: math.nan},
        {1: -math.inf},
        {True: 1},
        {1.5: 1},
        5,
    ],
    "allowed_token_ids": [[], [1.5], 5, [None]],
    "logprob_token_ids": [[], [1.5], 5, [None]],
    "extra_args": [[], "a", 5, {1: 2}, {"a": object()}, {"a": {1j}}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in FIELDS_AND_BAD_VALUES.items() for value in values]
)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name.split("_")[0]) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    assert isinstance(caught.value, ValueError)


def test_every_field_has_bad_values() -> None:
    assert set(FIELDS_AND_BAD_VALUES) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    "params",
    [
        {"n": 128},
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_k": -1},
        {"top_k": np.int64(5)},
        {"top_p": np.float32(0.5)},
        {"max_tokens": None},
        {"min_tokens": 16},
        {"seed": -1},
        {"seed": 2**63 - 1},
        {"logprobs": 0},
        {"stop": "x"},
        {"stop": []},
        {"stop": ("a", "b")},
        {"logit_bias": {5: -100, 6: 100.0}},
        {"stop_token_ids": []},
    ],
)
def test_edge_values_are_taken_and_survive_messages(params: dict[str, object]) -> None:
    made = SamplingParams(**params)  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(made), type=SamplingParams) == made
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"best_of": 2}', type=SamplingParams)


def test_decoding_checks_too() -> None:
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.json.decode(b'{"top_p": 2}', type=SamplingParams)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_validate_knows_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1.0}, allowed_token_ids=[0]).validate(10)
    for name, value in (("stop_token_ids", [10]), ("logit_bias", {-1: 1.0}), ("allowed_token_ids", [10])):
        with pytest.raises(RequestError, match="vocabulary of 10") as caught:
            SamplingParams(**{name: value}).validate(10)  # type: ignore[arg-type]
        assert caught.value.param == name


def test_greedy_and_penalties() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(presence_penalty=-0.1).has_penalties


def test_max_tokens_without_limit() -> None:
    assert SamplingParams(max_tokens=-1).max_tokens is SamplingParams(max_tokens=None).max_tokens is None
    with pytest.raises(RequestError, match=r"max_tokens must be between 1 and 2147483647, or -1 .*, got 0"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {}),
        ({}, {}),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"do_sample": False, "top_p": 0, "top_k": 2.5}, {"temperature": 0.0}),
        ({"min_p": 0.1, "max_new_tokens": 99}, {"min_p": 0.1, "max_tokens": 99}),
    ],
)
def test_recommendations(tmp_path: Path, content: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert recommended_sampling(tmp_path) == expected


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
