"""`POST /v1/decisions`: the probabilities of answers to questions about one input; no text is generated.

Each question is a chat that ends with it and the labels of its options, one token each. The probabilities are those of
the labels as the next token, of all labels together one; `confidence` is the chosen label's among all tokens. OpenAI
has not published its method; this is vLLM's and SGLang's. The input is the beginning of all prompts: the first question
brings it into the prefix cache, the others follow at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from runtime.engine.messages import ImageItem
from runtime.engine.sampling_params import SamplingParams
from server.errors import in_own_names, invalid
from server.openai_api.schema import ChatCompletionRequest, Message
from server.requests.answering import Pending, answered
from server.requests.generation import Generation, GenerationError, Scheduling
from server.requests.prompt import conversation_prompt
from server.requests.thinking import thinking_variables
from server.responses_api.objects import InputTokensDetails, OutputTokensDetails, ResponseUsage
from server.responses_api.request import input_messages
from server.service import Service, new_id
from server.transport.body import Body, decode_body
from server.transport.json_answer import JsonAnswer
from server.transport.sse import watch_disconnect
from tokenizer import Tokenizer

Instructions = str | list[dict[str, Any]]


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    value: str | bool
    description: str | None = None


class Level(msgspec.Struct, forbid_unknown_fields=True):
    label: str
    description: str | None = None


class _Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    instructions: Instructions
    name: str | None = None


class PredicateQuestion(_Question, tag_field="type", tag="predicate", kw_only=True):
    """True or false."""


class ChoiceQuestion(_Question, tag_field="type", tag="choice", kw_only=True):
    """The best of 2 to 255 options."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=2, max_length=255)]


