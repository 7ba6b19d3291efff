"""Pictures in requests of all four APIs: the answer that `LLM` gives, whole and streamed; and what is refused."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from PIL import Image

from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from server.config import ServerConfig
from server.pictures import reader
from tests.models.vision.chat_model import IMAGE, PAD, write_chat_model
from tests.server.pictures.test_fetching import OK, says, web
from tests.server.real_server import Real, serving_real

CHAT = "/v1/chat/completions"
PIXELS = np.random.RandomState(4).randint(0, 256, (40, 56, 3)).astype(np.uint8)
NUM_TOKENS = 5 * 7
OPTIONS: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "max_model_len": 128}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


def file_of(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


FILE = file_of(PIXELS)
BASE64 = base64.b64encode(FILE).decode()
URI = f"data:image/png;base64,{BASE64}"


@dataclass
class Pictures:
    """A server of a model that reads pictures, what `LLM` answers to "Look:", the picture, "What?", and makes of it as
    an embedding, and a web that has the picture."""

    real: Real
    token_ids: list[int]
    prompt_ids: list[int]
    embedding: list[float]
    url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pictures]:
    folder: Path = write_chat_model(tmp_path_factory.mktemp("vl"))
    question = [{"role": "user", "content": content(URI)}]
    question[0]["content"][1] = {"type": "image", "image": PIXELS}
    with LLM(folder, compile_ahead=False, **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        (expected,) = llm.chat(question, params, use_tqdm=False)
        (embedded,) = llm.embed({"prompt": f"[user]Look:{PAD}What?", "images": [PIXELS]}, use_tqdm=False)
    with web(says(f"{OK}\nContent-Length: {len(FILE)}", FILE)) as place:
        config = ServerConfig(
            limit_images=3, allow_image_urls=True, allow_image_hosts=(place,), tool_call_parser="none"
        )
        with serving_real(folder, config=config, **OPTIONS) as real:
            yield Pictures(
                real, expected.outputs[0].token_ids, list(expected.prompt_token_ids), embedded.outputs.embedding,
                f"http://{place}/a.png",
            )  # fmt: skip


def content(url: Any, **image: Any) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": url, **image}},
        {"type": "text", "text": "What?"},
    ]


def ask(served: Pictures, *parts: Any, **fields: Any) -> Any:
    """A chat's answer, or its error."""
    body = {"messages": [{"role": "user", "content": list(parts)}], "return_token_ids": True, "ignore_eos": True}
    answer = served.real.http.post(CHAT, json={**body, **GREEDY, **fields})
    return answer.json()


def test_the_sdk_whole_and_streamed_by_uri_and_by_url(served: Pictures) -> None:
    chat: Any = served.real.openai.chat.completions
    extra = {"return_token_ids": True, "ignore_eos": True}
    for url in (URI, served.url):
        messages = [{"role": "user", "content": content(url, detail="auto")}]
        asked = {"model": served.real.model, "messages": messages, "extra_body": extra, **GREEDY}
        whole = chat.create(**asked)
        assert whole.choices[0].token_ids == served.token_ids
        assert whole.prompt_token_ids == served.prompt_ids
        assert whole.usage.prompt_tokens == len(served.prompt_ids)
        assert whole.prompt_token_ids.count(IMAGE) == NUM_TOKENS
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chat.create(**asked, stream=True))
        assert text == whole.choices[0].message.content


def test_responses(served: Pictures) -> None:
    parts = [
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": URI, "detail": "high"},
        {"type": "input_text", "text": "What?"},
    ]
    responses: Any = served.real.openai.responses
    asked: dict[str, Any] = {"model": served.real.model, "temperature": 0, "max_output_tokens": 6}
    first = responses.create(input=[{"role": "user", "content": parts}], **asked)
    assert first.usage.input_tokens == len(served.prompt_ids)
    second = responses.create(input="And?", previous_response_id=first.id, **asked)
    assert second.usage.input_tokens > len(served.prompt_ids), "the picture is still there"
    for part, name in (
        ({"type": "input_image", "file_id": "file-1"}, "input[0].content[0].file_id"),
        ({"type": "input_image", "image_url": "data:x"}, "input[0].content[0].image_url"),
        ({"type": "input_image"}, "input[0].content[0].image_url"),
        ({"type": "input_image", "image_url": URI, "detail": "most"}, "input[0].content[0].detail"),
    ):
        body = {"input": [{"role": "user", "content": [part]}]}
        answer = served.real.http.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name, answer.json()


