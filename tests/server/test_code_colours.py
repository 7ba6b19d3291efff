"""`POST /page/render`, and its process: it is bounded, replaced when it dies, and ends with the server. Every character
of code has a colour, and the code stays what it is."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import msgspec
import psutil
import pytest
from pygments.lexers import get_all_lexers

from server import code_colours
from server.code_colours import Renderer
from server.code_worker import HighlightError, highlight
from server.worker_process import WorkerProcess
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer


def ask(served: Served, **body: Any) -> Any:
    return served.http.post("/page/render", json=body)


def test_code_has_its_colours(served: Served) -> None:
    codes = [{"language": language, "text": text} for language, text in (("python", "x = 1"), ("nothing", "x")) * 2]
    answer = ask(served, code=codes)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json() == {"code": [["", 4, "m", 1], None] * 2}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"code": [{"language": "c", "text": "x"}] * 65}, "code"),
        ({"code": [{"language": "c", "text": "x" * 40_001}]}, "code"),
        ({"code": [{"language": "c"}]}, "code"),
        ({"maths": []}, "maths"),
        ({"code": [{"language": "c", "text": 1}]}, "code"),
    ],
)
def test_what_is_too_large_or_wrong_is_refused(served: Served, body: dict[str, Any], param: str) -> None:
    answer = ask(served, **body)
    assert answer.status_code == 400
    assert param in (answer.json()["error"]["param"] or "") or param in answer.json()["error"]["message"]


def test_a_job_has_a_time_and_a_dead_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = (
        "import sys, time, msgspec\nfrom server.worker_process import answer_jobs\n"
        "def answer(job, _):\n  time.sleep(1000 if b'slow' in bytes(job) else 0)\n"
        "  if b'dead' in bytes(job): sys.exit()\n  return msgspec.Raw(b'[1]')\n"
        "answer_jobs(answer, max_memory_bytes=1 << 30)\n"
    )
    monkeypatch.setattr(WorkerProcess, "command", staticmethod(lambda module: ("-c", slow)))
    caplog.set_level(logging.WARNING, "xserv.server")

    async def use() -> None:
        made = Renderer(job_timeout_s=TIMEOUT_S)
        raw, nothing = msgspec.Raw(b"[1]"), msgspec.Raw(b"null")

        async def one(word: str) -> bytes:
            return bytes((await made.render([("c", word)]))[0])

        assert await one("a") == bytes(raw)
        first = made._process
        assert first is not None
        made._job_timeout_s = 0.3  # for this job alone: the others may take their time on a busy machine
        assert await one("slow") == bytes(nothing)
        made._job_timeout_s = TIMEOUT_S
        assert first.popen.poll() is not None
        assert await one("b") == bytes(raw)
        assert await one("dead") == bytes(nothing)
        assert await one("c") == bytes(raw)
        second = made._process
        assert second is not None
        second.popen.kill()
        second.popen.wait()
        assert await one("d") == bytes(raw)
        third = made._process
        assert third not in (None, second)
        assert await one("slow") == bytes(nothing)  # it is known, and costs no second process
        assert made._process is third
        made.close()
        assert third is not None
        assert third.popen.poll() is not None

    asyncio.run(use())
    assert "took too long" in caplog.text


def test_what_is_kept_is_bounded_and_belongs_to_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Renderer, "_ask", lambda self, job: asked.append(job[1]) or msgspec.Raw(b"1" * 1000))
    monkeypatch.setattr(code_colours, "MAX_KEPT_BYTES", 10_000)

    async def use() -> None:
        made = Renderer()
        await made.render([("c", "x"), ("c", "x")], "one")
        await made.render([("c", "x")], "one")
        assert asked == ["x"]
        await made.render([("c", "x")], "two")
        assert asked == ["x", "x"]
        for number in range(100):
            await made.render([("c", str(number))])
        assert len(made._kept) <= 10
        assert made._num_kept_bytes <= 10_000
        await made.render([("c", "99")])
        assert len(asked) == 102
        made.close()

    asyncio.run(use())


def test_no_more_wait_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, fake_engine: FakeEngineClient
) -> None:
    monkeypatch.setattr(code_colours, "MAX_WAITING", -1)
    with serving(fake_engine, tokenizer) as served:
        answer = ask(served, code=[{"language": "c", "text": "y"}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "renderer_busy")
    assert answer.headers["retry-after"] == "1"


def test_the_process_is_started_late_and_ends_with_the_server(
    tokenizer: Tokenizer, fake_engine: FakeEngineClient
) -> None:
    def workers() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [child for child in children if "server.code_worker" in " ".join(child.cmdline())]

    before = len(workers())
    with serving(fake_engine, tokenizer) as served:
        served.http.get("/")
        assert len(workers()) == before
        assert ask(served, code=[{"language": "c", "text": "z"}]).status_code == 200
        assert len(workers()) == before + 1
    wait_until(lambda: len(workers()) == before)


def test_the_page_is_told_of_the_model(served: Served) -> None:
    assert served.http.get("/page/about").json() == {
        "model": "fake-model",
        "max_model_len": 256,
        "has_chat_template": True,
        "reads_images": False,
    }


CODE = """\n\n#!/bin/sh\n\tdef f(x: int) -> str:  # é😀\n    return f"{x!r}" + 'y' * 0x1F\n\n<b class="x">&amp;</b>
{"a": 1} SELECT * FROM t WHERE a = 'b'; /* c */ @decorator\n- removed\n+ added  \n"""


def pieces(code: str, runs: list[str | int]) -> list[tuple[str, str]]:
    found = []
    units = code.encode("utf-16-le")
    at = 0
    for name, length in zip(runs[::2], runs[1::2], strict=True):
        assert isinstance(length, int)
        found.append((str(name), units[at : at + 2 * length].decode("utf-16-le")))
        at += 2 * length
    assert at == len(units)
    return found


def test_python() -> None:
    code = "def f(x):\n    return 'é😀' + 1  # why\n"
    runs = pieces(code, highlight("python", code))
    assert ("k", "def") in runs
    assert ("f", "f") in runs
    assert ("s", "'é😀'") in runs
    assert ("m", "1") in runs
    assert ("c", "# why") in runs


LANGUAGES = ("js", "html", "json", "bash", "c++", "rust", "sql", "diff", "yaml", "console", "tex")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_usual_languages_keep_the_code(language: str) -> None:
    runs = pieces(CODE, highlight(language, CODE))
    assert "".join(text for _, text in runs) == CODE
    assert any(name for name, _ in runs)


@pytest.mark.exhaustive
def test_every_language_keeps_the_code_or_is_refused() -> None:
    draw = random.Random(3)
    num_refused = 0
    languages = sorted(names[0] for _, names, _, _ in get_all_lexers() if names)
    for language in languages:
        code = "".join(draw.choice(CODE) for _ in range(200)) + CODE
        try:
            pieces(code, highlight(language, code))
        except HighlightError:
            num_refused += 1
    assert num_refused < len(languages) / 2


@pytest.mark.parametrize("language", ["", "nothing", "../python", "python; rm"])
def test_an_unknown_language_is_refused(language: str) -> None:
    with pytest.raises(HighlightError):
        highlight(language, "x = 1")
