"""`POST /classify`, `/score`, `/rerank` and `/pooling` in vLLM's shapes, `/rerank` in Jina's, too, and `/v2/rerank` in
Cohere's; `/similarity`, the cosine of embeddings. `/rerank` and `/similarity` also read those of
text-embeddings-inference, which have other fields.

A score is the one label's of a model that was trained to rank: it reads both texts at once. Other models are refused:
nearness of embeddings is not relevance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime.engine.errors import ContextLengthExceededError
from runtime.pooling import POOLING_TASKS, activated
from runtime.text.pooled_texts import check_cut, pair_of
from server.errors import engine_errors, in_own_names, invalid
from server.openai_api.embeddings import AskedEmbeddings, Vector, prepare_embeddings
from server.openai_api.schema import EmbeddingRequest
from server.requests.answering import answered
from server.requests.prompt import entry_names
from server.service import Service, new_id
from server.transport.body import Body, decode_body
from server.vllm_api.scoring_schema import (
    OF_DOCUMENTS,
    OF_TEXTS,
    Classified,
    ClassifyAnswer,
    ClassifyRequest,
    CohereMeta,
    CohereRanked,
    CohereRerankAnswer,
    CohereRerankRequest,
    Direction,
    PairsRequest,
    Pooled,
    PoolingAnswer,
    PoolingRequest,
    Ranked,
    RankedText,
    RerankAnswer,
    RerankRequest,
    Score,
    ScoreAnswer,
    ScoreRequest,
    SimilarityRequest,
    TeiRanked,
)


def _prepare_pooling(service: Service, body: Body) -> AskedEmbeddings:
    """The results of a task for inputs or pairs of texts, in vLLM's shape."""
    asked = decode_body(body, PoolingRequest, service.config)
    pooling = service.client.info.pooling
    task = asked.task or ("token_classify" if pooling.token_labels and not pooling.labels else "embed")
    if task not in POOLING_TASKS:
        known = ", ".join(POOLING_TASKS)
        raise invalid("task", f"Unsupported value: task {asked.task!r}, must be one of {known}.", "unsupported_value")
    if why_not := pooling.why_not(task):
        raise invalid("task", f"The model {service.model_name!r} cannot do {task}: {why_not}.")
    if asked.text_1 is None and asked.text_2 is None:
        prepared = prepare_embeddings(service, asked, _pooled, body.exchange.tenant)
    else:
        prepared = _of_pairs(service, asked, body)
    prepared.task = task
    if task in ("classify", "token_classify"):
        prepared.answer = _scored(asked.use_activation)
    elif asked.use_activation is not None:
        raise invalid(
            "use_activation",
            "use_activation is for the tasks 'classify' and 'token_classify'.",
            "unsupported_parameter",
        )
    return prepared


def _of_pairs(service: Service, asked: PoolingRequest, body: Body) -> AskedEmbeddings:
    """The pairs of `text_1` and `text_2`, each encoded as one prompt. Raises `ApiError` 400."""
    for name in ("input", "messages", "prompt_name", "add_special_tokens"):
        if getattr(asked, name) is not None:
            raise invalid(name, f"{name} is not sent with text_1 and text_2.", "unsupported_parameter")
    for name in ("text_1", "text_2"):
        if getattr(asked, name) is None:
            raise invalid(name, f"Send {name}, too: text_1 and text_2 are a pair.", "missing_required_parameter")
    first, second = _pairs(PairsRequest(text_1=asked.text_1, text_2=asked.text_2))
    pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
    asked.input, second_from = encoded_pairs(service, pairs, ("text_1", "text_2"), asked.truncate_prompt_tokens)
    asked.truncate_prompt_tokens = None
    prepared = prepare_embeddings(service, asked, _pooled, body.exchange.tenant, "text_2")
    prepared.second_from = second_from
    return prepared


def _pooled(asked: AskedEmbeddings, vectors: list[Vector]) -> PoolingAnswer:
    data = [Pooled(index=index, data=asked.shaped(vector)) for index, vector in enumerate(vectors)]
    return PoolingAnswer(id=new_id("pool"), **_common(asked), data=data)


