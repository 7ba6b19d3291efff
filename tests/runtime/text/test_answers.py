"""The whole pipeline: any way of cutting the ids into outputs gives the answer that one output gives."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.messages import FinishReason
from runtime.engine.sampling_params import SamplingParams
from runtime.text.formats import AnswerFormat
from runtime.text.parts import Part, PartParser
from runtime.text.pipeline import TextDelta, TextPipeline
from runtime.text.reasoning import ReasoningParser, reasoning_start
from runtime.text.tools.table import HERMES, JSON, QWEN3_CODER, ToolCallParser, ToolReading
from tests.runtime.text.answers import Message, message_of, message_of_parts, parts_of, pieces, stopped
from tests.runtime.text.test_pipeline import outputs_of, run
from tests.runtime.text.tokenizers import (
    SPECIAL,
    byte_level_content,
    byte_level_tokenizer,
    fallback_tokenizer,
    with_special,
)
from tokenizer import Tokenizer
from tokenizer.json_fields import Fields
from tokenizer.loading import TokenizerFiles
from tokenizer.warn import warn_once

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
QWEN3 = DATA / "tokenizers" / "qwen3"
STREAMS = DATA / "openai" / "recorded_streams"

PROMPTS = ("Hi{}assistant\n", "Hi{}assistant\n<think>\n", "Hi{}assistant\n<think>\n\n</think>\n\n")


@functools.cache
def qwen3() -> Tokenizer:
    return Tokenizer.from_pretrained(QWEN3)


TOKENIZERS = {"byte level": byte_level_tokenizer, "byte fallback": fallback_tokenizer}
if QWEN3.is_dir():
    TOKENIZERS["Qwen3"] = qwen3

needs_qwen3 = pytest.mark.skipif(not QWEN3.is_dir(), reason="needs ../shared/data")


def pipeline(tokenizer: Tokenizer, prompt: list[int], parallel: bool = True, **fields: Any) -> TextPipeline:
    params = SamplingParams(max_tokens=None, logprobs=0, **fields)
    start = reasoning_start(tokenizer, prompt)
    return TextPipeline(tokenizer, params, prompt, reasoning=start, tools=ToolReading(HERMES, parallel=parallel))


def told(pipe: TextPipeline, ids: list[int], edges: list[int], reason: FinishReason) -> tuple[Any, ...]:
    """All that a client could tell two answers apart by."""
    _, deltas = run(pipe, outputs_of(ids, edges, reason))
    return (
        message_of(deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs or ()],
        [entry for delta in deltas for entry in delta.content_logprobs or ()],
        sum(delta.num_reasoning_tokens for delta in deltas),
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
        any(delta.should_cancel for delta in deltas[:-1]),
    )


class Chain:
    """Both parsers, one behind the other, on a whole text."""

    def __init__(self, first: PartParser, second: PartParser) -> None:
        self.first, self.second = first, second

    def push(self, text: str) -> list[Part]:
        return self._sorted(self.first.push(text))

    def finish(self) -> list[Part]:
        return self._sorted(self.first.finish()) + self.second.finish()

    def _sorted(self, parts: list[Part]) -> list[Part]:
        return [each for part in parts for each in (self.second.push(part.text) if part.kind == "content" else [part])]


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(TOKENIZERS)),
    fragments=st.lists(pieces, max_size=6),
    opening=st.sampled_from(PROMPTS),
    stops=st.lists(st.sampled_from(["</think>", "tool_call", '"}', "\n\n", "world", "e", '{"'])),
    include=st.booleans(),
    skip=st.booleans(),
    parallel=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 3, 12]),
    edges=st.lists(st.integers(0, 100), max_size=12),
    reason=st.sampled_from(["stop", "length"]),
)
def test_any_cut_gives_the_same(
    data: st.DataObject,
    name: str,
    fragments: list[str],
    opening: str,
    stops: list[str],
    include: bool,
    skip: bool,
    parallel: bool,
    min_tokens: int,
    edges: list[int],
    reason: FinishReason,
) -> None:
    tokenizer = TOKENIZERS[name]()
    special = SPECIAL if name != "Qwen3" else "<|im_start|>"
    prompt = tokenizer.encode(opening.format(special), add_special_tokens=False)
    some_id = st.integers(0, tokenizer.vocab_size - 1)
    ids: list[int] = []
    for fragment in fragments:
        ids += tokenizer.encode(fragment, add_special_tokens=False)
        ids += data.draw(st.lists(some_id, max_size=1))
    if reason == "stop" and not ids:
        reason = "length"
    fields: Any = {
        "stop": stops,
        "include_stop_str_in_output": include,
        "skip_special_tokens": skip,
        "min_tokens": min_tokens,
    }

    def tell(edges: list[int]) -> tuple[Any, ...]:
        return told(pipeline(tokenizer, prompt, parallel, **fields), ids, edges, reason)

    whole = tell([])
    assert tell(edges) == whole
    assert tell(list(range(len(ids)))) == whole

    of_text: Any = {"max_tokens": None, "logprobs": 0, "include_stop_str_in_output": include}
    params = SamplingParams(**of_text, skip_special_tokens=skip)
    _, plain = run(TextPipeline(tokenizer, params, prompt), outputs_of(ids, [], reason))
    ends = plain[0].token_ends or []
    floor = ([0, *ends] if min_tokens < len(ids) else [len(plain[0].text)])[: min_tokens + 1][-1]
    reasoning = ReasoningParser(reasoning_start(tokenizer, prompt))
    parser = Chain(reasoning, ToolCallParser(ToolReading(HERMES, parallel=parallel)))
    parts, match = stopped(parts_of(parser, [plain[0].text]), stops, floor, keeps_stop=include)
    assert whole[0] == message_of_parts(parts)
    num_tokens = len(ids) if match is None else sum(end < match.end for end in ends) + 1
    assert whole[1] == [entry.token_id for entry in whole[2]] == ids[:num_tokens]
    assert whole[5:7] == ((reason, None) if match is None else ("stop", match.stop))


def recorded(file: Path) -> Message:
    """The message of a recorded stream's first choice; a refusal is content here."""
    message = Message()
    for line in file.read_text().splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            if choice["index"]:
                continue
            delta = choice["delta"]
            message.content += (delta.get("content") or "") + (delta.get("refusal") or "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message.tool_calls.append((call["function"]["name"], ""))
                function, arguments = message.tool_calls[call["index"]]
                message.tool_calls[call["index"]] = (function, arguments + call["function"]["arguments"])
    return message


@needs_qwen3
@pytest.mark.parametrize("file", sorted(STREAMS.glob("*.bin")), ids=lambda file: file.name[:8])
@pytest.mark.parametrize("reasoning", ["", "The user asks for <something>.\n\nSo: 北京 😀."])
def test_recorded_answers_in_the_model_s_own_notation(file: Path, reasoning: str) -> None:
    """What OpenAI's models answered, as Qwen3's template writes it, in its tokens."""
    answer = recorded(file)
    assert answer.content or answer.tool_calls
    answer.reasoning = reasoning
    tokenizer, rng = qwen3(), random.Random(file.name)
    bodies = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in answer.tool_calls]
    calls = [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]
    text = "\n".join([*([answer.content] if answer.content else []), *calls])
    if reasoning:
        text = f"<think>\n{reasoning}\n</think>\n\n{text}"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id or 0]
    prompt = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    cuts = [[rng.randrange(len(ids)) for _ in range(rng.randrange(len(ids)))] for _ in range(10)]
    seen = [told(pipeline(tokenizer, prompt), ids, edges, "stop") for edges in cuts]
    assert seen[0][0] == answer
    assert all(other == seen[0] for other in seen)
    assert seen[0][1] == ids
    content_ids = [entry.token_id for entry in seen[0][3]]
    assert tokenizer.decode(content_ids) == answer.content
    assert bool(seen[0][4]) == bool(reasoning)


