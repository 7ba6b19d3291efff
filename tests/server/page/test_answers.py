"""What a model says, on the page: text stays text, markdown becomes elements, reasoning and calls are told apart."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Browser, expect

from tests.server.conftest import Served, say
from tests.server.page.browser import answers, ask, needs_browser, opened, wait_idle

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
        expect(prose.locator("p > em").first).to_have_text("italic")
        expect(prose.locator("p em strong")).to_have_text("both")
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
