"""Measures a drafter on the bundled model: tokens per step on held-out questions, and time.

    python -m tools.measure_drafter [--speculation eagle3] [--num 20] [--rounds 5] [--tokens 7]

Each question runs alone, decoded greedily. A step's tokens are its accepted ones plus the one of the model; steps with
prompts are left out. Then all questions run one after another, in turns with and without speculation, with the engine's
choice of the draft length, and the medians of the rounds are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

from models.checkpoints.hub import resolve_model
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.make_engine import engine_of
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.text.load import read_tokenizer
from tools.demo_model import tasks


def _ask(engine: Engine, name: str, prompt: list[int]) -> tuple[int, int]:
    """Tokens after the first, and their steps."""
    params = SamplingParams(max_tokens=96, temperature=0.0)
    engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params,
                             eos_token_ids=engine.info.eos_token_ids))  # fmt: skip
    tokens = steps = 0
    while engine.has_work:
        count = sum(len(output.new_token_ids) for output in engine.step())
        tokens, steps = tokens + count, steps + (count > 0)
    return tokens - 1, steps - 1


def _engine(speculation: str, most: int, *, is_fixed: bool) -> Engine:
    config = EngineConfig(
        max_model_len=1024, device="cpu", speculation=speculation, num_speculative_tokens=most, kv_cache_bytes=1 << 26,
        seed=0,
    )  # fmt: skip
    engine = engine_of(resolve_model(None), config)
    if is_fixed and engine.speculator is not None:
        engine.speculator.tries_all()
    return engine


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--speculation", default="eagle3")
    parser.add_argument("--num", type=int, default=20, help="questions a task")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=7, help="most proposals a step")
    options = parser.parse_args()
    tokenizer = read_tokenizer(resolve_model(None))
    prompts: dict[str, list[list[int]]] = defaultdict(list)
    for task in tasks.TASKS:
        for turn in tasks.held_out_questions(task, options.num, 0):
            prompts[task].append(tokenizer.encode(f"<|user|>{turn.question}<|assistant|>"))
    engine = _engine(options.speculation, options.tokens, is_fixed=True)
    total = [0, 0]
    for task, questions in prompts.items():
        counts = [_ask(engine, f"{task}{i}", prompt) for i, prompt in enumerate(questions)]
        tokens, steps = (sum(each) for each in zip(*counts, strict=True))
        total = [total[0] + tokens, total[1] + steps]
        print(f"{task}: {tokens / max(1, steps):.2f} tokens a step")
    print(f"all: {total[0] / total[1]:.2f} tokens a step ({total[0]} tokens, {total[1]} steps)")
    engine.close()
    engines = {name: _engine(name, options.tokens, is_fixed=False) for name in ("off", "auto", options.speculation)}
    seconds: dict[str, list[float]] = defaultdict(list)
    everything = [prompt for questions in prompts.values() for prompt in questions]
    for number in range(options.rounds + 1):  # the first warms up
        for name, each in engines.items():
            each.reset_prefix_cache()
            begun = time.perf_counter()
            for i, prompt in enumerate(everything):
                _ask(each, f"{number} {i}", prompt)
            if number:
                seconds[name].append(time.perf_counter() - begun)
    if not options.rounds:
        return
    base = statistics.median(seconds["off"])
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times):.3f} s, {base / statistics.median(times):.2f} times as fast as off")


if __name__ == "__main__":
    main()
