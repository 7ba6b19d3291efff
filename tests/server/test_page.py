"""The page at `/` in a browser: the chat, its keys and its memory, the view of the engine, and what it never does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright", reason="needs Playwright, of the extra dev")

from playwright.sync_api import Browser, Page, expect

from runtime.engine.build import build_engine
from runtime.engine.client import ThreadEngineClient
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.page import CONTENT_SECURITY_POLICY, page_files
from tests.server.browser import chromium, needs_browser, opened
from tests.server.conftest import Served, say, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.running import running, wait_until
from tokenizer import Tokenizer

expect.set_options(timeout=20_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Served]:
    engine = FakeEngineClient(lambda request, index: say("Hello."), max_model_len=8192)
    with serving(engine, tokenizer) as served:
        yield served
    engine.close()


@pytest.fixture
def fake(shared: Served) -> Iterator[Served]:
    shared.engine.reset(lambda request, index: say("Hello."))
    yield shared
    eventually(lambda: shared.engine.num_open == 0)


def eventually(condition: Callable[[], bool]) -> None:
    wait_until(condition, timeout_s=20)


def ask(page: Page, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def answers(page: Page) -> Any:
    return page.locator(".message.assistant .body > .prose")


def wait_idle(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible()


# Its files


def test_its_files_are_strict_and_kept(served: Served) -> None:
    response = served.http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    tag = response.headers["etag"]
    for given in (tag, f'"other", W/{tag}', "*"):
        again = served.http.get("/", headers={"If-None-Match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert served.http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    head = served.http.head("/")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)


def test_all_that_is_referred_to_is_there(served: Served) -> None:
    index = served.http.get("/").text
    scripts = {name: file.content.decode() for name, file in page_files().items() if name.endswith(".js")}
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"', index))
    named |= {name for text in scripts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named | {"index.html"} == set(page_files())
    for name in named:
        response = served.http.get(f"/page/{name}")
        assert response.status_code == 200
        assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert not re.search(r"<style|\sstyle=|<script(?![^>]*src=)|\son\w+=", index)
    for text in scripts.values():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


@pytest.mark.parametrize("name", ["", "nothing.js", "..%2fpage.py", "%2e%2e/app.py", "index.html%00", "style.css/"])
def test_no_other_file_is_served(served: Served, name: str) -> None:
    assert served.http.get(f"/page/{name}").status_code == 404


# With the demo model


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    engine = build_engine(None, device="cpu", num_blocks=600)
    client = ThreadEngineClient(engine)
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
        expect(answers(page)).to_have_text("1 2 3 4 5 6 7 8 9")
        eventually(partial(has_pixels, page, "#timeline", "prefill"))  # what it shows is a tenth of a second old
        page.click("#freeze")
        for canvas, kind in (("#timeline", "prefill"), ("#timeline", "decode"), ("#blocks", "cached")):
            eventually(partial(has_pixels, page, canvas, kind))
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


# The chat


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
        eventually(lambda: fake.engine.num_open == 0)
        expect(page.locator(".assistant .meta")).to_contain_text("Stopped.")

        fake.engine.step_s = 0.0
        fake.engine.script = lambda request, index: say("A second answer.")
        page.click("[aria-label='Answer again']")
        expect(answers(page)).to_have_text("A second answer.")
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
    fake.engine.script = lambda request, index: say("line\n\n" * 400)
    fake.engine.step_s = 0.001
    with opened(browser, fake.url) as page:
        ask(page, "much text")
        scroll = page.locator("#scroll")
        is_at_end = partial(
            scroll.evaluate, "(e) => e.scrollTop > 300 && e.scrollHeight - e.scrollTop - e.clientHeight < 40"
        )
        eventually(is_at_end)
        page.locator("#scroll").hover()
        page.mouse.wheel(0, -250)
        expect(page.locator("#to-latest")).to_be_visible()
        place, height = scroll.evaluate("(e) => [e.scrollTop, e.scrollHeight]")
        eventually(lambda: scroll.evaluate("(e) => e.scrollHeight") > height + 200)
        assert scroll.evaluate("(e) => e.scrollTop") <= place
        page.click("#to-latest")
        eventually(is_at_end)
        page.click("#stop")
        wait_idle(page)
        eventually(is_at_end)


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
        page.context.set_offline(True)
        ask(page, "and now?")
        expect(failure).to_contain_text("cannot be reached")


@needs_browser
def test_a_key_is_asked_for_and_used(browser: Browser, tokenizer: Tokenizer) -> None:
    engine = FakeEngineClient(lambda request, index: say("Hello."))
    with serving(engine, tokenizer, config=ServerConfig(api_keys=("secret",))) as served:
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
    engine.close()


# What a model says


XSS = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1"><svg onload="window.hacked=1">
[a](javascript:window.hacked=1) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>alert(1)</script>)
[d](//evil.example/x) ![i](https://evil.example/i.png) <javascript:alert(1)> [e](https://good.example/"onmouseover=x)
<https://auto.example/> <iframe src="https://evil.example"></iframe>

```html"><img src=x onerror=window.hacked=1>
</code></pre><script>window.hacked = 1</script>
```

| <b>x</b> | `<i>` |
|---|---|
| <img src=x onerror=window.hacked=1> | [t](vbscript:x) |
"""


