"""`xserv serve` over a model without a chat template, and with one that it is given: both through the real command."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.runtime.commands.running import ROOT, STORIES, needs_stories
from tests.waiting import TIMEOUT_S, wait_until

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ASKED = {"model": "stories260K", "messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0}


@contextmanager
def served(log: Path, *arguments: str) -> Iterator[str]:
    """The address of a server that is started with these arguments."""
    with log.open("w") as written:
        server = subprocess.Popen(
            [sys.executable, "-m", "runtime.cli", "serve", *arguments, "--port", "0", "--device", "cpu"],
            cwd=ROOT, stdout=written, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text()) or server.poll() is not None)
        address = re.findall(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text())[0]
        wait_until(lambda: httpx.get(f"{address}/ready", timeout=TIMEOUT_S).status_code == 200)
        yield address
    finally:
        server.terminate()
        server.wait(TIMEOUT_S)


@pytest.mark.exhaustive
@needs_stories
def test_a_template_makes_a_chat_of_it(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    with served(tmp_path / "log", str(STORIES), "--chat-template", str(template)) as address:
        chat = httpx.post(f"{address}/v1/chat/completions", json={**ASKED, "max_tokens": 8}, timeout=TIMEOUT_S)
        plain = {"model": "stories260K", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
        text = httpx.post(f"{address}/v1/completions", json=plain, timeout=TIMEOUT_S).json()["choices"][0]["text"]
    assert chat.status_code == 200
    assert chat.json()["choices"][0]["message"]["content"] == text


@pytest.mark.exhaustive
@needs_stories
def test_without_one_it_says_so(tmp_path: Path) -> None:
    with served(tmp_path / "log", str(STORIES)) as address:
        refused = httpx.post(f"{address}/v1/chat/completions", json=ASKED, timeout=TIMEOUT_S)
    assert refused.status_code == 400
    assert "no chat template" in refused.json()["error"]["message"]
