"""Compares answers with speculation to those without: ids, log probabilities to the bit, reasons of ends.

    python tools/compare_speculation.py [--model FOLDER] [--device DEVICE] [--requests 10000] [--seed 0]

Requests of all kinds (greedy and seeded at several temperatures, penalties, biases, bad words, stop ids, grammars, log
probabilities, three choices) run in rounds, each under a schedule of its own: little memory, so that sequences are
preempted and swapped, few tokens in a step, chunks of odd lengths, requests that come while others run, and some that
are cancelled. Each round runs without speculation and with every drafter, whose proposals are all tried: whether that
pays is not asked. On a GPU it runs with `exact`. Prints what differs, and how many proposals were tried and kept.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models.base import Model
from models.hub import resolve_model
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.make_engine import engine_over, limits_of, loaded_model
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.draft_model import DraftModelDrafter
from runtime.engine.speculation.drafter import Drafter, Ids
from runtime.engine.speculation.ngram import NgramDrafter, SuffixDrafter
from runtime.engine.speculation.speculator import Speculator
from runtime.kv.groups import blocks_of_sequence

ROUND = 25
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"]}'

Answer = dict[tuple[str, int], tuple[list[int], list[Any], Any, Any]]
"""By request and choice: ids, log probabilities, why it ended, and at which stop."""


class Guesses:
    """Proposes what the answer is known to be, with mistakes: all lengths of agreement come."""

    name = "guesses"

    def __init__(self, known: Answer, vocab_size: int, seed: int) -> None:
        self._known, self._vocab_size = known, vocab_size
        self._rng = random.Random(seed)

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        ids = self._known.get((sequence.request.request_id, sequence.index), ([], [], None, None))[0]
        drafts = ids[sequence.num_output_tokens :][: self._rng.randrange(most + 1)]
        drafts += [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randrange(3))]
        if drafts and self._rng.random() < 0.4:
            drafts[self._rng.randrange(len(drafts))] = self._rng.randrange(self._vocab_size)
        return np.array(drafts[:most], np.int32), 0

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class Comparison:
    """What was found."""

    num_answers: int = 0
    num_preemptions: int = 0
    tried: dict[str, list[int]] = field(default_factory=dict)
    """By drafter: proposed tokens, and accepted ones."""
    differences: list[str] = field(default_factory=list)


def compare(model: Model, folder: Path, num_requests: int, seed: int, **settings: Any) -> Comparison:
    """Runs so many requests in rounds of ``ROUND``."""
    found = Comparison()
    for number in range(-(-num_requests // ROUND)):
        rng = random.Random(f"{seed} {number}")
        config = _config(rng, model, settings)
        requests = [_request(rng, i, model.config.vocab_size, config.max_model_len or 64) for i in range(ROUND)]
        arrivals = sorted(rng.randrange(40) for _ in requests)
        cancels = {rng.randrange(5, 60): f"r{rng.randrange(ROUND)}" for _ in range(2)}
        plain, engine = _run(model, folder, config, None, requests, arrivals, {})
        found.num_answers += len(plain)
        found.num_preemptions += engine.stats().num_preemptions
        drafters: list[Drafter] = [
            NgramDrafter(), SuffixDrafter(), Guesses(plain, model.config.vocab_size, number)
        ]  # fmt: skip
        limits = limits_of(model, config)  # the model drafts for itself, with too few pages now and then
        drafted = DraftModelDrafter(model, model.max_positions, model.rotary_switch, limits, limits.num_blocks)
        if number % 2 == 0:  # it takes as long as all the others
            drafters.append(drafted)
        predicted = [_with_prediction(rng, request, plain, model.config.vocab_size) for request in requests]
        for drafter in (*drafters, None):
            name = "predictions" if drafter is None else drafter.name
            speculator = Speculator(drafter, rng.choice((1, 3, 7)), model.config.vocab_size, fixed=True)
            asked = predicted if drafter is None else requests
            answers, engine = _run(model, folder, config, speculator, asked, arrivals, cancels)
            cancelled = set(cancels.values())
            for key, answer in plain.items():
                if key[0] not in cancelled and answers.get(key) != answer:
                    found.differences.append(f"round {number}, {name}, {key}: {answers.get(key)} not {answer}")
            tried = found.tried.setdefault(name, [0, 0])
            tried[0] += speculator.counters.num_draft_tokens
            tried[1] += speculator.counters.num_accepted_tokens
            found.num_preemptions += engine.stats().num_preemptions
            if drafter is drafted and drafted.num_free_blocks != drafted.num_blocks:
                found.differences.append(f"round {number}: the draft model's pages leaked")
            if drafter is not None and not speculator.is_on:
                found.differences.append(f"round {number}: the drafter {name} was turned off")
    return found


def _config(rng: random.Random, model: Model, settings: dict[str, Any]) -> EngineConfig:
    length = settings.get("max_model_len", min(model.max_positions, 96))
    chosen: dict[str, Any] = {"max_model_len": length, "block_size": rng.choice((8, 16)), "seed": 0}
    least = blocks_of_sequence(
        length, model.kv_cache_spec(chosen["block_size"]).group_windows, chosen["block_size"], chunk=1
    )
    chosen["num_blocks"] = int(least * rng.choice((1.2, 2, 20)))
    chosen["max_num_seqs"] = rng.choice((2, 6, 16))
    chosen["max_num_batched_tokens"] = max(chosen["max_num_seqs"], rng.choice((8, 17, 64, 512)))
    chosen["enable_prefix_caching"] = rng.random() < 0.7
    chosen["preemption"] = rng.choice(("auto", "recompute", "swap"))
    chosen["swap_space_bytes"] = 1 << 24
    return EngineConfig(**{**chosen, **settings})


def _request(rng: random.Random, number: int, vocab_size: int, max_model_len: int) -> EngineRequest:
    alphabet = [rng.randrange(3, vocab_size) for _ in range(rng.choice((2, 5, 200)))]
    prompt = [rng.choice(alphabet) for _ in range(rng.randrange(1, max_model_len // 2))]
    if rng.random() < 0.5:
        prompt = [(alphabet * max_model_len)[i] for i in range(len(prompt))]
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, max_model_len // 2), "temperature": 0.0}
    params["ignore_eos"] = rng.random() < 0.6
    if rng.random() < 0.7:
        params |= {"temperature": rng.choice((0.3, 1.0, 1.5)), "seed": rng.randrange(2**40)}
        params |= rng.choice(({}, {"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.05}))
    if rng.random() < 0.5:
        params["logprobs"] = rng.choice((0, 3))
    if rng.random() < 0.2:
        params["prompt_logprobs"] = 2
    if rng.random() < 0.25:
        params["n"] = 3
    params |= rng.choice(
        (
            {}, {}, {"frequency_penalty": 0.6, "presence_penalty": 0.3}, {"repetition_penalty": 1.3},
            {"logit_bias": {alphabet[0]: 4.0, alphabet[-1]: -3.0}}, {"bad_words_token_ids": [[alphabet[0]]]},
            {"stop_token_ids": alphabet[:3], "min_tokens": min(2, params["max_tokens"])},
            {"allowed_token_ids": sorted(set(alphabet))},
            {"structured_outputs": {"json": SCHEMA}},
        )
    )  # fmt: skip
    if "structured_outputs" in params:
        from runtime.engine.grammar.structured_outputs import StructuredOutputsParams

        params["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
        params["ignore_eos"] = False
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        cache_salt=rng.choice((None, None, "tenant")),
    )


def _with_prediction(rng: random.Random, request: EngineRequest, known: Answer, vocab_size: int) -> EngineRequest:
    """The request with a text that its answer nearly is: tokens are wrong, missing, or too many; now and then without
    speculation."""
    ids = list(known[request.request_id, 0][0])
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(ids) + 1)
        ids[at : at + rng.randrange(2)] = [rng.randrange(vocab_size) for _ in range(rng.randrange(2))]
    return msgspec.structs.replace(request, prediction=ids, speculates=rng.random() < 0.8)


def _run(
    model: Model,
    folder: Path,
    config: EngineConfig,
    speculator: Speculator | None,
    requests: list[EngineRequest],
    arrivals: list[int],
    cancels: dict[int, str],
) -> tuple[Answer, Engine]:
    engine = engine_over(model, folder, config, "compared")
    if speculator is not None:
        engine.use(speculator)
    answers: Answer = {}
    step = added = 0
    while added < len(requests) or engine.has_work:
        while added < len(requests) and (arrivals[added] <= step or not engine.has_work):
            request = requests[added]
            eos = engine.info.eos_token_ids
            engine.add(
                msgspec.structs.replace(request, eos_token_ids=eos)
            )
            added += 1
        outputs = engine.step()
        if step in cancels:
            outputs = [*outputs, *engine.cancel(cancels[step])]
        step += 1
        for output in outputs:
            key = (output.request_id, output.index)
            ids, logprobs, _, _ = answers.get(key, ([], [], None, None))
            ids += output.new_token_ids
            logprobs += [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
            answers[key] = (ids, logprobs, output.finish_reason, output.stop_reason)
    engine.check_invariants()
    assert engine.pool.num_free == engine.pool.num_blocks, "blocks leaked"
    engine.close()
    return answers, engine


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = resolve_model(options.model)
    settings = {"device": options.device, "exact": options.device != "cpu"}
    model = loaded_model(folder, EngineConfig(**settings, max_model_len=96))
    found = compare(model, folder, options.requests, options.seed, **settings)
    for difference in found.differences[:20]:
        print(difference)
    for name, (tried, kept) in found.tried.items():
        print(f"{name}: {tried:,} proposed tokens were tried, {kept:,} kept")
    print(f"{found.num_answers:,} answers, {found.num_preemptions:,} preemptions, {len(found.differences)} differences")
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main())
