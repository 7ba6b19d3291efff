"""`/v1/responses` on the fake engine: the events' order, what is stored and for how long, what the items become."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from server.config import ServerConfig
from server.openai_api.schema import Message
from server.responses_api.objects import ReasoningSettings, Response
from server.responses_api.schema import TextOptions
from server.responses_api.store import ResponseStore
from tests.server.byte_tokenizer import TEMPLATE
from tests.server.conftest import ANSWER, Served, answer_of, say, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.openapi import check_answer
from tests.waiting import wait_until
from tokenizer import Tokenizer

PATH = "/v1/responses"
MODEL = "fake-model"


def post(served: Served, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = served.http.post(PATH, json={"model": MODEL, "input": "Hello", **fields})
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    return body if status == 200 else body["error"]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Each event's data, whose type stands in its `event:` line, too."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def prompt(served: Served) -> str:
    return bytes(i for i in served.engine.requests[-1].prompt_token_ids if i < 256).decode()


def test_the_events_of_a_text(served: Served) -> None:
    answer = served.http.post(PATH, json={"model": MODEL, "input": "Hello", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    names = [event["type"].removeprefix("response.") for event in found]
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(deltas) == ANSWER
    first, last = found[0]["response"], found[-1]["response"]
    assert (first["status"], first["output"], "usage" in first) == ("in_progress", [], False)
    assert (last["status"], last["error"], last["incomplete_details"]) == ("completed", None, None)
    assert found[2]["item"]["content"] == []
    assert found[3]["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert found[-2]["item"] == last["output"][0]
    assert {event["item_id"] for event in found if "item_id" in event} == {last["output"][0]["id"]}
    whole = post(served)
    assert whole["output"][0]["content"] == last["output"][0]["content"]
    assert whole["usage"] == last["usage"]
    assert set(whole) == set(last)


def test_reasoning_text_and_calls_become_items(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
    fake_engine.script = lambda request, index: say(f"<think>Hm.</think>Well.{call}{call}")
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
    body = {"model": MODEL, "input": "Go", "tools": [tool]}
    config = ServerConfig(reasoning_parser="think", tool_call_parser="hermes")
    with serving(fake_engine, tokenizer, config=config) as served:
        whole = post(served, **body)
        streamed = events(served.http.post(PATH, json={**body, "stream": True}))
        post(served, input=[{"type": "function_call_output", "call_id": "c", "output": "42"}], tools=[tool])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert whole["output"][1]["content"][0]["text"] == "Well."
    assert {item["name"] for item in whole["output"][2:]} == {"look"}
    assert [json.loads(item["arguments"]) for item in whole["output"][2:]] == [{"at": "x"}] * 2
    assert len({item["call_id"] for item in whole["output"][2:]}) == 2
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    check_answer("Response", whole)

    def bare(items: list[dict[str, Any]]) -> list[Any]:
        return [{key: each for key, each in item.items() if key not in ("id", "call_id")} for item in items]

    assert bare(streamed[-1]["response"]["output"]) == bare(whole["output"])
    for event in streamed:
        check_answer("ResponseStreamEvent", event)
    by_item: dict[int, list[str]] = {}
    for event in streamed[2:-1]:
        name = event["type"].removeprefix("response.")
        names = by_item.setdefault(event["output_index"], [])
        if not names or names[-1] != name:
            names.append(name)
    assert by_item[0][2:4] == ["reasoning_text.delta", "reasoning_text.done"]
    assert by_item[2] == by_item[3]
    assert by_item[2] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    indexes = [event["output_index"] for event in streamed[2:-1]]
    assert indexes == sorted(indexes)


def test_a_cut_answer_is_incomplete(served: Served) -> None:
    answer = post(served, max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["completed_at"] is None
    stream = events(served.http.post(PATH, json={"model": MODEL, "input": "x", "stream": True, "max_output_tokens": 3}))
    assert stream[-1]["type"] == "response.incomplete"


def test_a_conversation_goes_on(served: Served) -> None:
    first = post(served, input="One", instructions="Be kind.")
    assert prompt(served) == "system:Be kind.user:Oneassistant:"
    second = post(served, input=[{"role": "user", "content": "Two"}], previous_response_id=first["id"])
    assert prompt(served) == f"user:Oneassistant:{ANSWER}user:Twoassistant:"
    post(served, input="Three", previous_response_id=second["id"], instructions="Be brief.")
    assert prompt(served) == f"system:Be brief.user:Oneassistant:{ANSWER}user:Twoassistant:{ANSWER}user:Threeassistant:"
    assert second["previous_response_id"] == first["id"]
    fork = post(served, input="Other", previous_response_id=first["id"])
    assert prompt(served) == f"user:Oneassistant:{ANSWER}user:Otherassistant:"
    assert fork["id"] not in (first["id"], second["id"])


def test_a_stored_response_is_found_again_and_forgotten(served: Served) -> None:
    made = post(served, metadata={"a": "b"})
    url = f"{PATH}/{made['id']}"
    assert served.http.get(url).json() == made
    items = served.http.get(f"{url}/input_items").json()
    assert items["data"][0]["content"] == [{"type": "input_text", "text": "Hello"}]
    assert items["first_id"] == items["last_id"] == items["data"][0]["id"]
    assert served.http.post(f"{url}/cancel").json() == made
    assert served.http.delete(url).json() == {"id": made["id"], "object": "response", "deleted": True}
    for answer in (served.http.get(url), served.http.delete(url), served.http.get(f"{url}/input_items")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert post(served, 404, previous_response_id=made["id"])["param"] == "previous_response_id"


def test_what_is_not_to_be_stored_is_not(served: Served) -> None:
    made = post(served, store=False)
    assert served.http.get(f"{PATH}/{made['id']}").status_code == 404


def test_nobody_finds_anothers_responses(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("key-of-one-tenant", "key-of-another"))
    config = ServerConfig(api_keys=("key-of-one-tenant", "key-of-another"))
    with serving(fake_engine, tokenizer, config=config) as served:
        body = {"model": MODEL, "input": "x"}
        made = served.http.post(PATH, json=body, headers=mine).json()
        url = f"{PATH}/{made['id']}"
        assert served.http.get(url, headers=mine).status_code == 200
        assert served.http.get(url, headers=theirs).status_code == 404
        assert served.http.delete(url, headers=theirs).status_code == 404
        again = {**body, "previous_response_id": made["id"]}
        assert served.http.post(PATH, json=again, headers=theirs).status_code == 404
        assert served.http.post(PATH, json=again, headers=mine).status_code == 200


def test_a_running_response_is_seen_and_cancelled(served: Served) -> None:
    served.engine.script = lambda request, index: [65] * 1000
    served.engine.step_s = 0.02
    body = {"model": MODEL, "input": "x", "stream": True}
    with served.http.stream("POST", PATH, json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        response_id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
        while json.loads(next(lines).removeprefix("data: "))["type"] != "response.output_text.delta":
            pass
        seen = served.http.get(f"{PATH}/{response_id}").json()
        assert seen["status"] == "in_progress"
        assert seen["output"][0]["content"][0]["text"].startswith("A")
        assert served.http.post(f"{PATH}/{response_id}/cancel").json()["status"] == "cancelled"
        rest = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert (rest[-1]["type"], rest[-1]["code"]) == ("error", "request_cancelled")
    wait_until(lambda: served.engine.num_open == 0)
    assert served.http.get(f"{PATH}/{response_id}").json()["status"] == "cancelled"


def test_a_fault_ends_the_stream_with_a_failed_response(served: Served) -> None:
    served.engine.failing.add(0)
    stream = events(served.http.post(PATH, json={"model": MODEL, "input": "x", "stream": True}))
    assert stream[-1]["type"] == "response.failed"
    assert stream[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(stream)
    served.engine.reset(answer_of)
    served.engine.failing.add(0)
    assert post(served, 500)["code"] == "internal_error"


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([{"role": "developer", "content": "A"}, {"role": "user", "content": "B"}], "system:Auser:B"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "A"}]}], "user:A"),
        (
            [
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
                {
                    "type": "message",
                    "id": "m",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "A", "annotations": [], "logprobs": []}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x":1}'},
                {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "42"}]},
                {"type": "function_call_output", "call_id": "d", "output": "43"},
            ],
            'assistant:ACALL{"x": 1}CALL{}tool:42tool:43',
        ),
    ],
)
def test_items_become_messages(served: Served, items: list[Any], expected: str) -> None:
    assert "tool_calls" in TEMPLATE
    post(served, input=items)
    assert prompt(served) == f"{expected}assistant:"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "input[0].content[0].y"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 99999}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"tools": [{"type": "file_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"n": 2}, "n"),
        ({"model": "other"}, "model"),
    ],
)
def test_a_wrong_field_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    error = post(served, 404 if param == "model" else 400, **fields)
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert served.engine.requests == []


def response(number: int, text: str = "") -> Response:
    return Response(
        id=f"resp_{number}",
        created_at=0,
        model="m",
        instructions=text,
        max_output_tokens=None,
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=ReasoningSettings(None, None),
        store=True,
        temperature=1.0,
        text=TextOptions(),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        metadata={},
    )


def test_the_store_holds_so_many_for_so_long() -> None:
    now = [0.0]
    store = ResponseStore(max_entries=3, max_bytes=10_000, ttl_s=10.0, clock=lambda: now[0])
    for number in range(4):
        now[0] = number
        store.put(None, response(number), [], [])
    assert [store.get(None, f"resp_{number}") is not None for number in range(4)] == [False, True, True, True]
    now[0] = 11.5  # the second was stored at 1
    assert [store.get(None, f"resp_{number}") is not None for number in range(4)] == [False, False, True, True]
    store.put(None, response(9, "x" * 9_000), [], [Message(role="user", content="y")])
    assert store.get(None, "resp_9") is not None
    assert store.size_bytes <= 10_000
    store.put(None, response(10, "x" * 20_000), [], [])
    assert store.get(None, "resp_10") is None
    now[0] = 100.0
    assert store.get(None, "resp_9") is None
    assert (len(store), store.size_bytes) == (0, 0)
