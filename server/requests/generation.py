"""One HTTP request in the engine: admission of its prompts, its choices' text as it arrives, its end.

    generation.start()                        # every prompt admitted, or a typed error
    with closing(generation):
        async for pieces in generation:       # all since the last round
            ...

`close` ends all running choices, so a disconnected client, an error and a cancelled task all free the request's blocks
within one step. The module does not depend on HTTP or OpenAI's shapes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add

import msgspec
from msgspec import UNSET, UnsetType

from runtime.engine.messages import (
    AdapterRef,
    EngineOutput,
    EngineRequest,
    ErrorCode,
    ImageItem,
    MissReason,
    PrefixMiss,
    ProposalCounts,
    Source,
    TokenLogprobs,
)
from runtime.engine.process.client import EngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.text.pipeline import TextDelta, TextPipeline
from runtime.text.reasoning import THINK, ReasoningTags, reasoning_start
from runtime.text.response_template.parser import AnswerTemplate
from runtime.text.tools.table import ToolReading
from runtime.text.turns import turn_start_id
from server.observing.meter import RequestMeter
from server.openai_api.schema import GenerationRequest
from server.requests.bridge import LoopBridge, Signal
from server.transport.key_holders import KeyHolder
from tokenizer import Tokenizer

TURN_S = 5e-3
OUTPUTS_AT_ONCE = 64
"""A request that many outputs have come for lets others have their turn after so long, looked at after so many."""

OUTPUT_BYTES, ENTRY_BYTES, ALTERNATIVE_BYTES = 400, 300, 40
"""Bytes in Python of an output of one token, of its log probability, and of each alternative."""


def kept_bytes(output: EngineOutput) -> int:
    """Approximate memory of an output until it is taken."""
    entries = (output.logprobs or [])[:1] + (output.prompt_logprobs or [])[-1:]
    num_entries = len(output.logprobs or ()) + len(output.prompt_logprobs or ())
    width = max((len(entry.top_ids) for entry in entries if entry is not None), default=0)
    return OUTPUT_BYTES + num_entries * (ENTRY_BYTES + ALTERNATIVE_BYTES * width)


class GenerationError(Exception):
    """A choice ended by a fault. `is_shutdown`: the engine was stopped while the choice was open. `is_cancelled`: not a
    fault, `Generation.cancel` was called. `code`: the request's error, by `EngineOutput.error_code`."""

    def __init__(
        self, message: str, *, is_shutdown: bool = False, is_cancelled: bool = False, code: ErrorCode | None = None
    ) -> None:
        super().__init__(message)
        self.is_shutdown = is_shutdown
        self.is_cancelled = is_cancelled
        self.code = code


_NO_PROPOSALS = ProposalCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """A request's scheduling, cache salt and name; the meanings are `EngineRequest`'s, but `given_id` is the client's
    name for it (its field `request_id`), and `holder` that of its API key, the tenant."""

    priority: int = 0
    cache_salt: str | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    given_id: str | None = None
    speculates: bool = True
    prediction: tuple[int, ...] = ()
    adapter: AdapterRef | None = None
    lease: str = ""
    source: Source | None = None
    holder: KeyHolder | None = None

    @classmethod
    def of(cls, asked: GenerationRequest, adapter: AdapterRef | None = None) -> Scheduling:
        return cls(
            adapter=adapter,
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt,
            ttft_target_s=asked.ttft_target_s,
            tpot_target_s=asked.tpot_target_s,
            given_id=asked.request_id,
            speculates=asked.speculation is not False,
        )


@dataclass(slots=True)
class Piece:
    """New output of one choice: `choice` counts over all prompts (prompt × n + index within the prompt)."""

    choice: int
    delta: TextDelta


@dataclass(slots=True)
class _Held:
    """The pieces of a choice that may begin anew, and their tokens, until it has ended."""

    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class _Prompt:
    """A prompt's state. `open_choices` still owe text to the client, `running_choices` still run in the engine;
    a choice that has met a stop string is running but not open until the engine has stopped it."""

    number: int
    request_id: str
    token_ids: list[int]
    pipelines: list[TextPipeline]
    open_choices: set[int]
    running_choices: set[int] = field(default_factory=set)
    logprobs: list[TokenLogprobs | None] | None = None
    calls: dict[int, dict[int, tuple[str, list[str]]]] = field(default_factory=dict)
    held: dict[int, _Held] = field(default_factory=dict)

    def note_calls(self, choice: int, delta: TextDelta) -> None:
        """Keeps the ids of a choice's calls, and their arguments in pieces, by the calls' numbers."""
        calls = self.calls.setdefault(choice, {})
        for piece in delta.tool_calls:
            if piece.id is not None:
                calls[piece.index] = (piece.id, [])
            calls[piece.index][1].append(piece.arguments)


