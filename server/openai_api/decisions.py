"""`POST /v1/decisions`: the probabilities of answers to questions about one input (`runtime/text/decisions.py`).

The input is the beginning of all prompts: the first question brings it into the prefix cache, the others follow at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from runtime.engine.messages import AdapterRef, ImageItem
from runtime.engine.sampling_params import SamplingParams
from runtime.text.classifier_decisions import read_by_classifier, reading_of, text_of_input
from runtime.text.decisions import (
    MOST_QUESTIONS,
    Beginning,
    DecisionAnswer,
    Options,
    Question,
    answer,
    content_start,
    json_as_text,
    options_by_question,
    question_parts,
    with_question,
)
from runtime.text.formats import end_ids
from server.errors import engine_errors, in_own_names, invalid
from server.openai_api.embeddings import AskedEmbeddings, Vector, prepare_embeddings
from server.openai_api.schema import ChatCompletionRequest, EmbeddingRequest, Message
from server.requests.answering import Pending, answered
from server.requests.generation import Generation, GenerationError, Scheduling
from server.requests.prompt import ReadPictures, conversation_prompt
from server.requests.thinking import thinking_variables
from server.responses_api.objects import InputTokensDetails, OutputTokensDetails, ResponseUsage
from server.responses_api.request import ItemMessages, input_messages
from server.service import Service, new_id
from server.transport.body import Body, decode_body
from server.transport.json_answer import JsonAnswer
from server.transport.sse import watch_disconnect
from tokenizer import Tokenizer


class DecisionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/decisions`.

    input              a text, or messages and calls, as of `/v1/responses`
    questions          1 to 400, answered in their order
    refusal_threshold  a question is answered by a refusal if all of its labels together have less probability
    prompt_cache_key, prompt_cache_options, safety_identifier  accepted: prefixes are cached anyway
    """

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    questions: Annotated[list[Question], msgspec.Meta(min_length=1, max_length=MOST_QUESTIONS)]
    refusal_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class Decision(msgspec.Struct, kw_only=True):
    answers: list[DecisionAnswer]
    model: str
    usage: ResponseUsage


@dataclass(slots=True)
class _Asked:
    """A question's prompt, with its pictures, and its options; `found` are the log probabilities of its labels' tokens,
    as they come."""

    token_ids: list[int]
    images: tuple[ImageItem, ...]
    options: Options
    found: dict[Beginning, dict[int, float]] = field(default_factory=dict)


Row = tuple[_Asked, Beginning, Sequence[int]]
"""A question after the beginning of a label, and the tokens whose log probabilities are needed there."""