@needs_browser
def test_what_a_model_says_stays_text(browser: Browser, fake: Served) -> None:
    fake.engine.script = lambda request, index: say(XSS)
    provoked = ("TrustedHTML", "policy: require-trusted-types-for")
    with opened(browser, fake.url, expected_errors=provoked) as page:
        ask(page, "<img src=x onerror=window.hacked=1>")
        wait_idle(page)
        expect(page.locator(".bubble")).to_have_text("<img src=x onerror=window.hacked=1>")
        log = page.locator("#log")
        assert log.locator("script, img, iframe, style, object, b, i:not(.pending i)").count() == 0
        assert page.evaluate("window.hacked") is None
        links = log.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
        assert [href for href, _, _ in links] == [
            "https://evil.example/i.png",
            "https://good.example/%22onmouseover=x",
            "https://auto.example/",
            "https://evil.example/",
        ]
        assert all(rel.split() == ["noopener", "noreferrer", "nofollow"] for _, rel, _ in links)
        attributes = log.evaluate("log => [...log.querySelectorAll('*')].flatMap(e => e.getAttributeNames())")
        assert not any(name.startswith("on") for name in attributes)
        with pytest.raises(Exception, match="Trusted"):  # the browser itself refuses markup made of strings
            page.evaluate("document.body.innerHTML = '<p>'")
        page.reload()
        assert page.evaluate("window.hacked") is None


MARKDOWN = """# Title

Text with **bold**, *italic*, ***both***, ~~gone~~, `code *x*`, snake_case_name and 2 * 3 * 4 \\*kept\\*.
A second line, see [docs](https://example.org/a_(b)) or https://example.org/x.

- one
  - inner
    continued
- two

3. three
4. four

> quoted **text**
> - item

| left | right |
|:-----|------:|
| a\\|b | 1 |

---

```python
def f(x):
    return "**not bold**"
```

```
open until the end"""


@needs_browser
def test_markdown_becomes_elements(browser: Browser, fake: Served) -> None:
    fake.engine.script = lambda request, index: say(MARKDOWN)
    with opened(browser, fake.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(page, "show me")
        wait_idle(page)
        prose = answers(page)
        expect(prose.locator("h3.level-1")).to_have_text("Title")
        expect(prose.locator("p strong").first).to_have_text("bold")
        expect(prose.locator("p > em")).to_have_text("italic")
        expect(prose.locator("p strong em")).to_have_text("both")
        expect(prose.locator("del")).to_have_text("gone")
        expect(prose.locator("p > code")).to_have_text("code *x*")
        paragraph = prose.locator("p").first.inner_text()
        assert "snake_case_name and 2 * 3 * 4 *kept*." in paragraph
        assert "A second line" in paragraph.split("\n")[1]
        links = prose.locator("a").evaluate_all("all => all.map(a => [a.textContent, a.href])")
        assert links == [["docs", "https://example.org/a_(b)"], ["https://example.org/x"] * 2]
        assert prose.locator("> ul > li").count() == 2
        expect(prose.locator("> ul ul li")).to_have_text(re.compile("inner"))
        assert prose.locator("> ol").get_attribute("start") == "3"
        expect(prose.locator("> ol > li")).to_have_text(["three", "four"])
        expect(prose.locator("blockquote strong")).to_have_text("text")
        expect(prose.locator("blockquote li")).to_have_text("item")
        expect(prose.locator("td")).to_have_text(["a|b", "1"])
        expect(prose.locator("td").last).to_have_class("right")
        assert prose.locator("hr").count() == 1
        expect(prose.locator("figure code")).to_have_text(
            ['def f(x):\n    return "**not bold**"', "open until the end"], use_inner_text=True
        )
        prose.locator("[aria-label='Copy code']").first.click()
        assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "**not bold**"'


@needs_browser
def test_markdown_takes_time_in_proportion_and_every_cut_ends_the_same(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        worst = page.evaluate(
            """async () => {
                const { parse, render } = await import("/page/markdown.js");
                const hostile = ["*a ", "**a", "_a_", "`", "[", "[a](", "](", "![", "http://", "<", "> ", "- ",
                    "1. a\\n ", "  - a\\n", "|a", "|-|\\n", "~~", "***", "\\\\", "#", "# # ", "```\\n",
                    "- - ", "(", "*_", "<http://a"];
                const take = (text) => {
                    const begin = performance.now();
                    for (const block of parse(text)) render(block);
                    return performance.now() - begin;
                };
                let worst = [0, ""];
                for (const part of hostile) {
                    const text = part.repeat(Math.ceil(32000 / part.length));
                    let growth = Infinity; // one long text against the same in eight pieces: both take as long, or
                    for (let round = 0; round < 4 && growth > 4; round += 1) {
                        let inPieces = 0;
                        for (let at = 0; at < 8; at += 1) inPieces += take(text.slice(at * 4000, at * 4000 + 4000));
                        const whole = take(text);
                        growth = Math.min(growth, whole < 100 ? 1 : whole / inPieces); // a square takes eight times
                    }
                    if (growth > worst[0]) worst = [growth, part];
                }
                return worst;
            }"""
        )
        assert worst[0] <= 4, worst
        differing = page.evaluate(
            """async (text) => {
                const { MarkdownView } = await import("/page/markdown.js");
                const whole = document.createElement("div");
                new MarkdownView(whole).update(text);
                const grown = document.createElement("div");
                const view = new MarkdownView(grown);
                for (let end = 1; end <= text.length; end += 1) view.update(text.slice(0, end));
                return whole.isEqualNode(grown) ? null : [whole.textContent, grown.textContent];
            }""",
            MARKDOWN + "\n```\n" + XSS,
        )
        assert differing is None


@needs_browser
def test_reasoning_is_folded_and_tool_calls_are_shown(browser: Browser, fake: Served) -> None:
    chunks = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me <b>think</b>."},
        {"reasoning_content": " Yes."},
        {"content": "It is sunny."},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
    ]
    frames = [{"id": "chatcmpl-1", "choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in chunks]
    frames.append({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
    with opened(browser, fake.url) as page:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        ask(page, "weather?")
        expect(answers(page)).to_have_text("It is sunny.")
        thoughts = page.locator(".reasoning .prose")
        expect(thoughts).to_be_hidden()
        page.click(".reasoning summary")
        expect(thoughts).to_have_text("Let me <b>think</b>. Yes.")
        expect(page.locator(".call figcaption")).to_contain_text("get_weather")
        expect(page.locator(".call code")).to_have_text('{\n  "city": "Oslo"\n}', use_inner_text=True)


# How it looks


@needs_browser
def test_light_and_dark(browser: Browser, fake: Served) -> None:
    def ground(page: Page) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    with opened(browser, fake.url, color_scheme="dark") as page:
        assert ground(page) < 150
        page.click("#theme")
        assert ground(page) > 600
        page.reload()
        assert ground(page) > 600
        page.click("#theme")
        assert ground(page) < 150
        page.emulate_media(color_scheme="light")
        assert ground(page) < 150
        page.click("#theme")  # as the system has it
        assert ground(page) > 600


@needs_browser
def test_on_a_phone(browser: Browser, fake: Served) -> None:
    fake.engine.script = lambda request, index: say("wide " + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n")
    size = {"width": 390, "height": 844}
    with opened(browser, fake.url, viewport=size, is_mobile=True, has_touch=True) as page:
        overflow = "document.documentElement.scrollWidth > innerWidth"
        ask(page, "a question " + "z" * 200)
        wait_idle(page)
        assert page.evaluate(overflow) is False
        assert page.evaluate("(e => e.scrollWidth > e.clientWidth)(document.querySelector('#scroll'))") is False
        expect(page.locator("#new-chat")).not_to_be_in_viewport()
        page.tap("#open-sidebar")
        expect(page.locator("#new-chat")).to_be_in_viewport()
        assert page.evaluate("document.querySelector('#main').inert") is True
        page.keyboard.press("Escape")
        expect(page.locator("#new-chat")).not_to_be_in_viewport()
        page.tap("#toggle-live")
        expect(page.locator("#live")).to_be_visible()
        expect(page.locator("#chat")).to_be_hidden()
        assert page.evaluate(overflow) is False
        small = page.evaluate(
            """[...document.querySelectorAll("button")].filter((button) => {
                const box = button.getBoundingClientRect();
                return box.width && (box.height < 28 || box.width < 28);
            }).map((button) => button.outerHTML)"""
        )
        assert small == []


@needs_browser
def test_by_keyboard_and_for_screen_readers(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url, reduced_motion="reduce") as page:
        ask(page, "hello")
        wait_idle(page)
        page.click("#toggle-live")
        unnamed = page.evaluate(
            """[...document.querySelectorAll("button, input:not([hidden]), textarea, select, a, canvas")].filter((e) =>
                !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim())
            ).map((e) => e.outerHTML)"""
        )
        assert unnamed == []
        expect(page.locator("#announcer")).to_have_text("Hello.")
        page.fill("#message", "two")
        page.press("#message", "Shift+Enter")
        page.keyboard.type("lines")
        assert page.input_value("#message") == "two\nlines"
        page.locator("#message").fill("")
        page.keyboard.press("Tab")
        seen = set()
        for _ in range(40):
            seen.add(
                page.evaluate(
                    "(e => [e.id || e.className, getComputedStyle(e).outlineStyle])(document.activeElement).join()"
                )
            )
            page.keyboard.press("Tab")
        names = {each.split(",")[0] for each in seen}
        assert {"new-chat", "theme", "toggle-live", "open-settings", "scroll", "freeze", "timeline"} <= names
        bare = {each for each in seen if each.endswith(",none")}  # the message box shows its focus by its frame
        assert bare <= {"message,none", "with-live,none"}


# The view of the engine


@needs_browser
def test_the_view_reads_only_while_it_is_seen(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        assert not fake.engine.watchers
        page.click("#toggle-live")
        eventually(lambda: bool(fake.engine.watchers))
        page.reload()
        expect(page.locator("#live")).to_be_visible()
        page.click("#toggle-live")
        eventually(lambda: not fake.engine.watchers)


@needs_browser
def test_thousands_of_steps_take_no_more_memory(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        sizes = page.evaluate(
            """async () => {
                const { EngineModel } = await import("/page/engine.js");
                const model = new EngineModel();
                let step = 0;
                const info = { num_blocks: 100, block_size: 16, max_num_seqs: 64 };
                const stats = { num_running: 64, num_waiting: 3, num_blocks: 100, num_free_blocks: 9,
                    num_cached_blocks: 2 };
                const feed = (numSteps) => {
                    for (let end = step + numSteps; step < end; step += 1) {
                        const chunks = [];
                        for (let row = 0; row < 64; row += 1) {
                            const life = step + row * 3;
                            const position = life % 200;
                            const start = position ? 99 + position : 0;
                            chunks.push({ request_id: `r${row}-${Math.floor(life / 200)}`, index: 0, start,
                                count: position ? 1 : 100, num_prompt_tokens: 100, arrival_s: step * 0.02 - 0.5 });
                        }
                        const preempted = step % 50 === 7 ? [`r1-${Math.floor((step + 3) / 200)}`] : [];
                        model.take({ now_s: step * 0.02, state: "ready", info, stats, num_missed: 0, steps: [{ step,
                            start_s: step * 0.02, duration_s: 0.019, chunks, num_running: 64, num_waiting: 3,
                            preempted, block_map: "60u20s11c9f" }] });
                    }
                    return [model.requests.size <= 1024, model.spans.size, model.steps.size, model.requests.size];
                };
                const first = feed(8500);
                const second = feed(1500);
                return { first, second, numSteps: model.numSteps, generated: model.requests.get("r5-40")?.generated };
            }"""
        )
        first, second = sizes["first"], sizes["second"]
        assert first[0]
        assert second[0]
        assert (second[1], second[2]) == (first[1], first[2]) == (1 << 15, 1 << 13)
        assert sizes["numSteps"] == 10000
