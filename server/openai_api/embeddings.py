"""`POST /v1/embeddings`: vectors of texts, token ids or a conversation, which may have pictures, of the served model.

A decoder that was not trained to embed makes weaker vectors than an embedding model; but its last token has attended to
the whole input, and the mean of all is a robust summary."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import ImageItem, PoolingRequest
from runtime.errors import XservError
from runtime.pooling import PoolingTask, normalized
from runtime.text.pooled_texts import num_unpooled
from server.errors import engine_errors, from_engine, in_own_names, internal_error, invalid
from server.openai_api.answers import Embedding, EmbeddingList, EmbeddingUsage
from server.openai_api.schema import EmbeddingRequest
from server.requests.answering import Pending, answered
from server.requests.bridge import result_of
from server.requests.prompt import are_texts, embedding_conversation, embedding_inputs
from server.service import Service
from server.transport.body import Body, decode_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import watch_disconnect

logger = logging.getLogger("xserv.server")

Vector = NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class AskedEmbeddings(Pending):
    """A request that has passed all checks but the engine's.

    task          what the engine makes of each input
    second_from   the first token of the second of two texts, of each input; empty: they have one text
    num_unpooled  how many of each input's first tokens are not pooled
    answer        makes the answer of the engine's vectors, or of the labels' scores
    field         the request's name of its inputs
    """

    service: Service
    asked: EmbeddingRequest
    inputs: list[list[int]]
    task: PoolingTask = "embed"
    second_from: Sequence[int | None] = ()
    num_unpooled: int = 0
    images: tuple[ImageItem, ...]
    cache_salt: str | None
    answer: Callable[[AskedEmbeddings, list[Vector]], Any]
    field: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))

    @property
    def usage(self) -> EmbeddingUsage:
        return EmbeddingUsage(prompt_tokens=self.num_tokens, total_tokens=self.num_tokens)

    async def respond(self, request: Request) -> Response:
        """Submits all inputs at once; when the client leaves, waiting ones are not computed."""
        with engine_errors():
            use = Exchange.of(request).use(self.num_tokens)
        try:
            vectors = await self._vectors(request)
        finally:
            if use is not None:
                use.end()
        wanted, most = self.asked.dimensions, vectors[0].shape[-1]
        if wanted is not None and wanted > most:
            raise invalid("dimensions", f"dimensions must be at most {most}, got {wanted}.")
        work = partial(self.answer, self, vectors)
        return JsonAnswer(await self.service.prepare(sum(each.nbytes for each in vectors), work))

    async def _vectors(self, request: Request) -> list[Vector]:
        futures: list[Future[Vector]] = []
        has_left = asyncio.Event()

        def cancel() -> None:
            for future in futures:
                future.cancel()

        def leave() -> None:
            has_left.set()
            cancel()

        try:
            futures.append(self._start(0))  # the engine computes while the rest is made ready
            async with watch_disconnect(request.receive, leave):
                num_done = 0
                for index in range(1, len(self.inputs)):
                    while True:
                        try:
                            futures.append(self._start(index))
                            break
                        except QueueFullError:  # perhaps of this request's own inputs
                            if num_done == len(futures):
                                raise
                            await result_of(futures[num_done])
                            num_done += 1
                return [await result_of(future) for future in futures]
        except asyncio.CancelledError:
            if has_left.is_set():
                raise ClientDisconnect from None
            raise
        except (EngineDeadError, QueueFullError, RequestError) as error:
            raise from_engine(error, {"token_ids": self.field, "images": "messages"}) from None
        except XservError as error:
            logger.error("an embedding failed: %s", error)
            raise internal_error() from None
        finally:
            cancel()

    def _start(self, index: int) -> Future[Vector]:
        second_from = self.second_from[index] if self.second_from else None
        ids, pooling = self.inputs[index], self.asked.pooling
        return self.service.client.embed(
            PoolingRequest(ids, pooling, self.images, self.cache_salt, self.task, second_from, self.num_unpooled)
        )

    def shaped(self, vector: Vector) -> list[Any] | str:
        """The vector, or each token's, for JSON, truncated and normalised: numbers, or base64 of little-endian float32.
        The zero vector stays."""
        vector, wanted = vector[..., : self.asked.dimensions], self.asked.normalize
        if wanted is None:
            wanted = self.service.client.info.pooling.normalize or self.asked.dimensions is not None
        if wanted:
            vector = normalized(vector)
        if self.asked.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[Any] = vector.tolist()
        return numbers


def prepare_embeddings(
    service: Service,
    asked: EmbeddingRequest,
    answer: Callable[[AskedEmbeddings, list[Vector]], Any],
    tenant: str | None,
    field: str = "input",
) -> AskedEmbeddings:
    """A decoded request's inputs as ids, not admitted yet; `tenant` owns their pictures, `field` is the request's name
    of the inputs. Raises `ApiError`."""
    service.check_model(asked.model)
    if (asked.input is None) == (asked.messages is None):
        raise invalid("input", "Send either input or messages.", "missing_required_parameter")
    if asked.mm_processor_kwargs is not None and asked.messages is None:
        raise invalid("mm_processor_kwargs", "mm_processor_kwargs is for messages, not for input.")
    images: tuple[ImageItem, ...] = ()
    left_out = 0
    if asked.messages is None:
        with in_own_names({"input": field}):
            inputs = embedding_inputs(service, asked)
        if service.tokenizer is not None and are_texts(asked.input):
            left_out = num_unpooled(service.tokenizer, service.client.info.pooling, asked.prompt_name)
    else:
        prompt = embedding_conversation(service, tenant, asked)
        inputs, images = [prompt.token_ids], prompt.images
    return AskedEmbeddings(
        service=service, asked=asked, inputs=inputs, images=images, cache_salt=service.salt_of(tenant), answer=answer,
        field=field, num_unpooled=left_out,
    )  # fmt: skip


def _prepare(service: Service, body: Body) -> AskedEmbeddings:
    asked = decode_body(body, EmbeddingRequest, service.config)
    return prepare_embeddings(service, asked, _answer, body.exchange.tenant)


def _answer(asked: AskedEmbeddings, vectors: list[Vector]) -> EmbeddingList:
    data = [Embedding(index=index, embedding=asked.shaped(vector)) for index, vector in enumerate(vectors)]
    return EmbeddingList(data=data, model=asked.service.model_name, usage=asked.usage)


create_embeddings = answered(_prepare)
