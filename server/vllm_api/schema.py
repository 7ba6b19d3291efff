"""The requests and answers of vLLM's routes beside OpenAI's, in its shapes and, for reranking, Jina's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from runtime.engine.messages import EngineState
from server.openai_api.answers import EmbeddingUsage
from server.openai_api.schema import EmbeddingRequest, RequestId


class PoolingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /pooling`: an embedding, with one more field.

    task  "embed" (default), the only task of a decoder without a head
    """

    task: Literal["embed", "token_embed", "classify", "token_classify", "score", "encode", "plugin"] | None = None


Texts = str | Annotated[list[str], msgspec.Meta(min_length=1)]


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /score`: the similarity of texts, as the cosine of their embeddings.

    text_1, text_2          one text and several, or equally many of both (`queries` and `documents` are
                            their other names)
    pooling                 as of an embedding
    truncate_prompt_tokens  only the last so many tokens of each text are read
    """

    model: str | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    request_id: RequestId | None = None


class RerankText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /rerank`: documents sorted by their similarity to a query, the most similar first.

    documents         texts, or objects with a text
    top_n             only the first so many (0 and null: all)
    return_documents  with the texts (default: true)
    """

    query: str
    documents: Annotated[list[str | RerankText], msgspec.Meta(min_length=1)]
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    request_id: RequestId | None = None


class Pooled(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class PoolingAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, kw_only=True):
    index: int
    document: RankedText | None = None
    relevance_score: float


class RerankAnswer(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]


class ServerLoad(msgspec.Struct):
    """server_load: open requests, without this one."""

    server_load: int


class ServerInfo(msgspec.Struct):
    """engine: its fields of `GET /live`; server: `ServerConfig` without keys and files."""

    version: str
    models: list[str]
    engine: dict[str, Any]
    server: dict[str, Any]


class CacheReset(msgspec.Struct):
    """num_dropped_blocks: removed from the cache; num_held_blocks: in use by running requests."""

    num_dropped_blocks: int
    num_held_blocks: int


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The tokenizer's settings that lm-eval and others need to reproduce it."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class ListedEngine(msgspec.Struct, kw_only=True):
    """num_routed: requests routed to it, with several engines. The numbers after it are null while it does not
    answer."""

    engine: int
    state: EngineState
    num_routed: int | None
    num_running: int | None
    num_waiting: int | None
    kv_cache_usage: float | None


class EngineList(msgspec.Struct, kw_only=True):
    """routing_policy: of several engines."""

    engines: list[ListedEngine]
    routing_policy: str | None
    is_restarting: bool