@pytest.mark.parametrize("skip", [True, False])
def test_tags_that_are_special_tokens_are_seen(skip: bool) -> None:
    """A tokenizer may count its tags among the special tokens, which leave no text."""
    tokenizer = with_special("<think>", "</think>", "<tool_call>", "</tool_call>")
    text = '<think>hm</think>Yes.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) < len(text.encode())
    end = tokenizer.encode(SPECIAL, add_special_tokens=False)
    pipe = pipeline(tokenizer, ids[:1], skip_special_tokens=skip)
    message, *_ = told(pipe, ids + end, list(range(99)), "length")
    assert message == Message("Yes." + ("" if skip else SPECIAL), "hm", [("f", "{}")])


def test_which_tokens_are_content_and_which_are_reasoning() -> None:
    tokenizer = byte_level_tokenizer()
    text = "<think>\nab\n</think>\n\ncé \n<tool_call>" + '{"name": "f", "arguments": {}}' + "</tool_call>\n"
    ids = [*text.encode(), 33]
    _, token_ids, logprobs, content, num_reasoning, reason, *_ = told(pipeline(tokenizer, [1]), ids, [], "stop")
    assert token_ids == [entry.token_id for entry in logprobs] == ids
    assert bytes(entry.token_id for entry in content) == "cé".encode()
    assert (num_reasoning, reason) == (2, "stop")


