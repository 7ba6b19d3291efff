"""`POST /inference/v1/generate`: token ids in, token ids out, in vLLM's shapes. The answer's text is read for stop
strings alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from runtime.engine.messages import FinishReason, TokenLogprobs
from runtime.text.pipeline import TextDelta
from server.config import ServerConfig
from server.errors import ApiError, below, in_own_names, invalid
from server.openai_api.answers import PromptLogprobs, Usage
from server.openai_api.completions import PreparedCompletion, prepare_completion
from server.openai_api.logprobs import finite, prompt_logprobs
from server.openai_api.schema import CompletionRequest, Int, RequestId, StreamOptions
from server.requests.answering import Answer, answered
from server.requests.generation import Piece
from server.service import Service, new_id
from server.transport.body import Body, decode_body, typed_fields
from server.transport.sse import DONE, frame

_OF_REQUEST = ("prompt", "model", "stream", "stream_options", "cache_salt", "priority", "request_id", "echo", "suffix")
"""Fields of completions that `sampling_params` cannot have."""


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /inference/v1/generate`.

    request_id       a name for logs and cancelling, which the answer has
    token_ids        the prompt
    sampling_params  the sampling fields of `/v1/completions`, `logprobs` and `prompt_logprobs` among them; `detokenize`
                     is not read
    """

    token_ids: Annotated[list[Int], msgspec.Meta(min_length=1)]
    sampling_params: dict[str, Any]
    request_id: RequestId | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    priority: Int | None = None


class GeneratedLogprob(msgspec.Struct):
    """token: "token_id:" and the id."""

    token: str
    logprob: float
    top_logprobs: list[GeneratedLogprob] | UnsetType = UNSET


class GeneratedLogprobs(msgspec.Struct):
    content: list[GeneratedLogprob]


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    logprobs: GeneratedLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    weight_version: str | UnsetType = UNSET


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """The whole answer, and each chunk of a streamed one."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET


@dataclass(slots=True, kw_only=True)
class _TokenAnswer(Answer):
    """`completion` is the same request, prepared."""

    gives_aborted = True
    completion: PreparedCompletion
    name: str
    choices: list[GenerateChoice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [self._choice(index) for index in range(self.generation.params.n)]

    def push(self, piece: Piece) -> bytes:
        chunk = self._choice(piece.choice)
        self._add(chunk, piece)
        if not chunk.token_ids and chunk.finish_reason is None:
            return b""
        usage = Usage.of(self.generation) if self.completion.has_running_usage else UNSET
        return frame(GenerateAnswer(request_id=self.name, choices=[chunk], usage=usage))

    def closing(self) -> bytes:
        if not self.completion.has_usage:
            return DONE
        return frame(GenerateAnswer(request_id=self.name, choices=[], usage=Usage.of(self.generation))) + DONE

    def take(self, piece: Piece) -> None:
        self._add(self.choices[piece.choice], piece)

    async def whole(self) -> GenerateAnswer:
        entries = None
        if self.completion.has_prompt_logprobs:
            entries = await prompt_logprobs(self.generation.prompt_logprobs(0), self.service.tokenizer)
        return GenerateAnswer(
            request_id=self.name, choices=self.choices, prompt_logprobs=entries, usage=Usage.of(self.generation)
        )

    def _choice(self, index: int) -> GenerateChoice:
        logprobs = GeneratedLogprobs([]) if self.completion.has_logprobs else None
        return GenerateChoice(index=index, token_ids=[], logprobs=logprobs)

    def _add(self, choice: GenerateChoice, piece: Piece) -> None:
        delta: TextDelta = piece.delta
        choice.token_ids += delta.token_ids
        if choice.logprobs is not None:
            choice.logprobs.content += map(_logprob, delta.logprobs or ())
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            choice.weight_version = self.generation.version_of(piece.choice)


def _logprob(entry: TokenLogprobs) -> GeneratedLogprob:
    top = [
        GeneratedLogprob(f"token_id:{token_id}", finite(value))
        for token_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
    ]
    return GeneratedLogprob(f"token_id:{entry.token_id}", finite(entry.logprob), top)


def _prepare(service: Service, body: Body) -> _TokenAnswer:
    asked = decode_body(body, GenerateRequest, service.config)
    completion, names = _completion(asked, service.config, body.exchange.ignored)
    request_id = new_id("gen")
    with in_own_names(names):
        prepared = prepare_completion(service, body.exchange, completion, request_id)
    return _TokenAnswer(
        asked=prepared.asked, names={**names, "messages": "token_ids"}, completion=prepared,
        name=asked.request_id or request_id,
    )  # fmt: skip


def _completion(
    asked: GenerateRequest, config: ServerConfig, ignored: list[str]
) -> tuple[CompletionRequest, dict[str, str]]:
    """The request as one of completions, and where it has the fields of that. `ignored` gets the names of fields
    without effect. Raises `ApiError`."""
    given = {name: value for name, value in asked.sampling_params.items() if name != "detokenize"}
    without_effect: list[str] = []
    sent: dict[str, str] = {}
    try:
        with in_own_names(sent):
            completion = typed_fields({**given, "prompt": []}, CompletionRequest, config, without_effect, sent)
        for name in _OF_REQUEST:
            if name in given or (name != "prompt" and getattr(completion, name) is not None):
                param = sent.get(name, name)
                raise invalid(param, f"Unknown parameter: {param}.", "unknown_parameter")
    except ApiError as error:
        raise below("sampling_params", error) from None
    ignored += [f"sampling_params.{name}" for name in without_effect]
    own = [name for name in CompletionRequest.__struct_fields__ if name not in _OF_REQUEST]
    names = {name: f"sampling_params.{name}" for name in own}
    names |= {name: f"sampling_params.{other}" for name, other in sent.items()} | {"prompt": "token_ids"}
    for name in _OF_REQUEST:
        if (value := getattr(asked, name, None)) is not None:
            setattr(completion, name, value)
    completion.prompt = list(asked.token_ids)
    return completion, names


create_generation = answered(_prepare)
