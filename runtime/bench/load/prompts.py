"""Seeded random prompts of given lengths, as token ids, no two alike."""

from __future__ import annotations

import random

from runtime.bench.metrics import BenchmarkError


def random_prompts(num_prompts: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`num_prompts` distinct lists of `length` ids in [0, vocab_size), the same for the same arguments.

    They are distinct so that no engine can serve one from another's cache. Raises `BenchmarkError` if there are not
    that many distinct prompts.
    """
    if num_prompts < 1 or length < 1:
        raise BenchmarkError(f"{num_prompts} prompts of {length} tokens: both must be at least 1")
    if vocab_size ** min(length, 64) < 2 * num_prompts:
        raise BenchmarkError(
            f"{num_prompts} distinct prompts of {length} tokens need a larger vocabulary than {vocab_size}"
        )
    generator = random.Random(seed)
    seen: set[tuple[int, ...]] = set()
    prompts: list[list[int]] = []
    while len(prompts) < num_prompts:
        prompt = [generator.randrange(vocab_size) for _ in range(length)]
        if tuple(prompt) not in seen:
            seen.add(tuple(prompt))
            prompts.append(prompt)
    return prompts


def varied_lengths(num_prompts: int, length: int, range_ratio: float, seed: int) -> list[int]:
    """Lengths drawn evenly from [length·(1 − ratio), length·(1 + ratio)], at least 1, as in vLLM."""
    if not 0.0 <= range_ratio < 1.0:
        raise BenchmarkError(f"--random-range-ratio {range_ratio} must lie in [0, 1)")
    generator = random.Random(seed)
    low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
    return [max(1, generator.randint(low, high)) for _ in range(num_prompts)]
