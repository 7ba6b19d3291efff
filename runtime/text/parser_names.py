"""The names of the parsers that an operator may choose, cheap to import."""

from __future__ import annotations

from typing import Literal

TOOL_CALL_PARSERS = (
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "gemma4",
    "glm4",
    "glm45",
    "glm47",
    "granite",
    "harmony",
    "hermes",
    "json",
    "lfm2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "mistral",
    "mistral_v11",
    "nemotron_json",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
)
"""Parsers that vLLM has, too, have its names."""

ReasoningParser = Literal["auto", "think", "none"]
