"""`POST /pooling`, `/score` and `/rerank`: vLLM's uses of a decoder's embeddings.

A generative decoder has no scoring head, so a score is the cosine of embeddings. It measures similarity, not relevance,
and a model trained for ranking is better."""

from __future__ import annotations

import time
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError, invalid, renamed
from server.openai_api.answers import EmbeddingUsage
from server.openai_api.embeddings import AskedEmbeddings, Vector, embed, encoded, prepare_embeddings, shaped
from server.openai_api.schema import EmbeddingRequest
from server.service import Service, new_id
from server.transport.body import decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.vllm_api.schema import (
    Pooled,
    PoolingAnswer,
    PoolingRequest,
    Ranked,
    RankedText,
    RerankAnswer,
    RerankRequest,
    RerankText,
    Score,
    ScoreAnswer,
    ScoreRequest,
)

T = TypeVar("T")


async def create_pooling(request: Request) -> Response:
    """Vectors of inputs, in vLLM's shape."""
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    tenant = Exchange.of(request).tenant
    asked = await service.prepare_conversation(body, partial(_prepare_pooling, service, tenant, body))
    vectors = await embed(request, service, asked)
    data = [
        Pooled(index=index, data=encoded(shaped(vector, asked), is_base64=asked.is_base64))
        for index, vector in enumerate(vectors)
    ]
    return _json(
        PoolingAnswer(
            id=new_id("pool"), created=int(time.time()), model=service.model_name, data=data, usage=_usage(asked)
        )
    )


def _prepare_pooling(service: Service, tenant: str | None, body: bytes) -> AskedEmbeddings:
    asked = decode_body(body, PoolingRequest, service.config)
    if asked.task not in (None, "embed"):
        reason = "a decoder has no classifier, and hidden states of single tokens are not sent"
        raise invalid("task", f"Unsupported value: task {asked.task!r} ({reason}).", "unsupported_value")
    return prepare_embeddings(service, asked, tenant)


async def create_scores(request: Request) -> Response:
    """One score for each pair."""
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    asked, first, second = await service.prepare(len(body), partial(_prepare_scores, service, body))
    vectors = await embed(request, service, asked)
    lefts, rights = vectors[:first], vectors[first:]
    if first == 1:
        lefts = lefts * second
    data = [
        Score(index=index, score=cosine(left, right))
        for index, (left, right) in enumerate(zip(lefts, rights, strict=True))
    ]
    return _json(
        ScoreAnswer(
            id=new_id("score"), created=int(time.time()), model=service.model_name, data=data, usage=_usage(asked)
        )
    )


def _prepare_scores(service: Service, body: bytes) -> tuple[AskedEmbeddings, int, int]:
    """The texts of both sides, and their numbers. Raises `ApiError` 400."""
    asked = decode_body(body, ScoreRequest, service.config)
    first = _either(asked, "text_1", "queries")
    second = _either(asked, "text_2", "documents")
    if len(first) not in (1, len(second)):
        raise invalid(
            "text_2", f"text_1 must have one entry, or as many as text_2: they have {len(first)} and {len(second)}."
        )
    return _embeddings(service, asked, [*first, *second], "text_2"), len(first), len(second)


def _either(asked: ScoreRequest, name: str, other: str) -> list[str]:
    value, same = getattr(asked, name), getattr(asked, other)
    if (value is None) == (same is None):
        raise invalid(name, f"Send either {name} or {other}.", "missing_required_parameter")
    texts = value if value is not None else same
    return [texts] if isinstance(texts, str) else texts


async def create_ranking(request: Request) -> Response:
    """The documents most similar to the query, sorted; ties keep their order."""
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    given, asked = await service.prepare(len(body), partial(_prepare_ranking, service, body))
    query, *vectors = await embed(request, service, asked)
    scores = [cosine(query, vector) for vector in vectors]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: given.top_n or None]
    has_texts = given.return_documents is not False
    results = [
        Ranked(
            index=index,
            document=RankedText(_text(given.documents[index])) if has_texts else None,
            relevance_score=scores[index],
        )
        for index in order
    ]
    return _json(RerankAnswer(id=new_id("rerank"), model=service.model_name, usage=_usage(asked), results=results))


def _prepare_ranking(service: Service, body: bytes) -> tuple[RerankRequest, AskedEmbeddings]:
    asked = decode_body(body, RerankRequest, service.config)
    texts = [asked.query, *map(_text, asked.documents)]
    return asked, _embeddings(service, asked, texts, "documents")


def _text(document: str | RerankText) -> str:
    return document if isinstance(document, str) else document.text


def _embeddings(service: Service, asked: ScoreRequest | RerankRequest, texts: list[str], field: str) -> AskedEmbeddings:
    given = EmbeddingRequest(
        model=asked.model, input=[*texts], pooling=asked.pooling, truncate_prompt_tokens=asked.truncate_prompt_tokens
    )
    try:
        return prepare_embeddings(service, given)
    except ApiError as error:
        raise renamed(error, {"input": field}) from None


def cosine(left: Vector, right: Vector) -> float:
    """Between -1 and 1; 0 if a vector is zero."""
    one, other = left.astype(np.float64), right.astype(np.float64)
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return min(1.0, max(-1.0, float(one @ other) / length)) if length > 0 else 0.0


def _usage(asked: AskedEmbeddings) -> EmbeddingUsage:
    count = sum(map(len, asked.inputs))
    return EmbeddingUsage(prompt_tokens=count, total_tokens=count)


def _json(answer: msgspec.Struct) -> Response:
    return JsonAnswer(answer)
