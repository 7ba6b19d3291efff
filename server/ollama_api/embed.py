"""`POST /api/embed` and the older `/api/embeddings`: the vectors of `/v1/embeddings` in Ollama's shapes."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError, invalid, renamed
from server.ollama_api.objects import EmbedAnswer, EmbeddingsAnswer
from server.ollama_api.request import own_model
from server.ollama_api.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from server.openai_api.embeddings import AskedEmbeddings, Vector, embed, prepare_embeddings, shaped
from server.openai_api.schema import EmbeddingRequest
from server.service import Service
from server.transport.body import decode_body, read_body
from server.transport.json_answer import JsonAnswer


async def create_embed(request: Request) -> Response:
    service: Service = request.app.state.service
    begun = time.monotonic()
    body = await read_body(request, service.config)
    asked = await service.prepare(len(body), partial(_decode_embed, service, body))
    inputs = [asked.input] if isinstance(asked.input, str) else asked.input
    if not inputs or inputs == [""]:  # how Ollama's clients request that the model be loaded
        inputs = []
    num_tokens = 0
    vectors: list[list[float]] = []
    if inputs:
        prepared = await service.prepare(len(body), partial(_prepare, service, asked, inputs))
        vectors = [_numbers(vector, prepared) for vector in await embed(request, service, prepared)]
        num_tokens = sum(map(len, prepared.inputs))
    duration = round((time.monotonic() - begun) * 1e9)
    answer = EmbedAnswer(model=asked.model, embeddings=vectors, total_duration=duration, prompt_eval_count=num_tokens)
    return JsonAnswer(answer)


async def create_embeddings(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    prepared = await service.prepare(len(body), partial(_prepare_one, service, body))
    vectors = await embed(request, service, prepared)
    answer = EmbeddingsAnswer(_numbers(vectors[0], prepared))
    return JsonAnswer(answer)


def _decode_embed(service: Service, body: bytes) -> OllamaEmbedRequest:
    asked = decode_body(body, OllamaEmbedRequest, service.config)
    service.check_model(own_model(service, asked.model))
    return asked


def _prepare(service: Service, asked: OllamaEmbedRequest, inputs: list[str]) -> AskedEmbeddings:
    """Truncates inputs at their end; OpenAI's and vLLM's API keeps the end."""
    if service.tokenizer is None:
        raise invalid("input", "This model has no tokenizer: it has no vectors of texts.")
    ids: list[Any] = list(inputs)
    if asked.truncate is not False:
        most = service.client.info.max_model_len
        ids = [service.tokenizer.encode(text)[:most] for text in inputs]
    return prepare_embeddings(
        service, EmbeddingRequest(model=service.model_name, input=ids, dimensions=asked.dimensions)
    )


def _prepare_one(service: Service, body: bytes) -> AskedEmbeddings:
    asked = decode_body(body, OllamaEmbeddingsRequest, service.config)
    request = EmbeddingRequest(model=own_model(service, asked.model), input=asked.prompt, normalize=False)
    try:
        return prepare_embeddings(service, request)
    except ApiError as error:
        raise renamed(error, {"input": "prompt"}) from None


def _numbers(vector: Vector, asked: AskedEmbeddings) -> list[float]:
    numbers: list[float] = shaped(vector, asked).tolist()
    return numbers
