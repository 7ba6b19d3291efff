"""`POST /v1/embeddings`: vectors of texts, token ids or a conversation, which may have pictures, from the served
decoder's hidden states.

A decoder was not trained to embed, so its vectors are weaker than an embedding model's; but its last token has attended
to the whole input, and the mean of all is a robust summary."""

from __future__ import annotations

import asyncio
import base64
import logging
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import ImageItem
from runtime.errors import XservError
from server.errors import from_engine, internal_error, invalid
from server.openai_api.answers import Embedding, EmbeddingList, EmbeddingUsage
from server.openai_api.schema import EmbeddingRequest
from server.requests.prompt import embedding_conversation, embedding_inputs
from server.service import Service
from server.transport.body import decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import watch_disconnect

logger = logging.getLogger("xserv.server")

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AskedEmbeddings:
    """A request that has passed all checks but the engine's."""

    inputs: list[list[int]]
    images: tuple[ImageItem, ...]
    cache_salt: str | None
    pooling: str
    dimensions: int | None
    is_normalized: bool
    is_base64: bool


async def create_embeddings(request: Request) -> Response:
    """Submits all inputs at once; when the client leaves, waiting ones are not computed."""
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    tenant = Exchange.of(request).tenant
    asked = await service.prepare_conversation(body, partial(_prepare, service, tenant, body))
    vectors = await embed(request, service, asked)
    answer = await service.prepare(vectors[0].nbytes * len(vectors), partial(_answer, service, asked, vectors))
    return JsonAnswer(answer)


def _prepare(service: Service, tenant: str | None, body: bytes) -> AskedEmbeddings:
    """Prepares the request for the engine. Raises `ApiError`."""
    return prepare_embeddings(service, decode_body(body, EmbeddingRequest, service.config), tenant)


def prepare_embeddings(service: Service, asked: EmbeddingRequest, tenant: str | None = None) -> AskedEmbeddings:
    """A decoded request's inputs as ids, not admitted yet; `tenant` owns their pictures. Raises `ApiError`."""
    service.check_model(asked.model)
    if (asked.input is None) == (asked.messages is None):
        raise invalid("input", "Send either input or messages.", "missing_required_parameter")
    if asked.mm_processor_kwargs is not None and asked.messages is None:
        raise invalid("mm_processor_kwargs", "mm_processor_kwargs is for messages, not for input.")
    tokenizer, config, info = service.tokenizer, service.config, service.client.info
    images: tuple[ImageItem, ...] = ()
    if asked.messages is None:
        inputs = embedding_inputs(asked, tokenizer, config, info)
    else:
        prompt = embedding_conversation(asked, tokenizer, config, service.answer_format, info, service.pictures, tenant)
        inputs, images = [prompt.token_ids], prompt.images
    return AskedEmbeddings(
        inputs=inputs,
        images=images,
        cache_salt=service.salt_of(tenant),
        pooling=asked.pooling or "last",
        dimensions=asked.dimensions,
        is_normalized=asked.normalize is not False,
        is_base64=asked.encoding_format == "base64",
    )


async def embed(request: Request, service: Service, asked: AskedEmbeddings) -> list[Vector]:
    """The vectors, whole; see `shaped`. Raises `ApiError`."""
    vectors = await _vectors(request, service, asked)
    if asked.dimensions is not None and asked.dimensions > len(vectors[0]):
        raise invalid("dimensions", f"dimensions must be at most {len(vectors[0])}, got {asked.dimensions}.")
    return vectors


async def _vectors(request: Request, service: Service, asked: AskedEmbeddings) -> list[Vector]:
    futures: list[Future[Vector]] = []
    has_left = asyncio.Event()

    def cancel() -> None:
        for future in futures:
            future.cancel()

    def leave() -> None:
        has_left.set()
        cancel()

    try:
        for token_ids in asked.inputs:
            futures.append(service.client.embed(token_ids, asked.pooling, asked.images, asked.cache_salt))
        async with watch_disconnect(request.receive, leave):
            return [await asyncio.wrap_future(future) for future in futures]
    except asyncio.CancelledError:
        if has_left.is_set():
            raise ClientDisconnect from None
        raise
    except (EngineDeadError, QueueFullError, RequestError) as error:
        raise from_engine(error, {"token_ids": "input", "images": "messages"}) from None
    except XservError as error:
        logger.error("an embedding failed: %s", error)
        raise internal_error() from None
    finally:
        cancel()


def _answer(service: Service, asked: AskedEmbeddings, vectors: list[Vector]) -> EmbeddingList:
    data = [
        Embedding(index=index, embedding=encoded(shaped(vector, asked), is_base64=asked.is_base64))
        for index, vector in enumerate(vectors)
    ]
    num_tokens = sum(map(len, asked.inputs))
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return EmbeddingList(data=data, model=service.model_name, usage=usage)


def shaped(vector: Vector, asked: AskedEmbeddings) -> Vector:
    """Truncates and normalises the vector; the zero vector stays."""
    vector = vector[: asked.dimensions]
    if asked.is_normalized:
        length = float(np.linalg.norm(vector.astype(np.float64)))
        vector = (vector / length if length > 0 else vector).astype(np.float32)
    return vector


def encoded(vector: Vector, *, is_base64: bool) -> list[float] | str:
    """The vector for JSON: numbers, or base64 of little-endian float32."""
    if is_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers
