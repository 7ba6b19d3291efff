"""The process that renders (`server.worker_process`). Jobs and answers are JSON.

It reads a model's text with third-party parsers and regular expressions, some of which are slow on bad input. A job is
`["math", latex, is_display]` or `["code", language, text]`; its answer is a tree, runs, or null."""

from __future__ import annotations

from typing import Any

import msgspec

from server.rendering.highlighting import HighlightError, highlight
from server.rendering.mathml import MathError, math_tree
from server.worker_process import answer_jobs

MAX_MEMORY_BYTES = 1 << 30


def render(job: list[Any]) -> Any:
    """The answer to one job, or None to show the source."""
    kind, first, second = job
    try:
        return math_tree(first, is_display=second) if kind == "math" else highlight(first, second)
    except (MathError, HighlightError, RecursionError, MemoryError):
        return None


def answer(job: memoryview, _: memoryview) -> msgspec.Raw:
    """The answer as JSON to a job as JSON."""
    return msgspec.Raw(msgspec.json.encode(render(msgspec.json.decode(job))))


if __name__ == "__main__":
    answer_jobs(answer, max_memory_bytes=MAX_MEMORY_BYTES)
