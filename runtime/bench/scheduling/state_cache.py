"""The prefix cache of a model with states beside one of attention alone, of as many bytes.

The engine's own scheduler and block pools serve a trace's prompts, each with one token of answer, as fast as they come:
there is no clock, and what counts is which prompt tokens are found. A budget is a share of the bytes of all different
prompt pages; a hybrid's is divided into pages of tokens and pages of states, those of running sequences included.

A recorded conversation is served turn by turn, with its answers and the boundaries that its template shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bench.environment import describe_machine
from runtime.bench.load.traces import Trace, numbered
from runtime.bench.metrics import BenchmarkError
from runtime.engine.admission import turn_starts
from runtime.engine.limits import EngineLimits, tokens_beside_state
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import pool_of
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request
from runtime.engine.scheduling.sequence import Sequence as Choice
from runtime.kv.kinds import FULL, AnyKind, State
from runtime.text.turns import turn_start_id
from tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The bytes that matter: of one token's keys and values in bfloat16, and of one sequence's state in float32."""

    token_bytes: int
    state_bytes: int

    @property
    def state_share(self) -> float:
        """The share of the bytes that an engine gives to states."""
        state_tokens = self.state_bytes / self.token_bytes
        return state_tokens / (state_tokens + tokens_beside_state(state_tokens))


def _qwen3_5(num_layers: int, kv_heads: int, value_heads: int) -> Hybrid:
    """Three of four layers have a state of 128 x 128 a value head, and a convolution of four taps in bfloat16."""
    with_state = num_layers * 3 // 4
    convolution = 3 * (2 * 16 + value_heads) * 128 * 2
    return Hybrid(
        (num_layers - with_state) * 2 * kv_heads * 256 * 2, with_state * (value_heads * 128 * 128 * 4 + convolution)
    )


HYBRIDS = {
    "qwen3.5-9b": _qwen3_5(32, 4, 32),
    "qwen3.5-27b": _qwen3_5(64, 4, 48),
    "qwen3.5-35b-a3b": _qwen3_5(40, 2, 32),
}

CONVERSATION_PAGE = 16
"""Tokens of a page, for a conversation."""

_TOKEN = np.full(1, -(1 << 31), np.int32)  # the sampled token of a trace's requests: no prompt has it
_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