def _scored(use_activation: bool | None) -> Callable[[AskedEmbeddings, list[Vector]], PoolingAnswer]:
    def answer(asked: AskedEmbeddings, scores: list[Vector]) -> PoolingAnswer:
        data = [
            Pooled(index=index, data=probabilities(asked.service, each, use_activation).tolist())
            for index, each in enumerate(scores)
        ]
        return PoolingAnswer(id=new_id("pool"), **_common(asked), data=data)

    return answer


def _prepare_classes(service: Service, body: Body) -> AskedEmbeddings:
    """The labels of texts."""
    asked = decode_body(body, ClassifyRequest, service.config)
    labels = service.client.info.pooling.labels

    def answer(prepared: AskedEmbeddings, scores: list[Vector]) -> ClassifyAnswer:
        data = []
        for index, each in enumerate(scores):
            found = probabilities(service, each, asked.use_activation)
            label = labels[int(np.argmax(found))]
            data.append(Classified(index=index, label=label, probs=found.tolist(), num_classes=len(labels)))
        return ClassifyAnswer(id=new_id("classify"), **_common(prepared), data=data)

    return prepare_labels(service, asked, answer, body.exchange.tenant)


def prepare_labels(
    service: Service,
    asked: ClassifyRequest,
    answer: Callable[[AskedEmbeddings, list[Vector]], Any],
    tenant: str | None,
    field: str = "input",
) -> AskedEmbeddings:
    """A decoded request's inputs, its `field`, for the classifier. Raises `ApiError`."""
    service.check_model(asked.model)
    _check_labels(service, "model")
    given = EmbeddingRequest(
        model=asked.model, input=asked.input, truncate_prompt_tokens=asked.truncate_prompt_tokens,
        add_special_tokens=asked.add_special_tokens, prompt_name="",
    )  # fmt: skip
    prepared = prepare_embeddings(service, given, answer, tenant, field)
    prepared.task = "classify"
    return prepared


def _check_labels(service: Service, field: str) -> None:
    pooling = service.client.info.pooling
    if not pooling.labels:
        raise invalid(
            field,
            f"The model {service.model_name!r} classifies no texts: {pooling.why_no_classes}."
            f" POST {'/pooling' if pooling.token_labels else '/v1/embeddings'} has its results.",
        )


def probabilities(service: Service, scores: Vector, use_activation: bool | None) -> Vector:
    return scores if use_activation is False else activated(scores, service.client.info.pooling.activation)


def _prepare_scores(service: Service, body: Body) -> AskedEmbeddings:
    """One score for each pair."""
    asked = decode_body(body, ScoreRequest, service.config)
    first, second = _pairs(asked)

    def answer(prepared: AskedEmbeddings, scores: list[Vector]) -> ScoreAnswer:
        data = [
            Score(index=index, score=float(probabilities(service, each, asked.use_activation)[0]))
            for index, each in enumerate(scores)
        ]
        return ScoreAnswer(id=new_id("score"), **_common(prepared), data=data)

    pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
    return _ranking(
        service, body.exchange.tenant, asked.model, pairs, _names(asked), asked.truncate_prompt_tokens, answer
    )


