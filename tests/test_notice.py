"""NOTICE names every package that installing this one brings, and every file of data that others made is there."""

from __future__ import annotations

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
    for name in re.findall(r"\b(?:tokenizer|models|tests|tools)/[\w/.]*\w", carried):
        assert (ROOT / name).exists(), name
    assert "UNICODE LICENSE V3" in (ROOT / "NOTICE").read_text(encoding="utf-8")
