"""Harmony through the text pipeline: what is reasoning, a call and content, however the ids come;
and beside the package `openai-harmony`, in part and as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.sampling_params import SamplingParams
from runtime.errors import InvalidArgumentError
from runtime.text.formats import AnswerFormat, end_ids
from runtime.text.harmony.message import HARMONY, SPECIAL_TOKENS
from runtime.text.pipeline import TextDelta, TextPipeline
from runtime.text.tools.table import ToolReading
from tests.runtime.text.answers import Message, message_of
from tests.runtime.text.harmony.against_package import Comparison, write_vocabulary
from tests.runtime.text.harmony.small_model import TEMPLATE, ids_of, small_ids, small_tokenizer
from tests.runtime.text.test_pipeline import outputs_of, run
from tests.runtime.text.tokenizers import byte_level_tokenizer
from tests.tokenizer.support import shared

PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm: é.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
FINAL = "<|channel|>final<|message|>It is 4."
READING = ToolReading(HARMONY, {"f": None})


def deltas_of(
    answer: str,
    edges: list[int],
    *,
    prompt: str = PROMPT,
    tools: ToolReading | None = READING,
    end: str = "<|return|>",
    params: SamplingParams | None = None,
) -> tuple[list[TextDelta], TextPipeline]:
    params = params or SamplingParams(max_tokens=None, logprobs=0)
    pipeline = TextPipeline(small_tokenizer(), params, ids_of(prompt), tools=tools, harmony=True)
    ids = ids_of(answer + end)
    _, deltas = run(pipeline, outputs_of(ids, edges, "stop" if end else "length"))
    assert [i for delta in deltas for i in delta.token_ids] == ids
    return deltas, pipeline


def message(answer: str, edges: list[int] | None = None, **how: object) -> Message:
    return message_of(deltas_of(answer, edges or [], **how)[0])  # type: ignore[arg-type]


def test_channels() -> None:
    got = message(THOUGHT + PREAMBLE + CALL, end="<|call|>")
    assert (got.reasoning, got.content) == ("Hm: é.", "Let me see.")
    assert got.tool_calls == [("f", '{"a": 1}')]
    got = message(THOUGHT + FINAL)
    assert (got.reasoning, got.content, got.tool_calls) == ("Hm: é.", "It is 4.", [])


def test_arguments_come_as_they_are_written() -> None:
    deltas, _ = deltas_of(CALL, list(range(400)), end="<|call|>")
    pieces = [call.arguments for delta in deltas for call in delta.tool_calls]
    assert pieces == ["", *'{"a": 1}']


def test_recipient_in_the_role_and_no_call_without_tools() -> None:
    text = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    assert message(text, end="<|call|>").tool_calls == [("f", '{"a": 1}')]
    assert message(text, end="<|call|>", tools=None).content == '{"a": 1}'
    closed = ToolReading(HARMONY, {"g": None}, is_closed=True)
    assert message(text, end="<|call|>", tools=closed).tool_calls == []


def test_one_call_where_one_was_asked_for() -> None:
    text = f"{CALL}<|end|><|start|>assistant{CALL}"
    assert len(message(text, end="<|call|>").tool_calls) == 2
    assert len(message(text, end="<|call|>", tools=ToolReading(HARMONY, parallel=False)).tool_calls) == 1


def test_messages_of_others_are_not_the_answer() -> None:
    got = message(f"{CALL}<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>5")
    assert (got.content, got.reasoning, len(got.tool_calls)) == ("", "", 1)


@pytest.mark.parametrize(
    ("begun", "rest", "content"),
    [
        ("<|channel|>final<|message|>It", " is 4.", " is 4."),
        ("<|channel|>final", "<|message|>It is 4.", "It is 4."),
        ("<|channel|>fi", "nal<|message|>It is 4.", "It is 4."),
    ],
)
def test_an_answer_that_the_prompt_has_begun(begun: str, rest: str, content: str) -> None:
    assert message(rest, prompt=PROMPT + begun).content == content
    got = message('{"a": 2}', prompt=f"{PROMPT}{CALL[:-8]}", end="<|call|>")
    assert got.tool_calls == [("f", '{"a": 2}')]


def test_malformed_headers_are_counted() -> None:
    _, pipeline = deltas_of("Hello there, all of you", [])
    assert pipeline.num_malformed_headers == 1
    assert deltas_of(THOUGHT + FINAL, [])[1].num_malformed_headers == 0


def test_tokens_of_reasoning_and_of_content_are_told_apart() -> None:
    deltas, _ = deltas_of(THOUGHT + FINAL, [])
    assert sum(delta.num_reasoning_tokens for delta in deltas) == len(ids_of("Hm: é."))
    content = [entry.token_id for delta in deltas for entry in delta.content_logprobs or ()]
    assert content == ids_of("It is 4.")


WORDS = ("assistant", "analysis", "final", " to=functions.f", "json", " ", "Hello", "é")
PIECES = (*SPECIAL_TOKENS, *WORDS, THOUGHT, CALL, FINAL)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12),
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from([READING, None, ToolReading(HARMONY, parallel=False)]),
    st.sampled_from(["<|return|>", "<|call|>", ""]),
)
def test_any_cut_gives_the_same(pieces: list[str], edges: list[int], tools: ToolReading | None, end: str) -> None:
    answer = "".join(pieces)
    whole, cut = (message(answer, cuts, tools=tools, end=end) for cuts in ([], edges))
    assert (whole.content, whole.reasoning) == (cut.content, cut.reasoning)
    assert whole.tool_calls == cut.tool_calls


def test_who_speaks_harmony() -> None:
    renders = AnswerFormat(True, HARMONY, HARMONY, harmony=True, renders_harmony=True)
    assert AnswerFormat.of(small_tokenizer()) == renders
    other = small_tokenizer(TEMPLATE.replace("You are ChatGPT", "You are Xavier"))
    assert AnswerFormat.of(other) == AnswerFormat(True, HARMONY, HARMONY, harmony=True)
    assert not AnswerFormat.of(small_tokenizer("{{ messages[0].content }}")).harmony
    assert not AnswerFormat.of(byte_level_tokenizer()).harmony
    assert AnswerFormat.of(small_tokenizer(), tool_call_parser="none").tools is None
    assert not AnswerFormat.of(small_tokenizer(), tool_call_parser="hermes").harmony
    assert AnswerFormat.of(small_tokenizer("{{ messages[0].content }}"), tool_call_parser="openai").harmony
    with pytest.raises(InvalidArgumentError, match="tool_call_parser is 'harmony', and the model's vocabulary lacks"):
        AnswerFormat.of(byte_level_tokenizer(), tool_call_parser="harmony")


def test_an_answer_ends_with_return_and_call() -> None:
    ids = small_ids()
    of_harmony = AnswerFormat.of(small_tokenizer())
    assert end_ids(of_harmony, small_tokenizer(), (7, ids.return_)) == (7, ids.return_, ids.call)
    assert end_ids(AnswerFormat(), small_tokenizer(), (7,)) == (7,)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    folder = shared("tokenizers/gpt-oss")
    pytest.importorskip("openai_harmony", reason="needs the package openai-harmony")
    return Comparison(folder)


def test_some_conversations(comparison: Comparison) -> None:
    report = comparison.conversations(60, seed=1)
    assert report.differences == []
    assert report.counts["chats whose analysis the package dropped"] > 5


def test_some_answers(comparison: Comparison) -> None:
    report = comparison.answers(300, seed=1)
    assert report.differences == []
    assert report.counts["agree"] > 80


@pytest.mark.exhaustive
def test_ten_thousand_conversations_and_a_hundred_thousand_answers(comparison: Comparison) -> None:
    assert comparison.conversations(10_000, seed=0).differences == []
    report = comparison.answers(100_000, seed=0)
    assert report.differences == []
    assert report.counts["agree"] > 0.95 * report.counts["read by the package"]


def test_the_vocabulary_is_made_of_no_other_tokenizer(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from tests.runtime.text.tokenizers import byte_level_tokenizer

    with pytest.raises(ValueError, match="not o200k_base"):
        write_vocabulary(byte_level_tokenizer(), tmp_path)
