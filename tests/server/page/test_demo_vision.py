"""The page with the bundled model that reads pictures: one dropped, one pasted, and its answers."""

from __future__ import annotations

import base64

import pytest
from playwright.sync_api import Browser, expect

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from tests.server.page.browser import answers, ask, needs_browser, opened, wait_idle
from tests.server.real_server import serving_real
from tests.server.test_demo_vision import ANSWER, CHART, FOLDER, OPTIONS, QUESTION

GIVE = """([event, target, base64]) => {
    const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "chart.png", { type: "image/png" }));
    const options = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
    const made = event === "paste" ? new ClipboardEvent(event, options) : new DragEvent(event, options);
    document.querySelector(target).dispatchEvent(made);
}"""


@needs_browser
@pytest.mark.exhaustive  # pictures on the page with a tiny random model are tested each time
def test_it_reads_what_is_dropped_and_what_is_pasted(browser: Browser) -> None:
    file = base64.b64encode(CHART.read_bytes()).decode()
    with serving_real(FOLDER, **OPTIONS) as real, opened(browser, real.url) as page:
        expect(page.locator("#attach")).to_have_attribute("aria-label", "Attach pictures or text files")
        for event, target in (("drop", "#scroll"), ("paste", "#message")):
            page.evaluate(GIVE, [event, target, file])
            expect(page.locator("#files li img")).to_have_count(1)
            ask(page, QUESTION)
            expect(answers(page).last).to_have_text(ANSWER)
            wait_idle(page)
            ask(page, "How many bars are there?")  # the picture is part of the conversation
            expect(answers(page).last).to_have_text("There are three bars.")
            wait_idle(page)
            page.keyboard.press("Control+k")  # a new conversation
            expect(answers(page)).to_have_count(0)