def _prepare_similarities(service: Service, body: Body) -> AskedEmbeddings:
    """The cosine of each pair's embeddings."""
    asked = decode_body(body, SimilarityRequest, service.config)
    if asked.parameters:
        raise invalid("parameters", "parameters must be empty: its fields are not built.", "unsupported_parameter")
    if asked.inputs is None:
        first, second = _pairs(asked)
        names = _names(asked)
    else:
        for name in ("text_1", "text_2", "queries", "documents"):
            if getattr(asked, name) is not None:
                raise invalid(name, f"{name} is sent without inputs.", "unsupported_parameter")
        first, second = [asked.inputs.source_sentence], asked.inputs.sentences
        names = "inputs.source_sentence", "inputs.sentences"

    def answer(prepared: AskedEmbeddings, vectors: list[Vector]) -> ScoreAnswer | list[float]:
        lefts, rights = vectors[: len(first)], vectors[len(first) :]
        found = [cosine(*pair) for pair in zip(lefts * (len(rights) // len(lefts)), rights, strict=True)]
        if asked.inputs is not None:
            return found
        data = [Score(index=index, score=each) for index, each in enumerate(found)]
        return ScoreAnswer(id=new_id("score"), **_common(prepared), data=data)

    given = EmbeddingRequest(
        model=asked.model, input=[*first, *second], pooling=asked.pooling,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
    )  # fmt: skip
    places = [*entry_names(names[0], len(first)), *entry_names(names[1], len(second))]
    with in_own_names(dict(zip(entry_names("input", len(places)), places, strict=True))):
        return prepare_embeddings(service, given, answer, body.exchange.tenant)


def _names(asked: PairsRequest) -> tuple[str, str]:
    """The names under which the request has a pair's texts."""
    return "queries" if asked.text_1 is None else "text_1", "documents" if asked.text_2 is None else "text_2"


def _pairs(asked: PairsRequest) -> tuple[list[str], list[str]]:
    first = _either(asked, "text_1", "queries")
    second = _either(asked, "text_2", "documents")
    if len(first) not in (1, len(second)):
        raise invalid(
            "text_2", f"text_1 must have one entry, or as many as text_2: they have {len(first)} and {len(second)}."
        )
    return first, second


def _either(asked: PairsRequest, name: str, other: str) -> list[str]:
    value, same = getattr(asked, name), getattr(asked, other)
    if (value is None) == (same is None):
        raise invalid(name, f"Send either {name} or {other}.", "missing_required_parameter")
    texts = value if value is not None else same
    return [texts] if isinstance(texts, str) else texts


def _prepare_ranking(service: Service, body: Body) -> AskedEmbeddings:
    """The documents most relevant to the query, sorted; ties keep their order."""
    asked = decode_body(body, RerankRequest, service.config)
    if (asked.texts is None) == (asked.documents is None):
        raise invalid("documents", "Send either documents or texts.", "missing_required_parameter")
    for field in OF_DOCUMENTS if asked.documents is None else OF_TEXTS:
        if getattr(asked, field) is not None:
            own, given = ("documents", "texts") if asked.documents is None else ("texts", "documents")
            raise invalid(field, f"{field} is sent with {own}, not with {given}.", "unsupported_parameter")
    if asked.documents is None:
        return _tei_ranking(service, asked, body.exchange.tenant)
    texts = [document if isinstance(document, str) else document.text for document in asked.documents]
    has_texts = asked.return_documents is not False

    def answer(prepared: AskedEmbeddings, scores: list[Vector]) -> RerankAnswer:
        results = [
            Ranked(index=index, document=RankedText(texts[index]) if has_texts else None, relevance_score=score)
            for index, score in _ranked(service, scores, asked.use_activation, asked.top_n)
        ]
        return RerankAnswer(id=new_id("rerank"), model=service.model_name, usage=prepared.usage, results=results)

    pairs = [(asked.query, text) for text in texts]
    return _ranking(
        service, body.exchange.tenant, asked.model, pairs, ("query", "documents"), asked.truncate_prompt_tokens, answer
    )


def _tei_ranking(service: Service, asked: RerankRequest, tenant: str | None) -> AskedEmbeddings:
    """The same in text-embeddings-inference's shape."""
    texts, most = asked.texts or [], tei_room(asked.truncate, asked.truncation_direction)

    def answer(prepared: AskedEmbeddings, scores: list[Vector]) -> list[TeiRanked]:
        return [
            TeiRanked(index, score, texts[index] if asked.return_text else None)
            for index, score in _ranked(service, scores, not asked.raw_scores, None)
        ]

    pairs = [(asked.query, text) for text in texts]
    return _ranking(service, tenant, asked.model, pairs, ("query", "texts"), most, answer)


def tei_room(truncate: bool | None, direction: Direction | None) -> int | None:
    """text-embeddings-inference's `truncate` as `truncate_prompt_tokens`; without it, the direction means nothing
    there, either. Raises `ApiError` 400."""
    if truncate and direction in ("Left", "left"):
        problem = "truncation_direction 'Left' is not built: texts are cut at their end ('Right')."
        raise invalid("truncation_direction", problem, "unsupported_value")
    return -1 if truncate else None


def _prepare_cohere_ranking(service: Service, body: Body) -> AskedEmbeddings:
    """The same in Cohere's shape: documents that are too long are cut."""
    asked = decode_body(body, CohereRerankRequest, service.config)

    def answer(prepared: AskedEmbeddings, scores: list[Vector]) -> CohereRerankAnswer:
        results = [CohereRanked(*each) for each in _ranked(service, scores, None, asked.top_n)]
        return CohereRerankAnswer(
            id=new_id("rerank"), results=results, meta=CohereMeta({"version": "2"}, {"search_units": 1})
        )

    tokenizer = service.tokenizer
    texts = asked.documents
    if tokenizer is not None:
        most = asked.max_tokens_per_doc
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        texts = [
            text if len(each) <= most else tokenizer.decode(each[:most]) for text, each in zip(texts, ids, strict=True)
        ]
    pairs = [(asked.query, text) for text in texts]
    return _ranking(service, body.exchange.tenant, asked.model, pairs, ("query", "documents"), -1, answer)


def _ranked(
    service: Service, scores: list[Vector], use_activation: bool | None, most: int | None
) -> list[tuple[int, float]]:
    """The numbers of the documents with their scores, the most relevant first."""
    found = [float(probabilities(service, each, use_activation)[0]) for each in scores]
    order = sorted(range(len(found)), key=lambda index: -found[index])[: most or None]
    return [(index, found[index]) for index in order]


def _ranking(
    service: Service,
    tenant: str | None,
    model: str | None,
    pairs: Sequence[tuple[str, str]],
    names: tuple[str, str],
    most: int | None,
    answer: Callable[[AskedEmbeddings, list[Vector]], Any],
) -> AskedEmbeddings:
    """The scores of pairs, whose two fields in the request are `names`. Raises `ApiError` 400, also for a model that
    was not trained to rank."""
    service.check_model(model)
    info = service.client.info
    if not info.pooling.scores_pairs:
        raise invalid(
            "model",
            f"The model {service.model_name!r} cannot rank: {info.pooling.why_no_scores}. POST /similarity compares"
            " embeddings.",
        )
    ids, second_from = encoded_pairs(service, pairs, names, most)
    given = EmbeddingRequest(model=model, input=ids)
    prepared = prepare_embeddings(service, given, answer, tenant, names[1])
    prepared.task, prepared.second_from = "classify", second_from
    return prepared


def encoded_pairs(
    service: Service, pairs: Sequence[tuple[str, str]], names: tuple[str, str], most: int | None
) -> tuple[list[str | int | list[int]], list[int | None]]:
    """The ids of pairs, and each one's first token of the second text's type, or None; `names`: of the two fields.
    Raises `ApiError` 400."""
    first, field = names
    info = service.client.info
    if service.tokenizer is None:
        raise invalid(field, f"This model has no tokenizer: it has no scores of texts in {field}.")
    if len(pairs) > service.config.max_inputs:
        raise invalid(field, f"{field} must have at most {service.config.max_inputs} entries, got {len(pairs)}.")
    room = None if most is None else info.max_model_len if most == -1 else min(most, info.max_model_len)
    found = [pair_of(service.tokenizer, info.pooling, *pair, room) for pair in pairs]
    with engine_errors():
        for (query, _), (ids, _) in zip(pairs, found, strict=True):
            if len(ids) > info.max_model_len:  # no shorter document helps a query that is too long itself
                num_least = len(pair_of(service.tokenizer, info.pooling, query, "")[0])
                if num_least > info.max_model_len:
                    raise ContextLengthExceededError(num_least, info.max_model_len, has_answer=False, param=first)
            check_cut(ids, most)
    return [ids for ids, _ in found], [second_from for _, second_from in found]


create_pooling, create_classes, create_scores, create_similarities, create_ranking, create_cohere_ranking = map(
    answered,
    (_prepare_pooling, _prepare_classes, _prepare_scores, _prepare_similarities, _prepare_ranking,
     _prepare_cohere_ranking),
)  # fmt: skip


def _common(asked: AskedEmbeddings) -> dict[str, Any]:
    return {"created": int(time.time()), "model": asked.service.model_name, "usage": asked.usage}


def cosine(left: Vector, right: Vector) -> float:
    """Between -1 and 1; 0 if a vector is zero."""
    one, other = left.astype(np.float64), right.astype(np.float64)
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return min(1.0, max(-1.0, float(one @ other) / length)) if length > 0 else 0.0
