"""Small schedulers with known numbers, for tests of single rules."""

from __future__ import annotations

import random
from typing import Any

from runtime.engine.config import SchedulingConfig
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Step
from tests.runtime.engine.scheduler_driver import VOCAB_SIZE, Driver


def make_driver(*, overlaps: bool = False, **settings: Any) -> Driver:
    """Blocks of 4 tokens, a budget of 16 tokens; ``settings`` are fields of the limits or of the scheduling."""
    names = SchedulingConfig.__dataclass_fields__
    scheduling = {name: settings.pop(name) for name in list(settings) if name in names}
    limits: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_blocks": 64,
        "max_waiting": 100,
        **settings,
    }
    limits.setdefault("max_model_len", limits["num_blocks"] * limits["block_size"])
    return Driver(
        random.Random(0), EngineLimits(**limits, scheduling=SchedulingConfig(**scheduling)), overlaps=overlaps
    )


def add(driver: Driver, num_prompt_tokens: int, max_tokens: int = 8, **fields: Any) -> Sequence:
    """A request whose prompt nobody else has; its first choice."""
    rng = random.Random(driver.num_requests)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)]
    fields.setdefault("cache_salt", f"own {driver.num_requests}")
    request = driver.add(prompt, max_tokens=max_tokens, **fields)
    assert request is not None
    return request.sequences[0]


def run(driver: Driver, count: int = 1) -> list[Step]:
    """The next steps, as they were planned, of a plain loop."""
    steps: list[Step] = []
    schedule = driver.scheduler.schedule

    def remember() -> Step:
        steps.append(schedule())
        return steps[-1]

    driver.scheduler.schedule = remember  # type: ignore[method-assign]
    try:
        for _ in range(count):
            driver.step()
    finally:
        driver.scheduler.schedule = schedule  # type: ignore[method-assign]
    return steps


def chunks_of(step: Step) -> list[tuple[int, int, int]]:
    """(request's number, start, number of tokens) of each chunk."""
    return [(chunk.sequence.request.number, chunk.start, chunk.num_tokens) for chunk in step.chunks]


def first_chunk(driver: Driver, prompt: list[int], **fields: object) -> tuple[int, int]:
    """(start, number of tokens) of the prompt's only chunk."""
    request = driver.add(prompt, max_tokens=2, **fields)
    assert request is not None
    (step,) = run(driver)
    (chunk,) = [chunk for chunk in step.chunks if chunk.sequence.request is request]
    driver.drain()
    return chunk.start, chunk.num_tokens