def test_anthropics_messages(served: Pictures) -> None:
    def asked(source: dict[str, Any]) -> dict[str, Any]:
        blocks = [{"type": "text", "text": "Look:"}, {"type": "image", "source": source}]
        text = {"type": "text", "text": "What?"}
        return {"model": served.real.model, "messages": [{"role": "user", "content": [*blocks, text]}]}

    http = served.real.http
    for source in ({"type": "base64", "media_type": "image/png", "data": BASE64}, {"type": "url", "url": served.url}):
        answer = http.post("/v1/messages", json={**asked(source), **GREEDY}).json()
        usage = answer["usage"]
        assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == len(served.prompt_ids)
        counted = http.post("/v1/messages/count_tokens", json=asked(source)).json()
        assert counted == {"input_tokens": len(served.prompt_ids)}
    for source, name in (
        ({"type": "base64", "media_type": "image/png", "data": "!"}, "source"),
        ({"type": "base64", "media_type": "image/png"}, "source.data"),
        ({"type": "base64", "data": BASE64, "url": "x"}, "source.url"),
        ({"type": "url"}, "source.url"),
        ({"type": "url", "url": "http://127.0.0.1/"}, "source"),
    ):
        answer = http.post("/v1/messages", json={**asked(source), **GREEDY})
        assert answer.status_code == 400
        assert f"messages[0].content[1].{name}" in answer.json()["error"]["message"]


def test_ollamas_chat(served: Pictures) -> None:
    message = {"role": "user", "content": "Look:", "images": [BASE64]}
    asked = {"model": served.real.model, "stream": False, "options": {"temperature": 0, "num_predict": 3}}
    answer = served.real.http.post("/api/chat", json={**asked, "messages": [message]}).json()
    assert answer["prompt_eval_count"] == len(served.prompt_ids) - len("What?")
    prompt = {"prompt": "Look:", "images": [BASE64]}
    answer = served.real.http.post("/api/generate", json={**asked, **prompt}).json()
    assert answer["prompt_eval_count"] == len(served.prompt_ids) - len("What?")
    for fields, name in (
        ({"images": ["?"]}, "images[0]"), ({"images": ["?"], "system": "s"}, "images[0]"),
        ({"images": 3}, "images"), ({"raw": True}, "images"),
    ):  # fmt: skip
        answer = served.real.http.post("/api/generate", json={**asked, **prompt, **fields})
        assert answer.status_code == 400
        assert name in answer.json()["error"]
    for images in (3, [3], {"a": 1}):
        answer = served.real.http.post("/api/chat", json={**asked, "messages": [{**message, "images": images}]})
        assert answer.status_code == 400
    wrong = {**message, "images": [BASE64, "?"]}
    answer = served.real.http.post("/api/chat", json={**asked, "messages": [wrong]})
    assert answer.status_code == 400
    assert "messages[0].images[1]" in answer.json()["error"]


