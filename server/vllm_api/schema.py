"""The requests of vLLM's routes beside OpenAI's, in its shapes and, for reranking, Jina's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

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
