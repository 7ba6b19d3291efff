"""Perplexity of a text over windows.

The text's ids are cut into windows, each ``stride`` tokens after the previous one. A window scores its new tokens, with
the rest as their context; the first scores all but its first token. So every token but the first is scored once, and

    perplexity = exp(- sum of log p(token | its predecessors in its window) / number of scored tokens)

Two runs have the same windows if ``token_ids_sha256``, ``window`` and ``stride`` agree. Scores are the engine's own
prompt_logprobs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.engine.sampling_params import SamplingParams
from runtime.errors import InvalidArgumentError
from runtime.llm import LLM

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


def log_probabilities(llm: LLM, token_ids: Sequence[int], cut: Sequence[Window]) -> Iterator[list[float]]:
    """For each window the log probabilities of its scored tokens, by the engine, many windows per batch."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for first in range(0, len(cut), 512):
        part = cut[first : first + 512]
        outputs = llm.generate([token_ids[each.start : each.end] for each in part], params, use_tqdm=False)
        for each, output in zip(part, outputs, strict=True):
            assert output.prompt_logprobs is not None, output.outputs[0].error
            entries = output.prompt_logprobs[each.first_scored - each.start :]
            ids = token_ids[each.first_scored : each.end]
            yield [entry[token_id].logprob for entry, token_id in zip(entries, ids, strict=True) if entry is not None]


def measure(llm: LLM, text: str, window: int | None, stride: int | None, max_tokens: int | None) -> dict[str, Any]:
    """The report over a text. Raises ``InvalidArgumentError`` for windows that do not fit it."""
    token_ids = llm.get_tokenizer().encode(text)[:max_tokens]
    window, stride = window_and_stride(window, stride, llm.client.info.max_model_len - 1)  # one more token is sampled
    try:
        cut = windows(len(token_ids), window, stride)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    return summary(log_probabilities(llm, token_ids, cut), token_ids, window, stride)
