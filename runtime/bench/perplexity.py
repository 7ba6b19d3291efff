"""Perplexity of a text over windows.

The text's ids are cut into windows, each ``stride`` tokens after the previous one. A window scores its new tokens, with
the rest as their context; the first scores all but its first token. So every token but the first is scored once, and

    perplexity = exp(- sum of log p(token | its predecessors in its window) / number of scored tokens)

Two runs have the same windows if ``token_ids_sha256``, ``window`` and ``stride`` agree. The module imports only the
standard library, so that ``tools/perplexity.py`` can do the same in another Python.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_WINDOW = 1024
"""Unless a window is named, where the model has as many positions."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``start : end`` of a text, scored from ``first_scored`` on."""

    start: int
    end: int
    first_scored: int


def windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Windows that score each token but the first once.

    Raises ``ValueError`` for fewer than two tokens, a window of fewer, and a stride outside ``1 … window``: tokens
    between two windows would not be scored.
    """
    if num_tokens < 2 or window < 2:
        raise ValueError(f"the text has {num_tokens} tokens, the window {window}: both need at least 2")
    if not 1 <= stride <= window - 1:
        raise ValueError(f"stride is {stride}, must be from 1 to {window - 1}, one less than the window")
    found: list[Window] = []
    scored = 1
    for start in range(0, num_tokens, stride):
        end = min(start + window, num_tokens)
        found.append(Window(start, end, scored))
        scored = end
        if end == num_tokens:
            break
    return found


def summary(scores: Iterator[list[float]], token_ids: Sequence[int], window: int, stride: int) -> dict[str, Any]:
    """The report of a run. Raises ``ValueError`` unless every token but the first has a finite score."""
    found = [score for of_window in scores for score in of_window]
    if len(found) != len(token_ids) - 1 or not all(math.isfinite(score) for score in found):
        raise ValueError(f"{len(found)} scores, not all finite or not one for each of {len(token_ids) - 1} tokens")
    return {
        "perplexity": math.exp(-math.fsum(found) / len(found)),
        "nats_per_token": -math.fsum(found) / len(found),
        "num_scored_tokens": len(found),
        "window": window,
        "stride": stride,
        "token_ids_sha256": hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest(),
    }


def window_and_stride(window: int | None, stride: int | None, positions: int) -> tuple[int, int]:
    """The given ones, or ``LONGEST_WINDOW`` or all of a model's positions, and half a window."""
    chosen = window or min(LONGEST_WINDOW, positions)
    return chosen, stride or max(1, chosen // 2)
