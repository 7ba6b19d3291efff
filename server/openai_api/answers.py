"""The answers of OpenAI's API as typed objects; a field that is UNSET is not sent, one that is None is sent
as null.

Beyond OpenAI's fields there are vLLM's `token_ids`, `prompt_token_ids`, `prompt_logprobs` and `stop_reason`.

Answers of other APIs are items one after the other (`AnswerItems`): reasoning, text, calls. An item is open until a
delta of another kind, or of another call, comes. A whole answer holds the final items, so that it agrees with the
events of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from runtime.engine.messages import FinishReason, MissReason
from runtime.text.parts import ToolCallDelta
from runtime.text.pipeline import TextDelta
from server.openai_api.schema import KVTransferParams
from server.requests.generation import Generation


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """cached_tokens: prompt tokens found in the prefix cache. miss_reason: why no more were; first_difference: the
    first token that no prompt in the cache has."""

    cached_tokens: int
    miss_reason: MissReason | None = None
    first_difference: int | None = None


class CompletionTokensDetails(msgspec.Struct, omit_defaults=True):
    """reasoning_tokens: tokens of reasoning in the completion. With a prediction, the numbers of its tokens that were
    accepted and rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, generation: Generation, *, has_output: bool = True) -> Usage:
        """So far. `has_output`: the completion is sent."""
        num_tokens = generation.num_completion_tokens if has_output else 0
        return cls(
            generation.num_prompt_tokens,
            num_tokens,
            generation.num_prompt_tokens + num_tokens,
            PromptTokensDetails(generation.num_cached_tokens, *generation.missed),
            CompletionTokensDetails(generation.num_reasoning_tokens, *generation.of_prediction),
        )


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The legacy form: four lists in step. The first token of an echoed prompt has no probability: null."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""vLLM's form: for each prompt token (null for the first) token id → {logprob, rank, decoded_token}."""


ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatFunction(msgspec.Struct):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct):
    id: str
    function: ChatFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """content: null if there are only tool calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class ChatFunctionDelta(msgspec.Struct):
    name: str | UnsetType
    arguments: str


class ChatToolCallDelta(msgspec.Struct):
    """id, type and the function's name: only in the first piece of a call."""

    index: int
    id: str | UnsetType
    type: Literal["function"] | UnsetType
    function: ChatFunctionDelta


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The whole answer, and each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class Embedding(msgspec.Struct, kw_only=True):
    """embedding: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Cancelled(msgspec.Struct):
    """How many running requests a cancellation ended."""

    id: str
    cancelled: int


Item = TypeVar("Item")
Event = TypeVar("Event")


class AnswerItems(ABC, Generic[Item, Event]):
    """The items so far. The events of `push` and `finish` must be encoded at once: they hold the items themselves,
    which still change."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: tuple[str, int] | None = None  # the kind of the last item, and its number among the calls

    @property
    def index(self) -> int:
        """The last item's."""
        return len(self.items) - 1

    def push(self, delta: TextDelta, logprobs: Sequence[ChatTokenLogprob] = ()) -> Iterator[Event]:
        """Adds a delta; returns its events. `logprobs` belong to its text."""
        if delta.reasoning:
            yield from self._grow("reasoning", None, delta.reasoning)
        if delta.text or logprobs:
            yield from self._grow("text", None, delta.text, logprobs)
        for call in delta.tool_calls:
            yield from self._grow("call", call, call.arguments)

    def finish(self, *, is_complete: bool = True) -> Iterator[Event]:
        """Ends the open item. Only an answer's last can be incomplete."""
        if self._open is not None:
            self._open = None
            yield from self._end(self.items[-1], is_complete=is_complete)

    def _grow(
        self,
        kind: Literal["reasoning", "text", "call"],
        call: ToolCallDelta | None,
        text: str,
        logprobs: Sequence[ChatTokenLogprob] = (),
    ) -> Iterator[Event]:
        key = (kind, 0 if call is None else call.index)
        if self._open != key:
            yield from self.finish()
            self._open = key
            yield from self._begin(self._new(kind, call))
        if text or logprobs:
            yield from self._add(self.items[-1], text, logprobs)

    @abstractmethod
    def _new(self, kind: str, call: ToolCallDelta | None) -> Item:
        """An empty item; `call` is a call's first piece."""

    @abstractmethod
    def _begin(self, item: Item) -> Iterator[Event]:
        """Appends an item."""

    @abstractmethod
    def _add(self, item: Item, text: str, logprobs: Sequence[ChatTokenLogprob]) -> Iterator[Event]:
        """Adds to the last item."""

    @abstractmethod
    def _end(self, item: Item, *, is_complete: bool) -> Iterator[Event]:
        """Completes the last item."""
