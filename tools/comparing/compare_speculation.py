"""Compares answers with speculation to those without: ids, log probabilities to the bit, reasons of ends.

    python -m tools.comparing.compare_speculation [--models FOLDER ...] [--device DEVICE] [--requests 10000]
            [--seed 0] [--turns]
    python -m tools.comparing.compare_speculation --models prediction_layer --drafters mtp  # no other has MTP

Requests of all kinds (greedy and seeded at several temperatures, penalties, biases, bad words, stop ids, stop strings,
grammars, log probabilities, three choices) run in rounds, each under a schedule of its own: little memory, so that
sequences are preempted and swapped, small steps, chunks of odd lengths, shared prompts, requests that arrive while
others run, and cancelled ones. Each round runs without speculation and with every drafter (with `--turns`: with one
after another), and all proposals are tried. Drafters without hidden states share one engine, which keeps its
recordings. On a GPU it runs with `exact`. Models take turns; `babyllama` is a small Llama with random weights,
`prediction_layer` a tiny GLM-4.5 whose prediction layer is often right. A model without an EAGLE-3 drafter has an
untrained one, and each an untrained DSpark, which is right only by chance. After each hundred requests it prints the
differences, and by drafter the numbers of requests and of drafted and accepted tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models.base import Model
from models.checkpoints.hub import resolve_model
from models.decoder import Decoder
from models.drafters.dflash import load_dflash
from models.drafters.eagle3 import load_eagle3
from models.drafters.gemma4_assistant import AssistantDrafter
from models.drafters.hidden_state_drafter import BlockDrafter, PairDrafter
from models.drafters.mtp import load_mtp
from models.experts import MoeConfig
from runtime.engine.config import OWN_DRAFTER, EngineConfig
from runtime.engine.dry import DryBreakers
from runtime.engine.engine import Engine
from runtime.engine.grammar.structured_outputs import StructuredOutputsParams
from runtime.engine.make_engine import engine_over, limits_of, loaded_model
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Sequence as Choice
from runtime.engine.speculation.draft_model import DraftModelDrafter
from runtime.engine.speculation.drafter import Drafter, Ids
from runtime.engine.speculation.ngram import NgramDrafter, SuffixDrafter
from runtime.engine.speculation.page_proposer import PageProposer
from runtime.engine.speculation.speculator import Speculator
from runtime.engine.speculation.state_proposer import StateProposer
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.kv.kinds import blocks_of_sequence
from runtime.text.load import load_tokenizer
from runtime.text.pipeline import TextPipeline
from tests.models.drafters.mtp_cases import write_bigrams
from tokenizer import Tokenizer

ROUND, PIECE = 50, 100
"""Requests of a schedule, and of a model before the next model's turn."""

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"]}'

BABYLLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "vocab_size": 1600, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
"""No KV head is shared, and the head has weights of its own."""

PREDICTION_LAYER = "prediction_layer"
"""The name of the model that has one."""

StateReader = PairDrafter | BlockDrafter | AssistantDrafter

MOST_OUTPUT = 47
"""Tokens of an answer, unless told."""


class Answer(msgspec.Struct):
    """A choice's result: ids and text up to a stop, log probabilities, finish reason, and stop."""

    ids: list[int] = []
    text: str = ""
    logprobs: list[Any] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None


Answers = dict[tuple[str, int], Answer]
"""By request and choice."""


class Guesses:
    """Proposes the known answer with mistakes, to cover all accepted lengths."""

    name = "guesses"

    def __init__(self, known: Answers, vocab_size: int, seed: int) -> None:
        self._known, self._vocab_size = known, vocab_size
        self._rng = random.Random(seed)

    def propose(self, sequence: Choice, most: int) -> tuple[Ids, int]:
        ids = self._known.get((sequence.request.request_id, sequence.index), Answer()).ids
        drafts = ids[sequence.num_output_tokens :][: self._rng.randrange(most + 1)]
        drafts += [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randrange(3))]
        if drafts and self._rng.random() < 0.4:
            drafts[self._rng.randrange(len(drafts))] = self._rng.randrange(self._vocab_size)
        return np.array(drafts[:most], np.int32), 0

    def end(self, sequence: Choice) -> None:
        """Does nothing: there is no state."""


