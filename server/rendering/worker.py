"""The process that renders: a job a line on its standard input, an answer a line on its standard output, both JSON.

It reads what a model wrote with parsers and regular expressions of other people, some of which take their time over
the right input. So it is a process of its own, which whoever started it may end at any time; it ends by itself with its
input. A job is `["math", latex, is_display]` or `["code", language, text]`; its answer is a tree, runs, or null."""

from __future__ import annotations

import resource
import signal
import sys
from typing import Any

import msgspec

from server.rendering.highlighting import HighlightError, highlight
from server.rendering.mathml import MathError, math_tree

MAX_MEMORY_BYTES = 1 << 30


def render(job: list[Any]) -> Any:
    """The answer to one job; None: it is to be shown as it is."""
    kind, first, second = job
    try:
        return math_tree(first, is_display=second) if kind == "math" else highlight(first, second)
    except (MathError, HighlightError, RecursionError, MemoryError):
        return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the terminal's, for the server
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for line in sys.stdin.buffer:
        answer = msgspec.json.encode(render(msgspec.json.decode(line)))
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