def test_embeddings(served: Pictures) -> None:
    def embed(**body: Any) -> Any:
        return served.real.http.post("/v1/embeddings", json=body).json()

    for url in (URI, served.url):
        found = embed(messages=[{"role": "user", "content": content(url)}])
        np.testing.assert_allclose(found["data"][0]["embedding"], served.embedding, rtol=0, atol=1e-5)
        assert found["usage"]["prompt_tokens"] == len(served.prompt_ids) - 3  # "[a]": no answer begins
    other = content(f"data:image/png;base64,{base64.b64encode(file_of(PIXELS[::-1])).decode()}")
    again = embed(messages=[{"role": "user", "content": other}])["data"][0]["embedding"]
    assert np.abs(np.array(again) - served.embedding).max() > 1e-3
    asked = [{"role": "user", "content": content(URI)}]
    broken = [{"role": "user", "content": content("data:image/png;base64,AAAA")}]
    for body, name in (
        ({"messages": asked, "input": "a"}, "input"), ({}, "input"), ({"messages": []}, "messages"),
        ({"input": "a", "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"messages": asked, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"messages": asked, "add_special_tokens": False}, "add_special_tokens"),
        ({"messages": broken}, "messages[0].content[1].image_url"),
    ):  # fmt: skip
        assert embed(**body)["error"]["param"].startswith(name), body


def test_what_is_typed_is_text(served: Pictures) -> None:
    answer = ask(served, {"type": "text", "text": PAD}, content(URI)[1], {"type": "text", "text": f"is{PAD}"})
    assert answer["prompt_token_ids"].count(IMAGE) == NUM_TOKENS


def test_detail_and_pixels(served: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(**fields: Any) -> int:
        return int(ask(served, content(URI)[1], **fields)["prompt_token_ids"].count(IMAGE))

    assert count() == NUM_TOKENS
    assert count(mm_processor_kwargs={"max_pixels": 640}) == 2 * 3
    assert count(mm_processor_kwargs={"min_pixels": 4096, "max_pixels": 4096}) >= 60
    low = ask(served, content(URI, detail="low")[1])["prompt_token_ids"]
    assert low.count(IMAGE) == NUM_TOKENS, "it has fewer pixels than the low detail already"
    monkeypatch.setattr(reader, "LOW_DETAIL_SIDE", 25)
    low = ask(served, content(URI, detail="low")[1])["prompt_token_ids"]
    assert low.count(IMAGE) == 2 * 3
    assert ask(served, content(URI, detail="high")[1])["prompt_token_ids"].count(IMAGE) == NUM_TOKENS
    for given, name in (
        ({"max_pixels": 10}, "max_pixels"), ({"max_pixels": 5000}, "max_pixels"), ({"max_pixels": "1"}, "max_pixels"),
        ({"max_pixels": True}, "max_pixels"), ({"fps": 2}, "fps"),
        ({"min_pixels": 900, "max_pixels": 800}, "min_pixels"),
    ):  # fmt: skip
        error = ask(served, content(URI)[1], mm_processor_kwargs=given)["error"]
        assert error["param"] == f"mm_processor_kwargs.{name}"


def test_the_event_loop_reads_none(served: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a small body writes that it has one."""
    threads: list[str] = []
    read = reader.PictureReader.read

    def noted(self: Any, *arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(self, *arguments)

    monkeypatch.setattr(reader.PictureReader, "read", noted)
    small = base64.b64encode(file_of(PIXELS[:8, :8])).decode()
    body = json.dumps({"messages": [{"role": "user", "content": content(f"data:;base64,{small}")}], **GREEDY})
    for text in (body, body.replace("image", "\\u0069mage")):
        assert len(text) < 4096
        answer = served.real.http.post(CHAT, content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text
    assert [name.rpartition("_")[0] for name in threads] == ["xserv-pictures"] * 2


def test_several_pictures_and_the_most(served: Pictures) -> None:
    other = f"data:image/png;base64,{base64.b64encode(file_of(255 - PIXELS[:8, :8])).decode()}"
    picture, small = content(URI)[1], content(other)[1]
    ids = ask(served, small, picture, small)["prompt_token_ids"]
    assert ids.count(IMAGE) == NUM_TOKENS + 2
    error = ask(served, *[small] * 4)["error"]
    assert error["param"] == "messages[0].content[3]"
    assert "3 images" in error["message"]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": 3}, ".image_url"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": None}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": ""}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": [URI]}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": URI, "detail": "much"}}, ".image_url.detail"),
        ({"type": "image_url", "image_url": {"url": URI, "size": 3}}, ".image_url.size"),
        ({"type": "image"}, ".image"),
        ({"type": "image", "image": "picture.png"}, ".image"),
        ({"type": "image", "path": "/etc/passwd"}, ".path"),
        ({"type": "image", "image": URI, "url": URI}, ".url"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, ".source.type"),
        *(
            ({"type": "image_url", "image_url": {"url": url}}, ".image_url.url")
            for url in (
                "data:", "data:,x", "data:image/png,x", "data:image/png;base64", "data:image/png;base64,",
                "data:image/png;base64,x", "data:image/png;base64,\u00e9\u00e9", f"data:text/html;base64,{BASE64}",
                f"data:image/png;base64, {BASE64}", f"data:image/png;base64,{BASE64[:80]}",
                "data:image/png;base64,AAAA",
                "file:///etc/passwd", "http://127.0.0.1:1/a.png", "https://10.0.0.1/a.png", "picture.png", "\x00",
            )
        ),
        ({"type": "video_url", "video_url": {"url": URI}}, ".type"),
        ({"type": "input_audio", "input_audio": {}}, ".type"),
        ({"type": "picture", "image": URI}, ".type"),
    ],
)  # fmt: skip
def test_bad_parts_are_named(served: Pictures, part: dict[str, Any], name: str) -> None:
    error = ask(served, {"type": "text", "text": "a"}, part)["error"]
    assert error["param"] == f"messages[0].content[1]{name}", error
    assert len(error["message"]) < 400


def test_no_pictures_of_the_assistants_and_none_in_a_cut_prompt(served: Pictures) -> None:
    picture = content(URI)[1]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [picture]}]
    error = served.real.http.post(CHAT, json={"messages": [*messages, messages[0]]}).json()["error"]
    assert error["param"] == "messages[1].content[0].type"
    assert ask(served, picture, truncate_prompt_tokens=5)["error"]["param"] == "truncate_prompt_tokens"


def test_tokenize_counts_them(served: Pictures) -> None:
    answer = served.real.http.post("/tokenize", json={"messages": [{"role": "user", "content": content(URI)}]}).json()
    assert answer["tokens"] == served.prompt_ids


SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": URI},
        {"type": "image", "url": URI},
        {"type": "image", "base64": BASE64},
        {"type": "image", "source": SOURCE},
        {"type": "image_url", "image_url": URI},
        {"type": "input_image", "image_url": {"url": URI}},
    ],
)
def test_a_picture_in_each_apis_form(served: Pictures, part: dict[str, Any]) -> None:
    assert ask(served, content(URI)[0], part, content(URI)[2])["prompt_token_ids"] == served.prompt_ids


def test_pictures_in_tools_results(served: Pictures) -> None:
    """The same prompt on all four APIs: the picture stands in the result, between its texts."""
    http, model = served.real.http, served.real.model
    arguments = {"a": 1}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    begin = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    c, d = ({"type": "text", "text": words} for words in "cd")
    parts: list[Any] = [c, {"type": "image_url", "image_url": {"url": URI}}, d]
    asked = {"messages": [*begin, {"role": "tool", "tool_call_id": "1", "content": parts}], "return_token_ids": True}
    first = http.post(CHAT, json={**asked, **GREEDY}).json()
    assert "error" not in first, first
    ids = first["prompt_token_ids"]
    assert ids.count(IMAGE) == NUM_TOKENS
    assert http.post("/tokenize", json={"messages": asked["messages"]}).json()["tokens"] == ids

    blocks = [c, {"type": "image", "source": SOURCE}, d]
    called = [{"type": "text", "text": "b"}, {"type": "tool_use", "id": "1", "name": "f", "input": arguments}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": called}]
    body = {"model": model, "messages": [*turns, {"role": "user", "content": [result]}]}
    assert http.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": len(ids)}

    output = [{"type": "input_text", "text": "c"}, INPUT_IMAGE, {"type": "input_text", "text": "d"}]
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": json.dumps(arguments)},
        {"type": "function_call_output", "call_id": "1", "output": output},
    ]
    answer = http.post("/v1/responses", json={"model": model, "input": items, "max_output_tokens": 3}).json()
    assert answer["usage"]["input_tokens"] == len(ids)
    items[-1]["output"] = [{"type": "input_image", "image_url": "data:x"}]
    error = http.post("/v1/responses", json={"model": model, "input": items, "max_output_tokens": 3}).json()["error"]
    assert error["param"] == "input[3].output[0].image_url"

    begin[1]["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]
    last = {"role": "tool", "content": "c[img]d", "images": [BASE64]}
    options = {"temperature": 0, "num_predict": 3}
    body = {"model": model, "messages": [*begin, last], "stream": False, "options": options}
    assert http.post("/api/chat", json=body).json()["prompt_eval_count"] == len(ids)


IMAGE_PART = {"type": "image_url", "image_url": {"url": URI, "detail": "low"}}
INPUT_IMAGE = {"type": "input_image", "image_url": URI}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}


@pytest.mark.parametrize(
    ("path", "fields", "is_allowed"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE_PART]}]}, True),
        (CHAT, {"messages": [{"role": "user", "content": [INPUT_IMAGE]}]}, True),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "mm_processor_kwargs": {"max_pixels": 999}}, True),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "mm_processor_kwargs": {"fps": 1}}, False),
        (CHAT, {"messages": [{"role": "user", "content": [{**IMAGE_PART, "size": 3}]}]}, False),
        ("/v1/responses", {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, True),
        ("/v1/responses", {"input": [{"role": "user", "content": [{**INPUT_IMAGE, "detail": "most"}]}]}, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": [BLOCK]}], "max_tokens": 3}, True),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [BLOCK]}], "max_tokens": 3}, False),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [BASE64]}]}, True),
        ("/api/generate", {"prompt": "x", "images": [BASE64]}, True),
        ("/api/generate", {"prompt": "x", "images": [3]}, False),
    ],
)
def test_the_description_allows_what_is_taken(
    served: Pictures, path: str, fields: dict[str, Any], is_allowed: bool
) -> None:
    document = served.real.http.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = {"model": served.real.model, **fields}
    assert jsonschema_rs.is_valid({**schema, "components": document["components"]}, body) == is_allowed
    assert (served.real.http.post(path, json=body).status_code == 200) == is_allowed


def test_a_server_that_fetches_nothing(tmp_path: Path) -> None:
    with serving_real(write_chat_model(tmp_path / "vl"), **OPTIONS) as real:
        body = {"messages": [{"role": "user", "content": content("https://images.example/a.png")}]}
        error = real.http.post(CHAT, json=body).json()["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert "--allow-image-urls" in error["message"]


def test_the_server_starts_without_the_extra() -> None:
    """What only pictures need is imported where there are some."""
    script = (
        "import sys; sys.modules.update(PIL=None, httpcore=None)\n"
        "import server.serve, server.app, server.pictures.decoder, server.pictures.reader"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3], timeout=60)
