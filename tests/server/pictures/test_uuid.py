"""Pictures that are sent once under a `uuid`, then named by it: the same answer, for the same tenant alone."""

from __future__ import annotations

import base64
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from server.config import ServerConfig
from server.pictures.reader import KeptPictures
from tests.models.vision.chat_model import IMAGE, write_chat_model
from tests.server.pictures.test_endpoints import OPTIONS, PIXELS, URI, file_of
from tests.server.real_server import Real, serving_real

CHAT = "/v1/chat/completions"
OTHER = f"data:image/png;base64,{base64.b64encode(file_of(255 - PIXELS)).decode()}"
NOISE = np.random.RandomState(5).randint(0, 256, (90, 90, 3)).astype(np.uint8)
LARGE = f"data:image/png;base64,{base64.b64encode(file_of(NOISE)).decode()}"
MOST_BYTES = 40_000
BY_UUID = "messages[0].content[0].uuid"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = write_chat_model(tmp_path_factory.mktemp("vl"))
    config = ServerConfig(api_keys=("one", "two"), max_kept_image_bytes=MOST_BYTES)
    with serving_real(folder, config=config, **OPTIONS) as serving:
        yield serving


def post(real: Real, path: str, body: dict[str, Any], key: str = "one") -> Any:
    answer = real.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code in (200, 400), answer.text
    return answer.json()


def named(uuid: Any, url: str | None = None, **image: Any) -> dict[str, Any]:
    image_url = {"url": url, **image} if url or image else None
    return {"type": "image_url", "image_url": image_url, "uuid": uuid}


def ask(real: Real, *parts: dict[str, Any], key: str = "one", **fields: Any) -> Any:
    """A chat's answer, or its error."""
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    asked = {"messages": messages, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    return post(real, CHAT, {**asked, **fields}, key)


def said(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_a_picture_is_found_again(real: Real) -> None:
    unnamed = said(ask(real, {"type": "image_url", "image_url": {"url": URI}}))
    assert said(ask(real, named("cat", URI))) == unnamed
    for part in (
        named("cat"), {"type": "image_url", "uuid": "cat"}, {"type": "image_url", "image_url": {}, "uuid": "cat"},
        named("cat", detail="high"), {"type": "input_image", "uuid": "cat"},
        {"type": "input_image", "image_url": None, "uuid": "cat", "detail": "auto"},
    ):  # fmt: skip
        again = ask(real, part)
        assert said(again) == unnamed, part
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert said(ask(real, named("dog", OTHER), named("dog"))) == said(ask(real, named("x", OTHER), named("y", OTHER)))


def test_a_name_is_an_alias_of_what_was_sent_last(real: Real) -> None:
    """Neither the prefix cache nor kept embeddings know it."""
    first, second = (said(ask(real, {"type": "image_url", "image_url": url})) for url in (URI, OTHER))
    assert first != second, "else this test shows nothing"
    for url, expected in ((URI, first), (OTHER, second), (URI, first)):
        assert said(ask(real, named("same name", url))) == expected
        assert said(ask(real, named("same name"))) == expected
    assert ask(real, named("same name", "data:image/png;base64,AAAA"))["error"]["param"].endswith("image_url.url")
    assert said(ask(real, named("same name"))) == first, "what cannot be read changes nothing"


def test_another_grid_is_another_picture(real: Real) -> None:
    fewer = {"mm_processor_kwargs": {"max_pixels": 640}}
    expected = [ask(real, {"type": "image_url", "image_url": URI}, **fields) for fields in ({}, fewer)]
    ask(real, named("grid", URI))
    for fields, wanted in (({}, expected[0]), (fewer, expected[1]), ({}, expected[0])):
        answer = ask(real, named("grid"), **fields)
        assert answer["prompt_token_ids"] == wanted["prompt_token_ids"]
        assert said(answer) == said(wanted)
    counts = [each["prompt_token_ids"].count(IMAGE) for each in expected]
    assert counts[0] > counts[1]


def test_nobody_else_finds_it(real: Real) -> None:
    ask(real, named("mine", URI))
    ask(real, named("mine", OTHER), cache_salt="salted")
    for key, fields in (("two", {}), ("one", {"cache_salt": "other"}), ("two", {"cache_salt": "salted"})):
        error = ask(real, named("mine"), key=key, **fields)["error"]
        assert error["param"] == BY_UUID
        assert "no image is kept" in error["message"]
    assert said(ask(real, named("mine"))) == said(ask(real, named("", URI) | {"uuid": None}))
    salted = said(ask(real, named("mine"), cache_salt="salted"))
    assert salted == said(ask(real, {"type": "image_url", "image_url": OTHER}))


def test_the_other_apis(real: Real) -> None:
    part = {"type": "input_image", "image_url": URI, "uuid": "r"}
    asked = {"temperature": 0, "max_output_tokens": 4}
    first = post(real, "/v1/responses", {"input": [{"role": "user", "content": [part]}], **asked})
    del part["image_url"]
    second = post(real, "/v1/responses", {"input": [{"role": "user", "content": [part]}], **asked})
    assert second["output"][0]["content"] == first["output"][0]["content"]
    third = post(real, "/v1/responses", {"input": "And?", "previous_response_id": second["id"], **asked})
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    error = post(real, "/v1/responses", {"input": [{"role": "user", "content": [{**part, "uuid": "?"}]}]})["error"]
    assert error["param"] == "input[0].content[0].uuid"
    messages = [{"role": "user", "content": [named("r")]}]
    assert post(real, "/tokenize", {"messages": messages}) == post(
        real, "/tokenize", {"messages": [{"role": "user", "content": [named(None, URI)]}]}
    )
    assert post(real, "/tokenize", {"messages": messages}, "two")["error"]["param"] == BY_UUID


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (named("never sent"), "uuid"),
        (named(""), "uuid"),
        (named("", URI), "uuid"),
        (named("x" * 257, URI), "uuid"),
        (named(3, URI), "uuid"),
        (named(["x"]), "uuid"),
        (named(None), "image_url"),
        ({"type": "image_url", "image_url": "", "uuid": "x"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": 3}, "uuid": "x"}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": ""}, "uuid": "x"}, "image_url.url"),
        ({"type": "image_url", "image_url": [], "uuid": "x"}, "image_url"),
        ({"type": "image_url", "image_url": {"detail": "most"}, "uuid": "x"}, "image_url.detail"),
        ({"type": "text", "text": "a", "uuid": "x"}, "uuid"),
    ],
)
def test_bad_names(real: Real, part: dict[str, Any], name: str) -> None:
    error = ask(real, part)["error"]
    assert error["param"] == f"messages[0].content[0].{name}", error
    assert len(error["message"]) < 200
    document = real.http.get("/openapi.json", headers={"Authorization": "Bearer one"}).json()
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = {"model": real.model, "messages": [{"role": "user", "content": [part]}]}
    is_described = jsonschema_rs.is_valid({**schema, "components": document["components"]}, body)
    assert is_described == (part.get("uuid") == "never sent")


