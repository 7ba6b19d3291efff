"""OpenAI's Python SDK on a tour of every endpoint, with the bundled model, and Anthropic's and Ollama's on
theirs; what OpenAI's Python gets validates against OpenAI's description, and plain answers against ours."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import ollama
import openai
import pytest

from runtime.later import later
from server.config import ServerConfig
from tests.server.openapi import check_answer
from tests.server.test_real_engine import Real, serving_real

anthropic = later("anthropic")  # takes a second to import

DEMO = Path(__file__).parents[2] / "models" / "demo"
HELLO: list[Any] = [{"role": "user", "content": "Say something."}]
VOWELS = ["a", "e", "i", "o"]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    """The bundled model's template knows no tools; that there are Hermes calls is said by hand."""
    with serving_real(DEMO, config=ServerConfig(tool_call_parser="hermes"), max_model_len=1024) as real:
        yield real


def checked(schema: str, answer: Any) -> Any:
    """The SDK's object as it came, valid by OpenAI's description, without what vLLM adds."""
    check_answer(schema, json.loads(answer.to_json()))
    return answer


def test_models(real: Real) -> None:
    assert [model.id for model in checked("ListModelsResponse", real.openai.models.list())] == [real.model]
    assert checked("Model", real.openai.models.retrieve(real.model)).id == real.model


