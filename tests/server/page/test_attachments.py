"""Text files that go with a message: picked, dropped or pasted, within limits that are told, and sent as text."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.server.conftest import Served
from tests.server.page.browser import ask, needs_browser, opened, wait_idle
from tests.server.page.test_chat import sent


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
