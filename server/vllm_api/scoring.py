"""`POST /pooling`, `/score` and `/rerank`: vLLM's uses of a decoder's embeddings, in its shapes and, for reranking,
Jina's.

A generative decoder has no scoring head, so a score is the cosine of embeddings. It measures similarity, not relevance,
and a model trained for ranking is better."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from server.errors import in_own_names, invalid
from server.openai_api.answers import EmbeddingUsage
from server.openai_api.embeddings import AskedEmbeddings, Vector, prepare_embeddings
from server.openai_api.schema import EmbeddingRequest, RequestId
from server.requests.answering import answered
from server.service import Service, new_id
from server.transport.body import Body, decode_body


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


def _prepare_pooling(service: Service, body: Body) -> AskedEmbeddings:
    """Vectors of inputs, in vLLM's shape."""
    asked = decode_body(body, PoolingRequest, service.config)
    if asked.task not in (None, "embed"):
        reason = "a decoder has no classifier, and hidden states of single tokens are not sent"
        raise invalid("task", f"Unsupported value: task {asked.task!r} ({reason}).", "unsupported_value")
    return prepare_embeddings(service, asked, _pooled, body.exchange.tenant)


def _pooled(asked: AskedEmbeddings, vectors: list[Vector]) -> PoolingAnswer:
    data = [Pooled(index=index, data=asked.shaped(vector)) for index, vector in enumerate(vectors)]
    return PoolingAnswer(id=new_id("pool"), **_common(asked), data=data)


def _prepare_scores(service: Service, body: Body) -> AskedEmbeddings:
    """One score for each pair."""
    asked = decode_body(body, ScoreRequest, service.config)
    first = _either(asked, "text_1", "queries")
    second = _either(asked, "text_2", "documents")
    if len(first) not in (1, len(second)):
        raise invalid(
            "text_2", f"text_1 must have one entry, or as many as text_2: they have {len(first)} and {len(second)}."
        )

    def answer(prepared: AskedEmbeddings, vectors: list[Vector]) -> ScoreAnswer:
        lefts, rights = vectors[: len(first)], vectors[len(first) :]
        pairs = zip(lefts * (len(rights) // len(lefts)), rights, strict=True)
        data = [Score(index=index, score=cosine(left, right)) for index, (left, right) in enumerate(pairs)]
        return ScoreAnswer(id=new_id("score"), **_common(prepared), data=data)

    return _embeddings(service, asked, [*first, *second], "text_2", answer)


def _either(asked: ScoreRequest, name: str, other: str) -> list[str]:
    value, same = getattr(asked, name), getattr(asked, other)
    if (value is None) == (same is None):
        raise invalid(name, f"Send either {name} or {other}.", "missing_required_parameter")
    texts = value if value is not None else same
    return [texts] if isinstance(texts, str) else texts


def _prepare_ranking(service: Service, body: Body) -> AskedEmbeddings:
    """The documents most similar to the query, sorted; ties keep their order."""
    asked = decode_body(body, RerankRequest, service.config)
    texts = [document if isinstance(document, str) else document.text for document in asked.documents]
    has_texts = asked.return_documents is not False

    def answer(prepared: AskedEmbeddings, vectors: list[Vector]) -> RerankAnswer:
        query, *others = vectors
        scores = [cosine(query, vector) for vector in others]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n or None]
        results = [
            Ranked(index=index, document=RankedText(texts[index]) if has_texts else None, relevance_score=scores[index])
            for index in order
        ]
        return RerankAnswer(id=new_id("rerank"), model=service.model_name, usage=prepared.usage, results=results)

    return _embeddings(service, asked, [asked.query, *texts], "documents", answer)


create_pooling, create_scores, create_ranking = map(answered, (_prepare_pooling, _prepare_scores, _prepare_ranking))


def _embeddings(
    service: Service,
    asked: ScoreRequest | RerankRequest,
    texts: list[str],
    field: str,
    answer: Callable[[AskedEmbeddings, list[Vector]], Any],
) -> AskedEmbeddings:
    given = EmbeddingRequest(
        model=asked.model, input=[*texts], pooling=asked.pooling, truncate_prompt_tokens=asked.truncate_prompt_tokens
    )
    with in_own_names({"input": field}):
        return prepare_embeddings(service, given, answer)


def _common(asked: AskedEmbeddings) -> dict[str, Any]:
    return {"created": int(time.time()), "model": asked.service.model_name, "usage": asked.usage}


def cosine(left: Vector, right: Vector) -> float:
    """Between -1 and 1; 0 if a vector is zero."""
    one, other = left.astype(np.float64), right.astype(np.float64)
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return min(1.0, max(-1.0, float(one @ other) / length)) if length > 0 else 0.0
