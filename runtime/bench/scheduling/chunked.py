"""`bench chunked`: what computing a prompt in chunks costs against computing it whole."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from runtime.bench.environment import describe_engine
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import BenchmarkError, check_finite
from runtime.bench.peers.greedy import check_same_greedy
from runtime.bench.scheduling.engines import Stepper, like

if TYPE_CHECKING:
    from runtime.engine.engine import Engine


def bench_chunked(engine: Engine, *, prompt_len: int, chunk: int, num_rounds: int, seed: int = 0) -> dict[str, Any]:
    """Seconds from a prompt to its first token, whole and in chunks, in turns; `overhead` is the ratio of medians.

    Both ways compute the same prompts, without a prefix cache, and must give the same first token up to a tie.
    """
    limits = engine.limits
    if not 1 <= chunk < prompt_len <= limits.max_num_batched_tokens:
        raise BenchmarkError(
            f"a chunk of {chunk} must be shorter than the prompt of {prompt_len} tokens, and that no longer than "
            f"max_num_batched_tokens={limits.max_num_batched_tokens}"
        )
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    prompts = random_prompts(num_rounds + 1, prompt_len, engine.info.vocab_size, seed)
    settings = {"whole": {}, "chunked": {"prefill_chunk": chunk}}
    num_steps = {"whole": 1, "chunked": -(-prompt_len // chunk)}
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    num_ties = 0
    for index, prompt in enumerate(prompts):  # the first warms up
        tokens = {}
        for name in sorted(settings, reverse=index % 2 == 0):
            stepper = Stepper(like(engine, enable_prefix_caching=False, **settings[name]))
            request_id = stepper.add(prompt, 1)
            times, tokens[name] = stepper.first_token(request_id)
            if len(times) != num_steps[name]:
                raise BenchmarkError(f"{name}: the prompt took {len(times)} steps, not {num_steps[name]}")
            if index:
                seconds[name].append(sum(times))
        num_ties += check_same_greedy(
            "chunked against whole", [prompt], [[tokens["chunked"]]], [[tokens["whole"]]], engine.logits
        )
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    report = {
        "overhead": medians["chunked"] / medians["whole"],
        "overheads": [a / b for a, b in zip(seconds["chunked"], seconds["whole"])],
        "whole_s": medians["whole"],
        "chunked_s": medians["chunked"],
        "prompt_len": prompt_len,
        "chunk": chunk,
        "num_rounds": num_rounds,
        "num_ties": num_ties,
        "environment": describe_engine(engine.info),
    }
    check_finite(report)
    return report