@dataclass(slots=True)
class Comparison:
    """The results of the comparison."""

    num_answers: int = 0
    num_preemptions: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    """Answers without speculation by why they ended; "stop string" apart."""
    tried: dict[str, list[int]] = field(default_factory=dict)
    """By drafter: proposed tokens, and accepted ones."""
    num_requests: dict[str, int] = field(default_factory=dict)
    """By drafter."""
    differences: list[str] = field(default_factory=list)

    def tell(self) -> None:
        """Prints the numbers, and the first differences."""
        for difference in self.differences[:20]:
            print(difference)
        for name, (tried, kept) in self.tried.items():
            print(f"{name}: {self.num_requests[name]:,} requests, {tried:,} proposed tokens were tried, {kept:,} kept")
        ends = ", ".join(f"{count:,} by {reason}" for reason, count in sorted(self.ends.items()))
        print(f"{self.num_answers:,} answers, {self.num_preemptions:,} preemptions; ended: {ends}")
        print(f"{len(self.differences)} differences", flush=True)


def compare(
    model: Model, folder: Path, num_requests: int, seed: int, *, found: Comparison | None = None,
    states: Sequence[StateReader] = (), takes_turns: bool = False, drafters: Collection[str] = (),
    most_output: int = MOST_OUTPUT, round_size: int = ROUND, **settings: Any,
) -> Comparison:  # fmt: skip
    """Runs so many requests in rounds of ``round_size``, and adds the results to ``found``. A round has all drafters,
    or one at a time. ``states``: drafters that read the model's hidden states. ``drafters``: the wanted names; all if
    empty."""
    found = found or Comparison()
    tokenizer = load_tokenizer(folder)
    can_say_json = tokenizer is not None and tokenizer.decode(tokenizer.encode('{"a": 1}')).strip() == '{"a": 1}'
    for number in range(-(-num_requests // round_size)):
        count = min(round_size, num_requests - number * round_size)
        rng = random.Random(f"{seed} {number}")
        config = _config(rng, model, settings)
        vocab_size, length = model.config.vocab_size, config.max_model_len or 64
        requests = [_request(rng, i, vocab_size, length, most_output, tokenizer, can_say_json) for i in range(count)]
        arrivals = sorted(rng.randrange(40) for _ in requests)
        cancels = {rng.randrange(5, 60): f"r{rng.randrange(count)}" for _ in range(2)}
        engine = engine_over(model, folder, config, "compared")
        plain = _run(engine, None, requests, arrivals, {}, tokenizer)
        found.num_answers += len(plain)
        for answer in plain.values():
            reason = "stop string" if isinstance(answer.stop_reason, str) else str(answer.finish_reason)
            found.ends[reason] = found.ends.get(reason, 0) + 1
        chosen: list[Drafter | AssistantDrafter | None] = [
            NgramDrafter(),
            SuffixDrafter(),
            Guesses(plain, vocab_size, number),
        ]
        limits = limits_of(model, config)  # the model drafts for itself, at times with too few pages
        drafted = DraftModelDrafter(model, model.max_positions, model.longrope_threshold, limits, limits.num_blocks)
        chosen += [drafted, None]
        for each in states:
            num_blocks = max(2, int(limits.num_blocks * rng.choice((0.3, 1, 2))))
            is_assistant = isinstance(each, AssistantDrafter)  # which reads the pages of an engine that is made below
            chosen.append(each if is_assistant else StateProposer(each, limits, num_blocks, 7))  # type: ignore[arg-type]
        chosen = [drafter for drafter in chosen if not drafters or _name(drafter) in drafters]
        predicted = [_with_prediction(rng, request, plain, vocab_size) for request in requests]
        for drafter in [chosen[(seed + number) % len(chosen)]] if takes_turns else chosen:
            name, own = _name(drafter), engine
            if isinstance(drafter, StateProposer | AssistantDrafter):  # hidden states are kept from the beginning
                own = engine_over(model, folder, config, "compared")
            if isinstance(drafter, AssistantDrafter):
                assert isinstance(own.executor, LocalExecutor), "there are no ranks"
                drafter = PageProposer(drafter, own.executor.kv_cache, own.executor.rows.tables, limits, 7)
            speculator = Speculator(drafter, rng.choice((1, 3, 7)), vocab_size, fixed=True, hang_s=math.inf)
            asked = predicted if drafter is None else requests
            answers = _run(own, speculator, asked, arrivals, cancels, tokenizer)
            cancelled = set(cancels.values())
            for key, answer in plain.items():
                if key[0] not in cancelled and answers.get(key) != answer:
                    where = f"{folder.name}, seed {seed}, round {number}, {name}, {key}"
                    found.differences.append(f"{where}: {answers.get(key)} not {answer}")
            tried = found.tried.setdefault(name, [0, 0])
            tried[0] += speculator.counters.num_draft_tokens
            tried[1] += speculator.counters.num_accepted_tokens
            found.num_requests[name] = found.num_requests.get(name, 0) + len(requests)
            if drafter is drafted and drafted.num_free_blocks != drafted.num_blocks:
                found.differences.append(f"round {number}: the draft model's pages leaked")
            if isinstance(drafter, StateProposer):
                drafter.pool.check_invariants([])
            if own is not engine:
                found.num_preemptions += own.stats().num_preemptions
                own.close()
            if drafter is not None and not speculator.is_on:
                found.differences.append(f"round {number}: the drafter {name} was turned off")
        found.num_preemptions += engine.stats().num_preemptions
        engine.close()
    return found


def _name(drafter: Drafter | AssistantDrafter | None) -> str:
    return "predictions" if drafter is None else getattr(drafter, "kind", "") or drafter.name  # type: ignore[union-attr]


def _config(rng: random.Random, model: Model, settings: dict[str, Any]) -> EngineConfig:
    length = settings.get("max_model_len", min(model.max_positions, 96))
    chosen: dict[str, Any] = {"max_model_len": length, "block_size": rng.choice((8, 16)), "seed": 0}
    least = blocks_of_sequence(
        length, model.kv_cache_spec(chosen["block_size"]).group_kinds, chosen["block_size"], chunk=1
    )
    chosen["num_blocks"] = int(least * rng.choice((1.2, 2, 4, 20)))
    chosen["max_num_seqs"] = rng.choice((2, 6, 16, 32))
    chosen["max_num_batched_tokens"] = max(chosen["max_num_seqs"], rng.choice((8, 17, 64, 512)))
    chosen["enable_prefix_caching"] = rng.random() < 0.7
    chosen["preemption"] = rng.choice(("auto", "recompute", "swap"))
    chosen["swap_space_bytes"] = 1 << 24
    return EngineConfig(**{**chosen, **settings})


def _request(
    rng: random.Random, number: int, vocab_size: int, max_model_len: int, most_output: int,
    tokenizer: Tokenizer | None, can_say_json: bool,
) -> EngineRequest:  # fmt: skip
    alphabet = [rng.randrange(3, vocab_size) for _ in range(rng.choice((2, 5, 200)))]
    prompt = [rng.choice(alphabet) for _ in range(rng.randrange(1, max_model_len // 2))]
    if rng.random() < 0.5:
        prompt = [(alphabet * max_model_len)[i] for i in range(len(prompt))]
    most = min(most_output, max_model_len // 2 - 1)
    params: dict[str, Any] = {"max_tokens": rng.randint(1, most), "temperature": 0.0}
    params["ignore_eos"] = rng.random() < 0.6
    if rng.random() < 0.7:
        params |= {"temperature": rng.choice((0.3, 1.0, 1.5)), "seed": rng.randrange(2**40)}
        params |= rng.choice(({}, {"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.05}))
    if rng.random() < 0.4:
        params |= rng.choice(
            (
                {"mirostat": 2, "mirostat_tau": rng.choice((0.5, 3.0)), "mirostat_eta": 0.5},
                {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_breakers": DryBreakers(token_ids=alphabet[:1])},
                {"typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.02, "dynatemp_range": 0.5},
                {"temperature_last": True, "top_n_sigma": 1.5, "mirostat": 2, "dry_multiplier": 2.0},
            )
        )
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
    if not can_say_json:
        params.pop("structured_outputs", None)
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
        params["ignore_eos"] = False
    if tokenizer is not None and rng.random() < 0.3:  # short ones, which occur in answers
        texts = (tokenizer.decode([rng.randrange(vocab_size)]) for _ in range(8))
        params["stop"] = [text for text in texts if text and "\ufffd" not in text][:4] or ["e"]
        params["include_stop_str_in_output"] = rng.random() < 0.5
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        cache_salt=rng.choice((None, None, "tenant")),
    )


def _with_prediction(rng: random.Random, request: EngineRequest, known: Answers, vocab_size: int) -> EngineRequest:
    """The request with a prediction close to its answer: tokens are wrong, missing, or too many; at times without
    speculation."""
    ids = list(known[request.request_id, 0].ids)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(ids) + 1)
        ids[at : at + rng.randrange(2)] = [rng.randrange(vocab_size) for _ in range(rng.randrange(2))]
    return msgspec.structs.replace(request, prediction=ids, speculates=rng.random() < 0.8)


def _run(
    engine: Engine,
    speculator: Speculator | None,
    requests: list[EngineRequest],
    arrivals: list[int],
    cancels: dict[int, str],
    tokenizer: Tokenizer | None,
) -> Answers:
    """Runs the requests without prefixes of earlier runs."""
    engine.reset_prefix_cache()
    engine.use(speculator)
    answers: Answers = {}
    pipelines: dict[tuple[str, int], TextPipeline] = {}
    step = added = 0
    while added < len(requests) or engine.has_work:
        while added < len(requests) and (arrivals[added] <= step or not engine.has_work):
            request = msgspec.structs.replace(requests[added], eos_token_ids=engine.info.eos_token_ids)
            engine.add(request)
            for index in range(request.params.n):
                key = (request.request_id, index)
                pipelines[key] = TextPipeline(tokenizer, request.params, request.prompt_token_ids)
            added += 1
        outputs = engine.step()
        if step in cancels:
            outputs = [*outputs, *engine.cancel(cancels[step])]
        step += 1
        for output in outputs:
            key = (output.request_id, output.index)
            answer = answers.setdefault(key, Answer())
            delta = pipelines[key].push(output)
            answer.ids += delta.token_ids
            answer.text += delta.text
            answer.logprobs += [*(delta.logprobs or ()), *(output.prompt_logprobs or ())]
            if delta.finish_reason is not None:
                answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
            if delta.should_cancel:
                engine.cancel(*key)
    engine.check_invariants()
    assert engine.pool.num_free == engine.pool.num_blocks, "blocks leaked"
    return answers


def _model(name: str | None, settings: dict[str, Any], scratch: Path) -> tuple[Model, Path]:
    if name == "babyllama":
        (scratch / "config.json").write_text(json.dumps(BABYLLAMA), encoding="utf-8")
        return loaded_model(scratch, EngineConfig(**settings, max_model_len=96, load_format="dummy")), scratch
    if name == PREDICTION_LAYER:
        folder = write_bigrams(scratch / "model", "glm4_moe_groups", share=0.3)
    else:
        folder = resolve_model(name)
    return loaded_model(folder, EngineConfig(**settings, max_model_len=96)), folder


def _states(model: Model, folder: Path, scratch: Path, settings: dict[str, Any]) -> list[StateReader]:
    """Drafters over the model's hidden states: its own, or an untrained one."""
    found: list[StateReader] = []
    if isinstance(model.config, MoeConfig) and model.config.num_prediction_layers:
        found.append(load_mtp(folder, model, max_model_len=96, **settings))
    if (folder / OWN_DRAFTER).is_dir():
        found.append(load_eagle3(folder / OWN_DRAFTER, model, max_model_len=96, **settings))
    elif isinstance(model, Decoder):
        own = write_untrained(scratch / folder.name / OWN_DRAFTER, model)
        found.append(load_eagle3(own, model, max_model_len=96, load_format="dummy", **settings))
    if isinstance(model, Decoder):
        own = write_untrained_dspark(scratch / folder.name / "dspark", model)
        found.append(load_dflash(own, model, max_model_len=96, load_format="dummy", **settings))
    return found


def write_untrained(folder: Path, model: Model) -> Path:
    """The config of an EAGLE-3 drafter for a model, which knows half of its tokens."""
    config = model.config
    folder.mkdir(parents=True)
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 96, "rms_norm_eps": 1e-6,
        "draft_vocab_size": config.vocab_size // 2, "eagle_aux_hidden_state_layer_ids": [0, config.num_layers],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def write_untrained_dspark(folder: Path, model: Model) -> Path:
    """The config of a DSpark drafter for a model, which shares its table and head."""
    config = model.config
    folder.mkdir(parents=True)
    values = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "block_size": 5, "mask_token_id": 0, "target_layer_ids": [-1, config.num_layers - 2], "markov_rank": 8,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", help=f"folders, babyllama, {PREDICTION_LAYER}; default: bundled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", action="store_true", help="a round has one drafter, each in its turn")
    parser.add_argument("--drafters", nargs="+", default=[], help="of these names alone; default: all")
    parser.add_argument("--most-output", type=int, default=MOST_OUTPUT, help="tokens of an answer")
    parser.add_argument("--round", type=int, default=ROUND, help="requests of a schedule")
    options = parser.parse_args()
    piece = max(PIECE, options.round)
    settings = {"device": options.device, "exact": options.device != "cpu"}
    found, done = Comparison(), 0
    with tempfile.TemporaryDirectory(prefix="babyllama-") as scratch:
        models = []
        for number, name in enumerate(options.models or [None]):
            own = Path(scratch) / str(number)
            own.mkdir()
            model, folder = _model(name, settings, own)
            models.append((model, folder, _states(model, folder, own / "states", settings)))
        while done < options.requests:
            model, folder, states = models[done // piece % len(models)]
            count = min(piece, options.requests - done)
            compare(
                model, folder, count, options.seed + done // piece, found=found, states=states,
                takes_turns=options.turns, drafters=options.drafters, most_output=options.most_output,
                round_size=options.round, **settings,
            )  # fmt: skip
            done += count
            print(f"-- {done:,} requests, the latest of {folder.name}")
            found.tell()
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main())
