"""The engine's record of a request and of each of its choices.

A ``Request`` holds what its choices share: the prompt, the parameters, the prompt's log probabilities. A
``Sequence`` is one choice: its output so far, its KV blocks and how many of its tokens are computed. One that outgrows
a model's ``longrope_threshold`` (longrope) is recomputed, since all of its tokens are then rotated otherwise.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.grammar.matcher import GrammarMatcher
from runtime.engine.messages import Begun, EngineRequest, PrefixMiss, RequestTimes, Source, TokenLogprobs
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import Chain, by_page
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.pictures import Pictures
from runtime.engine.scheduling.prefix_cache import Salt, SaltedPrefixes

_FIRST_OUTPUT_CAPACITY = 32


class State(enum.Enum):
    """HELD → WAITING ⇄ RUNNING → FINISHED. A choice is held until the request's grammar is compiled, all but the first
    until that has computed the prompt, and while its request is paused."""

    HELD = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


NO_STATE = range(0)
"""In ``state_ends``: the page holds no state."""

NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


class ReadAdapter(Protocol):
    """An adapter as it was read: the digest of its content, hexadecimal, and its pairs by the model's modules."""

    @property
    def digest(self) -> str: ...

    @property
    def pairs(self) -> Mapping[str, Any]: ...


class Request:
    """An admitted request; it is open while it has sequences.

    number          the order of arrival, unique
    prompt_ids      [num_prompt_tokens] int32
    seed            the request's seed, or one drawn at admission
    max_tokens      output tokens of each choice, at least 1, already cut to the context's end
    stop_ids        ids that end a choice, mapped to its ``stop_reason`` (None for EOS)
    adapter_digest  of the content of the adapter that it asks for; empty for none
    adapter         the content, once it is read; None for none
    adapter_slot    where that lies on the device, once it does; -1 for none
    cache_salt      prefixes are shared within it and the same adapter; None for those of all requests without a salt
    tenant          is charged for its tokens under the fair policy, and has this weight; the salt if none is named
    ttft_target_s, tpot_target_s  for the deadline policy, or None for the config's
    speculates      its tokens may be speculated
    prediction      [n] int32, tokens that its choices may repeat
    prompt_logprobs entries for the first prompt tokens, complete when the prompt is; None if not requested
    awaits_grammar  its grammar is being compiled, and its choices are held until then
    awaits_adapter  the same until its adapter has a slot
    awaits_pictures the same for its images' embeddings
    pictures        of the prompt, or None
    prefix_keys     [num_prompt_tokens] int32: the prompt's keys in the prefix cache
    boundaries      where later prompts may leave this one, such as ends of messages; ascending
    shows_difference  its first output says which tokens the prefix cache has instead
    begun           the beginning of each choice, if another engine has computed one
    lease           its pages are offered under this, and its choices leave after their first token; empty: they stay
    offered         the offer, once it is complete
    source          another engine's offer of its pages, or None
    awaits_pages    the same as `awaits_grammar` for these
    asked           the client's message, from which it begins again when the weights change; None if it ends then
    num_restarts    how often it has begun again after it had an output
    """

    __slots__ = (
        "adapter",
        "adapter_digest",
        "adapter_slot",
        "arrival_s",
        "asked",
        "awaits_adapter",
        "awaits_grammar",
        "awaits_pages",
        "awaits_pictures",
        "begun",
        "boundaries",
        "cache_salt",
        "eos_token_ids",
        "lease",
        "max_tokens",
        "num_restarts",
        "number",
        "offered",
        "params",
        "pictures",
        "prediction",
        "prefix_keys",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "request_id",
        "seed",
        "sequences",
        "shows_difference",
        "source",
        "speculates",
        "stop_ids",
        "tenant",
        "tenant_weight",
        "tpot_target_s",
        "ttft_target_s",
        "was_scheduled",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: NDArray[np.int32],
        params: SamplingParams,
        *,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        ttft_target_s: float | None = None,
        tpot_target_s: float | None = None,
        max_tokens: int,
        arrival_s: float,
        speculates: bool = True,
        prediction: NDArray[np.int32] = NO_IDS,
        pictures: Pictures | None = None,
        boundaries: tuple[int, ...] = (),
        shows_difference: bool = False,
        adapter_digest: bytes = b"",
        begun: list[Begun] | None = None,
        lease: str = "",
        source: Source | None = None,
        asked: EngineRequest | None = None,
        tenant: str | None = None,
        tenant_weight: float = 1.0,
    ) -> None:
        self.asked, self.num_restarts = asked, 0
        self.offered: Source | None = None
        self.begun, self.lease, self.source, self.awaits_pages = begun or [], lease, source, source is not None
        self.adapter_digest, self.awaits_adapter = adapter_digest, bool(adapter_digest)
        self.adapter: Future[ReadAdapter] | None = None
        self.adapter_slot = -1
        self.boundaries = boundaries
        self.shows_difference = shows_difference
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.eos_token_ids = eos_token_ids
        self.priority = priority
        self.cache_salt = cache_salt
        self.tenant, self.tenant_weight = cache_salt if tenant is None else tenant, tenant_weight
        self.ttft_target_s = ttft_target_s
        self.tpot_target_s = tpot_target_s
        self.max_tokens = max_tokens
        self.arrival_s = arrival_s
        self.speculates = speculates
        self.prediction = prediction
        self.stop_ids: dict[int, int | None] = {i: i for i in params.stop_token_ids or ()}
        if not params.ignore_eos:
            self.stop_ids.update(dict.fromkeys(eos_token_ids))
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None and not self.has_given_prompt:
            self.prompt_logprobs = [None]  # nothing precedes the first token
        self.number = 0
        self.seed = 0
        self.sequences: list[Sequence] = []
        self.was_scheduled = False
        self.awaits_grammar = params.grammar is not None
        self.pictures = pictures
        self.awaits_pictures = pictures is not None
        self.prefix_keys = prompt_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def is_awaiting(self) -> bool:
        """Whether its grammar, images, adapter or pages must be there before it is queued."""
        return self.awaits_grammar or self.awaits_pictures or self.awaits_adapter or self.awaits_pages

    @property
    def has_given_prompt(self) -> bool:
        """Whether another engine has output the first token, and with it what was asked about the prompt."""
        return bool(self.begun) and (self.begun[0].has_ended or bool(self.begun[0].token_ids))

    def prefix_salt(self, rotary_offset: int = 0) -> Salt:
        """Its prefixes in the cache, rotated so, are shared within this."""
        if not self.adapter_digest and not rotary_offset:
            return self.cache_salt
        return SaltedPrefixes(self.cache_salt, rotary_offset, self.adapter_digest)

    @property
    def open_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]