def bench_state_cache(
    trace: Trace,
    models: Sequence[str] = tuple(HYBRIDS),
    budgets: Sequence[float] = (0.05, 0.2, 1.0),
    *,
    state_share: float | None = None,
    max_num_seqs: int = 16,
    report_progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """For each budget the hits of attention alone, and for each hybrid its own, why it missed, and their ratio. Raises
    BenchmarkError for an unknown hybrid, a share or budget that cannot be, a budget that no sequence fits, or a trace
    without hashes."""
    size = trace.hash_block_len
    pages = {each for request in trace.requests for each in request.hash_ids[: request.input_len // size]}
    if not pages:
        raise BenchmarkError(f"trace {trace.name} has no hashes of prompts, such as Mooncake's have")
    served = _Served(
        lambda: (_Prompt(trace.prompt_ids(index, numbered), _TOKEN) for index in range(len(trace.requests))),
        size, trace.longest, len(pages), max_num_seqs,
    )  # fmt: skip
    rows = _compare(served, models, budgets, state_share, report_progress)
    return {
        "trace": trace.name, "state_share": state_share, "max_num_seqs": max_num_seqs, "results": rows,
        "environment": describe_machine(),
    }  # fmt: skip


def bench_conversation(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    models: Sequence[str] = tuple(HYBRIDS),
    budgets: Sequence[float] = (2.0,),
    *,
    state_share: float | None = None,
    report_progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The same of one conversation: each message of the assistant answers a prompt of those before it. Raises
    BenchmarkError, also for messages without an answer, and ChatTemplateError."""
    opens = turn_start_id(tokenizer)
    prompts: list[_Prompt] = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            ids = np.array(tokenizer.apply_chat_template(messages[:place], None, True), np.int32)
            whole = tokenizer.apply_chat_template(messages[: place + 1], None)
            answer = np.array(whole[len(ids) :] or [0], np.int32)
            prompts.append(_Prompt(ids, answer, turn_starts(ids, opens)))
    if not prompts:
        raise BenchmarkError("the conversation has no message of the assistant")
    size, pages = CONVERSATION_PAGE, set[int]()
    for prompt in prompts:
        digest = 0
        for start, end in pairwise(range(0, len(prompt.ids) + 1, size)):
            digest = hash((digest, prompt.ids[start:end].tobytes()))
            pages.add(digest)
    longest = max(len(prompt.ids) + len(prompt.answer) for prompt in prompts)
    served = _Served(lambda: prompts, size, longest, len(pages), 1)
    rows = _compare(served, models, budgets, state_share, report_progress)
    return {
        "num_turns": len(prompts), "longest": longest, "state_share": state_share, "results": rows,
        "environment": describe_machine(),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, its answer, and the places where later prompts may leave it."""

    ids: NDArray[np.int32]
    answer: NDArray[np.int32]
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Served:
    """Prompts, the tokens of a page, the most tokens of a prompt and its answer, and how many different pages all
    prompts have."""

    prompts: Callable[[], Iterable[_Prompt]]
    page: int
    longest: int
    num_pages: int
    max_num_seqs: int


def _compare(
    served: _Served, models: Sequence[str], budgets: Sequence[float], state_share: float | None,
    report_progress: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    if unknown := [name for name in models if name not in HYBRIDS]:
        raise BenchmarkError(f"models: {unknown[0]!r}, must be some of {', '.join(HYBRIDS)}")
    if wrong := [budget for budget in budgets if not 0 < budget < math.inf]:
        raise BenchmarkError(f"budgets: {wrong[0]}, must be above 0")
    if state_share is not None and not 0 < state_share < 1:
        raise BenchmarkError(f"state_share is {state_share}, must be above 0 and below 1")
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        num_pages = round(budget * served.num_pages)
        plain = _hits(served, (FULL,), (num_pages,))
        rows.append({"budget": budget, "model": "attention alone", "num_pages": num_pages, **plain})
        report_progress(str(rows[-1]))
        for name in models:
            hybrid = HYBRIDS[name]
            pages_a_state = hybrid.state_bytes / (hybrid.token_bytes * served.page)
            num_states = int((state_share or hybrid.state_share) * num_pages / pages_a_state)
            sizes = (num_pages - round(num_states * pages_a_state), num_states)
            found = _hits(served, (FULL, State()), sizes)
            rows.append(
                {
                    "budget": budget, "model": name, "num_pages": sizes[0], "num_states": num_states,
                    "state_bytes_share": num_states * pages_a_state / num_pages, **found,
                    "hits_of_attention": found["hit_tokens"] / max(1, plain["hit_tokens"]),
                }
            )  # fmt: skip
            report_progress(str(rows[-1]))
    return rows


def _hits(served: _Served, kinds: tuple[AnyKind, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
    size, max_num_seqs = served.page, served.max_num_seqs
    if sizes[0] < -(-(served.longest + 1) // size) or min(sizes) < 2:
        states = "".join(f" and {count} states" for count in sizes[1:])
        raise BenchmarkError(
            f"budgets: {sizes[0]} pages of {size} tokens{states} are too few for a request of {served.longest} tokens "
            "and 2 states: raise them"
        )
    limits = EngineLimits(
        max_model_len=served.longest + size, max_num_seqs=max_num_seqs, max_num_batched_tokens=8192,
        block_size=size, num_blocks=sum(sizes), max_waiting=max_num_seqs, cache_kinds=kinds,
        cache_pools=tuple(range(len(kinds))), pool_sizes=sizes,
    )  # fmt: skip
    pool = pool_of(limits)
    scheduler = Scheduler(limits, pool)
    waiting = enumerate(served.prompts())
    answers: dict[Choice, NDArray[np.int32]] = {}
    while True:
        while len(scheduler.waiting) < 2 and (following := next(waiting, None)) is not None:
            index, prompt = following
            request = Request(
                str(index), prompt.ids, _PARAMS, max_tokens=len(prompt.answer), arrival_s=0.0,
                boundaries=prompt.boundaries,
            )  # fmt: skip
            request.number = index
            choice = Choice(request, 0)
            request.sequences = [choice]
            answers[choice] = prompt.answer
            scheduler.add(choice)
        if not scheduler.has_work:
            break
        step = scheduler.schedule()
        scheduler.commit(step)
        for chunk in step.chunks:
            if chunk.is_last:
                sequence = chunk.sequence
                answer = answers[sequence]
                sequence.append(int(answer[sequence.num_output_tokens]))
                if sequence.num_output_tokens == len(answer):
                    scheduler.finish(sequence)
                    del answers[sequence]
    counters = pool.counters
    return {
        "queried_tokens": counters.queried_tokens, "hit_tokens": counters.hit_tokens,
        "missed_tokens": dict(counters.missed_tokens), "num_preemptions": scheduler.num_preemptions,
    }  # fmt: skip
