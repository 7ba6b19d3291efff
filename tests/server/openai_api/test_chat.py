"""Chat completions through OpenAI's SDK, streamed and not, against what the fake engine says; `prediction`, and our
`speculation: false`, as they reach the engine, and what usage says."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.messages import ProposalCounts
from tests.server.byte_tokenizer import END_OF_TURN
from tests.server.conftest import ANSWER, Served
from tests.server.openapi import check_answer

MODEL = "fake-model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PROMPT = "<s>user:Hello</s><s>assistant:"


def prompt_text(served: Served, number: int = -1) -> str:
    """What the engine was asked to continue, special tokens spelled out."""
    return decoded(served.engine.requests[number].prompt_token_ids)


def decoded(ids: list[int]) -> str:
    special = {256: b"<s>", 257: b"<text>", 258: b"</s>"}
    return b"".join(special.get(i, bytes([i & 255])) for i in ids).decode()


def test_an_answer(served: Served) -> None:
    answer = served.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    num_answer_tokens = len(ANSWER.encode()) + 1  # with the end of the turn
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(served.engine.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == num_answer_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_answer_tokens
    assert prompt_text(served) == PROMPT
    check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))


def test_a_stream_says_the_same(served: Served) -> None:
    with served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    for chunk in chunks:
        check_answer("CreateChatCompletionStreamResponse", chunk.model_dump(exclude_unset=True))
    assert len({chunk.id for chunk in chunks}) == 1
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == ANSWER
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in middle)
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(ANSWER.encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_usage_ends_with_the_finish_reason(served: Served) -> None:
    with served.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as stream:
        chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_every_chunk_has_the_usage_so_far_when_asked(served: Served) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    with served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options=options
    ) as stream:
        counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(ANSWER.encode()) + 1


def test_choices_interleave_in_one_stream(served: Served) -> None:
    with served.openai.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True) as stream:
        chunks = list(stream)
    texts = ["", "", ""]
    for chunk in chunks:
        check_answer("CreateChatCompletionStreamResponse", chunk.model_dump(exclude_unset=True))
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [ANSWER, f"{ANSWER} 1", f"{ANSWER} 2"]
    order = [chunk.choices[0].index for chunk in chunks]
    assert order[:3] == [0, 1, 2]
    assert order != sorted(order), "one choice after the other"
    ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2]


def test_several_choices_at_once(served: Served) -> None:
    answer = served.openai.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))
    contents = [(choice.index, choice.message.content) for choice in answer.choices]
    assert contents == [(0, ANSWER), (1, f"{ANSWER} 1"), (2, f"{ANSWER} 2")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * (len(ANSWER.encode()) + 1) + 2 + 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(served: Served, stream: bool) -> None:
    entries: list[Any] = []
    if stream:
        with served.openai.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, stream=True
        ) as chunks:
            for chunk in chunks:
                check_answer("CreateChatCompletionStreamResponse", chunk.model_dump(exclude_unset=True))
                if chunk.choices[0].logprobs is not None:
                    entries += chunk.choices[0].logprobs.content or []
    else:
        answer = served.openai.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
        check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
    data = b"".join(bytes(entry.bytes) for entry in entries)
    assert data == ANSWER.encode()
    assert entries[0].token == "G"
    assert entries[0].logprob == -0.25
    assert [top.token for top in entries[0].top_logprobs] == ["G", "H"]
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.25, -1.25]
    half_a_character = entries[2]  # "ü" is two tokens
    assert bytes(half_a_character.bytes) == "ü".encode()[:1]


def test_logprobs_without_alternatives(served: Served) -> None:
    answer = served.openai.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_the_work(served: Served, stream: bool) -> None:
    served.engine.script = lambda request, index: [*b"one two three ", *[120] * 1000]
    served.engine.step_s = 0.005
    asked: Any = {"model": MODEL, "messages": HELLO, "stop": ["never", "o th"], "stream": stream}
    if stream:
        with served.openai.chat.completions.create(**asked) as chunks:
            choices = [chunk.choices[0] for chunk in chunks]
        text = "".join(choice.delta.content or "" for choice in choices)
        last = choices[-1]
    else:
        last = served.openai.chat.completions.create(**asked).choices[0]
        text = last.message.content
    assert text == "one tw"
    assert last.finish_reason == "stop"
    assert last.stop_reason == "o th"
    assert served.engine.cancelled == [served.engine.requests[0].request_id]


def test_a_stop_string_ends_one_choice_of_two(served: Served) -> None:
    served.engine.script = lambda request, index: [*(b"a STOP b", b"go on")[index], END_OF_TURN]
    answer = served.openai.chat.completions.create(model=MODEL, messages=HELLO, n=2, stop="STOP")
    assert [choice.message.content for choice in answer.choices] == ["a ", "go on"]


def test_the_stop_string_may_stay(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stop="!", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].message.content == "Grüße, 世界!"


def test_max_tokens_cuts_within_a_character(served: Served) -> None:
    """The third token is half of "ü": what is there of it becomes U+FFFD when the answer ends."""
    limits: list[dict[str, Any]] = [{"max_tokens": 3}, {"max_completion_tokens": 3}]
    for limit in limits:
        answer = served.openai.chat.completions.create(model=MODEL, messages=HELLO, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "Gr\ufffd"
        assert answer.usage.completion_tokens == 3


def test_two_turns_with_history(served: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    first = served.openai.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    served.openai.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert prompt_text(served) == (
        f"<s>system:Be brief.</s><s>user:Hello</s><s>assistant:{ANSWER}</s><s>user:And?</s><s>assistant:"
    )


def test_content_in_parts(served: Served) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    served.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert prompt_text(served) == "<s>user:one\ntwo</s><s>assistant:"


def test_the_developer_is_the_system_to_an_older_template(served: Served) -> None:
    served.openai.chat.completions.create(model=MODEL, messages=[{"role": "developer", "content": "x"}, *HELLO])
    assert prompt_text(served).startswith("<s>system:x</s>")


def test_tools_and_their_history_reach_the_template(served: Served) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    tool: Any = {"type": "function", "function": function}
    messages: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": [1]}'}},
                {"id": "2", "type": "function", "function": {"name": "weather", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    served.openai.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
    text = prompt_text(served)
    assert text.startswith('TOOLS[{"type": "function", "function": {"name": "weather"')
    assert 'CALL{"a": [1]}CALL{}</s><s>tool:sunny</s>' in text
    served.openai.chat.completions.create(model=MODEL, messages=messages, tools=[tool], tool_choice="none")
    assert "TOOLS" not in prompt_text(served)
    deep = '{"a":' * 99 + "1" + "}" * 99
    for arguments, reason in (("{broken", "no JSON"), ("[1]", "no object but '[1]'"), (deep, "deeper than 64")):
        messages[-2]["tool_calls"][1]["function"]["arguments"] = arguments
        error = served.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}).json()["error"]
        assert error["param"] == "messages[1].tool_calls[1].function.arguments"
        assert reason in error["message"]


def test_the_last_message_can_be_continued_and_echoed(served: Served) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    body: Any = {"continue_final_message": True, "echo": True}
    answer = served.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
    assert prompt_text(served) == "<s>user:Hello</s><s>assistant:Once upon"
    assert answer.choices[0].message.content == f"Once upon{ANSWER}"
    with served.openai.chat.completions.create(model=MODEL, messages=messages, stream=True, extra_body=body) as stream:
        assert "".join(c.choices[0].delta.content or "" for c in stream) == f"Once upon{ANSWER}"


def test_template_options(served: Served) -> None:
    body: Any = {"add_generation_prompt": False, "chat_template_kwargs": {"flavour": "mild"}}
    served.openai.chat.completions.create(model=MODEL, messages=HELLO, extra_body=body)
    assert prompt_text(served) == "<s>user:Hello</s>[mild]"


def test_token_ids_on_request(served: Served) -> None:
    body: Any = {"return_token_ids": True}
    answer: Any = served.openai.chat.completions.create(model=MODEL, messages=HELLO, extra_body=body)
    assert answer.choices[0].token_ids == [*ANSWER.encode(), END_OF_TURN]
    assert decoded(answer.prompt_token_ids) == PROMPT
    with served.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_body=body) as stream:
        ids = [i for c in stream for i in getattr(c.choices[0], "token_ids", None) or []]
    assert ids == [*ANSWER.encode(), END_OF_TURN]


def test_log_probabilities_by_ids_are_those_of_all_tokens(served: Served) -> None:
    """TRL's client wants as many entries as token ids, with one for the end of the answer."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {}, "return": {"type": "integer"}}}
    body: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": 0, "min_p": 0.0}
    asked: Any = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "tools": [tool], "tool_choice": "none"}
    choice: Any = served.openai.chat.completions.create(model=MODEL, **asked, extra_body=body).choices[0]
    assert [each.token for each in choice.logprobs.content] == [f"token_id:{each}" for each in choice.token_ids]
    top = choice.logprobs.content[0].top_logprobs
    assert [each.token for each in top] == [f"token_id:{choice.token_ids[0]}"]
    assert bytes(choice.logprobs.content[0].bytes) == ANSWER[0].encode()


