"""Files that go with a message: picked, dropped or pasted, within limits that are told; sent as text, or as
pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect

from tests.models.vision.chat_model import write_chat_model
from tests.server.conftest import Served
from tests.server.page.browser import ask, needs_browser, opened, wait_idle
from tests.server.page.test_chat import sent
from tests.server.real_server import serving_real


def give(page: Page, event: str, target: str, name: str, text: str) -> None:
    """A file by drag and drop, or from the clipboard."""
    page.evaluate(
        """([event, target, name, text]) => {
            const data = new DataTransfer();
            data.items.add(new File([text], name));
            const options = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
            const made = event === "paste" ? new ClipboardEvent(event, options) : new DragEvent(event, options);
            document.querySelector(target).dispatchEvent(made);
        }""",
        [event, target, name, text],
    )


@needs_browser
def test_files_are_shown_as_chips_and_sent_as_text(browser: Browser, fake: Served, tmp_path: Path) -> None:
    code = tmp_path / "notes <b>.py"
    code.write_text("x = '```'\n")
    with opened(browser, fake.url) as page:
        page.set_input_files("#file-input", code)
        chips = page.locator("#files li")
        expect(chips).to_have_text(["notes <b>.py10 bytes"])
        give(page, "drop", "#scroll", "data.csv", "a,b\n")
        give(page, "paste", "#message", "gone.txt", "gone")
        expect(chips).to_have_count(3)
        page.click("[aria-label='Remove gone.txt']")
        page.reload()  # files are part of the draft
        expect(chips).to_have_count(2)
        ask(page, "What is this?")
        wait_idle(page)
        expect(chips).to_have_count(0)
        assert sent(fake) == (
            "user:notes <b>.py:\n````py\nx = '```'\n````\n\ndata.csv:\n```csv\na,b\n```\n\nWhat is this?assistant:"
        )
        sent_files = page.locator(".user details.file")
        expect(sent_files.locator("summary span")).to_have_text(["notes <b>.py", "data.csv"])
        sent_files.first.locator("summary").click()
        expect(sent_files.first.locator("pre")).to_have_text("x = '```'", use_inner_text=True)
        page.locator(".user").hover()
        page.click("[aria-label='Edit message']")
        page.fill(".editing textarea", "And this?")
        page.press(".editing textarea", "Enter")
        wait_idle(page)
        assert sent(fake).startswith("user:notes <b>.py:")  # an edited message keeps its files
        assert sent(fake).endswith("And this?assistant:")


@needs_browser
def test_what_is_no_text_or_too_large_is_refused_in_words(browser: Browser, fake: Served, tmp_path: Path) -> None:
    with opened(browser, fake.url) as page:
        for name, content, words in (
            ("large.txt", b"x" * (256 * 1024 + 1), "large.txt has 256 KB; a file may have up to 256 KB."),
            ("image.png", b"\x89PNG\xff", "image.png is no text"),
            ("zeros.bin", b"a\0b", "zeros.bin is no text"),
        ):
            file = tmp_path / name
            file.write_bytes(content)
            page.set_input_files("#file-input", file)
            expect(page.locator("#toast")).to_contain_text(words)
        good = tmp_path / "good.txt"
        good.write_bytes(b"x" * 256 * 1024)
        page.set_input_files("#file-input", [good] * 9)
        expect(page.locator("#toast")).to_contain_text("up to 8 files")
        expect(page.locator("#files li")).to_have_count(8)
        expect(page.locator("#send")).to_be_enabled()


DROP_PICTURE = """async ([event, target, name, type, side]) => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = side;
    const context = canvas.getContext("2d");
    context.fillStyle = "teal";
    context.fillRect(0, 0, side, side / 2);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, type));
    const data = new DataTransfer();
    data.items.add(new File([blob], name, { type }));
    const options = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
    const made = event === "paste" ? new ClipboardEvent(event, options) : new DragEvent(event, options);
    document.querySelector(target).dispatchEvent(made);
}"""


@needs_browser
def test_pictures_are_shown_sent_and_kept(browser: Browser, tmp_path: Path) -> None:
    """By a model that reads them: dropped, pasted and picked; the random one answers something."""
    pytest.importorskip("PIL", reason="needs Pillow (extra vision)")
    folder = write_chat_model(tmp_path / "vl")
    asked: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith("/chat/completions"):
            asked.append(request.post_data_json)

    settings = {"block_size": 8, "max_num_seqs": 2, "max_model_len": 128}
    with serving_real(folder, **settings) as real, opened(browser, real.url) as page:
        page.on("request", note)
        page.evaluate("() => document.querySelector('#set-max_tokens, [name=max_tokens]').value = '4'")
        expect(page.locator("#attach")).to_have_attribute("aria-label", "Attach pictures or text files")
        page.evaluate(DROP_PICTURE, ["drop", "#scroll", "small.png", "image/png", 24])
        page.evaluate(DROP_PICTURE, ["paste", "#message", "large.png", "image/png", 2000])
        give(page, "drop", "#scroll", "notes.txt", "ab")
        chips = page.locator("#files li")
        expect(chips).to_have_count(3)
        expect(chips.locator("img")).to_have_count(2)
        page.click("[aria-label='Remove notes.txt']")
        page.reload()  # pictures are part of the draft
        expect(chips.locator("img")).to_have_count(2)
        ask(page, "What?")
        wait_idle(page)
        parts = asked[0]["messages"][-1]["content"]
        assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
        assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
        assert parts[1]["image_url"]["url"].startswith("data:image/jpeg;base64,"), "it was made smaller"
        expect(page.locator(".failure:not([hidden])")).to_have_count(0)
        shown = page.locator(".user img.picture")
        expect(shown).to_have_count(2)
        assert shown.nth(0).evaluate("(image) => image.naturalWidth") == 24
        assert shown.nth(1).evaluate("(image) => image.naturalWidth") == 1536
        page.reload()
        expect(page.locator(".user img.picture")).to_have_count(2)  # remembered in this browser


@needs_browser
def test_a_picture_that_is_none(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="needs Pillow (extra vision)")
    folder = write_chat_model(tmp_path / "vl")
    settings = {"block_size": 8, "max_num_seqs": 2, "max_model_len": 128}
    with serving_real(folder, **settings) as real, opened(browser, real.url) as page:
        expect(page.locator("#attach")).to_have_attribute("aria-label", "Attach pictures or text files")
        page.evaluate(
            """() => {
                const data = new DataTransfer();
                data.items.add(new File(["no picture"], "fake.png", { type: "image/png" }));
                const options = { bubbles: true, cancelable: true, dataTransfer: data };
                document.querySelector("#scroll").dispatchEvent(new DragEvent("drop", options));
            }"""
        )
        expect(page.locator(".toast")).to_contain_text("fake.png cannot be read as a picture")
        expect(page.locator("#files li")).to_have_count(0)