class Sequence:
    """One choice of a request.

    order          its place in every queue, set by the scheduler's policy
    max_tokens     most output tokens, the request's
    num_tokens     known tokens, prompt and output
    num_pending    tokens that planned steps will sample: 0, 1, or 2 while a step runs and the next is planned
    num_computed   tokens whose keys and values lie in ``blocks`` (in ``host_slots`` while it is swapped out) when the
                   planned steps have run
    num_committed  of those, the ones in ``blocks`` whose step has run
    blocks         by cache group, by page; ``NO_BLOCK`` for pages given up outside a window. Of a state's group: the
                   block of the last state, as planned, then that of the one before, which the next chunk overwrites
    state_ends     by entry: after how many tokens the page gives states; several after draft tokens that were kept
    checkpoints    where its chunks end, so that a state is kept there, ascending
    first_pages    by cache group: pages before this one were given up
    gives_up_at    the ``num_committed`` from which on the next page can be given up
    host_slots     by cache group: slots of its pages from ``first_pages`` on while it is swapped out; else empty
    chain          how many of its blocks are recorded in the prefix cache
    rotary_offset  rotary position minus position of its tokens: 0, the model's ``longrope_threshold`` if it is longer,
                   or an offset due to images
    row            its row in the persistent batch while it runs, unique among the running; else None
    last_step      number of the last step that had a chunk of it, or -1
    proposals      the numbers of `ProposalCounts`, if tokens were speculated
    num_cached_tokens  tokens that were found when it first started; None before that
    miss           why no more were; None if there were no more
    cached_ids     what another prompt has where this one differs, if the request shows it
    matcher        the state of its output in the request's grammar, or None
    mirostat_mu    mirostat's mu after its last token; None before the first
    """

    __slots__ = (
        "_output_buffer",
        "blocks",
        "cached_ids",
        "chain",
        "checkpoints",
        "first_pages",
        "first_scheduled_s",
        "first_token_s",
        "gives_up_at",
        "host_slots",
        "index",
        "last_step",
        "last_token_id",
        "last_token_s",
        "matcher",
        "max_tokens",
        "mirostat_mu",
        "miss",
        "num_cached_tokens",
        "num_committed",
        "num_computed",
        "num_output_tokens",
        "num_pending",
        "num_prompt_tokens",
        "num_tokens",
        "order",
        "proposals",
        "request",
        "rotary_offset",
        "row",
        "state",
        "state_ends",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.order: tuple[float, int, int] = (0.0, request.number, index)
        self.max_tokens = request.max_tokens
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_output_tokens = 0
        self.num_tokens = self.num_prompt_tokens
        self.num_pending = 0
        self.num_computed = 0
        self.num_committed = 0
        self.num_cached_tokens: int | None = None
        self.proposals: list[int] | None = None
        self.last_step = -1
        self.last_token_id = int(request.prompt_ids[-1])
        self.blocks: list[list[int]] = []
        self.first_pages: list[int] = []
        self.gives_up_at = 0
        self.host_slots: list[list[int]] = []
        self.chain = Chain(request.prefix_salt())
        self.rotary_offset = 0 if request.pictures is None else request.pictures.rotary_offset
        self.row: int | None = None
        self.matcher: GrammarMatcher | None = None
        self.mirostat_mu: float | None = None
        self.state = State.HELD
        self.state_ends = (range(1), NO_STATE)
        self.checkpoints: list[int] = []
        self.miss: PrefixMiss | None = None
        self.cached_ids: list[int] = []
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        capacity = min(request.max_tokens, _FIRST_OUTPUT_CAPACITY)
        self._output_buffer: NDArray[np.int32] = np.empty(capacity, np.int32)
        if request.begun:
            self._take_up(request.begun[index])

    def _take_up(self, begun: Begun) -> None:
        """Take over the tokens that another engine has sampled."""
        if begun.token_ids:
            self._output_buffer = np.array(begun.token_ids, np.int32)
            self.last_token_id = begun.token_ids[-1]
            self.num_output_tokens = len(begun.token_ids)
            self.num_tokens += self.num_output_tokens
        self.mirostat_mu = begun.mirostat_mu
        if begun.has_ended:
            self.state = State.FINISHED

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """The output so far, ``[num_output_tokens]`` int32: a view that the next ``append`` may invalidate."""
        return self._output_buffer[: self.num_output_tokens]

    @property
    def held_blocks(self) -> list[int]:
        """Those of all groups, in page order."""
        return by_page(self.blocks, self.first_pages)

    @property
    def is_finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def is_drawing_last(self) -> bool:
        """Whether the planned steps sample its last token: it only waits for them."""
        return self.num_output_tokens + self.num_pending >= self.max_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether computing the prompt has to give log probabilities."""
        logprobs = self.request.prompt_logprobs
        return self.index == 0 and logprobs is not None and len(logprobs) < self.num_prompt_tokens

    def cut(self, end: int) -> int:
        """The last position up to ``end`` where a step may end."""
        pictures = self.request.pictures
        return end if pictures is None else pictures.cut(end)

    @property
    def least_end(self) -> int:
        """The first position where its next chunk may end."""
        pictures = self.request.pictures
        return self.num_computed + 1 if pictures is None else pictures.least_end(self.num_computed)

    @property
    def is_at_whole_picture(self) -> bool:
        """Whether its next chunk begins with an image that may not be cut; while it waits, whether it may."""
        pictures = self.request.pictures
        if pictures is None or not pictures.whole:
            return False
        return self.state is State.WAITING or pictures.least_end(self.num_computed) > self.num_computed + 1

    def append(self, token_id: int) -> None:
        """Add a sampled token; its keys and values are computed by a later step."""
        count = self.num_output_tokens
        if count == len(self._output_buffer):
            self._output_buffer = np.resize(self._output_buffer, 2 * count)
        self._output_buffer[count] = token_id
        self.last_token_id = token_id
        self.num_output_tokens = count + 1
        self.num_tokens += 1
        self.num_pending -= 1

    def token_ids(self, start: int, end: int) -> NDArray[np.int32]:
        """The known tokens ``start:end`` of prompt and output: maybe a view that the next ``append`` may invalidate."""
        return self._known(self.request.prompt_ids, start, end)

    def prefix_keys(self, start: int, end: int) -> NDArray[np.int32]:
        """Their keys in the prefix cache."""
        return self._known(self.request.prefix_keys, start, end)

    def _known(self, prompt_ids: NDArray[np.int32], start: int, end: int) -> NDArray[np.int32]:
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return prompt_ids[start:end]
        if start >= num_prompt:
            return self._output_buffer[start - num_prompt : end - num_prompt]
        return np.concatenate((prompt_ids[start:], self._output_buffer[: end - num_prompt]))

    def times(self) -> RequestTimes:
        return RequestTimes(
            arrival_s=self.request.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
        )


def is_at_switch(sequence: Sequence, switch: int) -> bool:
    """Whether the next token that a running sequence computes is its first beyond the switch."""
    return sequence.num_computed == switch and not sequence.rotary_offset and not sequence.is_drawing_last


def choose_rotation(sequence: Sequence, switch: int, host_pool: HostPool | None) -> None:
    """Choose the rotation of a waiting sequence, whose tokens are all known. Its swapped content is dropped if that was
    rotated otherwise."""
    if sequence.rotary_offset or sequence.num_tokens <= switch:
        return
    sequence.rotary_offset = switch
    sequence.chain.salt = sequence.request.prefix_salt(switch)
    if sequence.host_slots:
        assert host_pool is not None
        host_pool.give([slot for slots in sequence.host_slots for slot in slots])
        sequence.host_slots, sequence.first_pages, sequence.num_computed = [], [], 0


def within_switch(drafts: list[int], sequence: Sequence, start: int, switch: int) -> list[int]:
    """The draft tokens after the token at ``start`` that are rotated as it is."""
    return drafts if sequence.rotary_offset else drafts[: switch - start - 1]
