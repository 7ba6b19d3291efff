"""A model folder that can be talked to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runtime.commands.running import STORIES

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K with a chat template, so that it can be talked to."""
    folder = tmp_path_factory.mktemp("stories") / "stories260K"
    shutil.copytree(STORIES, folder, ignore=shutil.ignore_patterns("bytelevel", "golden*"))
    folder.chmod(0o755)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
