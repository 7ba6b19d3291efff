"""Every field of both requests with values of every type: taken or refused by name, never a fault."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.openai_api.fields import ACCEPTED_WITHOUT_EFFECT, NOT_BUILT
from server.openai_api.schema import ChatCompletionRequest, CompletionRequest
from tests.server.conftest import Served

VALUES: list[Any] = [
    {},
    {"a": {"b": [None]}},
    [],
    [[]],
    ["a", 1],
    "",
    "text",
    0,
    -1,
    10**25,
    2.5,
    -1e300,
    True,
]
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
