"""`POST /v1/completions`: the legacy form, with features that evaluation tools need: raw prompts, token ids, echo, and
log probabilities of the prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from msgspec import UNSET

from runtime.text.fill_in import fill_in_end_ids
from runtime.text.pipeline import TextDelta
from server.errors import invalid
from server.openai_api.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from server.openai_api.logprobs import (
    Echo,
    EncodedLogprobs,
    TokenPlaces,
    join_logprobs,
    legacy_logprobs,
    prompt_logprobs,
)
from server.openai_api.schema import CompletionRequest, Prompt
from server.requests.answering import Answer, Prepared, answered
from server.requests.generation import Generation, Piece, Scheduling
from server.requests.prompt import completion_prompts
from server.requests.sampling import completion_params, stream_flags
from server.requests.structured import RequestSchemas, answer_grammar
from server.requests.transfer import answer_of, transfer_of
from server.service import Service, new_id
from server.transport.body import Body, decode_body
from server.transport.exchange import Exchange
from server.transport.sse import DONE, frame
from tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class PreparedCompletion(Answer):
    """
    echoes        each prompt's text, and with logprobs its tokens; None without `echo`
    drops_output  `max_tokens=0`: only the prompt is wanted, the one sampled token is not sent
    names_ids     log probabilities name tokens by their ids
    """

    gives_aborted = True
    created: int
    prompts: list[list[int]]
    echoes: list[Echo] | None
    drops_output: bool
    has_logprobs: bool
    has_prompt_logprobs: bool
    has_usage: bool
    has_running_usage: bool
    has_token_ids: bool
    names_ids: bool
    streams: list[_ChoiceStream] = field(init=False)
    choices: list[_WholeChoice] = field(init=False)

    def __post_init__(self) -> None:
        num_choices = len(self.prompts) * self.generation.params.n
        self.streams = [_ChoiceStream(self, index) for index in range(num_choices)]
        self.choices = [_WholeChoice(CompletionChoice(index=index, text="")) for index in range(num_choices)]

    def frames(self, pieces: list[Piece]) -> Iterator[bytes]:
        """A chunk for each non-empty piece, the last of a choice with its finish_reason."""
        data = bytearray()
        for piece in pieces:
            for number, choice in enumerate(self.streams[piece.choice].chunks(piece.delta)):
                if number:
                    yield bytes(data)
                    data.clear()
                if _says_something(choice):
                    data += frame(self.envelope([choice], has_usage=self.has_running_usage))
        yield bytes(data)

    def closing(self) -> bytes:
        return (frame(self.envelope([], has_usage=True)) if self.has_usage else b"") + DONE

    async def take(self, piece: Piece) -> None:
        for number, chunk in enumerate(self.streams[piece.choice].chunks(piece.delta)):
            if number:
                await asyncio.sleep(0)
            self.choices[piece.choice].add(chunk)

    async def whole(self) -> Completion:
        generation = self.generation
        answers = [choice.choice(self) for choice in self.choices]
        if self.has_prompt_logprobs:
            for number in range(len(self.prompts)):
                entries = await prompt_logprobs(generation.prompt_logprobs(number), self.service.tokenizer)
                for choice in answers[number * generation.params.n : (number + 1) * generation.params.n]:
                    choice.prompt_logprobs = entries
        found = self.envelope(answers, has_usage=True)
        if generation.offered is not None:
            found.kv_transfer_params = answer_of(generation.offered)
        return found

    def envelope(self, choices: list[CompletionChoice], *, has_usage: bool) -> Completion:
        return Completion(
            id=self.generation.request_id,
            created=self.created,
            model=self.asked.model_name,
            choices=choices,
            usage=Usage.of(self.generation, has_output=not self.drops_output) if has_usage else UNSET,
            system_fingerprint=self.service.system_fingerprint,
        )


def _prepare(service: Service, body: Body) -> PreparedCompletion:
    asked = decode_body(body, CompletionRequest, service.config)
    return prepare_completion(service, body.exchange, asked, new_id("cmpl"))


create_completion = answered(_prepare)


def prepare_completion(
    service: Service, exchange: Exchange, asked: CompletionRequest, request_id: str
) -> PreparedCompletion:
    """A decoded request's generation, not admitted yet. Raises `ApiError`."""
    adapter = service.adapter_of(asked.model)
    has_usage, has_running_usage = stream_flags(asked)
    schemas = RequestSchemas(closes=service.config.close_schemas)
    grammar = answer_grammar(asked, schemas)
    params = completion_params(asked, service.default_sampling, service.tokenizer, grammar=grammar)
    if asked.stream and asked.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not sent in a stream; echo with logprobs is.")
    prompts = completion_prompts(service, asked)
    most_choices = service.config.max_choices
    if len(prompts) * params.n > most_choices:
        raise invalid("n", f"n × prompts must be at most {most_choices}, got {params.n} × {len(prompts)}.")
    lease, source = transfer_of(
        service, asked, num_prompts=len(prompts), num_choices=params.n, max_tokens=params.max_tokens
    )
    generation = Generation(
        client=service.client,
        bridge=service.bridge,
        tokenizer=service.tokenizer,
        request_id=request_id,
        prompts=prompts,
        params=params,
        arrival_time_s=exchange.arrival_s,
        scheduling=replace(Scheduling.of(asked, adapter), lease=lease, source=source),
        eos_token_ids=fill_in_ends(service) if asked.suffix is not None else None,
    )
    echoes = None
    if asked.echo:
        echoes = _echoes(asked.prompt, prompts, service.tokenizer, has_offsets=asked.logprobs is not None)
    return PreparedCompletion(
        asked=Prepared(service=service, generation=generation, schemas=schemas, is_streamed=bool(asked.stream)),
        created=int(time.time()),
        names={"messages": "prompt", "logprobs": "logprobs"},
        prompts=prompts,
        echoes=echoes,
        drops_output=asked.max_tokens == 0,
        has_logprobs=asked.logprobs is not None,
        has_prompt_logprobs=asked.prompt_logprobs is not None,
        has_usage=has_usage,
        has_running_usage=has_running_usage,
        has_token_ids=bool(asked.return_token_ids) or service.tokenizer is None,
        names_ids=bool(asked.return_tokens_as_token_ids),
    )


