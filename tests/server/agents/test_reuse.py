"""What an agent's session of 40 turns reuses of what it could, over each API."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import models
from runtime.bench.scheduling.state_cache import HYBRIDS, bench_conversation
from runtime.text.load import load_tokenizer
from tests.server.agents.session import CLIENTS, PROGRAMS, TEMPLATE, messages, recorded, send_recorded

MODELS = Path(models.__file__).parent
LEAST_REUSED = 0.98


@pytest.mark.parametrize(
    "is_tiny", [pytest.param(True, id="tiny"), pytest.param(False, id="bundled", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    ("api", "model"),
    [
        *((api, "demo") for api in CLIENTS),
        ("messages", "demo_hybrid"),
        *(pytest.param(api, "demo_hybrid", marks=pytest.mark.exhaustive) for api in CLIENTS if api != "messages"),
    ],
)
def test_a_session_reuses_what_it_could(
    api: str, model: str, is_tiny: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(MODELS / model, tmp_path, monkeypatch, is_tiny=is_tiny) as server:
        CLIENTS[api](server)
        assert len(server.turns) == 40
        reused, could = server.reuse()
    assert reused <= could
    assert reused >= LEAST_REUSED * could, f"{reused} of {could} tokens were reused"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("claude", "demo"),
        ("codex", "demo"),
        ("claude", "demo_hybrid"),
        pytest.param("codex", "demo_hybrid", marks=pytest.mark.exhaustive),
    ],
)
def test_a_program_reuses_what_it_could(name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests as Claude Code and Codex sent them."""
    program = PROGRAMS[name]
    with recorded(MODELS / model, tmp_path, monkeypatch, is_tiny=True, texts=program["answers"]) as server:
        send_recorded(server, program)
        assert len(server.turns) == 9
        reused, could = server.reuse()
    assert reused <= could
    assert reused >= LEAST_REUSED * could, f"{reused} of {could} tokens were reused"


@pytest.mark.parametrize("name", ["aider", "opencode", "cline"])
def test_a_program_that_changes_its_history_reuses_what_is_left(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aider puts the files before its latest question, and drops them from its history; opencode asks for a title
    between; Cline begins each task anew."""
    program = PROGRAMS[name]
    with recorded(MODELS / "demo", tmp_path, monkeypatch, is_tiny=True, texts=program["answers"]) as server:
        send_recorded(server, program)
        turns = server.turns
    reused, could = sum(turn.num_cached for turn in turns[1:]), 0
    for before, turn in pairwise(turns):
        known = [*before.prompt_ids, *before.answer_ids][:-1]
        could += next((place for place, ids in enumerate(zip(known, turn.prompt_ids)) if ids[0] != ids[1]), len(known))
    assert could > 0
    assert reused >= LEAST_REUSED * could, f"{reused} of {could} tokens were reused"


def test_published_hybrids_hit_as_attention_does() -> None:
    """With pages and states of their sizes, four times the session's bytes, a quarter of them for states."""
    tokenizer = load_tokenizer(MODELS / "demo", TEMPLATE)
    assert tokenizer is not None
    report = bench_conversation(messages(), tokenizer, budgets=[4.0], state_share=0.25, report_progress=len)
    attention, *hybrids = report["results"]
    assert [each["model"] for each in hybrids] == list(HYBRIDS)
    assert attention["hit_tokens"] > 200_000
    for found in report["results"]:
        assert found["queried_tokens"] == found["hit_tokens"] + sum(found["missed_tokens"].values())
    for found in hybrids:
        assert found["hits_of_attention"] >= 0.95
        assert found["state_bytes_share"] <= 0.25
