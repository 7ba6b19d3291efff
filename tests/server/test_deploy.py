"""The files of `server/deploy` name options that there are, paths that there are, and secrets nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

import server
from runtime.cli import app

ROOT = Path(server.__file__).parents[1]
DEPLOY = ROOT / "server" / "deploy"


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "xserv.service"])
def test_options_are_those_of_serve(name: str) -> None:
    """All that is passed to `xserv serve`, in commands and in comments that show some."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {option for parameter in serve.params for option in parameter.opts}
    text = (DEPLOY / name).read_text(encoding="utf-8")
    begins = r"serve |command:|^CMD \[\"--|--drain|xserv:cuda --model"
    lines = [line for line in text.splitlines() if re.search(begins, line)]
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines)))
    used -= {"--gpus", "--time", "--build-arg", "--build"}  # docker's
    assert used
    assert used <= options, used - options


def test_what_the_image_copies_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
    assert "\nUSER xserv\n" in text
    assert text.index("\nUSER xserv\n") < text.index("\nENTRYPOINT")
    extras = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    for named in re.findall(r"EXTRAS[=:-]+([a-z,]+)", text):
        assert set(named.split(",")) <= set(extras)


def test_the_time_to_stop_is_longer_than_the_drain() -> None:
    for name, pattern in (("compose.yaml", r"stop_grace_period: (\d+)s"), ("xserv.service", r"TimeoutStopSec=(\d+)")):
        text = (DEPLOY / name).read_text(encoding="utf-8")
        drain = re.search(r"--drain-timeout-s\"?,? \"?(\d+)", text)
        stop = re.search(pattern, text)
        assert drain is not None
        assert stop is not None
        assert int(stop.group(1)) > int(drain.group(1)) + 5
