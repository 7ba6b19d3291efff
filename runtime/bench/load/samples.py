"""The requests of `bench serve`, and random prompts of given lengths, no two alike.

Prompts are random tokens, from a file, or of a recorded trace, with output lengths. Random prompts are token ids if the
server takes ids (completions). For chats each id is replaced by a word of `WORDS`, so that lengths are approximate, and
equal prefixes stay equal; the server counts the real tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bench.load.traces import random_tokens, read_trace
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


_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part over new sound
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    prompt      text, or token ids
    output_len  most tokens of the answer
    arrival_s   seconds after the start, from a trace; None if the load decides
    """

    prompt: str | list[int]
    output_len: int
    arrival_s: float | None = None


def random_samples(
    num_prompts: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    num_prefixes: int = 1,
    vocab_size: int,
    seed: int = 0,
) -> list[Sample]:
    """Token ids in `[0, vocab_size)`, no two prompts alike. Lengths vary by `range_ratio`, in [0, 1); each prompt comes
    after one of `num_prefixes` prefixes of `prefix_len` tokens, in turns. Raises `BenchmarkError`."""
    if prefix_len < 0 or num_prefixes < 1:
        raise BenchmarkError(f"--prefix-len {prefix_len}, --num-prefixes {num_prefixes}: at least 0 and 1")
    input_lens = varied_lengths(num_prompts, input_len, range_ratio, seed)
    output_lens = varied_lengths(num_prompts, output_len, range_ratio, seed + 1)
    prompts = random_prompts(num_prompts, max(input_lens), vocab_size, seed)
    prefixes = random_prompts(num_prefixes, prefix_len, vocab_size, seed + 2) if prefix_len else [[]]
    return [
        Sample(prefixes[index % len(prefixes)] + prompt[:length], output_lens[index])
        for index, (prompt, length) in enumerate(zip(prompts, input_lens))
    ]


def trace_samples(
    path: Path,
    num_prompts: int,
    *,
    rate: float = 1.0,
    length: float = 1.0,
    max_len: int | None = None,
    vocab_size: int,
    seed: int = 0,
) -> list[Sample]:
    """The first requests of a recorded trace, at its times (`rate` times as dense) and with its lengths (times
    `length`, cut to `max_len` tokens of prompt and answer) and shared prefixes. Raises `TraceError`."""
    trace = read_trace(path).head(num_prompts).scaled(rate=rate, length=length, max_len=max_len)
    fill = random_tokens(vocab_size, seed)
    return [
        Sample(trace.prompt_ids(index, fill).tolist(), request.output_len, request.arrival_s)
        for index, request in enumerate(trace.requests)
    ]


def file_samples(path: Path, num_prompts: int, output_len: int) -> list[Sample]:
    """Samples from a file of prompts, repeated if there are too few: `.txt` has one per line; `.jsonl` objects with
    `prompt` (text or token ids) and optionally `output_tokens` instead of `output_len`. Raises `BenchmarkError`."""
    if path.suffix not in (".txt", ".jsonl"):
        raise BenchmarkError(f"{path}: prompts stand in a .txt or .jsonl file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path}: {error}") from error
    samples = [
        Sample(line, output_len) if path.suffix == ".txt" else _sample(f"{path}:{number}", line, output_len)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not samples:
        raise BenchmarkError(f"{path}: there is no prompt in it")
    return [samples[index % len(samples)] for index in range(num_prompts)]


def as_text(samples: Sequence[Sample]) -> list[Sample]:
    """The same with words for token ids."""
    return [
        sample
        if isinstance(sample.prompt, str)
        else Sample(" ".join(WORDS[i % len(WORDS)] for i in sample.prompt), sample.output_len, sample.arrival_s)
        for sample in samples
    ]


def _sample(where: str, line: str, output_len: int) -> Sample:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise BenchmarkError(f"{where}: not JSON: {error}") from None
    prompt: Any = row.get("prompt") if isinstance(row, dict) else None
    is_ids = isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt)
    if not is_ids and not (isinstance(prompt, str) and prompt):
        raise BenchmarkError(f"{where}: prompt is neither text nor a list of token ids")
    length = row.get("output_tokens", output_len)
    if type(length) is not int or length < 1:
        raise BenchmarkError(f"{where}: output_tokens {length!r} is not a positive number of tokens")
    return Sample(prompt, length)