def test_chat(real: Real) -> None:
    create = real.openai.chat.completions.create
    answer = create(
        model=real.model, messages=HELLO, n=2, seed=1, max_completion_tokens=8, logprobs=True, top_logprobs=2, stop="~"
    )
    checked("CreateChatCompletionResponse", answer)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(c.logprobs.content or []) for c in answer.choices if c.logprobs)
    greedy = create(model=real.model, messages=HELLO, temperature=0, max_tokens=8)
    chunks = list(
        create(
            model=real.model,
            messages=HELLO,
            temperature=0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for chunk in chunks:
        checked("CreateChatCompletionStreamResponse", chunk)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == greedy.choices[0].message.content
    assert chunks[-1].usage is not None
    # The SDK's helper wants an answer that was not cut.
    with real.openai.chat.completions.stream(model=real.model, messages=HELLO, temperature=0, stop=VOWELS) as stream:
        content = stream.get_final_completion().choices[0].message.content
    assert content is not None
    assert not set(content).intersection(VOWELS)


def test_chat_with_structure_and_tools(real: Real) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = real.openai.chat.completions.create(model=real.model, messages=HELLO, response_format=form)
    assert json.loads(answer.choices[0].message.content or "")["answer"] in ("yes", "no")
    choice: Any = {"type": "function", "function": {"name": "look"}}
    tools: Any = [LOOK]
    called = real.openai.chat.completions.create(model=real.model, messages=HELLO, tools=tools, tool_choice=choice)
    checked("CreateChatCompletionResponse", called)
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["answer"] in ("yes", "no")


def test_completions(real: Real) -> None:
    prompts = ["Once", "Then there"]
    answer = real.openai.completions.create(
        model=real.model, prompt=prompts, max_tokens=4, echo=True, logprobs=2, temperature=0
    )
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.text.startswith(prompt)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs[0] is None  # as OpenAI's, though its description knows it not
    bare = real.openai.completions.create(model=real.model, prompt="Once", max_tokens=4, logprobs=2, n=2)
    checked("CreateCompletionResponse", bare)
    stream = real.openai.completions.create(
        model=real.model, prompt=prompts[0], max_tokens=4, temperature=0, stream=True
    )
    chunks = list(stream)
    checked("CreateCompletionResponse", chunks[-1])  # the others' finish_reason is null, as OpenAI's
    assert "Once" + "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    with pytest.raises(openai.BadRequestError, match="suffix"):
        real.openai.completions.create(model=real.model, prompt="a", suffix="b")


def test_embeddings(real: Real) -> None:
    inputs = ["one", "two", "one"]
    plain = real.openai.embeddings.create(model=real.model, input=inputs, encoding_format="float")
    checked("CreateEmbeddingResponse", plain)
    packed = real.openai.embeddings.create(model=real.model, input=inputs)
    first, second, third = (each.embedding for each in plain.data)
    assert first == third != second
    assert [each.embedding for each in packed.data] == [first, second, third]
    assert math.isclose(math.hypot(*first), 1, rel_tol=1e-5)
    short = real.openai.embeddings.create(model=real.model, input="one", dimensions=8).data[0].embedding
    length = math.hypot(*first[:8])
    assert short == pytest.approx([each / length for each in first[:8]], rel=1e-4)


def test_responses(real: Real) -> None:
    responses = real.openai.responses
    first = checked("Response", responses.create(model=real.model, input="Say.", instructions="Be brief.", top_p=0.5))
    assert first.output_text == first.output[0].content[0].text
    events = list(
        responses.create(
            model=real.model, input="More!", previous_response_id=first.id, stream=True, max_output_tokens=5
        )
    )
    for number, event in enumerate(events):
        assert event.sequence_number == number
        checked("ResponseStreamEvent", event)
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    kept = responses.retrieve(last.response.id)
    assert kept.output == last.response.output
    assert kept.usage is not None
    assert kept.usage.input_tokens > (first.usage.input_tokens if first.usage else 0)
    items = responses.input_items.list(kept.id).data
    assert items[0].content[0].text == "More!"  # type: ignore[union-attr]
    assert responses.cancel(kept.id).status == kept.status
    responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(kept.id)


def test_responses_with_structure_and_tools(real: Real) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    answer = real.openai.responses.create(model=real.model, input="Yes?", text=form, store=False)
    assert json.loads(checked("Response", answer).output_text)["answer"] in ("yes", "no")
    with pytest.raises(openai.NotFoundError):
        real.openai.responses.retrieve(answer.id)
    tool: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    called = real.openai.responses.create(model=real.model, input="Look!", tools=[tool], tool_choice="required")
    (call,) = checked("Response", called).output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["answer"] in ("yes", "no")


def test_anthropic(real: Real) -> None:
    tool: Any = {"name": "look", "input_schema": SCHEMA}
    forced: Any = {"type": "tool", "name": "look"}
    greedy: dict[str, Any] = {"model": real.model, "max_tokens": 8, "messages": HELLO, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=real.url, api_key="any", max_retries=0) as client:
        answer = client.messages.create(**greedy)
        expected = real.openai.chat.completions.create(model=real.model, messages=HELLO, max_tokens=8, temperature=0)
        assert answer.content[0].type == "text"
        assert answer.content[0].text == expected.choices[0].message.content
        assert answer.stop_reason == "max_tokens"
        usage = answer.usage
        assert expected.usage is not None
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.usage.prompt_tokens
        counted = client.messages.count_tokens(model=real.model, messages=HELLO)
        assert counted.input_tokens == expected.usage.prompt_tokens
        with client.messages.stream(**greedy) as stream:
            assert "".join(stream.text_stream) == answer.content[0].text
            assert stream.get_final_message().usage.output_tokens == 8
        called = client.messages.create(
            model=real.model, max_tokens=100, messages=HELLO, tools=[tool], tool_choice=forced
        )
        assert called.content[0].type == "tool_use"
        assert called.content[0].input["answer"] in ("yes", "no")
        assert called.stop_reason == "tool_use"


def test_ollama(real: Real) -> None:
    options = {"num_predict": 8, "temperature": 0}
    with ollama.Client(real.url, trust_env=False) as client:
        answer = client.chat(real.model, HELLO, options=options)
        expected = real.openai.chat.completions.create(model=real.model, messages=HELLO, max_tokens=8, temperature=0)
        assert answer.message.content == expected.choices[0].message.content
        assert (answer.done_reason, answer.eval_count) == ("length", 8)
        parts = client.chat(real.model, HELLO, options=options, stream=True)
        assert "".join(part.message.content or "" for part in parts) == answer.message.content
        raw = client.generate(real.model, "Once", raw=True, options=options)
        whole = real.openai.completions.create(model=real.model, prompt="Once", max_tokens=8, temperature=0)
        assert raw.response == whole.choices[0].text
        formed = client.generate(real.model, "Yes?", format=SCHEMA, options={"num_predict": 100})
        assert json.loads(formed.response or "")["answer"] in ("yes", "no")
        inputs = ["one", "two"]
        vectors = real.openai.embeddings.create(model=real.model, input=inputs, encoding_format="float").data
        assert client.embed(real.model, inputs).embeddings == [each.embedding for each in vectors]


def test_every_plain_answer_is_as_we_describe_it(real: Real) -> None:
    description = real.http.get("/openapi.json").json()
    tokens = real.http.post("/tokenize", json={"prompt": "one two", "return_token_strs": True}).json()["tokens"]
    short = {"model": real.model, "max_tokens": 2}
    asked: list[tuple[str, str, Any]] = [
        ("get", "/v1/models", None),
        ("get", "/health", None),
        ("get", "/ready", None),
        ("get", "/version", None),
        ("post", "/tokenize", {"messages": HELLO}),
        ("post", "/detokenize", {"tokens": tokens}),
        ("post", "/v1/completions", {**short, "prompt": tokens, "return_token_ids": True}),
        ("post", "/v1/chat/completions", {**short, "messages": HELLO, "prompt_logprobs": 1}),
        ("post", "/v1/embeddings", {"model": real.model, "input": [tokens, tokens], "pooling": "mean"}),
        ("post", "/v1/responses", {"model": real.model, "input": "x", "max_output_tokens": 2}),
        ("post", "/v1/responses", {"model": real.model}),
        ("post", "/v1/messages", {**short, "messages": HELLO}),
        ("post", "/v1/messages", {**short, "messages": HELLO, "n": 2}),
        ("post", "/v1/messages/count_tokens", {"model": real.model, "messages": HELLO}),
        ("post", "/api/chat", {"model": real.model, "messages": HELLO, "stream": False, "options": {"num_predict": 2}}),
        ("post", "/api/generate", {"model": real.model, "prompt": "x", "options": {"num_predict": -3}}),
        ("post", "/api/embed", {"model": real.model, "input": ["x", "y"]}),
        ("post", "/api/embeddings", {"model": real.model, "prompt": "x"}),
        ("post", "/api/show", {"model": real.model}),
        ("get", "/api/tags", None),
        ("get", "/api/ps", None),
        ("get", "/api/version", None),
    ]
    for method, path, body in asked:
        answer = real.http.request(method, path, json=body)
        content = description["paths"][path][method]["responses"][str(answer.status_code)]["content"]
        schema = content["application/json"]["schema"]
        jsonschema_rs.validate({**schema, "components": description["components"]}, answer.json())
