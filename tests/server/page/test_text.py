"""Texts that the model continues: all that the page offers for a model without a chat template, and one of its modes
for any other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.conftest import Served, faked, say
from tests.server.page.browser import ask, needs_browser, opened, wait_idle
from tests.server.page.test_chat import sent
from tests.waiting import wait_until
from tokenizer import Tokenizer


@pytest.fixture
def base_model(tmp_path: Path) -> Iterator[Served]:
    write_byte_tokenizer(tmp_path, has_template=False)
    with faked(
        Tokenizer.from_pretrained(tmp_path), lambda request, index: say(" there was"), max_model_len=2048
    ) as served:
        yield served


@needs_browser
def test_a_base_model_continues_a_text(browser: Browser, base_model: Served) -> None:
    engine = base_model.engine
    expected = ("Failed to load resource", "the server responded with a status")
    with opened(browser, base_model.url, expected_errors=expected) as page:
        text, go = page.locator("#text"), page.locator("#text-continue")
        expect(page.locator("#composer")).to_be_hidden()
        expect(page.locator("#new-label")).to_have_text("New text")
        expect(go).to_be_disabled()
        text.fill("Once upon a time")
        go.click()
        expect(text).to_have_value("Once upon a time there was")
        expect(page.locator("#text-meta")).to_contain_text("The model ended the text here.")
        assert sent(base_model) == "Once upon a time"
        assert engine.requests[-1].params.max_tokens == 256
        engine.script = lambda request, index: say(" a king")
        text.press("Control+Enter")
        expect(text).to_have_value("Once upon a time there was a king")
        engine.script = lambda request, index: say(" a queen")
        page.click("#text-again")
        expect(text).to_have_value("Once upon a time there was a queen")
        expect(go).to_be_visible()
        page.click("#text-undo")
        expect(text).to_have_value("Once upon a time there was")
        page.reload()
        expect(text).to_have_value("Once upon a time there was")
        expect(page.locator(".conversation span")).to_have_text(re.compile("^Once upon a time"))

        engine.script = lambda request, index: say(" word" * 350)
        engine.step_s = 0.03
        go.click()
        expect(text).to_have_value(re.compile("there was word word w"))
        page.keyboard.press("Escape")
        expect(page.locator("#text-meta")).to_contain_text("Stopped.")
        wait_until(lambda: engine.num_open == 0)
        engine.step_s = 0.0
        text.fill("x" * 3000)
        engine.script = lambda request, index: say(" end")
        go.click()
        expect(page.locator("#text-meta")).to_contain_text(
            "The context is full: the beginning of the text was left out."
        )
        expect(text).to_have_value("x" * 3000 + " end")
        engine.die()
        go.click()
        expect(page.locator("#text-failure")).to_contain_text("The engine is not available")
        expect(page.locator("#model")).to_have_text("restarting · fake-model")
        engine.revive()


@needs_browser
def test_any_model_can_continue_texts(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        ask(page, "a chat")
        wait_idle(page)
        page.click("#open-settings")
        page.select_option("#set-mode", "text")
        page.fill("#set-max-tokens", "7")
        page.fill("#set-stop", "END\n\\n\\n")
        for name, value in {
            "min-p": "0.1", "presence-penalty": "0.2", "frequency-penalty": "0.3", "repetition-penalty": "1.1"
        }.items():  # fmt: skip
            page.fill(f"#set-{name}", value)
        page.click("#settings .primary")
        expect(page.locator(".bubble")).to_have_text("a chat")  # what is open stays
        page.click("#new-chat")
        page.fill("#text", "A text")
        page.click("#text-continue")
        expect(page.locator("#text")).to_have_value("A textHello.")
        params = fake.engine.requests[-1].params
        assert (params.max_tokens, list(params.stop)) == (7, ["END", "\n\n"])
        assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.1, 0.2, 0.3)
        assert params.repetition_penalty == 1.1
        page.click(".conversation:has-text('a chat')")
        expect(page.locator("#composer")).to_be_visible()
        expect(page.locator("#document")).to_be_hidden()
        page.reload()
        expect(page.locator(".bubble")).to_have_text("a chat")
        page.click(".conversation:has-text('A text')")
        expect(page.locator("#text")).to_have_value("A textHello.")