@dataclass(slots=True, kw_only=True)
class PreparedDecisions(Pending):
    """A request that has passed all checks but the engine's."""

    service: Service
    arrival_s: float
    asked: DecisionRequest
    prompts: list[_Asked]
    adapter: AdapterRef | None = None
    num_cached_tokens: int = 0

    async def respond(self, request: Request) -> Response:
        """Asks the first question, then the others."""
        request_id = new_id("dec")
        for number, rows in enumerate(self._rounds()):
            await self._ask(request, f"{request_id}-{number}", rows)
        asked = self.asked
        answers = [
            answer(question, each.options.logprobs(each.found), asked.refusal_threshold)
            for question, each in zip(asked.questions, self.prompts, strict=True)
        ]
        name = self.service.model_name if self.adapter is None else self.adapter.name
        count, total = len(answers), sum(len(each.token_ids) for each in self.prompts)
        usage = ResponseUsage(
            total, InputTokensDetails(self.num_cached_tokens, total - self.num_cached_tokens), count,
            OutputTokensDetails(0), total + count,
        )  # fmt: skip
        return JsonAnswer(Decision(answers=answers, model=name, usage=usage), {"X-Request-Id": request_id})

    def _rounds(self) -> Iterator[list[Row]]:
        """The rows that are asked at once: the first question brings the input into the cache, the others bring their
        own ends, and then come beginnings of labels. As many as the engine runs, and its queue takes."""
        named = [(each, each.options.named()) for each in self.prompts]
        first: list[Row] = [(each, (), ids[()]) for each, ids in named]
        yield first[:1]
        rest = [*first[1:], *((each, given, own) for each, ids in named for given, own in ids.items() if given)]
        info = self.service.client.info
        longest = max(len(each.token_ids) for each in self.prompts)
        most = max(1, min(info.max_num_seqs, info.max_waiting // 2, info.max_waiting_tokens // 2 // longest))
        for start in range(0, len(rest), most):
            yield rest[start : start + most]

    async def _ask(self, request: Request, request_id: str, rows: Sequence[Row]) -> None:
        service = self.service
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True,
            logprob_token_ids=list(dict.fromkeys(token_id for _, _, ids in rows for token_id in ids)),
        )  # fmt: skip
        generation = Generation(
            client=service.client, bridge=service.bridge, tokenizer=service.tokenizer, request_id=request_id,
            prompts=[each.token_ids + list(given) for each, given, _ in rows], params=params,
            arrival_time_s=self.arrival_s, scheduling=Scheduling(speculates=False, adapter=self.adapter),
            images=[each.images for each, _, _ in rows],
        )  # fmt: skip
        service.admit(request, generation, {"prompt": "input", "images": "input"})
        try:
            with closing(generation):
                async with watch_disconnect(request.receive, generation.leave):
                    async for pieces in generation:
                        for piece in pieces:
                            for logprobs in piece.delta.logprobs or ():
                                each, given, _ = rows[piece.choice]
                                each.found[given] = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        except GenerationError as error:
            raise service.failure(request_id, error) from None
        if generation.has_left:
            raise ClientDisconnect
        if not any(given for _, given, _ in rows):
            self.num_cached_tokens += generation.num_cached_tokens


def _prepare(service: Service, body: Body) -> Pending:
    asked = decode_body(body, DecisionRequest, service.config)
    adapter, tokenizer = service.adapter_of(asked.model), service.tokenizer
    if tokenizer is None:
        raise invalid("questions", "This model has no tokenizer: it has no labels for answers.")
    pooling = service.client.info.pooling
    if not pooling.generates and pooling.labels:
        return _classified(service, tokenizer, asked, body.exchange.tenant)
    items = _items(asked.input)
    ends = end_ids(service.answer_format, tokenizer, service.client.info.eos_token_ids)
    with engine_errors():
        options = options_by_question(asked.questions, tokenizer, ends)
    tenant, pictures = body.exchange.tenant, ReadPictures()
    prompts = [
        _asked(service, tokenizer, tenant, items, question, own, f"questions[{index}]", pictures)
        for index, (question, own) in enumerate(zip(asked.questions, options, strict=True))
    ]
    return PreparedDecisions(
        service=service, arrival_s=body.exchange.arrival_s, asked=asked, prompts=prompts, adapter=adapter
    )


def _classified(service: Service, tokenizer: Tokenizer, asked: DecisionRequest, tenant: str | None) -> AskedEmbeddings:
    """The questions of a classifier. Raises `ApiError` 400."""
    info = service.client.info
    if asked.refusal_threshold:
        problem = "refusal_threshold is for a model that chats: a classifier always answers."
        raise invalid("refusal_threshold", problem, "unsupported_parameter")
    with engine_errors():
        text = text_of_input(asked.input, "input")
        readings = [
            reading_of(question, text, info.pooling, f"questions[{index}]")
            for index, question in enumerate(asked.questions)
        ]
    pairs = [pair for reading in readings for pair in reading.pairs]
    if len(pairs) > service.config.max_inputs:
        problem = f"questions are {len(pairs)} texts for this model: at most {service.config.max_inputs} are allowed."
        raise invalid("questions", problem)
    rows = [read_by_classifier(tokenizer, info.pooling, *pair) for pair in pairs]

    def answers(prepared: AskedEmbeddings, scores: list[Vector]) -> Decision:
        left, total = iter(scores), prepared.num_tokens
        found = [reading.answer([next(left) for _ in reading.pairs], info.pooling) for reading in readings]
        usage = ResponseUsage(total, InputTokensDetails(0, total), 0, OutputTokensDetails(0), total)
        return Decision(answers=found, model=service.model_name, usage=usage)

    given = EmbeddingRequest(model=asked.model, input=[ids for ids, _ in rows])
    prepared = prepare_embeddings(service, given, answers, tenant)
    prepared.task, prepared.second_from = "classify", [second for _, second in rows]
    return prepared


def _items(given: str | list[dict[str, Any]]) -> ItemMessages:
    """The input's messages, with JSON as text. Raises `ApiError` 400, also for a result without its call."""
    if isinstance(given, str):
        return input_messages(given)
    items, open_calls = [], set[str]()
    for index, item in enumerate(given):
        fields, path, call_id = dict(item), f"input[{index}]", item.get("call_id")
        for name in ("content", "output"):
            if isinstance(parts := fields.get(name), list) and all(isinstance(part, dict) for part in parts):
                with engine_errors():
                    fields[name] = [json_as_text(part, f"{path}.{name}[{at}]") for at, part in enumerate(parts)]
        if item.get("type") in ("function_call", "custom_tool_call"):
            open_calls.add(str(call_id))
        elif item.get("type") in ("function_call_output", "custom_tool_call_output") and str(call_id) not in open_calls:
            raise invalid(f"{path}.call_id", f"{path}.call_id: no call before it has the id {call_id!r:.80}.")
        items.append(fields)
    return input_messages(items)


def _asked(
    service: Service, tokenizer: Tokenizer, tenant: str | None, items: ItemMessages, question: Question,
    options: Options, path: str, pictures: ReadPictures,
) -> _Asked:  # fmt: skip
    """A question's prompt. Raises `ApiError` 400."""
    with engine_errors():
        parts = question_parts(question, options, path)
    *before, last = items.messages
    names = {f"messages{own_name}": name for own_name, name in items.names.items()}
    if last.role == "user":
        messages = [*before, Message(role="user", content=with_question(last.content, parts))]
        num_given = 1 if isinstance(last.content, str) else len(last.content or ())
    else:
        messages, num_given = [*items.messages, Message(role="user", content=parts)], 0
        names[f"messages[{len(messages) - 1}]"] = path
    for index in range(len(parts)):
        names[f"messages[{len(messages) - 1}].content[{num_given + index}]"] = f"{path}.instructions[{index}]"
    chat = ChatCompletionRequest(
        messages=messages, max_tokens=1,
        chat_template_kwargs=thinking_variables(service, False, has_tools=False) or None,
    )  # fmt: skip
    with in_own_names({**names, "messages": "input"}):
        prompt = conversation_prompt(service, tenant, chat, pictures)
    start = content_start(tokenizer, service.answer_format, prompt.token_ids)
    return _Asked(prompt.token_ids + start, prompt.images, options)


create_decision = answered(_prepare)
