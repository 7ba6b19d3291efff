"""The chat in a browser: its buttons, settings, keys and memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import httpx
from playwright.sync_api import Browser, expect

from server.config import ServerConfig
from tests.server.conftest import Served, faked, say
from tests.server.page.browser import answers, ask, needs_browser, opened, wait_idle
from tests.waiting import wait_until
from tokenizer import Tokenizer


@needs_browser
def test_stop_retry_edit_and_delete(browser: Browser, fake: Served) -> None:
    fake.engine.script = lambda request, index: say("word " * 100)
    fake.engine.step_s = 0.02
    with opened(browser, fake.url) as page:
        ask(page, "first question")
        expect(answers(page)).to_contain_text("word word")
        expect(page.locator("#send")).to_be_hidden()
        page.keyboard.press("Escape")
        wait_idle(page)
        wait_until(lambda: fake.engine.num_open == 0)
        expect(page.locator(".assistant .meta")).to_contain_text("Stopped.")

        fake.engine.step_s = 0.0
        fake.engine.script = lambda request, index: say("A second answer.")
        page.click("[aria-label='Answer again']")
        expect(answers(page)).to_have_text("A second answer.")
        wait_idle(page)
        expect(page.locator(".assistant .branches")).to_contain_text("2/2")
        page.click("[aria-label='Previous version']")
        expect(answers(page)).to_contain_text("word word")
        page.click("[aria-label='Next version']")

        page.press("#message", "ArrowUp")
        editor = page.locator("[aria-label='Edit message']:focus")
        expect(editor).to_have_value("first question")
        editor.fill("edited question")
        fake.engine.script = lambda request, index: say("An answer to that.")
        editor.press("Enter")
        expect(page.locator(".bubble")).to_have_text("edited question")
        expect(answers(page)).to_have_text("An answer to that.")
        wait_idle(page)
        expect(page.locator(".user .branches")).to_contain_text("2/2")
        assert sent(fake) == "user:edited questionassistant:"
        page.locator(".user").hover()
        page.click(".user [aria-label='Previous version']")
        expect(answers(page)).to_have_text("A second answer.")

        page.click(".assistant [aria-label='Delete from here']")
        expect(page.locator(".branches").last).to_contain_text("1/2")
        expect(answers(page)).to_contain_text("word word")
        page.click("text=Undo")
        expect(answers(page)).to_have_text("A second answer.")


def sent(fake: Served, number: int = -1) -> str:
    """The prompt of a request, as text; special tokens are not part of it."""
    return bytes(token for token in fake.engine.requests[number].prompt_token_ids if token < 256).decode()


@needs_browser
def test_an_edited_message_begins_a_branch_without_what_followed(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        for text in ("alpha", "beta"):
            ask(page, text)
            wait_idle(page)
        page.locator(".user").first.hover()
        page.locator(".user [aria-label='Edit message']").first.click()
        page.fill("[aria-label='Edit message']:focus", "gamma")
        page.click(".editing .primary")
        expect(page.locator(".message")).to_have_count(2)
        wait_idle(page)
        assert sent(fake) == "user:gammaassistant:"
        page.reload()
        expect(page.locator(".bubble")).to_have_text("gamma")
        page.locator(".user").hover()
        page.click(".user [aria-label='Previous version']")
        expect(page.locator(".message")).to_have_count(4)


@needs_browser
def test_settings_reach_the_engine_and_stay(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        page.click("#open-settings")
        values = {"temperature": "0.5", "top-p": "0.9", "top-k": "7", "max-tokens": "4", "seed": "11"}
        for name, value in values.items():
            page.fill(f"#set-{name}", value)
        page.fill("#set-system", "Be brief.")
        page.click("#settings .primary")
        expect(page.locator("#settings")).to_be_hidden()
        page.reload()
        page.wait_for_selector("#model[data-state=ready]")
        ask(page, "hi")
        expect(page.locator(".assistant .meta")).to_contain_text("Stopped at the token limit.")
        params = fake.engine.requests[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.9, 7, 4, 11)
        assert sent(fake) == "system:Be brief.user:hiassistant:"
        page.click("#open-settings")
        page.click("#reset-settings")
        page.keyboard.press("Escape")
        ask(page, "again")
        wait_idle(page)
        assert fake.engine.requests[-1].params.top_k != 7
        assert "Be brief" not in sent(fake)


@needs_browser
def test_conversations_stay_until_they_are_deleted(browser: Browser, fake: Served, tmp_path: Path) -> None:
    with opened(browser, fake.url) as page:
        ask(page, "one")
        wait_idle(page)
        page.keyboard.press("Control+k")
        expect(page.locator(".welcome")).to_be_visible()
        expect(page.locator("#message")).to_be_focused()
        ask(page, "two")
        wait_idle(page)
        titles = page.locator(".conversation span")
        expect(titles).to_have_text(["two", "one"])
        page.click(".conversation:has-text('one')")
        expect(page.locator(".bubble")).to_have_text("one")
        with page.expect_download() as download:
            page.click("#export")
        file = tmp_path / "exported.json"
        download.value.save_as(file)
        assert {each["title"] for each in json.loads(file.read_text())["conversations"]} == {"one", "two"}
        page.click("[aria-label='Delete “one”']", force=True)
        expect(titles).to_have_text(["two"])
        page.reload()
        expect(titles).to_have_text(["two"])
        page.set_input_files("#import-file", file)
        expect(page.locator("#toast")).to_contain_text("2 conversations were imported")
        expect(titles).to_have_count(3)
        file.write_text('{"format": "xserv-conversations-1", "conversations": [{"id": 1}]}')
        page.set_input_files("#import-file", file)
        expect(page.locator("#toast")).to_contain_text("cannot be read")
        page.evaluate("localStorage.setItem('xserv.conversation.x', '{broken')")
        page.reload()
        expect(titles).to_have_count(3)


@needs_browser
def test_storage_is_bounded_and_its_end_is_told(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        page.evaluate(
            """async () => {
                const { Store, MAX_CHARACTERS, addNode, newConversation } = await import("/page/store.js");
                const conversation = newConversation();
                addNode(conversation, null, { role: "user", content: "x".repeat(MAX_CHARACTERS - 1000) });
                addNode(conversation, null, { role: "user", content: "another branch, which is shown" });
                if (!new Store().save(conversation)) throw new Error("there was room");
            }"""
        )
        page.reload()
        expect(page.locator("#storage")).to_contain_text("100 %")
        page.click("#new-chat")
        fake.engine.script = lambda request, index: say("long " * 200)
        ask(page, "this has no room")
        expect(page.locator("#storage")).to_contain_text("not kept")
        wait_idle(page)
        used = page.evaluate("Object.entries(localStorage).reduce((sum, [k, v]) => sum + v.length, 0)")
        assert used < 4_001_000


@needs_browser
def test_the_reader_is_not_pulled_down(browser: Browser, fake: Served) -> None:
    fake.engine.script = lambda request, index: say("line\n\n" * 1300)  # it is stopped long before its end
    fake.engine.step_s = 0.002
    with opened(browser, fake.url) as page:
        ask(page, "much text")
        scroll = page.locator("#scroll")
        is_at_end = partial(
            scroll.evaluate, "(e) => e.scrollTop > 300 && e.scrollHeight - e.scrollTop - e.clientHeight < 40"
        )
        wait_until(is_at_end)
        scroll.press("PageUp")  # the mouse's wheel has no timeout
        expect(page.locator("#to-latest")).to_be_visible()
        place, height = scroll.evaluate("(e) => [e.scrollTop, e.scrollHeight]")
        wait_until(lambda: scroll.evaluate("(e) => e.scrollHeight") > height + 200)
        assert scroll.evaluate("(e) => e.scrollTop") <= place
        page.click("#to-latest")
        wait_until(is_at_end)
        page.click("#stop")
        wait_idle(page)
        wait_until(is_at_end)


@needs_browser
def test_errors_are_told_in_words(browser: Browser, fake: Served) -> None:
    expected = ("Failed to load resource", "the server responded with a status")
    with opened(browser, fake.url, expected_errors=expected) as page:
        failure = page.locator(".failure").last
        ask(page, "x" * 9000)
        expect(failure).to_contain_text("too long for the model")
        page.keyboard.press("Control+k")
        fake.engine.failing.add(len(fake.engine.requests))
        ask(page, "this one fails")
        expect(failure).to_contain_text("The server failed")
        assert "secret detail" not in page.content()
        fake.engine.die()
        ask(page, "is anybody there?")
        expect(failure).to_contain_text("The engine is not available")
        expect(failure).to_contain_text("Try again in 2 s")
        fake.engine.revive()
        page.click("[aria-label='Answer again'] >> nth=-1")
        expect(answers(page).last).to_have_text("Hello.")
        wait_idle(page)
        page.context.set_offline(True)
        ask(page, "and now?")
        expect(failure).to_contain_text("cannot be reached")


@needs_browser
def test_a_key_is_asked_for_and_used(browser: Browser, tokenizer: Tokenizer) -> None:
    with faked(tokenizer, lambda request, index: say("Hello."), config=ServerConfig(api_keys=("secret",))) as served:
        assert httpx.get(served.url).status_code == 401
        credentials = {"username": "anyone", "password": "secret", "origin": served.url}
        with opened(
            browser, served.url, http_credentials=credentials, expected_errors=("401", "Failed to load")
        ) as page:
            expect(page.locator("#model")).to_have_text("fake-model")
            ask(page, "hi")
            expect(answers(page)).to_have_text("Hello.")
            page.click("#open-settings")
            page.fill("#set-key", "wrong")
            page.click("#settings .primary")
            expect(page.locator("#key-note")).to_have_text("The server does not know this key.")
            expect(page.locator("#set-key")).to_be_focused()
            expect(page.locator("#model")).to_have_text("key needed")
            page.fill("#set-key", "secret")
            page.press("#set-key", "Enter")
            expect(page.locator("#model")).to_have_text("fake-model")
            ask(page, "hi again")
            expect(answers(page).last).to_have_text("Hello.")
            assert page.evaluate("sessionStorage.getItem('xserv.key')") == "secret"
            assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
