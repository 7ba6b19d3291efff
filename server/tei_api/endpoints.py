"""`POST /embed`, `/predict` and `/` in the shapes of Hugging Face's text-embeddings-inference, which its clients send:
`/` is the one that the model is for. Its `/rerank` and `/similarity` share their routes with others
(`server/vllm_api/scoring.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from server.errors import invalid
from server.openai_api.embeddings import AskedEmbeddings, Vector, prepare_embeddings
from server.openai_api.schema import EmbeddingInput, EmbeddingRequest
from server.requests.answering import answered
from server.requests.prompt import entry_names
from server.service import Service
from server.transport.body import Body, decode_body
from server.vllm_api.scoring import encoded_pairs, prepare_labels, probabilities, tei_room
from server.vllm_api.scoring_schema import ClassifyRequest, Direction, Texts


class TeiEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /embed`.

    inputs      a text or texts
    normalize   at length one (default: true)
    truncate    inputs that are too long are cut at their end (default: false)
    dimensions  only the first so many numbers, at length one
    encoding_format  "float": numbers; "base64": the same as little-endian float32
    """

    inputs: Texts
    model: str | None = None
    normalize: bool = True
    truncate: bool = False
    truncation_direction: Direction = "Right"
    prompt_name: str | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


class TeiParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that Hugging Face's client does not send beside the inputs.

    function_to_apply  "none": scores as they are
    top_k              only the likeliest labels
    """

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None


class TeiPredictRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /predict`: the labels of texts or pairs, by a model with a classifier.

    inputs      a text, a list of one text or of a pair's two, or a list of such lists
    raw_scores  scores as they are, not as probabilities
    """

    inputs: str | Annotated[list[str | list[str]], msgspec.Meta(min_length=1)]
    model: str | None = None
    raw_scores: bool = False
    truncate: bool = False
    truncation_direction: Direction = "Right"
    parameters: TeiParameters | None = None


class TeiRequest(TeiEmbedRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /`: as of `/predict` to a model that classifies and does not generate, else as of `/embed`. One input alone
    has a list of labels within a list, too, as Hugging Face's client reads it."""

    raw_scores: bool = False
    parameters: TeiParameters | None = None


class TeiLabel(msgspec.Struct):
    score: float
    label: str


def _given(inputs: Texts) -> EmbeddingInput:
    return inputs if isinstance(inputs, str) else [*inputs]


def _prepare_embed(service: Service, body: Body) -> AskedEmbeddings:
    return _embedding(service, body, decode_body(body, TeiEmbedRequest, service.config))


def _embedding(service: Service, body: Body, asked: TeiEmbedRequest) -> AskedEmbeddings:
    given = EmbeddingRequest(
        model=asked.model, input=_given(asked.inputs), normalize=asked.normalize, dimensions=asked.dimensions,
        prompt_name=asked.prompt_name, encoding_format=asked.encoding_format,
        truncate_prompt_tokens=tei_room(asked.truncate, asked.truncation_direction),
    )  # fmt: skip

    def answer(prepared: AskedEmbeddings, vectors: list[Vector]) -> Any:
        return [prepared.shaped(vector) for vector in vectors]

    return prepare_embeddings(service, given, answer, body.exchange.tenant, "inputs")


def _prepare_predict(service: Service, body: Body) -> AskedEmbeddings:
    asked = decode_body(body, TeiPredictRequest, service.config)
    given = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    flat = [each for each in given if isinstance(each, str)]
    listed = [flat] if flat else [each for each in given if isinstance(each, list)]
    if 0 < len(flat) < len(given):
        raise invalid("inputs", "inputs must not mix texts and lists of them.", "invalid_type")
    for name, texts in zip(entry_names("inputs", len(listed)), listed, strict=True):
        if not 1 <= len(texts) <= 2:
            problem = f'{name} must be one text, or the two of a pair, got {len(texts)}. A batch is [["a"], ["b"]].'
            raise invalid(name, problem)
        if len(texts) != len(listed[0]):
            raise invalid("inputs", "inputs must be single texts or pairs, not both: send them apart.")
    return _prediction(service, body, asked, listed, is_flat=bool(flat))


def _prediction(
    service: Service, body: Body, asked: TeiPredictRequest, listed: list[list[str]], *, is_flat: bool
) -> AskedEmbeddings:
    labels = service.client.info.pooling.labels
    parameters = asked.parameters or TeiParameters()
    own = service.client.info.pooling.activation
    wanted = parameters.function_to_apply
    if wanted not in (None, "none", own):
        problem = f"parameters.function_to_apply must be {own!r}, the model's own, or 'none', got {wanted!r}."
        raise invalid("parameters.function_to_apply", problem, "unsupported_value")
    is_raw = asked.raw_scores or wanted == "none"

    def one(scores: Vector) -> list[TeiLabel]:
        found = probabilities(service, scores, not is_raw).tolist()
        listed = [TeiLabel(score, label) for score, label in zip(found, labels, strict=True)]
        return sorted(listed, key=lambda each: -each.score)[: parameters.top_k]

    def answer(prepared: AskedEmbeddings, scores: list[Vector]) -> Any:
        return one(scores[0]) if is_flat else [one(each) for each in scores]

    most = tei_room(asked.truncate, asked.truncation_direction)
    if len(listed[0]) == 1:
        given = ClassifyRequest(model=asked.model, input=[text for (text,) in listed], truncate_prompt_tokens=most)
        return prepare_labels(service, given, answer, body.exchange.tenant, "inputs")
    pairs = [(first, second) for first, second in listed]
    ids, second_from = encoded_pairs(service, pairs, ("inputs", "inputs"), most)
    given = ClassifyRequest(model=asked.model, input=ids)
    prepared = prepare_labels(service, given, answer, body.exchange.tenant, "inputs")
    prepared.second_from = second_from
    return prepared


def _prepare_any(service: Service, body: Body) -> AskedEmbeddings:
    asked = decode_body(body, TeiRequest, service.config)
    pooling = service.client.info.pooling
    if pooling.generates or not pooling.labels:
        if asked.raw_scores or asked.parameters is not None:
            name = "raw_scores" if asked.raw_scores else "parameters"
            raise invalid(name, f"{name} is for a model with a classifier, which this is not.", "unsupported_parameter")
        return _embedding(service, body, asked)
    for name, default in (("normalize", True), ("prompt_name", None), ("dimensions", None),
                          ("encoding_format", None)):  # fmt: skip
        if getattr(asked, name) != default:
            raise invalid(name, f"{name} is for a model that embeds; this one classifies.", "unsupported_parameter")
    common = ("inputs", "model", "raw_scores", "truncate", "truncation_direction", "parameters")
    given = TeiPredictRequest(**{name: getattr(asked, name) for name in common})
    texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    return _prediction(service, body, given, [[text] for text in texts], is_flat=False)


create_embed, create_prediction, create_any = map(answered, (_prepare_embed, _prepare_predict, _prepare_any))
