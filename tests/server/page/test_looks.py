"""How the page looks and is used: light and dark, on a phone, by keyboard; its view of the engine over time."""

from __future__ import annotations

import json
import re

from playwright.sync_api import Browser, Page, expect

from tests.server.conftest import Served, say
from tests.server.page.browser import ask, needs_browser, opened, wait_idle
from tests.waiting import wait_until

GUTTER = 70
"""Pixels on the left of the timeline that its labels have."""


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


@needs_browser
def test_the_view_reads_only_while_it_is_seen(browser: Browser, fake: Served) -> None:
    wait_until(lambda: not fake.engine.watchers)  # another test's page has gone
    with opened(browser, fake.url) as page:
        assert not fake.engine.watchers
        page.click("#toggle-live")
        wait_until(lambda: bool(fake.engine.watchers))
        page.reload()
        expect(page.locator("#live")).to_be_visible()
        page.click("#toggle-live")
        wait_until(lambda: not fake.engine.watchers)


LARGE = {
    "now_s": 1000.0,
    "state": "ready",
    "info": {
        "model": "a-model-with-a-name-of-some-length-instruct-0905-quantised-q4_k_m",
        "device": "cuda:0", "dtype": "bfloat16", "quantization": "int8", "block_size": 16, "num_blocks": 123456,
        "max_num_seqs": 4096, "max_num_batched_tokens": 16384, "max_model_len": 131072, "group_windows": [None, 4096],
        "rank_stages": [0, 0, 1, 1],
    },
    "stats": {
        "num_running": 4096, "num_waiting": 12345, "num_blocks": 123456, "num_free_blocks": 11111,
        "num_cached_blocks": 1000, "num_preemptions": 123456, "prompt_tokens": 10**9, "generation_tokens": 10**9,
        "prefix_cache_queries": 1000, "prefix_cache_hits": 1000, "num_draft_tokens": 10**9, "num_accepted_tokens": 999,
    },
    "steps": [{
        "step": 1, "start_s": 999.0, "duration_s": 0.5, "num_running": 4096, "num_waiting": 12345, "preempted": [],
        "block_map": "100000u2345w10000s1000c10111f",
        "ranks": [{"rank": rank, "start_s": 999.0, "duration_s": 0.4, "waited_s": 0.1} for rank in range(4)],
        "chunks": [{"request_id": f"chatcmpl-{row:032x}-0", "index": 100 + row, "start": 0, "count": 123456,
                    "num_prompt_tokens": 123456, "arrival_s": 900.0} for row in range(9)],
    }],
    "num_missed": 123456,
}  # fmt: skip
"""A message of `/live` with numbers as large as they get."""


@needs_browser
def test_ranks_have_lanes(browser: Browser, fake: Served) -> None:
    script = """async (message) => {
        const { EngineModel } = await import(new URL("page/engine.js", location.href));
        const model = new EngineModel();
        model.take(message);
        const { lane, start, end, waited } = model.rankSteps.columns;
        const last = model.rankSteps.size - 1;
        return [model.rankNames, model.rankSteps.size, lane[last], start[last], end[last], waited[last]];
    }"""
    with opened(browser, fake.url) as page:
        names, *numbers = page.evaluate(script, LARGE)
    assert names == ["0, stage 0", "1, stage 0", "2, stage 1", "3, stage 1"]
    assert numbers == [4, 3, 999.0, 999.4, 0.1]


@needs_browser
def test_no_label_of_the_engine_is_cut_off(browser: Browser, fake: Served) -> None:
    with opened(browser, fake.url) as page:
        body = f"data: {json.dumps(LARGE)}\n\n"
        page.route("**/live", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        page.click("#toggle-live")
        expect(page.locator("#requests tr")).to_have_count(8)
        expect(page.locator("#live-state")).to_have_text("disconnected")
        expect(page.locator("#live-note")).to_contain_text(re.compile(r"\b999 of \S+ proposed tokens were kept\."))
        for width in (1360, 1280, 1179, 390):
            page.set_viewport_size({"width": width, "height": 844})
            cut = page.evaluate(
                """[...document.querySelectorAll("#live *, .bar *")].filter((e) => e.clientWidth && !e.closest("svg") &&
                    e.id !== "title" && e.scrollWidth > e.clientWidth + 1).map((e) => [e.tagName, e.textContent])"""
            )
            assert cut == [], width
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        expect(page.locator("#model")).to_be_in_viewport()
        # "this page", "tokens/s" and the names of choices stand in a column on the canvas
        widths = page.evaluate(
            """["requests", "tokens/s", "this page", "1e8b48·100"].map((text) => {
                const context = document.querySelector("#timeline").getContext("2d");
                return context.measureText(text).width;
            })"""
        )
        assert max(widths) <= GUTTER


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