class ScoreQuestion(_Question, tag_field="type", tag="score", kw_only=True):
    """A rating by 2 to 10 ordered levels."""

    levels: Annotated[list[Level], msgspec.Meta(min_length=2, max_length=10)]


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/decisions`.

    input              a text, or messages and calls, as of `/v1/responses`
    questions          1 to 400, answered in their order
    prompt_cache_key, prompt_cache_options, safety_identifier  accepted: prefixes are cached anyway
    """

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    questions: Annotated[list[Question], msgspec.Meta(min_length=1, max_length=400)]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class PredicateAnswer(msgspec.Struct, tag_field="type", tag="predicate", kw_only=True):
    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct):
    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, tag_field="type", tag="choice", kw_only=True):
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(msgspec.Struct):
    label: str
    value: int
    probability: float


class ScoreAnswer(msgspec.Struct, tag_field="type", tag="score", kw_only=True):
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class Decision(msgspec.Struct, kw_only=True):
    answers: list[DecisionAnswer]
    model: str
    usage: ResponseUsage


@dataclass(slots=True, kw_only=True)
class PreparedDecisions(Pending):
    """A request that has passed all checks but the engine's.

    labels  the token of each question's options
    """

    service: Service
    arrival_s: float
    asked: DecisionRequest
    prompts: list[list[int]]
    images: tuple[ImageItem, ...]
    labels: list[list[int]]
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    async def respond(self, request: Request) -> Response:
        """Asks the first question, then the others."""
        self.token_ids = list(dict.fromkeys(label for labels in self.labels for label in labels))
        request_id = new_id("dec")
        answers: list[DecisionAnswer] = []
        for number, numbers in enumerate(self._rounds()):
            answers += await self._ask(request, f"{request_id}-{number}", numbers)
        count, total = len(answers), sum(map(len, self.prompts))
        usage = ResponseUsage(
            total, InputTokensDetails(self.num_cached_tokens, total - self.num_cached_tokens), count,
            OutputTokensDetails(0), total + count,
        )  # fmt: skip
        decision = Decision(answers=answers, model=self.service.model_name, usage=usage)
        return JsonAnswer(decision, {"X-Request-Id": request_id})

    def _rounds(self) -> Iterator[list[int]]:
        """The numbers of the questions that are asked at once: the first brings the input into the cache; a prompt with
        pictures is a request by itself."""
        rest = list(range(1, len(self.prompts)))
        yield [0]
        yield from [[number] for number in rest] if self.images else [rest] if rest else []

    async def _ask(self, request: Request, request_id: str, numbers: list[int]) -> list[DecisionAnswer]:
        service = self.service
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=self.token_ids, ignore_eos=True)
        generation = Generation(
            client=service.client, bridge=service.bridge, tokenizer=service.tokenizer, request_id=request_id,
            prompts=[self.prompts[number] for number in numbers], params=params, arrival_time_s=self.arrival_s,
            scheduling=Scheduling(speculates=False), images=self.images,
        )  # fmt: skip
        service.admit(request, generation, {"prompt": "input", "images": "input"})
        found: dict[int, dict[int, float]] = {}
        try:
            with closing(generation):
                async with watch_disconnect(request.receive, generation.leave):
                    async for pieces in generation:
                        for piece in pieces:
                            for each in piece.delta.logprobs or ():
                                found[piece.choice] = dict(zip(each.top_ids, each.top_logprobs, strict=True))
        except GenerationError as error:
            raise service.failure(request_id, error) from None
        if generation.has_left:
            raise ClientDisconnect
        self.num_cached_tokens += generation.num_cached_tokens
        return [
            _answer(self.asked.questions[number], [found[place][label] for label in self.labels[number]])
            for place, number in enumerate(numbers)
        ]


def _answer(question: Question, logprobs: Sequence[float]) -> DecisionAnswer:
    """The answer by the log probabilities of the options' labels among all tokens."""
    most = max(logprobs)
    weights = [math.exp(each - most) for each in logprobs]
    total = sum(weights)
    probabilities = [each / total for each in weights]
    best = max(range(len(logprobs)), key=logprobs.__getitem__)
    confidence = math.exp(logprobs[best])
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(name=question.name, probability=probabilities[0])
    if isinstance(question, ChoiceQuestion):
        values = [choice.value for choice in question.choices]
        pairs = [ChoiceProbability(value, each) for value, each in zip(values, probabilities, strict=True)]
        return ChoiceAnswer(name=question.name, choice=values[best], confidence=confidence, probabilities=pairs)
    levels = [
        LevelProbability(level.label, value, each)
        for value, (level, each) in enumerate(zip(question.levels, probabilities, strict=True))
    ]
    score = sum(value * each for value, each in enumerate(probabilities))
    return ScoreAnswer(name=question.name, score=score, confidence=confidence, probabilities=levels)


_LABELS = (
    *(chr(code) for code in range(ord("A"), ord("Z") + 1)),
    *(str(number) for number in range(10)),
    *(chr(code) for code in range(ord("a"), ord("z") + 1)),
    *(str(number) for number in range(10, 1000)),
    *(first + second for first in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for second in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
)
_YES_AND_NO = (("Yes", "No"), ("yes", "no"), ("Y", "N"), ("A", "B"))


def _one_token(tokenizer: Tokenizer, label: str) -> int | None:
    ids = tokenizer.encode(label, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def _labels(tokenizer: Tokenizer, count: int, field_name: str) -> dict[str, int]:
    """So many labels of one token each, with their tokens. Raises `ApiError` 400."""
    found: dict[str, int] = {}
    for label in _LABELS:
        token_id = _one_token(tokenizer, label)
        if token_id is not None and token_id not in found.values():
            found[label] = token_id
        if len(found) == count:
            return found
    problem = f"{field_name} has {count} entries, but this model's tokenizer has {len(found)} labels of one token"
    raise invalid(field_name, f"{problem}: send fewer.")


def _text_of(instructions: Instructions, path: str) -> list[dict[str, Any]]:
    """The parts of a question's instructions. Raises `ApiError` 400."""
    if isinstance(instructions, str):
        return [{"type": "input_text", "text": instructions}]
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(instructions)]


def _part(part: dict[str, Any], path: str) -> dict[str, Any]:
    """A part with its JSON as text, and without marks for a cache."""
    part = {name: value for name, value in part.items() if name != "prompt_cache_breakpoint"}
    if part.get("type") != "input_json":
        return part
    if not isinstance(part.get("data"), dict | list):
        raise invalid(f"{path}.data", f"{path}.data must be an object or an array of objects.")
    return {"type": "input_text", "text": msgspec.json.encode(part["data"]).decode()}


def _asked(question: Question, tokenizer: Tokenizer, path: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The parts of the last message, and the options' tokens. Raises `ApiError` 400."""
    parts = _text_of(question.instructions, f"{path}.instructions")
    if isinstance(question, PredicateQuestion):
        for yes, no in _YES_AND_NO:
            ids = [_one_token(tokenizer, label) for label in (yes, no)]
            if None not in ids and ids[0] != ids[1]:
                end = "" if yes[0].lower() == "y" else f" ({yes}: yes, {no}: no)"
                text = f"\n\nAnswer with {yes} or {no} alone{end}."
                return [*parts, {"type": "input_text", "text": text}], [each for each in ids if each is not None]
        raise invalid(path, f"{path}: this model's tokenizer has no word of one token for yes and no.")
    if isinstance(question, ChoiceQuestion):
        name, options = "choices", [(_shown(each.value), each.description) for each in question.choices]
        values = [(type(each.value), each.value) for each in question.choices]
        if len(set(values)) < len(values):
            raise invalid(f"{path}.choices", f"{path}.choices has a value twice.")
    else:
        name, options = "levels", [(each.label, each.description) for each in question.levels]
    labels = _labels(tokenizer, len(options), f"{path}.{name}")
    lines = [
        f"{label}: {value}" + (f" ({description})" if description else "")
        for label, (value, description) in zip(labels, options, strict=True)
    ]
    kind = "options" if name == "choices" else "levels, from the lowest to the highest"
    text = f"\n\nThe {kind}:\n" + "\n".join(lines) + "\n\nAnswer with the label alone."
    return [*parts, {"type": "input_text", "text": text}], list(labels.values())


def _with_question(messages: Sequence[Message], parts: list[dict[str, Any]]) -> list[Message]:
    """The messages with the question at the end of the last one, if that is the user's: templates may refuse two."""
    *before, last = messages
    if last.role != "user":
        return [*messages, Message(role="user", content=parts)]
    content = last.content or []
    given = [{"type": "input_text", "text": content}] if isinstance(content, str) else list(content)
    gap = [{"type": "input_text", "text": "\n\n"}]
    return [*before, Message(role="user", content=[*given, *gap, *parts])]


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else "true" if value else "false"


def _prepare(service: Service, body: Body) -> PreparedDecisions:
    asked = decode_body(body, DecisionRequest, service.config)
    service.check_model(asked.model)
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise invalid("questions", "This model has no tokenizer: it has no labels for answers.")
    given = asked.input
    if not isinstance(given, str):
        given = [
            {**item, "content": [_part(part, f"input[{index}].content[{place}]") for place, part in enumerate(content)]}
            if isinstance(content := item.get("content"), list) and all(isinstance(part, dict) for part in content)
            else item
            for index, item in enumerate(given)
        ]
    items = input_messages(given)
    prompts: list[list[int]] = []
    labels: list[list[int]] = []
    images: tuple[ImageItem, ...] = ()
    for index, question in enumerate(asked.questions):
        parts, own = _asked(question, tokenizer, f"questions[{index}]")
        messages = _with_question(items.messages, parts)
        chat = ChatCompletionRequest(
            messages=messages,
            chat_template_kwargs=thinking_variables(service, False, has_tools=False) or None,
            max_tokens=1,
        )
        names = {f"messages{own_name}": path for own_name, path in items.names.items()}
        with in_own_names({**names, f"messages[{len(messages) - 1}]": f"questions[{index}]", "messages": "input"}):
            prompt = conversation_prompt(service, body.exchange.tenant, chat)
        prompts.append(prompt.token_ids)
        labels.append(own)
        images = prompt.images
    return PreparedDecisions(
        service=service, arrival_s=body.exchange.arrival_s, asked=asked, prompts=prompts, images=images, labels=labels
    )


create_decision = answered(_prepare)
