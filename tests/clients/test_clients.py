"""Client libraries that nobody here wrote, in their own environments, on servers that run. docs/clients.md is their
table.

The default tests run three libraries on one model; the exhaustive ones all libraries on all models."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import HERE, python_of
from tests.clients.servers import KINDS, serving

PROGRAMS = HERE / "programs"
TIMEOUT_S = 300

LIBRARIES = {
    "litellm_tour": "everyday",
    "langchain_tour": "everyday",
    "instructor_tour": "everyday",
}
"""Program: its environment."""


@pytest.fixture(scope="session", params=[])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """URL, model, kind."""
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as (url, model):
        yield url, model, request.param


def confined(home: Path, **more: str) -> dict[str, str]:
    """An environment for a client: a home of its own, no proxies, no network but this machine."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and "API_KEY" not in name}
    return {
        **kept,
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "loopback", PROGRAMS])),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        **more,
    }


def toured(program: str, environment: str, server: tuple[str, str, str], home: Path) -> None:
    """Runs a program's steps; every one must have run, and none failed."""
    python = python_of(environment)
    done = subprocess.run(
        [str(python), str(PROGRAMS / f"{program}.py"), *server],
        env=confined(home), cwd=home, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    failed = [f"{each['step']}:\n{each['error']}" for each in steps if each["error"]]
    assert done.returncode == 0, done.stderr[-3000:]
    assert steps, f"no step ran:\n{done.stderr[-3000:]}"
    assert not failed, "\n".join(failed)


CASES = [
    pytest.param(
        program,
        kind,
        marks=[] if environment == "everyday" and kind == "tools" else [pytest.mark.exhaustive],
        id=f"{program}-{kind}",
    )
    for program, environment in LIBRARIES.items()
    for kind in KINDS
]


@pytest.mark.parametrize(("program", "server"), CASES, indirect=["server"])
def test_a_library(program: str, server: tuple[str, str, str], tmp_path: Path) -> None:
    toured(program, LIBRARIES[program], server, tmp_path)
