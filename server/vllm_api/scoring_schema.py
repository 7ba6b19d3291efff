"""Requests and answers of `server/vllm_api/scoring.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from runtime.pooling import Pooling
from server.openai_api.answers import EmbeddingUsage
from server.openai_api.schema import EmbeddingRequest, RequestId

Texts = str | Annotated[list[str], msgspec.Meta(min_length=1)]


class PoolingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /pooling`: a vector, or the labels' scores; or those of each token.

    task            "embed" (default), "classify" for a model with a classifier, "token_embed", or "token_classify"
                    (default of a model that labels tokens)
    use_activation  labels' scores as probabilities (default: true)
    text_1, text_2  instead of input: one text and several, or equally many of both, such as a question and contexts for
                    a model that answers by a span of tokens
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    task: Literal["embed", "token_embed", "classify", "token_classify", "score", "encode", "plugin"] | None = None
    use_activation: bool | None = None


class ClassifyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /classify`: the labels of texts, by a model with a classifier.

    input                   a text, texts, the ids of one input, or those of several
    truncate_prompt_tokens  the first so many tokens of each text are read; -1: as many as fit
    use_activation          labels' scores as probabilities (default: true)
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    request_id: RequestId | None = None


Direction = Literal["Right", "right", "Left", "left"]


class PairsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Pairs of texts.

    text_1, text_2          one text and several, or equally many of both (`queries` and `documents` are
                            their other names)
    """

    model: str | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    request_id: RequestId | None = None


class ScoreRequest(PairsRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /score`: the relevance of texts, by a model that was trained to rank.

    text_1, text_2          one text and several, or equally many of both (`queries` and `documents` are
                            their other names)
    truncate_prompt_tokens  a pair has at most so many tokens, special ones included; its longer text is cut; -1: as
                            many as fit
    use_activation          a score from 0 to 1, if the model has such (default: true)
    """

    use_activation: bool | None = None


class SimilarityInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source_sentence: str
    sentences: Annotated[list[str], msgspec.Meta(min_length=1)]


class SimilarityRequest(PairsRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /similarity`: how near texts are, as the cosine of their embeddings.

    text_1, text_2          one text and several, or equally many of both (`queries` and `documents` are
                            their other names)
    pooling                 as of an embedding
    truncate_prompt_tokens  only so many tokens of each text are read
    inputs                  instead of texts: a sentence and others; the answer is a list of numbers, as
                            text-embeddings-inference gives it
    """

    pooling: Pooling | None = None
    inputs: SimilarityInputs | None = None
    parameters: dict[str, Any] | None = None


class RerankText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /rerank`: documents sorted by their relevance to a query, the most relevant first, by a model that was
    trained to rank.

    documents         texts, or objects with a text; or send `texts`
    top_n             only the first so many (0 and null: all)
    return_documents  with the texts (default: true)
    truncate_prompt_tokens  a query and a document have at most so many tokens together, special ones included; the
                            longer one is cut; -1: as many as fit
    use_activation    scores from 0 to 1, if the model has such (default: true)
    texts             instead of documents: the request and its answer have the shapes of text-embeddings-inference,
                      with raw_scores, return_text and truncate (default: false)
    """

    query: str
    documents: Annotated[list[str | RerankText], msgspec.Meta(min_length=1)] | None = None
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    use_activation: bool | None = None
    request_id: RequestId | None = None
    texts: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None


OF_DOCUMENTS = ("top_n", "return_documents", "truncate_prompt_tokens", "use_activation")
OF_TEXTS = ("raw_scores", "return_text", "truncate", "truncation_direction")
"""Fields that are sent with `documents` alone, and with `texts` alone."""


class CohereRerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v2/rerank`, Cohere's.

    top_n               only the first so many
    max_tokens_per_doc  a document has at most so many tokens (default: 4096), and as many as fit beside the query
    """

    model: str
    query: str
    documents: Annotated[list[str], msgspec.Meta(min_length=1)]
    top_n: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 4096


class Pooled(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolingAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
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


class TeiRanked(msgspec.Struct, omit_defaults=True):
    index: int
    score: float
    text: str | None = None


class CohereRanked(msgspec.Struct):
    index: int
    relevance_score: float


class CohereMeta(msgspec.Struct):
    api_version: dict[str, str]
    billed_units: dict[str, int]


class CohereRerankAnswer(msgspec.Struct, kw_only=True):
    id: str
    results: list[CohereRanked]
    meta: CohereMeta