def test_the_oldest_is_forgotten(real: Real) -> None:
    """And then refused by its name, until it is sent again."""
    assert MOST_BYTES // 2 < len(LARGE) * 3 // 4 < MOST_BYTES - 1024, "else this test shows nothing"
    ask(real, named("first", URI))
    ask(real, named("large 1", LARGE))
    ask(real, named("large 2", LARGE))
    assert ask(real, named("first"))["error"]["param"] == BY_UUID
    assert "choices" in ask(real, named("large 2"))
    assert "choices" in ask(real, named("first", URI))
    assert "choices" in ask(real, named("first"))


def test_kept_bytes_stay_within_their_bound() -> None:
    """Against a list of all that was put, the latest used last."""
    rng = random.Random(0)
    kept, model = KeptPictures(50_000), OrderedDict[tuple[Any, str], bytes]()
    for _ in range(3000):
        owner, uuid = (rng.choice([None, "a", "b"]), rng.choice([None, "s"])), rng.choice("uvwxyz")
        if rng.random() < 0.5:
            file = rng.randbytes(rng.choice([0, 10, 9_000, 20_000, 48_975, 48_976, 48_977, 60_000]))
            kept.put(owner, uuid, file)
            model.pop((owner, uuid), None)
            if len(file) + 1024 <= 50_000:
                model[owner, uuid] = file
            while sum(len(each) + 1024 for each in model.values()) > 50_000:
                model.popitem(last=False)
        else:
            if (owner, uuid) in model:
                model.move_to_end((owner, uuid))
            assert kept.get(owner, uuid) == model.get((owner, uuid))
        assert kept.num_bytes == sum(len(each) + 1024 for each in model.values()) <= 50_000
