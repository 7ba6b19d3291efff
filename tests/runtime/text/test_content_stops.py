"""A request's stop strings count in the content of an answer that has other parts, too."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.messages import FinishReason
from runtime.engine.sampling_params import SamplingParams
from runtime.text.harmony.message import HARMONY
from runtime.text.pipeline import TextPipeline
from runtime.text.reasoning import ReasoningStart
from runtime.text.tools.table import HERMES, ToolReading
from tests.runtime.text.answers import Message
from tests.runtime.text.harmony.small_model import ids_of, small_tokenizer
from tests.runtime.text.test_answers import told
from tests.runtime.text.tokenizers import build, byte_level_content, byte_level_tokenizer, special

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x\\n\\ny END"}}\n</tool_call>'
ARGUMENTS = ("f", '{"a": "x\\n\\ny END"}')


def answer(text: str, stop: str | list[str], *, start: ReasoningStart = "may_open", **fields: Any) -> tuple[Any, ...]:
    """What `told` tells of the text; one output a byte tells the same as one output of all."""
    ids = list(text.encode())
    reason: FinishReason = fields.pop("reason", "length")

    def tell(edges: list[int]) -> tuple[Any, ...]:
        params = SamplingParams(max_tokens=None, logprobs=0, stop=stop, **fields)
        tools = ToolReading(HERMES)
        return told(TextPipeline(byte_level_tokenizer(), params, [1], reasoning=start, tools=tools), ids, edges, reason)

    whole = tell([])
    assert tell(list(range(len(ids)))) == whole
    return whole


@pytest.mark.parametrize("start", ["may_open", "open"])
def test_reasoning_does_not_stop(start: ReasoningStart) -> None:
    """lm-eval sends "\\n\\n" with every request."""
    opening = "<think>\n" if start == "may_open" else ""
    text = opening + "17 + 25:\n\nthat is END 42.\n</think>\n\n17 + 25 = 42\n\nNext"
    message, ids, logprobs, content, num_reasoning, reason, stop_reason, _ = answer(text, ["\n\n", "END"], start=start)
    assert message == Message("17 + 25 = 42", "17 + 25:\n\nthat is END 42.")
    assert (reason, stop_reason) == ("stop", "\n\n")
    assert bytes(ids) == text.removesuffix("Next").encode()
    assert [entry.token_id for entry in logprobs] == ids
    assert bytes(entry.token_id for entry in content) == b"17 + 25 = 42\n\n"
    assert num_reasoning == len(message.reasoning)


def test_reasoning_that_never_closes_has_no_content_to_stop() -> None:
    message, ids, *_, reason, stop_reason, should_cancel = answer("<think>\na END\n\nb", ["END", "\n\n", "think"])
    assert (message.reasoning, reason, stop_reason, should_cancel) == ("a END\n\nb", "length", None, False)
    assert len(ids) == len("<think>\na END\n\nb")


def test_neither_tags_nor_calls_stop() -> None:
    stops = ["END", "tool_call", "<think>", "\\n", '"a"', "}"]
    message, *_, reason, _, _ = answer(f"<think>\nso\n</think>\n\n{CALL}\n{CALL}", stops)
    assert (message, reason) == (Message("", "so", [ARGUMENTS, ARGUMENTS]), "length")
    message, *_, reason, stop_reason, _ = answer(f"Well.\n{CALL}\nThe END\n{CALL}", stops)
    assert (message, reason, stop_reason) == (Message("Well.\nThe ", "", [ARGUMENTS]), "stop", "END")


def test_what_only_looks_like_a_call_is_content() -> None:
    message, *_, stop_reason, _ = answer("So: <tool_call>no END of it", "END")
    assert (message.content, stop_reason) == ("So: <tool_call>no ", "END")


def test_a_stop_string_lies_in_one_stretch_of_content() -> None:
    """The text before a call and the one after it are shown as one, and were not written as one."""
    message, *_, reason, _, _ = answer(f"ab{CALL}cd", ["bc", "b\n", "</tool_call>c"])
    assert (message, reason) == (Message("abcd", "", [ARGUMENTS]), "length")
    # The shorter one that had to wait for the longer one counts where the stretch ends.
    message, *_, stop_reason, _ = answer(f"xab{CALL}", ["xabc", "ab"])
    assert (message, stop_reason) == (Message("x"), "ab")


def test_white_space_before_a_call_is_no_content() -> None:
    assert answer(f"Well.\n\n{CALL}", "\n\n")[0] == Message("Well.", "", [ARGUMENTS])
    assert answer("Well.\n\nNo call", "\n\n")[0] == Message("Well.")
    assert answer("Well.\n\n", "\n\n")[5:7] == ("stop", "\n\n")


def test_the_stop_string_is_kept_if_wanted() -> None:
    message, *_ = answer("<think>END</think>\nThe END.", "END", include_stop_str_in_output=True)
    assert message == Message("The END", "END")


def test_min_tokens_counts_all_tokens() -> None:
    text = "<think>END</think>END or END."
    assert answer(text, "END", min_tokens=len("<think>END</think>EN"))[0].content == ""
    assert answer(text, "END", min_tokens=len("<think>END</think>END"))[0].content == "END or "


@pytest.mark.parametrize("keeps", [False, True])
def test_a_token_that_begins_in_reasoning_and_ends_beyond_the_stop(keeps: bool) -> None:
    """Its log probability is given once, as reasoning's and as content's."""
    content = byte_level_content()
    crossing = {**special(len(content["model"]["vocab"]) + 1, "m.</think>\n\nOk#No"), "special": False}
    tokenizer = build({**content, "added_tokens": [*content["added_tokens"], crossing]})
    ids = [*b"<think>H", crossing["id"], *b" more"]

    def tell(edges: list[int]) -> tuple[Any, ...]:
        params = SamplingParams(max_tokens=None, logprobs=0, stop="#", include_stop_str_in_output=keeps)
        return told(TextPipeline(tokenizer, params, [1], reasoning="may_open"), ids, edges, "length")

    message, token_ids, logprobs, content_logprobs, num_reasoning, reason, *_ = tell([])
    assert message == Message("Ok#" if keeps else "Ok", "Hm.")
    assert token_ids == [entry.token_id for entry in logprobs] == ids[:9]
    assert [entry.token_id for entry in content_logprobs] == [crossing["id"]]
    assert (num_reasoning, reason) == (2, "stop")
    assert tell(list(range(99))) == tell([])


# Harmony

THOUGHT = "<|channel|>analysis<|message|>So: END.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look. END<|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "END"}'
FINAL = "<|channel|>final<|message|>One."
NEXT = "<|end|><|start|>assistant"


def harmony(text: str, stop: str | list[str], edges: list[int], reason: FinishReason = "length") -> tuple[Any, ...]:
    params = SamplingParams(max_tokens=None, logprobs=0, stop=stop)
    prompt = ids_of("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    tools = ToolReading(HARMONY, {"f": None})
    return told(TextPipeline(small_tokenizer(), params, prompt, tools=tools, harmony=True), ids_of(text), edges, reason)


def test_only_harmonys_final_channel_stops() -> None:
    """A model writes commentary on its way to a call."""
    message, *_, reason, _, _ = harmony(THOUGHT + PREAMBLE + HARMONY_CALL, ["END", "<|start|>"], [])
    assert (message.content, message.tool_calls, reason) == ("I look. END", [("f", '{"a": "END"}')], "length")
    text = f"{THOUGHT}<|channel|>final<|message|>The END, I say"
    message, ids, *_, reason, stop_reason, _ = harmony(text, ["END"], [])
    assert (message.content, reason, stop_reason) == ("The ", "stop", "END")
    assert ids == ids_of(text.removesuffix(", I say"))


def test_harmonys_messages_of_one_kind_are_separated() -> None:
    text = THOUGHT + PREAMBLE + THOUGHT + FINAL + NEXT + "<|channel|>final<|message|>" + NEXT + FINAL
    for edges in ([], list(range(400))):
        message = harmony(text, "nowhere", edges)[0]
        assert (message.reasoning, message.content) == ("So: END.\nSo: END.", "I look. END\nOne.\nOne.")


def test_a_stop_string_lies_in_one_message() -> None:
    message, *_, reason, _, _ = harmony(FINAL + NEXT + FINAL, ["One.\nOne.", ".O", "\n"], [])
    assert (message.content, reason) == ("One.\nOne.", "length")
    message, *_, reason, _, _ = harmony(FINAL + NEXT + "<|channel|>final<|message|># no", "#", [])
    assert (message.content, reason) == ("One.", "stop")


HARMONY_PIECES = (THOUGHT, PREAMBLE, HARMONY_CALL, FINAL, NEXT, "<|channel|>", "<|message|>", "END", " a", "One", "\n")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(HARMONY_PIECES), max_size=10),
    st.lists(st.sampled_from(["END", "One.", "e", " a a", "<|", "\n"]), max_size=3),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_any_cut_of_harmony_gives_the_same(pieces: list[str], stops: list[str], edges: list[int]) -> None:
    text = "".join(pieces)
    assert harmony(text, stops, edges) == harmony(text, stops, []) == harmony(text, stops, list(range(400)))
