"""The check that two greedy runs gave the same tokens, which floats added in another order may excuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime.bench.metrics import BenchmarkError

TIE_TOLERANCE = 1e-3
"""Two tokens whose logits lie this close may change places when the batch, and with it the order of the
additions, changes."""


def check_same_greedy(
    what: str,
    prompts: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    logits_of: Callable[[list[int]], np.ndarray],
    tolerance: float = TIE_TOLERANCE,
) -> int:
    """Raises `BenchmarkError` unless each output equals the expected one up to a tie; returns their count.

    At the first token that differs, both tokens' logits must be within `tolerance` of the largest; after
    it the outputs continue different texts and are compared no further. `logits_of(token_ids)` is float32
    `[num_tokens, vocab]`, asked only where something differs.
    """
    num_ties = 0
    for index, (prompt, tokens, wanted) in enumerate(zip(prompts, got, expected, strict=True)):
        if len(tokens) != len(wanted):
            raise BenchmarkError(f"{what}: request {index} gave {len(tokens)} tokens, not {len(wanted)}")
        for position, (token, other) in enumerate(zip(tokens, wanted)):
            if token == other:
                continue
            row = np.asarray(logits_of([*prompt, *wanted[:position]]))[-1]
            behind = float(row.max() - min(row[token], row[other]))
            if not behind <= tolerance:
                raise BenchmarkError(
                    f"{what}: request {index} gave token {token} instead of {other} at position "
                    f"{position}, and one of them lies {behind:.2g} below the largest logit"
                )
            num_ties += 1
            break
    return num_ties
