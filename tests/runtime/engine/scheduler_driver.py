"""The pure scheduler under load, without a model: a driver that plays the engine, and pages that remember who wrote
them.

A slot of a page holds the group, a digest of the token written there and of all before it, the salt first, and how the
token was rotated. A state's page holds the digest of all tokens that it is of, and after draft tokens those of all that
may be kept. So a chunk that reads a stranger's page, a page with another history or another rotation, or one that was
never written is found before the chunk is "computed".
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import pytest

from runtime.engine.admission import prepare
from runtime.engine.config import BATCHING, POLICIES, PREEMPTIONS, VICTIMS, SchedulingConfig
from runtime.engine.errors import ContextLengthExceededError
from runtime.engine.limits import EngineLimits
from runtime.engine.messages import EngineInfo, EngineRequest, TokenLogprobs
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import pool_of
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.sequence import State as QueueState
from runtime.engine.scheduling.step import Chunk, Step
from runtime.kv.kinds import FULL, AnyKind, State, Window, blocks_of_sequence, window_of

VOCAB_SIZE = 4
GARBAGE = (-1, 0, 0)
MOST_DRAFTS = 3
LOGPROBS = TokenLogprobs(0, 0.0, 1, [], [])


class Pages:
    """What lies in each slot of each block, on the device and on the host."""

    def __init__(self, limits: EngineLimits) -> None:
        self.block_size = limits.block_size
        self.kinds = limits.cache_kinds
        self.blocks = [[GARBAGE] * self.block_size for _ in range(limits.num_blocks)]
        self.host = [[GARBAGE] * self.block_size for _ in range(limits.num_host_blocks)]

    def move(self, step: Step) -> None:
        for block_id, slot in step.swap_out:
            self.host[slot] = list(self.blocks[block_id])
        for slot, block_id in step.swap_in:
            self.blocks[block_id] = list(self.host[slot])
        for source, target in step.copies:
            self.blocks[target] = list(self.blocks[source])

    def check(self, chunk: Chunk, history: list[int]) -> None:
        """Before the chunk's tokens are computed, those before them must lie there."""
        size = self.block_size
        for group, (ids, kind) in enumerate(zip(chunk.sequence.blocks, self.kinds)):
            if not kind.follows_tokens:
                state = (group, history[chunk.start - 1], chunk.sequence.rotary_offset)
                assert not chunk.start or state in self.blocks[ids[1]], f"the state before {chunk} is not in {ids[1]}"
                continue
            window = window_of(kind)
            seen = kind.first_page(chunk.start, size) * size if window is None else max(0, chunk.start - window + 1)
            for place in range(seen // size, -(-chunk.start // size)):
                first = max(seen, place * size)
                digests = history[first : min((place + 1) * size, chunk.start)]
                expected = [(group, digest, chunk.sequence.rotary_offset) for digest in digests]
                found = self.blocks[ids[place]][first - place * size :][: len(expected)]
                assert found == expected, f"tokens {first} … of {chunk} are not in block {ids[place]}"

    def write(self, chunk: Chunk, history: list[int]) -> None:
        end = chunk.start + chunk.num_tokens
        digests, first_state = history[: end - len(chunk.draft_ids)], end - len(chunk.draft_ids)
        for token_id in chunk.draft_ids:
            digests.append(hash((digests[-1], token_id)))
        for group, (ids, kind) in enumerate(zip(chunk.sequence.blocks, self.kinds)):
            written = [(group, digest, chunk.sequence.rotary_offset) for digest in digests]
            if not kind.follows_tokens:
                assert chunk.start == 0 or ids[0] != ids[1], "a chunk writes the state that it reads"
                self.blocks[ids[0]] = written[first_state - 1 :] + [GARBAGE] * self.block_size
                continue
            for position in range(chunk.start, end):
                place, offset = divmod(position, self.block_size)
                self.blocks[ids[place]][offset] = written[position]


@dataclass
class Outcome:
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0


class Driver:
    """Plays the engine: admits, runs steps plainly or one ahead, draws random tokens, ends sequences.

    rng      everything that is random comes from here
    eos      probability that a drawn token ends its sequence
    failure  probability that a step fails after its transfers
    drafts   probability that a decode gets draft tokens, of which any number is right
    """

    def __init__(
        self, rng: random.Random, limits: EngineLimits, *, overlaps: bool, eos: float = 0.0, failure: float = 0.0,
        drafts: float = 0.0,
    ) -> None:  # fmt: skip
        self.rng = rng
        self.limits = limits
        self.overlaps = overlaps
        self.eos = eos
        self.failure = failure
        self.drafts = drafts
        self.num_drafts = 0
        self.pool = pool_of(limits)
        self.scheduler = Scheduler(limits, self.pool)
        self.pages = Pages(limits)
        self.info = _info(limits)
        self.open: list[Sequence] = []
        self.histories: dict[Sequence, list[int]] = {}
        self.outcome = Outcome()
        self.clock_s = 0.0
        self.num_steps = 0
        self.num_requests = 0
        self._current: Step | None = None
        self._idle_rounds = 0

    def add(self, prompt: list[int], **fields: object) -> Request | None:
        """Admit a request as the engine does; None when it was refused since it is too long."""
        params = {name: fields.pop(name) for name in ("n", "max_tokens", "prompt_logprobs") if name in fields}
        message = EngineRequest(
            request_id=f"r{self.num_requests}",
            prompt_token_ids=prompt,
            params=SamplingParams(**params),  # type: ignore[arg-type]
            arrival_time_s=self.clock_s + 1e-9,
            **fields,  # type: ignore[arg-type]
        )
        if len(prompt) >= self.limits.max_model_len:
            limit = self.limits.max_model_len
            with pytest.raises(ContextLengthExceededError, match=f"{limit} tokens.*{len(prompt)}, and"):
                prepare(message, self.info)
            self.outcome.refused += 1
            return None
        request = prepare(message, self.info)
        request.number = self.num_requests
        self.num_requests += 1
        request.sequences = [Sequence(request, index) for index in range(request.params.n)]
        salt = request.cache_salt
        history = [0 if salt is None else zlib.crc32(salt.encode()) + 1]
        for token_id in prompt:
            history.append(hash((history[-1], token_id)))
        for sequence in request.sequences:
            self.histories[sequence] = history[1:]
        self.open += request.sequences
        self.scheduler.add(request.sequences[0])
        return request

    def abort(self, sequence: Sequence) -> None:
        """End one choice; the first's end lets the others queue, as in the engine."""
        self._end(sequence)
        self.outcome.aborted += 1
        if sequence.index == 0:
            self._release_held(sequence.request)

    def step(self) -> None:
        """One round of the loop. All invariants are checked once a step: when one is open, the one before committed."""
        scheduler = self.scheduler
        self.clock_s += 0.01
        before = self.outcome.finished + sum(sequence.num_output_tokens for sequence in self.open)
        current, self._current = self._current, None
        if current is None:
            current = self._begin(self._plan())
        if self.overlaps:
            planned = self._plan()
            self._end_step(current)
            self.arrivals()
            scheduler.extend(planned)
            scheduler.check_invariants()
            self._check_budget(planned)
            if planned.has_work:
                self._current = self._begin(planned)
        else:
            self._end_step(current)
            self.arrivals()
        after = self.outcome.finished + sum(sequence.num_output_tokens for sequence in self.open)
        self._idle_rounds = self._idle_rounds + 1 if self.open and after == before else 0
        assert self._idle_rounds < 40 + 4 * self.limits.max_model_len, "no token for so long: a deadlock or a livelock"

    def drain(self) -> None:
        """Without newcomers everything ends, and nothing is left behind."""
        while self.open or self._current is not None:
            self.step()
        self.scheduler.check_invariants()
        assert not self.scheduler.has_work
        assert not self.scheduler.open_steps
        assert self.pool.num_free == self.pool.num_blocks, "blocks leaked"
        host_pool = self.pool.host_pool
        assert host_pool is None or host_pool.num_free == host_pool.num_slots, "host slots leaked"

    def arrivals(self) -> None:
        """Called between two steps; for subclasses and tests to replace."""

    def _plan(self) -> Step:
        scheduler = self.scheduler
        decoding = [s for s in scheduler.running if s.num_tokens + s.num_pending == s.num_computed + 1]
        decoding = [s for s in decoding if not s.is_drawing_last]
        had_work = bool(decoding or scheduler.waiting or self._prefilling())
        first = scheduler.running[0] if scheduler.running else None
        for sequence in decoding if self.drafts else ():
            if not sequence.num_pending and self.rng.random() < self.drafts:
                count = self.rng.randrange(1, MOST_DRAFTS + 1)
                scheduler.drafts[sequence] = [self.rng.randrange(VOCAB_SIZE) for _ in range(count)]
        step = scheduler.schedule()
        self.num_drafts += step.num_drafts
        assert all(sequence is not first for sequence, _ in step.preempted), "the first in order was a victim"
        if not self.overlaps:
            scheduler.check_invariants()
        self._check_budget(step)
        assert step.has_work or not had_work or scheduler.open_steps, "work was left undone"
        if self.limits.scheduling.batching == "stall-free":
            chosen = {id(chunk.sequence) for chunk in step.chunks}
            for sequence in decoding:
                is_paused = scheduler.open_steps and not self.pool.has_room(self.pool.page_counts)
                assert id(sequence) in chosen or sequence.state is QueueState.WAITING or is_paused, "a decode stalled"
        return step

    def _prefilling(self) -> bool:
        return any(sequence.num_tokens - sequence.num_computed > 1 for sequence in self.scheduler.running)

    def _check_budget(self, step: Step) -> None:
        chunks = step.chunks
        is_whole = self.limits.scheduling.batching != "stall-free"
        assert step.num_tokens == sum(chunk.num_tokens for chunk in chunks)
        assert step.num_tokens <= step.max_tokens or (is_whole and len(chunks) == 1), "beyond the budget"
        assert len({chunk.sequence for chunk in chunks}) == len(chunks) <= self.limits.max_num_seqs
        batching = self.limits.scheduling.batching
        starts = [chunk.is_first for chunk in chunks]
        if batching in ("prefill-first", "static"):
            assert all(starts) or not any(starts), "prompts and decodes are mixed"
        if batching == "static" and any(starts):
            assert len(starts) == len(self.scheduler.running), "a batch began before the last had ended"
        most = self.limits.scheduling.prefill_chunk
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.num_tokens >= 1
            assert sequence.num_output_tokens + sequence.num_pending <= sequence.request.max_tokens, "one too many"
            assert most is None or chunk.num_tokens - len(chunk.draft_ids) <= most
            if is_whole:
                assert chunk.is_last, "a whole prompt was cut"

    def _begin(self, step: Step) -> Step:
        """Run the step's transfers and chunks: every token of them is known by now."""
        self.pages.move(step)
        for chunk in step.chunks:
            sequence = chunk.sequence
            known = chunk.start + chunk.num_tokens - len(chunk.draft_ids)
            assert known <= sequence.num_tokens, "a token is computed that is not known"
            switch = self.limits.longrope_threshold
            is_longer = switch is not None and sequence.num_tokens > switch
            assert sequence.rotary_offset == (switch if is_longer else 0), "a token is rotated for another length"
            self.pages.check(chunk, self.histories[sequence])
        for chunk in step.chunks:
            self.pages.write(chunk, self.histories[chunk.sequence])
        return step

    def _end_step(self, step: Step) -> None:
        if not any(each is step for each in self.scheduler.open_steps):
            return  # without work when it was planned
        self.num_steps += 1
        if step.chunks and self.rng.random() < self.failure:
            self.scheduler.abandon(step)
            for chunk in step.chunks:
                for position in range(chunk.start, chunk.start + chunk.num_tokens):
                    self._spoil(chunk.sequence, position)
                self._spoil_states(chunk)
                for sequence in chunk.sequence.request.sequences:
                    if not sequence.is_finished:
                        self.outcome.failed += 1
                        self._end(sequence)
            return
        accepted = {
            chunk.sequence: self.rng.randrange(1, chunk.num_samples + 1) for chunk in step.chunks if chunk.draft_ids
        }
        self.scheduler.commit(step, accepted)
        self.scheduler.costs.observe_step(step.num_tokens, 0.001 + 0.0001 * step.num_tokens)
        if step.swap_out or step.swap_in:
            num_blocks = len(step.swap_out) + len(step.swap_in)
            self.scheduler.costs.observe_transfer(num_blocks, self.rng.choice((1e-6, 1e-2)) * num_blocks)
        for chunk in step.chunks:
            if not chunk.sequence.is_finished:
                self._add_prompt_logprobs(chunk)
                kept = chunk.draft_ids[: accepted.get(chunk.sequence, 1) - 1]
                for token_id in (*kept, self.rng.randrange(VOCAB_SIZE)) if chunk.is_last else ():
                    if not chunk.sequence.is_finished:
                        self._append(chunk.sequence, token_id)

    def _spoil(self, sequence: Sequence, position: int) -> None:
        place, offset = divmod(position, self.limits.block_size)
        for ids, first, kind in zip(sequence.blocks, sequence.first_pages, self.limits.cache_kinds):
            if first <= place < len(ids) and kind.follows_tokens:
                self.pages.blocks[ids[place]][offset] = GARBAGE

    def _spoil_states(self, chunk: Chunk) -> None:
        """Those that this chunk writes."""
        for ids, kind in zip(chunk.sequence.blocks, self.limits.cache_kinds):
            for block_id, ends in zip(ids, chunk.sequence.state_ends):
                if not kind.follows_tokens and chunk.start + chunk.num_tokens - len(chunk.draft_ids) in ends:
                    self.pages.blocks[block_id] = [GARBAGE] * self.limits.block_size

    def _append(self, sequence: Sequence, token_id: int) -> None:
        if sequence.num_output_tokens == 0 and sequence.index == 0:
            self._release_held(sequence.request)
        sequence.append(token_id)
        history = self.histories[sequence]
        history.append(hash((history[-1], token_id)))
        is_end = self.eos > 0.0 and self.rng.random() < self.eos
        if is_end or sequence.num_output_tokens == sequence.request.max_tokens:
            self.outcome.finished += 1
            self._end(sequence)

    def _add_prompt_logprobs(self, chunk: Chunk) -> None:
        """Every position of the prompt must be computed, none taken over from elsewhere."""
        request = chunk.sequence.request
        if chunk.sequence.needs_prompt_logprobs:
            assert request.prompt_logprobs is not None
            end = min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
            first = len(request.prompt_logprobs) - 1
            assert chunk.start <= first, "a part of the prompt was not computed"
            request.prompt_logprobs += [LOGPROBS] * (end - first)

    def _release_held(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.state is QueueState.HELD:
                self.scheduler.add(sequence)

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.open.remove(sequence)
        del self.histories[sequence]


STATE_KINDS: tuple[tuple[AnyKind, ...], ...] = (
    (State(),),
    (FULL, State()),
    (FULL, State(), State()),
    (State(), Window(3)),
    (FULL, State(), Window(5)),
)
"""Kinds of the cache groups of models with recurrent states."""

CACHE_KINDS: tuple[tuple[AnyKind, ...], ...] = (
    (FULL,),
    (Window(4),),
    (Window(1), Window(1)),
    (FULL, Window(3)),
    (FULL, Window(2), Window(2)),
    (FULL, Window(9), Window(9), Window(9)),
    (FULL, FULL, Window(5)),
    (Window(3), Window(6)),
)
"""Kinds of the cache groups of models that may be tried."""


def _policy(rng: random.Random, number: int) -> str:
    """One of all. The youngest goes by a number that is drawn anyway, so that other scenarios are as they were."""
    *others, youngest = POLICIES
    chosen = rng.choice(others)
    return youngest if number % 5 == 0 else chosen


def random_limits(rng: random.Random, *, cache_kinds: tuple[AnyKind, ...] = (FULL,), **fixed: object) -> EngineLimits:
    """Small in every way; ``fixed`` names fields of ``SchedulingConfig``."""
    batching = fixed.get("batching", rng.choice(BATCHING))
    block_size = rng.choice((1, 2, 4))
    num_whole = sum(kind.is_whole for kind in cache_kinds)
    num_blocks = rng.randrange(2, 14) * max(1, num_whole) + 2 * (len(cache_kinds) - num_whole)
    chunks: dict[str, object] = {}
    if batching == "stall-free":
        kind = rng.randrange(3)
        if kind == 1:
            chunks["prefill_chunk"] = rng.randrange(1, 9)
        elif kind == 2:
            chunks["prefill_chunk_stages"] = (64, 32, rng.randrange(1, 4), rng.randrange(1, 40))
    scheduling: dict[str, object] = {
        "batching": batching,
        "scheduling_policy": _policy(rng, num_blocks + block_size),
        "preemption": rng.choice(PREEMPTIONS),
        "victim": rng.choice(VICTIMS),
        "ageing_s": rng.choice((0.05, 10.0)),
        **chunks,
        **fixed,
    }
    max_num_batched_tokens = rng.randrange(1, 24)
    chunk = 1 if batching == "stall-free" else None
    longest = next(
        length
        for length in range(num_blocks * block_size, 0, -1)
        if blocks_of_sequence(length, cache_kinds, block_size, chunk=chunk) <= num_blocks
    )
    max_model_len = max(2, longest - rng.randrange(0, 3))
    return EngineLimits(
        max_model_len=max_model_len,
        max_num_seqs=min(rng.randrange(1, 6), max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        max_waiting=1000,
        scheduling=SchedulingConfig(**scheduling),  # type: ignore[arg-type]
        enable_prefix_caching=rng.random() < 0.8,
        num_host_blocks=rng.choice((0, 1, 4, 12)) * len(cache_kinds),
        cache_kinds=cache_kinds,
        pending_tokens=MOST_DRAFTS - 1,
        longrope_threshold=rng.randrange(1, max_model_len) if rng.random() < 0.3 else None,
    )


def add_random_request(driver: Driver, rng: random.Random) -> None:
    """A request that often shares its beginning with others, sometimes fills the context, sometimes does not fit."""
    limits = driver.limits
    longest = limits.max_model_len
    num_prompt_tokens = rng.choice((1, rng.randrange(1, longest + 1), rng.randrange(1, max(2, longest // 2))))
    prompt = [(position * position) % VOCAB_SIZE for position in range(num_prompt_tokens)]
    for _ in range(rng.randrange(0, 3)):
        position = rng.randrange(0, num_prompt_tokens)
        prompt[position] = rng.randrange(VOCAB_SIZE)
    fields: dict[str, object] = {
        "n": rng.choice((1, 1, 1, 2, 3)),
        "max_tokens": rng.choice((1, 2, rng.randrange(1, longest + 1), longest)),
    }
    if rng.random() < 0.1:
        fields["prompt_logprobs"] = 0
    if rng.random() < 0.3:
        fields["cache_salt"] = rng.choice(("a", "b"))
    policy = limits.scheduling.scheduling_policy
    if policy == "priority":
        fields["priority"] = rng.randrange(-2, 3)
    elif policy == "deadline":
        fields["ttft_target_s"] = rng.choice((None, 0.01, 1.0))
        fields["tpot_target_s"] = rng.choice((None, 0.001, 0.1))
    elif policy == "fair":
        fields["tenant"] = rng.choice((None, "one", "another"))
        fields["tenant_weight"] = rng.choice((1.0, 1.0, 0.25, 3))
    driver.add(prompt, **fields)


def _info(limits: EngineLimits) -> EngineInfo:
    return EngineInfo(
        model_name="none",
        model_path="none",
        architecture="None",
        device="cpu",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_waiting=limits.max_waiting,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        kv_cache_bytes=0,
        weight_bytes=0,
        scheduling_policy=limits.scheduling.scheduling_policy,
    )