def fill_in_ends(service: Service) -> tuple[int, ...]:
    """The ids that end a text between two others."""
    assert service.tokenizer is not None
    assert service.fill_in is not None
    own = service.client.info.eos_token_ids
    return tuple(dict.fromkeys((*own, *fill_in_end_ids(service.tokenizer, service.fill_in))))


def _echoes(given: Prompt, prompts: list[list[int]], tokenizer: Tokenizer | None, *, has_offsets: bool) -> list[Echo]:
    if tokenizer is None:
        raise invalid("echo", "This model has no tokenizer: there is no text to echo.")
    texts: list[str | None] = [given] if isinstance(given, str) else [t if isinstance(t, str) else None for t in given]
    if len(texts) != len(prompts):  # one prompt, given as its ids
        texts = [None]
    return [Echo.of(ids, text, tokenizer, has_offsets=has_offsets) for ids, text in zip(prompts, texts, strict=True)]


@dataclass(slots=True)
class _ChoiceStream:
    """Turns one choice's pieces into chunks. A whole answer is the sum of the same chunks, so both agree."""

    completion: PreparedCompletion
    index: int
    num_characters: int = 0
    text_start: int = 0  # where the answer begins, after an echoed prompt
    places: TokenPlaces | None = None
    is_begun: bool = False

    def chunks(self, delta: TextDelta) -> Iterator[CompletionChoice]:
        """The chunk of `delta`. With `echo` the first begins with the prompt; a long prompt with log probabilities gets
        chunks of its own before it."""
        completion, tokenizer = self.completion, self.completion.service.tokenizer
        names = None if completion.names_ids else tokenizer
        number = self.index // completion.generation.params.n
        choice = CompletionChoice(index=self.index, text="", finish_reason=None)
        parts: list[CompletionLogprobs] = []
        if not self.is_begun:
            self.is_begun = True
            if completion.has_token_ids:
                choice.prompt_token_ids = completion.prompts[number]
            if completion.echoes is not None:
                echo = completion.echoes[number]
                if completion.has_logprobs:
                    for text, logprobs in echo.parts(completion.generation.prompt_logprobs(number), names):
                        if parts:
                            yield self._ended(choice, parts)
                            choice = CompletionChoice(index=self.index, text="", finish_reason=None)
                        choice.text, parts = text, [logprobs]
                else:
                    choice.text = echo.text
        choice.finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            choice.weight_version = completion.generation.version_of(self.index)
        if not completion.drops_output:
            if completion.has_logprobs:
                if self.places is None:
                    self.places, self.text_start = TokenPlaces(tokenizer), self.num_characters + len(choice.text)
                end = self.num_characters + len(choice.text) + len(delta.text)
                parts.append(legacy_logprobs(delta, self.places, self.text_start, end, names))
            choice.text += delta.text
            if delta.stop_reason is not None:
                choice.stop_reason = delta.stop_reason
        elif delta.finish_reason is not None:
            choice.finish_reason = "length"
        if completion.has_token_ids and not completion.drops_output:
            choice.token_ids = delta.token_ids
        yield self._ended(choice, parts)

    def _ended(self, choice: CompletionChoice, parts: list[CompletionLogprobs]) -> CompletionChoice:
        """The completed chunk."""
        if self.completion.has_logprobs:
            choice.logprobs = join_logprobs(parts)
        if self.completion.has_token_ids and choice.token_ids is UNSET:
            choice.token_ids = []
        self.num_characters += len(choice.text)
        return choice


@dataclass(slots=True)
class _WholeChoice:
    """A choice of an answer that is not streamed: the sum of its chunks. The first chunk has its beginning, the last
    its end."""

    whole: CompletionChoice
    texts: list[str] = field(default_factory=list)
    logprobs: EncodedLogprobs = field(default_factory=EncodedLogprobs)
    token_ids: list[int] = field(default_factory=list)

    def add(self, chunk: CompletionChoice) -> None:
        whole = self.whole
        self.texts.append(chunk.text)
        whole.finish_reason = chunk.finish_reason
        whole.stop_reason = None if chunk.stop_reason is UNSET else chunk.stop_reason
        whole.weight_version = chunk.weight_version
        if chunk.logprobs is not None:
            self.logprobs.extend(chunk.logprobs)
        if chunk.token_ids is not UNSET:
            self.token_ids += chunk.token_ids
        if chunk.prompt_token_ids is not UNSET:
            whole.prompt_token_ids = chunk.prompt_token_ids

    def choice(self, completion: PreparedCompletion) -> CompletionChoice:
        whole = self.whole
        whole.text = "".join(self.texts)
        if completion.has_logprobs:
            whole.logprobs = self.logprobs.whole()
        if completion.has_token_ids:
            whole.token_ids = self.token_ids
        return whole


def _says_something(choice: CompletionChoice) -> bool:
    has_tokens = choice.logprobs is not None and choice.logprobs.tokens
    return bool(choice.text or choice.finish_reason or choice.token_ids or has_tokens)
