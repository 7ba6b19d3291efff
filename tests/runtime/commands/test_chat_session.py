"""The chat without a terminal: history, stopping, forgetting, sampling parameters, /commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.commands.chat_session import COMMANDS, ChatSession, run_slash
from runtime.engine.errors import RequestError
from runtime.errors import InvalidArgumentError, XservError
from tests.runtime.commands.fakes import FakeLLM


@pytest.fixture
def llm(tmp_path: Path) -> FakeLLM:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "top_k": 5}))
    return FakeLLM(tmp_path, reply=lambda prompt: "yes")


def test_history_is_part_of_the_next_prompt(llm: FakeLLM) -> None:
    session = ChatSession(llm, system="s")  # type: ignore[arg-type]
    assert list(session.answer("a")) == ["y", "e", "s"]
    list(session.answer("b"))
    assert llm.prompts == [
        "system:s;user:a;assistant:",
        "system:s;user:a;assistant:yes;user:b;assistant:",
    ]
    assert session.stats.num_output_tokens == 3
    assert session.stats.finish_reason == "stop"
    assert 0 <= session.stats.ttft_s <= session.stats.latency_s


def test_thoughts_are_shown_and_forgotten(llm: FakeLLM) -> None:
    thoughts: list[str] = []
    llm.thought = "hm"
    session = ChatSession(llm, on_reasoning=thoughts.append)  # type: ignore[arg-type]
    assert "".join(session.answer("a")) == "yes"
    assert thoughts == ["h", "m"]
    assert (session.stats.num_reasoning_tokens, session.stats.num_output_tokens) == (2, 5)
    assert session.conversation.messages()[-1] == {"role": "assistant", "content": "yes"}


def test_stopped_answer_stays_as_far_as_it_got(llm: FakeLLM) -> None:
    session = ChatSession(llm)  # type: ignore[arg-type]
    pieces = session.answer("a")
    assert next(pieces) == "y"
    pieces.close()
    assert llm.num_stopped == 1
    assert session.conversation.messages()[-1] == {"role": "assistant", "content": "y"}
    list(session.answer("b"))
    assert llm.prompts[-1] == "user:a;assistant:y;user:b;assistant:"


def test_answer_that_failed_takes_its_question_with_it(llm: FakeLLM) -> None:
    def fail(prompt: str) -> str:
        raise RequestError("no", param="prompt")

    session = ChatSession(llm)  # type: ignore[arg-type]
    llm.finish_reason = "error"
    with pytest.raises(XservError, match="could not finish"):
        list(session.answer("a"))
    assert session.conversation.messages()[-1]["content"] == "yes"  # what had been shown
    session.conversation.reset()
    llm.reply = fail
    with pytest.raises(RequestError):
        list(session.answer("a"))
    assert session.conversation.turns == []


def test_oldest_turns_are_forgotten(llm: FakeLLM) -> None:
    llm.max_model_len = 80
    session = ChatSession(llm)  # type: ignore[arg-type]
    session.set_sampling({"max_tokens": 30})
    list(session.answer("aaaaaaaa"))
    list(session.answer("bbbbbbbb"))
    assert session.stats.num_dropped_turns == 1
    assert llm.prompts[-1] == "user:bbbbbbbb;assistant:"
    with pytest.raises(InvalidArgumentError, match="there is room for 50"):
        list(session.answer("c" * 40))
    assert len(session.conversation.turns) == 1


def test_greedy_by_the_generation_config_unless_told_otherwise(llm: FakeLLM) -> None:
    session = ChatSession(llm)  # type: ignore[arg-type]
    list(session.answer("a"))
    assert (llm.params[-1].temperature, llm.params[-1].top_k, llm.params[-1].max_tokens) == (0.0, 0, None)
    session.set_sampling({"temperature": 0.5, "max_tokens": 7})
    list(session.answer("a"))
    assert (llm.params[-1].temperature, llm.params[-1].max_tokens) == (0.5, 7)


def test_model_without_a_tokenizer_says_so(llm: FakeLLM) -> None:
    llm.tokenizer = None
    with pytest.raises(RequestError, match="no tokenizer"):
        ChatSession(llm)  # type: ignore[arg-type]


def test_slash_commands(llm: FakeLLM) -> None:
    session = ChatSession(llm)  # type: ignore[arg-type]
    list(session.answer("a"))
    help_text = run_slash(session, "/help").text
    assert all(name in help_text for name in COMMANDS)
    assert "3 answered (stop)" in run_slash(session, "/stats").text
    assert run_slash(session, "/retry").message == "a"
    assert run_slash(session, "/retry").message is None
    run_slash(session, "/system be brief")
    assert session.conversation.system == "be brief"
    assert run_slash(session, "/system").text == "be brief"
    run_slash(session, "/system -")
    assert session.conversation.system is None
    list(session.answer("a"))
    run_slash(session, "/reset")
    assert session.conversation.turns == []
    assert run_slash(session, "/exit").is_exit
    assert run_slash(session, "/quit").is_exit


def test_set(llm: FakeLLM) -> None:
    session = ChatSession(llm)  # type: ignore[arg-type]
    for line in (
        "temperature 0.5",
        "top-k=3",
        "--max_tokens 4",
        "stop END now",
        "stop_token_ids 1,2",
        "ignore_eos on",
    ):
        run_slash(session, f"/set {line}")
    expected = {
        "temperature": 0.5,
        "top_k": 3,
        "max_tokens": 4,
        "stop": ["END now"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
    }
    assert session.given == expected
    assert "top_k = 3" in run_slash(session, "/set").text
    run_slash(session, "/set temperature default")
    assert "temperature" not in session.given


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nope", "there is no /nope"),
        ("/set colour red", "'colour'"),
        ("/set temperature hot", "temperature 'hot' is no float"),
        ("/set temperature -1", "temperature"),
        ("/set top_p nan", "top_p"),
        ("/set ignore_eos maybe", "ignore_eos 'maybe' is no bool"),
    ],
)
def test_wrong_commands_change_nothing(llm: FakeLLM, line: str, words: str) -> None:
    session = ChatSession(llm)  # type: ignore[arg-type]
    session.set_sampling({"temperature": 0.25})
    with pytest.raises(InvalidArgumentError, match=words):
        run_slash(session, line)
    assert session.given == {"temperature": 0.25}