@dataclass(slots=True, kw_only=True)
class Generation:
    """All choices of all prompts of one request.

    request_id      prefix of the engine's request ids
    prompts         token ids; each prompt is a request of its own to the engine, with `params.n` choices
    reasoning, tools, harmony  how answers are parsed: whether the model may think between tags, how it writes calls,
                    and whether it writes harmony's messages
    eos_token_ids   the ids that end a choice; the model's by default
    images          of each prompt, until they are admitted; none: no prompt has any
    meter           observes every output; `Service.admit` sets it
    on_call         called with the id and the arguments of each whole call

    max_kept_bytes  of pending outputs, about: beyond it the engine pauses the request until half of them are taken

    restarts        choices may begin anew on new weights: their pieces are held until they have ended
    tells_versions  answers say which weights computed them
    gives_aborted   a choice that a pause or new weights end is given as far as it came; else it is an error
    versions        of the weights that computed each choice, by its number over all prompts

    on_close        called once, by the first `close`
    on_miss         called with a prompt and the first output of its first choice, if it missed the prefix cache; such
                    outputs then have the tokens that the cache has instead

    `num_prompt_tokens`, `num_cached_tokens` (prompt tokens found in the prefix cache), `num_completion_tokens`
    and `num_reasoning_tokens` (of the completion's) and `proposals` count over all of them; `prefix_miss` is
    that of the first prompt that has one; `prompt_logprobs(i)` is set before the first piece of prompt i. `offered` are
    pages that another server can take."""

    client: EngineClient
    bridge: LoopBridge
    tokenizer: Tokenizer | None
    request_id: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    arrival_time_s: float
    scheduling: Scheduling = Scheduling()
    reasoning: ReasoningTags | None = None
    tools: ToolReading | None = None
    harmony: bool = False
    template: AnswerTemplate | None = None
    eos_token_ids: tuple[int, ...] | None = None
    images: Sequence[tuple[ImageItem, ...]] = ()
    meter: RequestMeter | None = None
    on_call: Callable[[str, str], None] | None = None
    max_kept_bytes: int = 1 << 62
    restarts: bool = False
    tells_versions: bool = False
    gives_aborted: bool = False
    versions: dict[int, str] = field(default_factory=dict)
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    proposals: ProposalCounts = _NO_PROPOSALS
    num_cached_tokens: int = 0
    prefix_miss: PrefixMiss | None = None
    offered: Source | None = None
    has_left: bool = False
    is_cancelled: bool = False
    on_close: list[Callable[[], object]] = field(default_factory=list)
    on_miss: Callable[[list[int], EngineOutput], object] | None = None
    _prompts: list[_Prompt] = field(default_factory=list)
    _outputs: deque[tuple[_Prompt, EngineOutput]] = field(default_factory=deque)
    _ready: deque[Piece] = field(default_factory=deque)  # of choices that were held
    _arrived: Signal = field(default_factory=Signal)
    _num_kept_bytes: int = 0
    _is_paused: bool = False

    def __post_init__(self) -> None:
        """Takes time linear in the prompts (each choice's decoder begins at its prompt's end)."""
        choices = range(self.params.n)
        self._prompts = [
            _Prompt(
                number=number,
                request_id=f"{self.request_id}-{number}",
                token_ids=token_ids,
                pipelines=[self._pipeline(token_ids) for _ in choices],
                open_choices=set(choices),
            )
            for number, token_ids in enumerate(self.prompts)
        ]

    def _pipeline(self, prompt_token_ids: list[int]) -> TextPipeline:
        reasoning, tags = None, self.reasoning
        if tags is not None and self.tokenizer is not None:
            reasoning = reasoning_start(self.tokenizer, prompt_token_ids, tags)
        return TextPipeline(
            self.tokenizer, self.params, prompt_token_ids, reasoning=reasoning, tags=tags or THINK, tools=self.tools,
            harmony=self.harmony, template=self.template,
        )  # fmt: skip

    def start(self) -> None:
        """Admits every prompt, or none; call it on the event loop. Raises the errors of `EngineClient.submit`."""
        eos_token_ids = self.client.info.eos_token_ids if self.eos_token_ids is None else self.eos_token_ids
        holder = self.scheduling.holder
        for prompt in self._prompts:
            request = EngineRequest(
                request_id=prompt.request_id,
                prompt_token_ids=prompt.token_ids,
                params=self.params,
                eos_token_ids=eos_token_ids,
                priority=self.scheduling.priority,
                cache_salt=self.scheduling.cache_salt,
                ttft_target_s=self.scheduling.ttft_target_s,
                tpot_target_s=self.scheduling.tpot_target_s,
                arrival_time_s=self.arrival_time_s,
                speculates=self.scheduling.speculates,
                prediction=list(self.scheduling.prediction),
                images=self.images[prompt.number] if self.images else (),
                turn_start_id=turn_start_id(self.tokenizer) if self.client.info.has_states else None,
                shows_difference=self.on_miss is not None,
                adapter=self.scheduling.adapter,
                lease=self.scheduling.lease,
                source=self.scheduling.source,
                restarts=self.restarts,
                tenant=None if holder is None else holder.tenant,
                tenant_weight=1.0 if holder is None else holder.terms.weight,
            )
            try:
                self.client.submit(request, self.bridge.sink(partial(self._receive, prompt)))
            except BaseException:
                self.close()
                raise
            prompt.running_choices.update(prompt.open_choices)
        self.images = ()

    def close(self) -> None:
        """Ends the open choices. May be called again."""
        while self._outputs:
            self._meter_end(self._outputs.popleft()[1])
        for prompt in self._prompts:
            prompt.open_choices.clear()
            if prompt.running_choices:
                prompt.running_choices.clear()
                self.client.cancel(prompt.request_id)
        while self.on_close:
            self.on_close.pop()()

    def cancel(self) -> None:
        """Frees the blocks now, and ends the iteration with `GenerationError`."""
        self.is_cancelled = True
        self.close()
        self._arrived.set()

    def leave(self) -> None:
        """Frees the blocks now, and ends the iteration: the client has disconnected."""
        self.has_left = True
        self.close()
        self._arrived.set()

    @property
    def has_parts(self) -> bool:
        """Whether an answer may hold parts other than content."""
        return self.harmony or any(each is not None for each in (self.reasoning, self.tools, self.template))

    @property
    def of_prediction(self) -> tuple[int, int] | tuple[()]:
        """The numbers of accepted and rejected tokens of the request's prediction, if it has one."""
        counts = self.proposals
        kept = counts.num_kept_of_prediction
        return (kept, counts.num_tried_of_prediction - kept) if self.scheduling.prediction else ()

    def version_of(self, choice: int) -> str | UnsetType:
        """The version of the weights of a choice that has ended, if answers tell it."""
        return self.versions.get(choice, UNSET) if self.tells_versions else UNSET

    @property
    def weight_version(self) -> str | UnsetType:
        """The same of all choices; several with commas."""
        return ",".join(dict.fromkeys(self.versions.values())) if self.tells_versions else UNSET

    @property
    def missed(self) -> tuple[MissReason, int] | tuple[()]:
        """Why a prompt missed the prefix cache, and its first token that differs."""
        miss = self.prefix_miss
        return () if miss is None else (miss.reason, miss.first_difference)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    def prompt_logprobs(self, number: int) -> list[TokenLogprobs | None]:
        """Log probabilities of prompt `number`, which must have been requested and have arrived."""
        logprobs = self._prompts[number].logprobs
        assert logprobs is not None
        return logprobs

    async def wait_for_first(self) -> None:
        """Returns when there is an output. Raises `GenerationError` if it says that the pages of the request's source
        are not to be had."""
        while not self._outputs and any(prompt.open_choices for prompt in self._prompts):
            await self._arrived.wait()
        self._arrived.set()  # for the iteration
        if self._outputs and (first := self._outputs[0][1]).error_code == "stale_lease":
            raise GenerationError(first.error or "", code=first.error_code)

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        """Lists of pieces, in order, until every choice has finished or the client has left.

        Raises `GenerationError` when the engine could not finish a choice, or after `cancel`.
        """
        while any(prompt.open_choices for prompt in self._prompts):
            await self._arrived.wait()
            turn_s = time.monotonic()
            while self._outputs or self._ready:
                if pieces := self._next_pieces():
                    yield pieces
                if time.monotonic() - turn_s > TURN_S:
                    await asyncio.sleep(0)
                    turn_s = time.monotonic()
        if self.is_cancelled:
            raise GenerationError("the request was cancelled", is_cancelled=True)

    def _next_pieces(self) -> list[Piece]:
        """The pieces of some of the outputs that have arrived."""
        pieces: list[Piece] = []
        for _ in range(min(len(self._ready), OUTPUTS_AT_ONCE)):
            pieces.append(self._ready.popleft())
        for _ in range(min(len(self._outputs), OUTPUTS_AT_ONCE - len(pieces))):
            prompt, output = self._outputs.popleft()
            self._num_kept_bytes -= kept_bytes(output)
            if output.index in prompt.open_choices:
                piece = self._push(prompt, output)
                if self.restarts:
                    self._hold(prompt, output.index, piece)
                else:
                    pieces.append(piece)
            else:  # it came before a stop string was found
                self._meter_end(output)
        if self._is_paused and self._num_kept_bytes <= self.max_kept_bytes // 2:
            self._is_paused = False
            for prompt in self._prompts:
                if prompt.running_choices:
                    self.client.resume(prompt.request_id)
        return pieces

    def _hold(self, prompt: _Prompt, index: int, piece: Piece) -> None:
        """Keeps a choice's pieces until it has ended."""
        held = prompt.held.setdefault(index, _Held())
        held.pieces.append(piece)
        held.num_tokens += len(piece.delta.token_ids)
        held.num_reasoning_tokens += piece.delta.num_reasoning_tokens
        if index not in prompt.open_choices:
            self._ready += prompt.held.pop(index).pieces

    def _begin_again(self, prompt: _Prompt, index: int) -> None:
        """Forgets what a choice has had so far."""
        prompt.pipelines[index] = self._pipeline(prompt.token_ids)
        prompt.calls.pop(index, None)
        if (held := prompt.held.pop(index, None)) is not None:
            self.num_completion_tokens -= held.num_tokens
            self.num_reasoning_tokens -= held.num_reasoning_tokens

    def _receive(self, prompt: _Prompt, output: EngineOutput) -> None:
        if output.finish_reason is not None:
            prompt.running_choices.discard(output.index)
        if self.meter is not None:
            self.meter.observe(output)
        if output.index not in prompt.open_choices:
            self._meter_end(output)
            return
        self._outputs.append((prompt, output))
        self._arrived.set()
        self._num_kept_bytes += kept_bytes(output)
        if self._num_kept_bytes > self.max_kept_bytes and not self._is_paused:
            self._is_paused = True
            for each in self._prompts:
                if each.running_choices:
                    self.client.pause(each.request_id)

    def _meter_end(self, output: EngineOutput) -> None:
        """Meters a choice's last output once its text is known or not needed: it may hold a stop string."""
        if self.meter is not None and output.finish_reason is not None:
            self.meter.finish(output)

    def _push(self, prompt: _Prompt, output: EngineOutput) -> Piece:
        is_given = output.finish_reason == "abort" and output.error is not None and self.gives_aborted
        if output.finish_reason in ("error", "abort") and not is_given:
            self._meter_end(output)
        if output.finish_reason == "error":
            raise GenerationError(
                output.error or "the engine reported an error", is_shutdown=output.engine_died, code=output.error_code
            )
        if output.finish_reason == "abort" and not is_given:
            raise GenerationError(output.error or "the engine was stopped", is_shutdown=True)
        if output.begins_again:
            self._begin_again(prompt, output.index)
        if output.prompt_logprobs is not None:  # with choice 0's first output; the other choices start later
            prompt.logprobs = output.prompt_logprobs
        if output.proposals is not None:
            self.proposals = ProposalCounts(
                *map(add, msgspec.structs.astuple(self.proposals), msgspec.structs.astuple(output.proposals))
            )
        if output.offered is not None:
            self.offered = output.offered
        if output.index == 0 and output.num_cached_tokens is not None:
            self.num_cached_tokens += output.num_cached_tokens
            self.prefix_miss = self.prefix_miss or output.prefix_miss
            if output.prefix_miss is not None and self.on_miss is not None:
                self.on_miss(prompt.token_ids, output)
        pipeline = prompt.pipelines[output.index]
        delta = pipeline.push(output)
        self.versions[prompt.number * self.params.n + output.index] = output.weight_version
        self.num_completion_tokens += len(delta.token_ids)
        self.num_reasoning_tokens += delta.num_reasoning_tokens
        if delta.tool_calls:
            prompt.note_calls(output.index, delta)
        if delta.finish_reason is not None:
            prompt.open_choices.discard(output.index)
            for call_id, pieces in prompt.calls.pop(output.index, {}).values():
                if self.on_call is not None:
                    self.on_call(call_id, "".join(pieces))
            if self.meter is not None:
                self.meter.mended(pipeline.num_malformed_headers)
                if delta.finish_reason == "stop":
                    self.meter.stop(prompt.request_id, output.index)
            if delta.should_cancel and output.index in prompt.running_choices:
                prompt.running_choices.discard(output.index)
                self.client.cancel(prompt.request_id, output.index)
        self._meter_end(output)
        return Piece(prompt.number * self.params.n + output.index, delta)
