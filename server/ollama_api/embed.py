"""`POST /api/embed` and the older `/api/embeddings`: the vectors of `/v1/embeddings` in Ollama's shapes."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from server.errors import ApiError, invalid, renamed
from server.ollama_api.request import own_model
from server.ollama_api.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from server.openai_api.embeddings import AskedEmbeddings, Vector, prepare_embeddings
from server.openai_api.schema import EmbeddingRequest
from server.requests.answering import answered
from server.service import Service
from server.transport.body import Body, decode_body


class EmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


def _prepare_embed(service: Service, body: Body) -> AskedEmbeddings | EmbedAnswer:
    """Truncates inputs at their end; OpenAI's and vLLM's API keeps the end."""
    asked = decode_body(body, OllamaEmbedRequest, service.config)
    service.check_model(own_model(service, asked.model))

    def answer(prepared: AskedEmbeddings | None, vectors: list[Vector]) -> EmbedAnswer:
        shaped: list[Any] = [prepared.shaped(vector) for vector in vectors] if prepared else []
        return EmbedAnswer(
            model=asked.model,
            embeddings=shaped,
            total_duration=round((time.monotonic() - body.exchange.arrival_s) * 1e9),
            prompt_eval_count=prepared.num_tokens if prepared else 0,
        )

    inputs = [asked.input] if isinstance(asked.input, str) else asked.input
    if not inputs or inputs == [""]:  # how Ollama's clients request that the model be loaded
        return answer(None, [])
    if service.tokenizer is None:
        raise invalid("input", "This model has no tokenizer: it has no vectors of texts.")
    ids: list[Any] = list(inputs)
    if asked.truncate is not False:
        most = service.client.info.max_model_len
        ids = [service.tokenizer.encode(text)[:most] for text in inputs]
    request = EmbeddingRequest(model=service.model_name, input=ids, dimensions=asked.dimensions)
    return prepare_embeddings(service, request, answer)


def _prepare_one(service: Service, body: Body) -> AskedEmbeddings:
    asked = decode_body(body, OllamaEmbeddingsRequest, service.config)
    request = EmbeddingRequest(model=own_model(service, asked.model), input=asked.prompt, normalize=False)
    try:
        return prepare_embeddings(service, request, _answer_one)
    except ApiError as error:
        raise renamed(error, {"input": "prompt"}) from None


def _answer_one(asked: AskedEmbeddings, vectors: list[Vector]) -> EmbeddingsAnswer:
    vector: Any = asked.shaped(vectors[0])
    return EmbeddingsAnswer(vector)


create_embed, create_embeddings = answered(_prepare_embed), answered(_prepare_one)
