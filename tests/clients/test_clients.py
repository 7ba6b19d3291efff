"""Client libraries that nobody here wrote, in their own environments, on servers that run. docs/clients.md is their
table.

The default tests run the most used libraries on one model; the exhaustive ones all libraries on all models. OpenAI's,
Anthropic's and Ollama's own SDKs for Python have their tests in tests/server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import HERE, LOCKS, NODE, node_modules, python_of
from tests.clients.servers import DEMO, KINDS, serving

PROGRAMS = HERE / "programs"
TIMEOUT_S = 300
QUICK = ("everyday", "node")
"""Environments of the default tests."""

LIBRARIES = {
    "litellm": "everyday",
    "langchain": "everyday",
    "instructor": "everyday",
    "dspy": "openai2",
    "llama_index": "openai2",
    "autogen": "openai3",
    "haystack": "openai3",
    "llm": "openai3",
    "openai_agents": "openai3",
    "pydantic_ai": "openai3",
    "smolagents": "openai3",
    "lm_eval": "lm_eval",
    "guidellm": "guidellm",
}
"""Library: its environment. `programs/LIBRARY_tour.py` is what it does."""
WITHOUT = {("openai", "scripted"), ("lm_eval", "scripted"), ("guidellm", "scripted"), ("guidellm", "tools")}
"""What the script has no answers to, and what would be the same again."""

CODEX = """
model = "{model}"
model_provider = "xserv"
web_search = "disabled"

[model_providers.xserv]
name = "xserv"
base_url = "{url}/v1"
wire_api = "responses"
"""


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


def test_clients_reach_this_machine_alone(tmp_path: Path) -> None:
    for reach in ("socket.create_connection(('192.0.2.1', 80))", "socket.getaddrinfo('example.com', 80)"):
        command = [sys.executable, "-c", f"import socket; {reach}"]
        done = subprocess.run(command, env=confined(tmp_path), capture_output=True, text=True, check=False)
        assert "BlockedError: the network is blocked here" in done.stderr


def run_steps(command: list[str], server: tuple[str, str, str], home: Path, **options: Any) -> None:
    """Runs a program's steps on a server."""
    run_program([*command, *server, str(DEMO)], home, **options)


def run_program(command: list[str], home: Path, **options: Any) -> list[dict[str, Any]]:
    """A program's steps; some must have run, and none failed."""
    done = subprocess.run(
        command, env=confined(home), capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options
    )
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    failed = [f"{each['step']}: {each['error']}" for each in steps if each["error"]]
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(steps) > 1, f"{len(steps)} steps ran:\n{done.stderr[-3000:]}"
    assert not failed, "\n".join(failed)
    return steps


def cases(libraries: Mapping[str, str]) -> list[Any]:
    """Each library on each model; exhaustive, but where it is quick to make and to import (litellm is slow)."""
    return [
        pytest.param(
            library,
            kind,
            marks=[] if environment in QUICK and kind == "tools" and library != "litellm" else [pytest.mark.exhaustive],
            id=f"{library}-{kind}",
        )
        for library, environment in libraries.items()
        for kind in KINDS
        if (library, kind) not in WITHOUT
    ]


@pytest.mark.parametrize(("library", "server"), cases(LIBRARIES), indirect=["server"])
@pytest.mark.exhaustive
def test_a_library(library: str, server: tuple[str, str, str], tmp_path: Path) -> None:
    program, python = PROGRAMS / f"{library}_tour.py", str(python_of(LIBRARIES[library]))
    if library == "guidellm" and subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("guidellm's lock has no libraries of CUDA, so pip or uv must be told of a CPU build of torch")
    run_steps([python, str(program)], server, tmp_path, cwd=tmp_path)


@pytest.mark.parametrize(("library", "server"), cases({"openai": "node", "ai_sdk": "node"}), indirect=["server"])
def test_a_library_of_node(library: str, server: tuple[str, str, str], tmp_path: Path) -> None:
    if not shutil.which("npm"):
        pytest.skip("there is no npm")
    # Read from stdin, a program's imports are looked for in the current folder.
    command = ["node", "--require", str(NODE / "loopback.cjs"), "--input-type=module", "-"]
    with (NODE / f"{library}_tour.mjs").open() as program:
        run_steps(command, server, tmp_path, cwd=node_modules(), stdin=program)


@pytest.mark.exhaustive
@pytest.mark.parametrize("server", ["scripted"], indirect=True)
def test_codex(server: tuple[str, str, str], tmp_path: Path) -> None:
    """The model that stands behind it asks for one command, which writes a file, and then answers."""
    if not shutil.which("npm"):
        pytest.skip("there is no npm")
    url, model, _ = server
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CODEX.format(url=url, model=model))
    codex = node_modules(HERE / "codex") / "node_modules" / ".bin" / "codex"
    # What runs is the script's command, so no sandbox is needed, which a container may not allow. Codex is a program
    # of its own: a proxy that is not there keeps it on this machine.
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [str(codex), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "How is Paris?"],
        env=confined(tmp_path, CODEX_HOME=str(home), **nowhere),
        cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "It is sunny in Paris."
    assert (work / "weather.txt").read_text() == "sunny\n"


PYTHON = {
    "litellm": "litellm",
    "langchain-openai": "langchain-openai",
    "instructor": "instructor",
    "LlamaIndex (`OpenAILike`)": "llama-index-llms-openai-like",
    "DSPy": "dspy",
    "openai-agents": "openai-agents",
    "pydantic-ai": "pydantic-ai-slim",
    "AutoGen": "autogen-agentchat",
    "Haystack": "haystack-ai",
    "smolagents": "smolagents",
    "llm": "llm",
    "lm-eval": "lm-eval",
    "guidellm": "guidellm",
    "cohere": "cohere",
    "huggingface_hub (`InferenceClient`)": "huggingface-hub",
}
"""A row of the table: its package."""
OF_NODE = {"openai (Node)": "openai", "AI SDK (Vercel)": "ai", "Codex CLI": "@openai/codex"}


def test_the_table_has_the_locked_versions() -> None:
    pinned: dict[str, str] = {}
    for lock in sorted(LOCKS.glob("*.txt")):
        pinned |= dict(re.findall(r"^(\S+)==(\S+)", lock.read_text(), re.M))
    packages: dict[str, dict[str, str]] = {}
    for folder in (NODE, HERE / "codex"):
        packages |= json.loads((folder / "package-lock.json").read_text())["packages"]
    expected = {row: pinned[package] for row, package in PYTHON.items()}
    expected |= {row: packages[f"node_modules/{package}"]["version"] for row, package in OF_NODE.items()}
    page = (HERE.parents[1] / "docs" / "clients.md").read_text().replace("**", "")
    table = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", page, re.M))
    assert {row: table.get(row) for row in expected} == expected
