"""Conversations over time: found and renamed, exported one by one, drafted, interrupted and continued, and longer than
the context."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.server.conftest import Served, say
from tests.server.page.browser import answers, ask, needs_browser, opened, send, wait_idle
from tests.server.page.test_chat import sent
from tests.waiting import wait_until


@needs_browser
def test_they_are_found_renamed_and_exported_one_by_one(browser: Browser, fake: Served, tmp_path: Path) -> None:
    with opened(browser, fake.url) as page:
        expect(page.locator("#search")).to_be_hidden()
        for text in ("about pears", "about plums"):
            page.keyboard.press("Control+k")
            ask(page, text)
            wait_idle(page)
        titles = page.locator(".conversation span")
        page.fill("#search", "PEARS")
        expect(titles).to_have_text(["about pears"])
        page.fill("#search", "hello")  # what was answered
        expect(titles).to_have_count(2)
        page.fill("#search", "apples")
        expect(page.locator("#conversations")).to_have_text("Nothing found.")
        page.press("#search", "Escape")
        expect(titles).to_have_text(["about plums", "about pears"])

        page.locator(".conversation").last.focus()
        page.keyboard.press("F2")
        expect(page.locator("#rename")).to_have_value("about pears")
        page.fill("#rename", "  fruit <b>\n")
        page.keyboard.press("Enter")
        expect(titles).to_have_text(["about plums", "fruit <b>"])
        page.click("[aria-label='Rename “about plums”']", force=True)
        page.fill("#rename", "nothing")
        page.keyboard.press("Escape")
        page.reload()
        expect(titles).to_have_text(["about plums", "fruit <b>"])

        page.click(".conversation >> nth=1")
        expect(page.locator("#title")).to_have_text("fruit <b>")
        page.click("#export-one")
        with page.expect_download() as download:
            page.click("#export-markdown")
        assert download.value.suggested_filename == "fruit-b.md"
        file = tmp_path / "exported"
        download.value.save_as(file)
        assert file.read_text() == "# fruit <b>\n\n## You\n\nabout pears\n\n## Answer\n\nHello.\n"
        page.click("#export-one")
        with page.expect_download() as download:
            page.click("#export-json")
        download.value.save_as(file)
        assert [each["title"] for each in json.loads(file.read_text())["conversations"]] == ["fruit <b>"]
        page.set_input_files("#import-file", file)
        expect(page.locator("#toast")).to_contain_text("One conversation was imported")
        expect(titles).to_have_count(3)


@needs_browser
def test_leaving_in_mid_answer_keeps_all_of_it(browser: Browser, fake: Served) -> None:
    fake.engine.script = lambda request, index: say("word " * 1000)  # it is left long before its end
    fake.engine.step_s = 0.01
    with opened(browser, fake.url) as page:
        ask(page, "first question")
        expect(answers(page)).to_contain_text("word word")
        page.fill("#message", "what I was about to ask")
        page.reload()
        expect(page.locator("#message")).to_have_value("what I was about to ask")
        expect(answers(page)).to_contain_text("word word")
        expect(page.locator(".assistant .meta")).to_contain_text("Interrupted")
        expect(page.locator(".failure")).to_have_count(1)
        expect(page.locator(".failure")).to_be_hidden()
        wait_until(lambda: fake.engine.num_open == 0)
        fake.engine.step_s = 0.0
        fake.engine.script = lambda request, index: say("and its end.")
        page.click("text=Continue")
        expect(answers(page)).to_contain_text("and its end.")
        assert sent(fake).startswith("user:first questionassistant:word word")
        expect(page.locator("button", has_text="Continue")).to_be_hidden()

        page.keyboard.press("Control+k")  # a draft belongs to its conversation, also to one that has not begun
        page.fill("#message", "another draft")
        page.reload()
        expect(page.locator("#message")).to_have_value("another draft")
        expect(page.locator(".welcome")).to_be_visible()
        page.click(".conversation")
        expect(page.locator("#message")).to_have_value("what I was about to ask")
        send(page)
        wait_idle(page)
        page.reload()
        expect(page.locator("#message")).to_have_value("")


@needs_browser
def test_the_oldest_turns_are_left_out_when_the_context_is_full(browser: Browser, fake: Served) -> None:
    """A token is a byte here, and the context has 8192: of it 256 are kept for the answer."""
    with opened(browser, fake.url) as page:
        page.click("#open-settings")
        page.fill("#set-system", "Be brief.")
        page.click("#settings .primary")
        for letter in "abc":
            ask(page, letter * 2600)
            wait_idle(page)
        expect(page.locator(".notice:visible")).to_have_count(0)
        prompt = sent(fake)
        assert [prompt.count(letter * 2600) for letter in "abc"] == [1, 1, 1]
        ask(page, "d" * 2600)
        expect(page.locator(".notice:visible")).to_have_text("The context is full: the oldest turn was left out.")
        wait_idle(page)
        prompt = sent(fake)
        assert prompt.startswith("system:Be brief.user:bbb")
        assert [prompt.count(letter * 2600) for letter in "abcd"] == [0, 1, 1, 1]
        assert len(fake.engine.requests[-1].prompt_token_ids) <= 8192 - 256
        page.reload()
        expect(page.locator(".notice:visible")).to_have_count(1)
        expect(page.locator(".bubble")).to_have_count(4)  # they are still on the screen
