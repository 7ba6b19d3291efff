"""Speculation on the device: the bundled model's answers with each kind of drafter, and the cost of a step with eight
positions of a sequence instead of one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Sequence as Choice
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.speculator import Speculator
from runtime.engine.timeline import StepRecord
from tools.gpu.sections import Case, Options, Result
from tools.gpu.serving.asking import DEMO, ask, first_difference, ids_of
from tools.gpu.serving.models import CONTEXT, OUTPUT, Model, config_of, quartiles_ms

WAYS = ("ngram", "suffix", "eagle3")
QUESTIONS = (
    "What is 17 plus 25?", "What is 123 plus 456?", "What is 90 minus 35?", "What is 7 plus 8?", "Who are you?",
    "Sort these words: pear, apple, fig", "Sort these words: dog, cat, cow, ant", "Reverse the word stone",
    "Reverse the word lamp", "How many letters are in table?", "Count from 3 to 9", "Count from 12 to 20",
    "Count from 9 to 3", "What is the capital of France?", "What is the capital of Peru?", "Hello!", "Good morning",
    "Write a poem about the dog.", "Translate apple into French.", "one two one two one two one two",
)  # fmt: skip
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "temperature 0.8": {"temperature": 0.8, "seed": 1},
}  # fmt: skip
NUM_TOKENS = 48
MOST = 7
"""Proposals a sequence."""


def correctness(options: Options) -> Iterator[Case]:
    """In exact mode answers must be those without proposals. Otherwise sums of steps with more rows may differ in their
    last bits: the number of equal answers is reported."""
    for exact in (True,) if options.is_quick else (True, False):
        plain = functools.cache(functools.partial(_answers, options, "off", exact=exact))
        for way in WAYS:
            name = f"{way}{', exact' if exact else ''}"
            yield Case(name, functools.partial(_compare, options, way, plain, exact=exact))


def _compare(options: Options, way: str, plain: Callable[[], tuple[Any, ...]], *, exact: bool) -> Result:
    answers, tried, kept = _answers(options, way, exact=exact)
    expected, _, _ = plain()
    result: Result = {"tried": tried, "kept": kept}
    for name, found in answers.items():
        difference = first_difference(found, expected[name])
        if exact and difference is not None:
            raise AssertionError(f"{way}, {name}: {difference}; {tried} proposals were tried, {kept} kept")
        result[name] = {
            "answers": len(found), "same": sum(one == other for one, other in zip(found, expected[name])),
        }  # fmt: skip
    if not tried and not options.is_quick:
        raise AssertionError(f"{way}: nothing was proposed")
    return result


def _answers(options: Options, way: str, *, exact: bool) -> tuple[dict[str, list[list[int]]], int, int]:
    """Answers by sampling parameters, and the numbers of drafted and accepted tokens."""
    prompts = [ids_of(DEMO, f"<|user|>{question}<|assistant|>") for question in QUESTIONS]
    prompts, length = (prompts[-1:], 4) if options.is_quick else (prompts, NUM_TOKENS)
    engine = build_engine(
        DEMO, device=options.device, exact=exact, speculation=way, num_blocks=512, max_model_len=192,
        max_num_seqs=len(prompts), enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    speculator = engine.speculator
    if speculator is not None and way != "off":
        speculator.tries_all()
        vars(speculator).update(_hang_s=math.inf, wants_tokens=lambda: True)  # the first proposal may load kernels
    client = ThreadEngineClient(engine)
    found: dict[str, list[list[int]]] = {}
    try:
        counts = [len(prompts)]
        if options.is_dry:  # steps of all sizes, as answers end at other times
            counts += [count for count in (1, 2, 3, 4, 5, 8, 12, 16) if count < len(prompts)]
        for count in counts:
            for name, sampling in SAMPLINGS.items():
                params = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, **sampling)
                answers = ask(client, [
                    EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params)
                    for number, prompt in enumerate(prompts[:count])
                ])  # fmt: skip
                found.setdefault(name, answers)
    finally:
        client.close()
    if speculator is None:
        return found, 0, 0
    return found, speculator.counters.num_draft_tokens, speculator.counters.num_accepted_tokens


class Known:
    """Proposes the known answers to prompts."""

    name = "known"

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        self._answers = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}

    def propose(self, sequence: Choice, most: int) -> tuple[Ids, int]:
        known = self._answers[tuple(sequence.request.prompt_ids.tolist())]
        return np.array(known[sequence.num_output_tokens :][:most], np.int32), 0

    def end(self, sequence: Choice) -> None:
        """Does nothing: there is no state."""


def speed(options: Options, name: str) -> Iterator[Case]:
    batches = (1, 2) if options.is_quick else (1, 8)
    model = Model(options, name, max_num_seqs=batches[-1])
    for batch in batches:
        yield Case(f"batch {batch}", functools.partial(_steps, model, batch))
    model.close()


def _steps(model: Model, batch: int) -> Result:
    """Plain decode steps, and steps that verify seven proposals of each sequence, after runs that record both."""
    engine, is_quick = model.engine, model.options.is_quick
    prompt_len, output_len = (6, 10) if is_quick else (CONTEXT, OUTPUT)
    prompts = model.prompts(batch, prompt_len)
    engine.use(None)
    model.run(prompts, output_len)
    answers, steps = model.run(prompts, output_len)
    plain = _full(steps, prompt_len, batch, 1)
    speculator = Speculator(Known(prompts, answers), MOST, engine.info.vocab_size, fixed=True, hang_s=math.inf)
    vars(speculator)["wants_tokens"] = lambda: True
    engine.use(speculator)
    try:
        for _ in range(1 if is_quick else 3):
            model.run(prompts, output_len)
        tries = [model.run(prompts, output_len) for _ in range(1 if is_quick else 3)]
    finally:
        engine.use(None)
    verified = [step for _, run in tries for step in _full(run, prompt_len, batch, 1 + MOST)]
    if not plain or not verified:
        raise AssertionError(f"{len(plain)} plain steps, {len(verified)} with {MOST} proposals a sequence")
    times = [quartiles_ms([step.end_s - step.start_s for step in each]) for each in (plain, verified)]
    counters = speculator.counters
    return {
        "layers": config_of(model.options, model.name)["num_hidden_layers"], "batch": batch, "context": prompt_len,
        "plain_steps": len(plain), "plain_ms": times[0], "verifying_steps": len(verified), "verifying_ms": times[1],
        "verifying_host_ms": quartiles_ms([step.host_s for step in verified]),
        "times_plain": round(times[1][1] / times[0][1], 3) if times[0][1] else None,
        "kept_share": round(counters.num_accepted_tokens / max(1, counters.num_draft_tokens), 3),
        "same_answers": sum(one == other for found, _ in tries for one, other in zip(found, answers)),
        "answers": len(tries) * batch,
    }  # fmt: skip


def _full(steps: Sequence[StepRecord], prompt_len: int, batch: int, width: int) -> list[StepRecord]:
    """Steps that compute exactly so many tokens of every answer."""
    return [
        step
        for step in steps
        if step.num_tokens == batch * width
        and len(step.chunks) == batch
        and all(chunk.start >= prompt_len and chunk.num_tokens == width for chunk in step.chunks)
    ]
