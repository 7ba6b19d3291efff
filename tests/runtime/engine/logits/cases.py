"""transformers' logits processors as numpy functions, and the prompts that both answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

MODEL = Path(__file__).parents[4] / "models" / "demo"
GOLDENS = Path(__file__).parent / "processor_goldens.json"
EOS = 635
PROMPTS = [[636, 72, 101, 108, 108, 111], [10, 11, 12, 13, 10, 11, 12], [300, 301, 302], [440, 341, 302, 587, 440]]
NUM_TOKENS = 24
PENALTY = 1.7
TOP_K = 5
MIN_TOKENS = 12


def repetition_penalty(prompt: Any, output: Any, logits: Any) -> Any:
    seen = np.unique(np.concatenate((prompt, output)))
    logits[seen] = np.where(logits[seen] < 0, logits[seen] * np.float32(PENALTY), logits[seen] / np.float32(PENALTY))
    return logits


def min_length(prompt: Any, output: Any, logits: Any) -> Any:
    if len(output) < MIN_TOKENS:
        logits[EOS] = -np.inf
    return logits


def no_repeat_ngram(prompt: Any, output: Any, logits: Any) -> Any:
    ids = np.concatenate((prompt, output))
    logits[ids[1:][ids[:-1] == ids[-1]]] = -np.inf
    return logits


def top_k(prompt: Any, output: Any, logits: Any) -> Any:
    logits[logits < np.sort(logits)[-TOP_K]] = -np.inf
    return logits


class ByRequest:
    """Acts on the requests that ask for it."""

    def new_request(self, extra_args: dict[str, Any]) -> Any:
        wanted = extra_args.get("processor")
        if wanted is None:
            return None
        if wanted not in FUNCTIONS:
            raise ValueError(f"processor must be one of {', '.join(FUNCTIONS)}, got {wanted!r}")
        return FUNCTIONS[wanted]


def fails_at_three(prompt: Any, output: Any, logits: Any) -> Any:
    if len(output) == 3:
        raise ValueError("three\ntokens are too many")
    return logits


def of_other_type(prompt: Any, output: Any, logits: Any) -> Any:
    return logits.astype(np.float64)


def of_other_shape(prompt: Any, output: Any, logits: Any) -> Any:
    return logits[None]


def gives_nan(prompt: Any, output: Any, logits: Any) -> Any:
    logits[7] = np.nan
    return logits


def gives_infinity(prompt: Any, output: Any, logits: Any) -> Any:
    logits[7] = np.inf
    return logits


def forbids_all(prompt: Any, output: Any, logits: Any) -> Any:
    logits[:] = -np.inf
    return logits


def gives_none(prompt: Any, output: Any, logits: Any) -> Any:
    return None


def writes_ids(prompt: Any, output: Any, logits: Any) -> Any:
    prompt[0] = 1
    return logits


FUNCTIONS = {
    each.__name__: each
    for each in (
        repetition_penalty, min_length, no_repeat_ngram, top_k, fails_at_three, of_other_type, of_other_shape,
        gives_nan, gives_infinity, forbids_all, gives_none, writes_ids,
    )
}  # fmt: skip
