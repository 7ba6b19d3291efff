"""The system's Chromium, driven by Playwright; every page is held to the policy and to the server's own origin."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.waiting import TIMEOUT_S

TIMEOUT_MS = TIMEOUT_S * 1000
expect.set_options(timeout=TIMEOUT_MS)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (Debian, Ubuntu: apt install chromium); CI installs it"
)

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, expected_errors: tuple[str, ...] = (), path: str = "/", **options: Any
) -> Iterator[Page]:
    """The page in a context of its own, ready to chat. At the end: no error on its console but `expected_errors` (parts
    of their texts), no breach of the policy, no request to anybody but the server.

    `options` are those of `Browser.new_context`: viewport, color_scheme, …"""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    faults: list[str] = []
    foreign: list[str] = []

    def note(text: str) -> None:
        if not any(expected in text for expected in expected_errors):
            faults.append(text)

    page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: note(str(error)))
    page.on("crash", lambda _: note("the page crashed"))
    page.on("request", lambda request: None if request.url.startswith(f"{url}/") else foreign.append(request.url))
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error('policy: ' + e.violatedDirective))"
    )
    page.goto(url + path)
    page.wait_for_selector("#model[data-state]", state="attached")
    try:
        yield page
    finally:
        context.close()
    assert not faults, faults
    assert not foreign, foreign


def ask(page: Page, text: str) -> None:
    page.fill("#message", text)
    send(page)


def send(page: Page) -> None:
    """Sends what is written, once the page knows its model: Enter does nothing before."""
    expect(page.locator("#send")).to_be_enabled()
    page.press("#message", "Enter")


def answers(page: Page) -> Any:
    return page.locator(".message.assistant .body > .prose")


def wait_idle(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible()
