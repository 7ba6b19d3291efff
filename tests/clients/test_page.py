"""docs/clients.md names the versions that the tests run."""

from __future__ import annotations

import json
import re

from tests.clients.environments import HERE, LOCKS, NODE

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
