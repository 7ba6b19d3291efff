"""The dot beside the model's name says how the server is, and the page comes back by itself. What the page consists of:
its files, their policy, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from server.static_page import CONTENT_SECURITY_POLICY, page_files
from tests.server.conftest import Served
from tests.server.fake_engine import FakeEngineClient
from tests.server.page.browser import answers, ask, needs_browser, opened, wait_idle
from tests.server.starting import starting_server


def shows(page: Page, text: str, kind: str) -> None:
    expect(page.locator("#model")).to_have_text(text)
    expect(page.locator("#model")).to_have_attribute("data-state", kind)


def look(page: Page) -> None:
    page.evaluate("dispatchEvent(new Event('online'))")


@needs_browser
def test_it_tells_how_server_and_engine_are(browser: Browser, fake: Served) -> None:
    expected = ("Failed to load resource", "the server responded with a status")
    with opened(browser, fake.url, expected_errors=expected) as page:
        shows(page, "fake-model", "ready")
        fake.engine.die()
        ask(page, "anybody?")
        shows(page, "restarting · fake-model", "waiting")
        fake.engine.state = "starting"
        look(page)
        shows(page, "restarting · fake-model", "waiting")
        fake.engine.die(retry_after_s=None)  # nobody starts it again
        look(page)
        shows(page, "engine failed · fake-model", "failed")
        fake.engine.revive()
        shows(page, "fake-model", "ready")  # without being asked
        page.click("[aria-label='Answer again']")
        expect(answers(page).last).to_have_text("Hello.")
        wait_idle(page)
        page.context.set_offline(True)
        shows(page, "server gone · fake-model", "failed")
        page.context.set_offline(False)
        shows(page, "fake-model", "ready")
        page.route("**/ready", lambda route: route.fulfill(status=503, json={"ready": False, "state": "draining"}))
        look(page)
        shows(page, "shutting down · fake-model", "waiting")


@needs_browser
def test_while_a_server_starts_nothing_can_be_sent(browser: Browser, fake: Served) -> None:
    expected = ("Failed to load resource", "the server responded with a status")
    fake.engine.state = "starting"
    with opened(browser, fake.url, expected_errors=expected) as page:
        shows(page, "starting", "waiting")
        page.click("text=What is 17 plus 25?")
        expect(page.locator("#message")).to_have_value("What is 17 plus 25?")
        expect(page.locator("#send")).to_be_disabled()
        fake.engine.revive()
        shows(page, "fake-model", "ready")
        expect(page.locator("#send")).to_be_enabled()


@needs_browser
def test_the_page_waits_for_the_model(browser: Browser, tmp_path: Path, fake_engine: FakeEngineClient) -> None:
    """The port is open, the model is being loaded; the view of the engine comes by itself, too."""
    expected = ("Failed to load resource", "the server responded with a status")
    with (
        starting_server(tmp_path, fake_engine) as starting,
        opened(browser, starting.url, path="/#engine", expected_errors=expected) as page,
    ):
        shows(page, "starting", "waiting")
        expect(page.locator("#live-state")).to_have_text("starting")
        page.fill("#message", "too early")
        expect(page.locator("#send")).to_be_disabled()
        starting.start.loaded.set()
        shows(page, "slow", "ready")
        expect(page.locator("#live-state")).to_have_text("running")
        expect(page.locator("#send")).to_be_enabled()


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
    own = {name: text for name, text in scripts.items() if not name.startswith("vendor/")}
    named |= {name for text in own.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    styles = page_files()["vendor/katex.min.css"].content.decode()
    named |= {f"vendor/{name}" for name in re.findall(r"url\((fonts/[^)]+woff2)\)", styles)}
    assert named | {"index.html"} == set(page_files())
    for name in named:
        response = served.http.get(f"/page/{name}")
        assert response.status_code == 200
        assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert not re.search(r"<style|\sstyle=|<script(?![^>]*src=)|\son\w+=", index)
    for text in scripts.values():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


@pytest.mark.parametrize("name", ["", "nothing.js", "..%2fpage.py", "%2e%2e/app.py", "index.html%00", "style.css//"])
def test_no_other_file_is_served(served: Served, name: str) -> None:
    assert served.http.get(f"/page/{name}").status_code == 404
