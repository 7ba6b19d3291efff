"""NOTICE names every package that installing this one brings, and every file that others made is there, unchanged."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_dependency_has_its_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = (ROOT / "NOTICE").read_text(encoding="utf-8").split("Installed beside it")[1]
    for requirement in [*project["dependencies"], *extras["cuda"], *extras["otel"], *extras["vision"]]:
        (name,) = re.findall(r"^[\w-]+", requirement)
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", named), name
    assert project["license-files"] == ["NOTICE"]


def test_what_is_carried_is_there() -> None:
    carried = (ROOT / "NOTICE").read_text(encoding="utf-8").split("Installed beside it")[0]
    for name in re.findall(r"\b(?:tokenizer|models|server|tests|tools)/[\w/.]*\w", carried):
        assert (ROOT / name).exists(), name
    assert "UNICODE LICENSE V3" in (ROOT / "NOTICE").read_text(encoding="utf-8")


def test_files_of_others_are_unchanged() -> None:
    folder = ROOT / "server" / "page" / "vendor"
    digests = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert set(digests) == set(found) - {"README.md", "SHA256SUMS"}
    for name, digest in digests.items():
        assert hashlib.sha256(found[name].read_bytes()).hexdigest() == digest, name
    notice, table = ((path).read_text(encoding="utf-8") for path in (ROOT / "NOTICE", folder / "README.md"))
    versions = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", table, re.MULTILINE)
    assert len(versions) == 2
    for name, version in versions:
        assert f"{name} {version}" in notice.lower()
        assert (folder / f"{name}.LICENSE").exists()