def test_prompt_logprobs(served: Served) -> None:
    answer: Any = served.openai.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"prompt_logprobs": 2})
    first, second, *_ = answer.prompt_logprobs
    assert first is None
    u = str(ord("u"))
    assert second[u] == {"logprob": -0.25, "rank": 1, "decoded_token": "u"}
    assert set(second) == {u, str(ord("u") + 1)}


def test_the_request_id_is_in_the_headers(served: Served) -> None:
    answer = served.openai.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)
    assert answer.headers["x-request-id"] == answer.parse().id


@pytest.mark.parametrize("content", ["a + b", [{"type": "text", "text": "a +"}, {"type": "text", "text": " b"}]])
def test_a_prediction_reaches_the_engine_and_is_counted(served: Served, content: Any) -> None:
    served.engine.proposals = ProposalCounts(9, 7, 8, 6)
    answer = served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, prediction={"type": "content", "content": content}
    )
    assert bytes(served.engine.requests[-1].prediction) == b"a + b"
    assert served.engine.requests[-1].speculates
    check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 2)
    *_, last = served.openai.chat.completions.create(
        model=MODEL, messages=HELLO, prediction={"type": "content", "content": content}, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert last.usage is not None
    assert last.usage.completion_tokens_details == details


def test_without_one_usage_does_not_speak_of_it(served: Served) -> None:
    served.engine.proposals = ProposalCounts(9, 7, 0, 0)
    body = {"model": MODEL, "messages": HELLO, "speculation": False}
    answer = served.http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert not served.engine.requests[-1].speculates
    assert served.engine.requests[-1].prediction == []


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("text", "prediction"),
        ({"type": "image", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content"}, "prediction"),
    ],
)
def test_others_are_refused(served: Served, prediction: Any, field: str) -> None:
    body = {"model": MODEL, "messages": HELLO, "prediction": prediction}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
