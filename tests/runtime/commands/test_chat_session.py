"""The chat without a terminal: history, stopping, forgetting, sampling parameters, /commands, and its calculator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.commands.calculator import answer
from runtime.commands.chat_session import COMMANDS, ChatSession, Conversation, Message, run_slash
from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineOutput, EngineRequest, FinishReason
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import InvalidArgumentError, XservError
from runtime.llm.job import Job
from runtime.text.formats import AnswerFormat
from runtime.text.pipeline import TextDelta
from tests.runtime.commands.fakes import FakeLLM
from tests.server.byte_tokenizer import write_byte_tokenizer
from tokenizer import Tokenizer


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


class ReadingLLM(FakeLLM):
    """Its tokenizer's ids are bytes, and its answers are read as `LLM` reads them."""

    def stream(
        self, prompt: list[int], params: SamplingParams, *, answer_format: AnswerFormat, lora_request: None
    ) -> Iterator[TextDelta]:
        job = Job(
            EngineRequest(request_id="a", prompt_token_ids=prompt, params=params), None, self.tokenizer, answer_format
        )
        ids = self.tokenizer.encode(self.reply(""), add_special_tokens=False)
        for index, token_id in enumerate(ids):
            reason: FinishReason | None = "length" if index == len(ids) - 1 else None
            yield job.receive(
                EngineOutput(
                    request_id="a",
                    index=0,
                    new_token_ids=[token_id],
                    num_prompt_tokens=len(prompt),
                    finish_reason=reason,
                )
            )


@pytest.mark.parametrize("calculates", [False, True])
def test_answers_are_read_by_the_response_template(calculates: bool, llm: FakeLLM) -> None:
    """With the calculator and without, whose calls are text."""
    call = '<<call>>{"name": "calculator", "arguments": {"expression": "1+1"}}<</call>>'
    replies = [f"((Hm.))Two:{call}", "2"]
    folder = llm.model_path
    write_byte_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    template = {
        "start_anchor": "<s>assistant:",
        "fields": {
            "reasoning_content": {"open": "((", "close": "))"},
            "tool_calls": {
                "open": "<<call>>", "close": "<</call>>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {},
        },
    }  # fmt: skip
    path.write_text(json.dumps({**json.loads(path.read_text()), "response_template": template}))
    thoughts: list[str] = []
    called: list[str] = []
    reading = ReadingLLM(folder, lambda prompt: replies.pop(0), 10_000, Tokenizer.from_pretrained(folder))
    session = ChatSession(
        reading, calculates=calculates, on_reasoning=thoughts.append, on_call=called.append,  # type: ignore[arg-type]
    )  # fmt: skip
    text = "".join(session.answer("1+1?"))
    assert "".join(thoughts) == "Hm."
    if calculates:
        assert (text, called) == ("Two:2", ['calculator({"expression": "1+1"}) = 2'])
    else:
        assert (text, called) == (f"Two:{call}", [])


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


def encode(messages: list[Message]) -> list[int]:
    """One id a character, so that lengths are easy to say."""
    return [ord(character) for message in messages for character in message["content"]]


def filled(system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for question, said in (("aa", "AA"), ("bb", "BB")):
        conversation.ask(question)
        conversation.answer(said)
    conversation.ask("cc")
    return conversation


def test_messages_are_in_order() -> None:
    roles = [message["role"] for message in filled("s").messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("most_tokens", "expected", "num_dropped"),
    [(11, "saaAAbbBBcc", 0), (10, "sbbBBcc", 1), (7, "sbbBBcc", 1), (6, "scc", 2), (3, "scc", 2)],
)
def test_oldest_turns_are_dropped(most_tokens: int, expected: str, num_dropped: int) -> None:
    conversation = filled("s")
    ids, dropped = conversation.fit(encode, most_tokens)
    assert ("".join(map(chr, ids)), dropped) == (expected, num_dropped)
    assert len(conversation.turns) == 3 - num_dropped


def test_too_long_a_message_is_taken_back_and_nothing_else() -> None:
    conversation = filled("s")
    with pytest.raises(InvalidArgumentError, match=r"3 tokens; there is room for 2"):
        conversation.fit(encode, 2)
    assert [turn[0]["content"] for turn in conversation.turns] == ["aa", "bb"]


def test_take_back_and_reset() -> None:
    conversation = filled("s")
    assert conversation.take_back() == "cc"
    conversation.reset()
    assert conversation.take_back() is None
    assert conversation.messages() == [{"role": "system", "content": "s"}]


@pytest.mark.parametrize(
    ("expression", "result"),
    [("34*12", "408"), ("7/2", "3.5"), ("10/3", "3.333"), ("2^10", "1024"), ("-(3+4)*2", "-14"), ("9 // 2+9 % 2", "5")],
)
def test_numbers(expression: str, result: str) -> None:
    assert answer("calculator", json.dumps({"expression": expression})) == result


@pytest.mark.parametrize(
    "arguments",
    [
        "", "[]", "{}", "3", '{"expression": 3}', '{"expression": ""}', '{"formula": "1"}', '{"expression": "1/0"}',
        '{"expression": "9**9**9**9"}', '{"expression": "2**65"}', '{"expression": "__import__(\'os\')"}',
        '{"expression": "a"}', '{"expression": "(1).real"}', '{"expression": "[1]"}', '{"expression": "True"}',
        '{"expression": "(-8)**0.5"}', '{"expression": "1e308*10"}', '{"expression": "1;2"}',
        json.dumps({"expression": "(" * 300}), json.dumps({"expression": "(" * 99 + "1" + ")" * 99}),
        json.dumps({"expression": "\x00"}), '{"expression": "0**-1"}',
    ],
)  # fmt: skip
def test_what_is_none_is_said_to_be_wrong(arguments: str) -> None:
    assert answer("calculator", arguments).startswith(("error: ", "1"))
    if "(" * 99 not in arguments:
        assert answer("calculator", arguments).startswith("error: ")


def test_there_is_one_tool() -> None:
    assert answer("delete", "{}") == "error: there is no tool 'delete', only 'calculator'"
