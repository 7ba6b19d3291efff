"""What is refused of a request's fields, over every type that a request can have: the error names the field, what it
had, and what it may have; and never a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as inspect
import pytest

from server.anthropic_api.schema import MessagesRequest
from server.description.operations import OPERATIONS
from server.errors import ApiError
from server.ollama_api.schema import OllamaChatRequest, OllamaOptions
from server.openai_api.fields import ACCEPTED_WITHOUT_EFFECT, NOT_BUILT
from server.openai_api.schema import ChatCompletionRequest, CompletionRequest, Tool
from server.responses_api.schema import ResponsesRequest
from server.transport.typed import converted, held_in
from tests.server.conftest import Served

ASKED = (each.request for each in OPERATIONS if each.request is not None)
ROOTS = dict.fromkeys((*ASKED, OllamaOptions, Tool))


def flat(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return flat(kind.type)
    return [each for inner in kind.types for each in flat(inner)] if isinstance(kind, inspect.UnionType) else [kind]


def structs_of(root: Any) -> dict[type, inspect.StructType]:
    found: dict[type, inspect.StructType] = {}
    waiting = flat(inspect.type_info(root))
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, inspect.StructType) and kind.cls not in found:
            found[kind.cls] = kind
            held = [one for field in kind.fields for one in held_in(field.type) or ()]
            waiting += [each for field in kind.fields for each in flat(field.type)]
            waiting += [each for one in held for each in flat(inspect.type_info(one))]
        inner = getattr(kind, "item_type", None)
        waiting += flat(inner) if inner is not None else []
    return found


STRUCTS = {cls: kind for root in ROOTS for cls, kind in structs_of(root).items()}


def least(kind: inspect.Type) -> Any:
    """The smallest value of a type."""
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    if isinstance(kind, inspect.StructType):
        tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        return tag | {field.encode_name: least(flat(field.type)[0]) for field in kind.fields if field.required}
    if isinstance(kind, inspect.ListType):
        return [least(flat(kind.item_type)[0])] * (kind.min_length or 0)
    return {inspect.StrType: "a", inspect.IntType: 1, inspect.FloatType: 1.0, inspect.DictType: {}}.get(type(kind))


def choices() -> Iterator[Any]:
    """Each field of each struct that has literals or tagged structs, as it stands or in a list."""
    for cls, struct in STRUCTS.items():
        for field in struct.fields:
            kinds = flat(field.type)
            lists = [flat(kind.item_type) for kind in kinds if isinstance(kind, inspect.ListType)]
            for is_list, inner in [(False, kinds), *((True, items) for items in lists)]:
                literals = [v for k in inner if isinstance(k, inspect.LiteralType) for v in k.values if v is not None]
                tagged = [k for k in inner if isinstance(k, inspect.StructType) and k.tag_field is not None]
                takes_text = any(isinstance(k, inspect.StrType) for k in inner)
                if (literals or tagged) and not takes_text:
                    name = f"{cls.__name__}.{field.encode_name}{'[]' if is_list else ''}"
                    yield pytest.param(struct, field.encode_name, is_list, literals, tagged, id=name)


def refusal(value: Any, cls: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        converted(value, cls)
    assert refused.value.status == 400
    assert not any(word in refused.value.message for word in ("`", "$", "^", "enum value", "Object ", "(?"))
    return refused.value


@pytest.mark.parametrize(("struct", "name", "is_list", "literals", "tagged"), [*choices()])
def test_every_choice_is_told(struct: Any, name: str, is_list: bool, literals: list[Any], tagged: list[Any]) -> None:
    def told(wrong: Any) -> ApiError:
        return refusal({**least(struct), name: [wrong] if is_list else wrong}, struct.cls)

    path = f"{name}[0]" if is_list else name
    if literals:
        error = told("wrong!")
        assert error.param == path
        assert '"wrong!"' in error.message or tagged or not isinstance(literals[0], str)
        for literal in literals:
            assert json.dumps(literal) in error.message
    if tagged:
        key = tagged[0].tag_field
        for wrong, param in (({key: "wrong!"}, f"{path}.{key}"), ({}, f"{path}.{key}"), (3, path)):
            if wrong == {} and len(tagged) == 1:  # then it may be left out
                continue
            error = told(wrong)
            assert error.param == param, error.message
            assert "wrong!" not in str(wrong) or '"wrong!"' in error.message
            for kind in tagged:
                assert json.dumps(kind.tag) in error.message, error.message


def patterned() -> Iterator[Any]:
    for cls, struct in STRUCTS.items():
        for field in struct.fields:
            if any(isinstance(kind, inspect.StrType) and kind.pattern for kind in flat(field.type)):
                yield pytest.param(struct, field.encode_name, id=f"{cls.__name__}.{field.encode_name}")


@pytest.mark.parametrize(("struct", "name"), [*patterned()])
def test_a_pattern_is_told_in_words(struct: Any, name: str) -> None:
    error = refusal({**least(struct), name: "not this\n"}, struct.cls)
    assert error.param == name
    assert '"not this\\n"' in error.message
    assert "128 ASCII letters" in error.message


def test_the_walk_finds_what_there_is() -> None:
    assert len(STRUCTS) > 40
    assert len(list(choices())) > 40
    assert len(list(patterned())) > 8


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 entry, got 0"),
        ({"tools": [{}] * 200}, "tools", "at most 128 entries, got 200"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character, got 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1, got -2"),
        ({"seed": 2**70}, "seed", "got 1180591620717411303424"),
        ({"temprature": 1}, "temprature", "Is 'temperature' meant?"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge", "Is 'include_usage' meant?"),
        ({"top_k": "x"}, "top_k", "expected integer or null, got string"),
        ({"logit_bias": {"a": "b"}}, "logit_bias", "expected number, got string"),
        ({"messages": [{"role": "user"}, {"role": "usr"}]}, "messages[1].role", '"usr"; it must be one of "'),
        ({"response_format": {"type": "json"}}, "response_format.type", 'got "json"; it must be one of "text", '),
        ({"response_format": {"schema": {}}}, "response_format.type", '"json_schema"'),
        ({"response_format": "json"}, "response_format", '"json_schema"'),
        ({"tool_choice": "any"}, "tool_choice", 'got "any"; it must be one of "auto", "none", "required"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name", "a b",
        ),
    ],
)  # fmt: skip
def test_messages(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal({"messages": [{"role": "user", "content": "a"}], **fields}, ChatCompletionRequest)
    assert (error.param, words in error.message) == (param, True), error.message


def test_a_field_is_named_below_where_it_stands() -> None:
    with pytest.raises(ApiError, match=r'tools\[3\]\.type: got "fn"; it must be "function"') as refused:
        converted({"type": "fn", "function": {"name": "f"}}, Tool, "tools[3]")
    assert refused.value.param == "tools[3].type"


@pytest.mark.parametrize(
    ("schema", "name", "meant"),
    [
        (ResponsesRequest, "max_tokens", "max_output_tokens"),
        (ResponsesRequest, "messages", "input"),
        (ResponsesRequest, "response_format", "text"),
        (ChatCompletionRequest, "input", "messages"),
        (ChatCompletionRequest, "max_output_tokens", "max_completion_tokens"),
        (CompletionRequest, "messages", "prompt"),
        (MessagesRequest, "stop", "stop_sequences"),
        (MessagesRequest, "effort", "output_config"),
        (OllamaChatRequest, "response_format", "format"),
    ],
)
def test_a_field_of_another_api_brings_the_name_of_this_one(schema: Any, name: str, meant: str) -> None:
    needed: dict[str, Any] = {"model": "m", "messages": [], "input": "x", "prompt": "x", "max_tokens": 1}
    with pytest.raises(ApiError, match=rf"Unknown parameter: {name}\. Is '{meant}' meant\?"):
        converted({name: 1} | {each: needed[each] for each in needed if each in schema.__struct_fields__}, schema)


VALUES: list[Any] = [{}, {"a": {"b": [None]}}, [], [[]], ["a", 1], "", "text", 0, -1, 10**25, 2.5, -1e300, True]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}
CASES = [
    (route, field)
    for route, schema in zip(BODIES, (ChatCompletionRequest, CompletionRequest), strict=True)
    for field in [*schema.__struct_fields__, *ACCEPTED_WITHOUT_EFFECT, *NOT_BUILT]
]


@pytest.mark.parametrize(("route", "field"), CASES)
def test_a_value_of_any_type(served: Served, route: str, field: str) -> None:
    for value in VALUES:
        body = {"model": "fake-model", "max_tokens": 4, **BODIES[route], field: value}
        content = msgspec.json.encode(body)
        response = served.http.post(route, content=content, headers={"content-type": "application/json"})
        if response.status_code == 200:
            continue
        error = response.json()["error"]
        assert response.status_code == (404 if error["code"] == "model_not_found" else 400), (value, error)
        assert error["param"] is not None, (value, error)
        assert error["param"].partition(".")[0].partition("[")[0] == field or field in RELATED.get(
            error["param"], ()
        ), (value, error)


RELATED = {
    # A value that is right by itself can make another field wrong.
    "top_logprobs": ("logprobs",),
    "max_tokens": ("max_completion_tokens", "min_tokens"),
    "stream_options": ("stream",),
}
