"""What the page consists of: its files, their policy, and no other."""

from __future__ import annotations

import re

import pytest

from server.static_page import CONTENT_SECURITY_POLICY, page_files
from tests.server.conftest import Served


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
