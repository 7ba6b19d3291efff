"""Requests to an engine, and the bundled models' prompts without their tokenizers' packages, which the machine may
lack."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.process.client import EngineClient
from tools.gpu.sections import ROOT

DEMO = ROOT / "models" / "demo"
LIMIT_S = 60.0
"""How long a request may be silent."""


def ids_of(folder: Path, text: str) -> list[int]:
    """Tokens of a byte-level vocabulary that spell an ASCII text, each the longest match. The tokenizer may split it
    differently."""
    stored: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known: dict[str, int] = {word.replace("\u0120", " "): number for word, number in stored["model"]["vocab"].items()}
    known |= {each["content"]: each["id"] for each in stored["added_tokens"]}
    found, longest = [], max(map(len, known))
    while text:
        word = next(text[:size] for size in range(min(longest, len(text)), 0, -1) if text[:size] in known)
        found.append(known[word])
        text = text[len(word) :]
    return found


def ask(client: EngineClient, requests: Sequence[EngineRequest], *, limit_s: float = LIMIT_S) -> list[list[int]]:
    """Runs all requests at once; returns their first choices' tokens. Raises AssertionError if one ends with an error,
    queue.Empty if none makes progress."""
    outputs: SimpleQueue[EngineOutput] = SimpleQueue()
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        client.submit(request, outputs.put)
    still_open = set(answers)
    while still_open:
        output = outputs.get(timeout=limit_s)
        answers[output.request_id] += output.new_token_ids
        if output.finish_reason is not None:
            still_open.discard(output.request_id)
            if output.finish_reason not in ("length", "stop"):
                raise AssertionError(f"a request ended by {output.finish_reason}: {output.error}")
    return list(answers.values())


def first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str | None:
    """The first difference of answers, in words, or None."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if list(one) != list(other):
            at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
            here, there = list(one[at : at + 5]), list(other[at : at + 5])
            return f"answer {number} differs from token {at} on: {here}, not {there}"
    return None