def test_tokens_without_text_go_with_what_follows_them() -> None:
    tokenizer = byte_level_tokenizer()
    (silent,) = tokenizer.encode(SPECIAL, add_special_tokens=False)
    text = '<think>\na\n</think>\nb <tool_call>{"name": "f", "arguments": {}}</tool_call>\nc'
    ids = [token_id for byte in text.encode() for token_id in (silent, byte)]
    whole = told(pipeline(tokenizer, [1]), ids, [], "length")
    assert whole == told(pipeline(tokenizer, [1]), ids, list(range(len(ids))), "length")
    assert [entry.token_id for entry in whole[3]] == [silent, *b"b", silent, *b"\n", silent, *b"c"]
    assert whole[4] == 2


def test_a_delta_waits_for_nothing_it_need_not() -> None:
    tokenizer = byte_level_tokenizer()
    pipe = pipeline(tokenizer, [1])
    shown = [
        (delta.reasoning, delta.text, [call.arguments for call in delta.tool_calls], bytes(delta.token_ids))
        for output in outputs_of([*b"<think>ab</think>cd <b"], list(range(99)), "length")
        for delta in [pipe.push(output)]
    ]
    assert shown[6:9] == [("", "", [], b"<think>"), ("a", "", [], b"a"), ("b", "", [], b"b")]
    assert shown[16:] == [
        ("", "", [], b"</think>"),
        ("", "c", [], b"c"),
        ("", "d", [], b"d"),
        ("", "", [], b""),
        ("", "", [], b""),
        ("", " <b", [], b" <b"),
    ]


def test_formats_are_found_in_templates() -> None:
    assert AnswerFormat.of(None) == AnswerFormat(False, None)
    plain = byte_level_tokenizer()
    assert AnswerFormat.of(plain) == AnswerFormat(False, None, JSON)
    chosen = AnswerFormat.of(plain, reasoning_parser="think", tool_call_parser="hermes")
    assert chosen == AnswerFormat(True, HERMES, HERMES)
    assert AnswerFormat.of(plain, tool_call_parser="none") == AnswerFormat()
    thinker = with_special("</think>")
    assert AnswerFormat.of(thinker) == AnswerFormat(True, None, JSON)
    assert AnswerFormat.of(thinker, reasoning_parser="none") == AnswerFormat(False, None, JSON)
    templates = {
        "{{ tools }}{{ '<tool_call>' }}": AnswerFormat(False, HERMES, HERMES),
        "{{ tools }}{{ '<tool_call><function=' }}": AnswerFormat(False, QWEN3_CODER, QWEN3_CODER),
        "{{ tools }}": AnswerFormat(False, None, JSON),
        "{{ messages }}": AnswerFormat(False, HERMES, HERMES, tells_tools=True),
    }
    for template, found in templates.items():
        plain.chat_templates = {"default": template}
        assert AnswerFormat.of(plain) == found
    plain.chat_templates = {}


@needs_qwen3
def test_qwen3_thinks_and_calls() -> None:
    """By its template, which writes calls as Hermes does."""
    found = AnswerFormat.of(qwen3())
    assert found.tools is not None
    assert (found.reasoning, found.tools.name, found.tools.markers) == (True, "chat_template", HERMES.markers)
    assert found.forced_tools == found.tools
    assert found.tags == AnswerFormat().tags


def test_deltas_after_the_end_are_empty() -> None:
    pipe = pipeline(byte_level_tokenizer(), [1])
    told(pipe, [*b"<think>"], [], "length")
    assert pipe.push(outputs_of([65], [], "length")[0]) == TextDelta()


def test_a_template_that_does_not_compile_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()  # another test of this process may have met the same template
    files = TokenizerFiles(Fields(byte_level_content(), "tokenizer.json"), chat_templates={"default": "{% if %}"})
    assert AnswerFormat.of(Tokenizer.from_files(files)) is not None
    assert "the chat template does not compile: line 1" in caplog.text
