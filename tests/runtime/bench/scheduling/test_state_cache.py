"""The prefix cache of models with states on a small trace."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.bench.load.traces import Trace, shared_prefixes
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.state_cache import HYBRIDS, bench_conversation, bench_state_cache
from tests.runtime.commands.running import invoke
from tests.runtime.text.tokenizers import with_special


def test_with_room_for_all_only_first_branches_are_missed() -> None:
    trace = shared_prefixes(num_requests=30, num_prefixes=2, prefix_len=1024, own_len=768, output_len=1)
    report = bench_state_cache(trace, ["qwen3.5-9b"], [2.0], state_share=0.25, max_num_seqs=1, report_progress=len)
    attention, hybrid = report["results"]
    assert attention["hit_tokens"] == 28 * 1024
    assert hybrid["hit_tokens"] == 26 * 1024  # the second prompt of each prefix shows where it ends
    assert hybrid["missed_tokens"]["no_checkpoint"] == 2 * 1024
    assert hybrid["queried_tokens"] == hybrid["hit_tokens"] + sum(hybrid["missed_tokens"].values())


def test_a_conversation_goes_on_from_its_last_state() -> None:
    tokenizer = with_special("<|im_start|>")
    tokenizer.chat_templates["default"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": ("user", "assistant")[place % 2], "content": f"{place} is a number. "} for place in range(12)]
    report = bench_conversation(messages, tokenizer, ["qwen3.5-9b"], [200.0], report_progress=len)
    attention, hybrid = report["results"]
    assert (report["num_turns"], hybrid["missed_tokens"]["no_checkpoint"]) == (6, 0)
    assert hybrid["hits_of_attention"] > 0.95 < attention["hit_tokens"]
    with pytest.raises(BenchmarkError, match="no message of the assistant"):
        bench_conversation(messages[:1], tokenizer, report_progress=len)


def test_what_cannot_be_is_named() -> None:
    trace = shared_prefixes(num_requests=3, num_prefixes=1, prefix_len=1024, own_len=768, output_len=1)
    alone = replace(trace, requests=tuple(replace(each, hash_ids=()) for each in trace.requests))
    cases: tuple[tuple[str, dict[str, Any], Trace], ...] = (
        ("models: 'gpt'", {"models": ["gpt"]}, trace),
        ("budgets: nan, must be above 0", {"budgets": [0.5, math.nan]}, trace),
        ("state_share is 1, must be above 0 and below 1", {"state_share": 1}, trace),
        ("budgets: 1 pages of 256 tokens are too few for a request of 1793 tokens", {"budgets": [0.1]}, trace),
        ("has no hashes of prompts", {}, alone),
    )
    for problem, arguments, given in cases:
        with pytest.raises(BenchmarkError, match=problem):
            bench_state_cache(given, **arguments, report_progress=len)


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        ("[]", (), "a conversation needs one: give a model's folder"),
        ("[", ("--tokenizer", "models/demo"), "Expecting value"),
        ('{"role": "user"}', ("--tokenizer", "models/demo"), "must be a list of messages with a role each"),
    ],
)
def test_a_file_that_is_no_conversation_is_named(
    tmp_path: Path, text: str, options: tuple[str, ...], problem: str
) -> None:
    (tmp_path / "conversation.json").write_text(text)
    status, _, errors = invoke("bench", "states", str(tmp_path / "conversation.json"), *options)
    assert status == 2
    assert problem in " ".join(errors.replace("│", " ").split())


def test_states_have_the_published_bytes() -> None:
    assert 50.3e6 < HYBRIDS["qwen3.5-9b"].state_bytes < 52e6
    assert 151e6 <= HYBRIDS["qwen3.5-27b"].state_bytes < 155e6
    assert HYBRIDS["qwen3.5-27b"].token_bytes == 64 << 10
