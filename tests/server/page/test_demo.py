"""The page with the demo model: a conversation, and the view of the engine behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from runtime.engine.make_engine import build_engine
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.loading import warm_up
from tests.server.page.browser import answers, ask, needs_browser, opened, wait_idle
from tests.server.running import running
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    engine = build_engine(None, device="cpu", num_blocks=600)
    client = ThreadEngineClient(engine)
    warm_up(client)  # its kernels are compiled now, not while the browser waits
    with running(create_app(client, load_tokenizer(Path(engine.info.model_path)), model_name="xserv-demo")) as url:
        yield url
    client.close()


@needs_browser
def test_a_conversation_with_the_demo_model_and_its_engine(browser: Browser, demo: str) -> None:
    with opened(browser, demo, expected_errors=("willReadFrequently",)) as page:  # of the test's own reading
        expect(page.locator("#model")).to_have_text("xserv-demo")
        page.click("text=What is 17 plus 25?")
        expect(answers(page)).to_have_text("42")
        wait_idle(page)
        expect(page.locator(".assistant .meta")).to_contain_text("first token")
        expect(page.locator(".assistant .meta")).to_contain_text("3 tokens")
        page.reload()
        expect(answers(page)).to_have_text("42")
        expect(page.locator("#title")).to_have_text("What is 17 plus 25?")
        page.click("#toggle-live")
        expect(page.locator("#live-state")).to_have_text("running")
        page.keyboard.press("Control+k")
        ask(page, "Count from 1 to 9")
        expect(page.locator(".user")).to_contain_text("Count from 1 to 9")
        expect(answers(page)).to_have_text("1 2 3 4 5 6 7 8 9")
        wait_until(partial(has_pixels, page, "#timeline", "prefill"))  # what it shows is a tenth of a second old
        page.click("#freeze")
        for canvas, kind in (("#timeline", "prefill"), ("#timeline", "decode"), ("#blocks", "cached")):
            wait_until(partial(has_pixels, page, canvas, kind))
        row = page.locator("#requests tr", has_text="this page").first
        expect(row).to_contain_text("done")
        expect(page.locator("#timeline")).to_have_attribute("aria-label", re.compile("1 requests"))
        expect(page.locator("#blocks")).to_have_attribute("aria-label", re.compile(r"[1-9]\d* cached"))
        page.click("#toggle-live")
        expect(page.locator("#live")).to_be_hidden()


def has_pixels(page: Page, canvas: str, kind: str) -> bool:
    """Whether some of a canvas has the colour of this kind in the legend."""
    number: int = page.evaluate(
        """([canvas, kind]) => {
            const colour = getComputedStyle(document.querySelector(`${canvas}-legend [data-kind=${kind}]`)).color;
            const wanted = colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const { width, height } = document.querySelector(canvas);
            const { data } = document.querySelector(canvas).getContext("2d").getImageData(0, 0, width, height);
            let number = 0;
            for (let at = 0; at < data.length; at += 4) {
                number += wanted.every((value, part) => Math.abs(value - data[at + part]) <= 2) && data[at + 3] > 250;
            }
            return number;
        }""",
        [canvas, kind],
    )
    return number > 3
