"""Questions about an input that are answered by probabilities, as in OpenAI's Decisions API; no text is generated.

Each question ends a chat with a label for each of its options. The options' probabilities are those of the labels as
the answer, of all labels together one; `confidence` is the chosen label's among all answers. OpenAI has not published
its method; this is vLLM's and SGLang's. A label is one token. If the vocabulary has too few, labels are numbers of
several tokens, and an option's probability is the product over its label and the end of the answer, so that "1" does
not get what belongs to "12".

The module knows no engine: `Options.named` has the tokens whose log probabilities are needed after each beginning of a
label, `Options.logprobs` makes the options' of them, `answer` the answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.errors import XservError
from runtime.text.formats import AnswerFormat
from runtime.text.harmony.message import special_ids
from runtime.text.reasoning import THINK, reasoning_start
from tokenizer import Tokenizer

Instructions = str | list[dict[str, Any]]


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: str | bool
    description: str | None = None


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    label: str
    description: str | None = None


class _Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instructions: Instructions
    name: str | None = None


class PredicateQuestion(_Question, frozen=True, tag_field="type", tag="predicate", kw_only=True):
    """True or false."""


class ChoiceQuestion(_Question, frozen=True, tag_field="type", tag="choice", kw_only=True):
    """The best of 2 to 255 options."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=2, max_length=255)]


class ScoreQuestion(_Question, frozen=True, tag_field="type", tag="score", kw_only=True):
    """A rating by 2 to 10 ordered levels."""

    levels: Annotated[list[Level], msgspec.Meta(min_length=2, max_length=10)]


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion
MOST_QUESTIONS = 400


class PredicateAnswer(msgspec.Struct, tag_field="type", tag="predicate", kw_only=True):
    """probability: of true. confidence: of the likelier one among all answers."""

    name: str | None
    probability: float
    confidence: float


class ChoiceProbability(msgspec.Struct):
    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, tag_field="type", tag="choice", kw_only=True):
    """choice: the likeliest value. confidence: its probability among all answers."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(msgspec.Struct):
    label: str
    value: int
    probability: float


class ScoreAnswer(msgspec.Struct, tag_field="type", tag="score", kw_only=True):
    """score: the mean level, counted from 0. confidence: the likeliest level's probability among all answers."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class RefusalAnswer(msgspec.Struct, tag_field="type", tag="refusal", kw_only=True):
    """The model gives the labels together less probability than the request's `refusal_threshold`."""

    name: str | None


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer

Beginning = tuple[int, ...]
"""The first tokens of a label, or all."""


@dataclass(frozen=True, slots=True)
class Options:
    """A question's options for the model.

    text       ends the question
    labels     the tokens of each option's label
    end_ids    the tokens that end an answer; none if each label is one token, after which nothing is asked
    """

    text: str
    labels: tuple[Beginning, ...]
    end_ids: tuple[int, ...] = ()

    def named(self) -> dict[Beginning, list[int]]:
        """After each beginning of a label: the tokens whose log probabilities are needed. The first is the empty
        beginning."""
        found: dict[Beginning, dict[int, None]] = {(): {}}
        for label in self.labels:
            for place, token_id in enumerate(label):
                found.setdefault(label[:place], {})[token_id] = None
            for token_id in self.end_ids:
                found.setdefault(label, {})[token_id] = None
        return {beginning: list(ids) for beginning, ids in found.items()}

    def logprobs(self, found: Mapping[Beginning, Mapping[int, float]]) -> list[float]:
        """The log probability of each option's label as the whole answer."""
        sums = []
        for label in self.labels:
            steps = [found[label[:place]][token_id] for place, token_id in enumerate(label)]
            if self.end_ids:
                steps.append(_log_of_sum([found[label][token_id] for token_id in self.end_ids]))
            sums.append(math.fsum(steps) if -math.inf not in steps else -math.inf)
        return sums


def _log_of_sum(logprobs: Sequence[float]) -> float:
    most = max(logprobs)
    return most if most == -math.inf else most + math.log(math.fsum(math.exp(each - most) for each in logprobs))


def answer(question: Question, logprobs: Sequence[float], refusal_threshold: float = 0.0) -> DecisionAnswer:
    """The answer by the log probabilities of the options' labels among all answers. If the labels have no probability
    at all, or less than ``refusal_threshold`` together, the model declines to answer."""
    if any(math.isnan(each) for each in logprobs):
        raise XservError("the model's log probabilities are not numbers")
    mass = _log_of_sum(logprobs)
    if mass == -math.inf or math.exp(mass) < refusal_threshold:
        return RefusalAnswer(name=question.name)
    return by_shares(question, [math.exp(each - mass) for each in logprobs], math.exp(max(logprobs)))


def by_shares(question: Question, shares: Sequence[float], confidence: float) -> DecisionAnswer:
    """The answer by the options' probabilities, whose sum is one."""
    best = max(range(len(shares)), key=shares.__getitem__)
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(name=question.name, probability=shares[0], confidence=confidence)
    if isinstance(question, ChoiceQuestion):
        values = [choice.value for choice in question.choices]
        pairs = [ChoiceProbability(value, each) for value, each in zip(values, shares, strict=True)]
        return ChoiceAnswer(name=question.name, choice=values[best], confidence=confidence, probabilities=pairs)
    levels = [
        LevelProbability(level.label, value, each)
        for value, (level, each) in enumerate(zip(question.levels, shares, strict=True))
    ]
    score = math.fsum(value * each for value, each in enumerate(shares))
    return ScoreAnswer(name=question.name, score=score, confidence=confidence, probabilities=levels)


_LABELS = (
    *(chr(code) for code in range(ord("A"), ord("Z") + 1)),
    *(str(number) for number in range(10)),
    *(chr(code) for code in range(ord("a"), ord("z") + 1)),
    *(str(number) for number in range(10, 1000)),
    *(first + second for first in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for second in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
)
_YES_AND_NO = (("Yes", "No"), ("yes", "no"), ("Y", "N"), ("A", "B"), ("1", "0"))


def _one_token(tokenizer: Tokenizer, label: str) -> int | None:
    ids = tokenizer.encode(label, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


@lru_cache(maxsize=64)
def _labels(tokenizer: Tokenizer, count: int) -> dict[str, Beginning] | None:
    """So many labels with their tokens: of one token each, or else numbers of several; None if these look alike."""
    found: dict[str, Beginning] = {}
    taken: set[int] = set()
    for label in _LABELS:
        token_id = _one_token(tokenizer, label)
        if token_id is not None and token_id not in taken:
            taken.add(token_id)
            found[label] = (token_id,)
        if len(found) == count:
            return found
    numbers = {str(number): tuple(tokenizer.encode(str(number), add_special_tokens=False)) for number in range(count)}
    return numbers if len(set(numbers.values())) == count else None


@lru_cache(maxsize=8)
def _yes_and_no(tokenizer: Tokenizer) -> tuple[str, str, int, int] | None:
    for yes, no in _YES_AND_NO:
        ids = _one_token(tokenizer, yes), _one_token(tokenizer, no)
        if ids[0] is not None and ids[1] is not None and ids[0] != ids[1]:
            return yes, no, ids[0], ids[1]
    return None


def options_of(question: Question, tokenizer: Tokenizer, end_ids: Sequence[int], path: str) -> Options:
    """The options of the question in the field ``path``; ``end_ids`` end the model's answers. Raises
    ``RequestError``."""
    if isinstance(question, PredicateQuestion):
        found = _yes_and_no(tokenizer)
        if found is None:
            raise RequestError(f"{path}: the tokenizer has no words of one token for yes and no", param=path)
        yes, no, *ids = found
        meaning = "" if yes[0].lower() == "y" else f" ({yes}: yes, {no}: no)"
        return Options(f"\n\nAnswer with {yes} or {no} alone{meaning}.", tuple((each,) for each in ids))
    if isinstance(question, ChoiceQuestion):
        kind, field = "options", f"{path}.choices"
        options = [(shown(each.value), each.description) for each in question.choices]
        check_choices(question, field)
    else:
        kind, field = "levels, from the lowest to the highest", f"{path}.levels"
        options = [(each.label, each.description) for each in question.levels]
    labels = _labels(tokenizer, len(options))
    if labels is None:
        problem = f"{field} has {len(options)} entries, and the tokenizer has neither as many labels of one token nor"
        raise RequestError(f"{problem} numbers that it tells apart: send fewer", param=field)
    lines = [
        f"{label}: {value}" + (f" ({description})" if description else "")
        for label, (value, description) in zip(labels, options, strict=True)
    ]
    text = f"\n\nThe {kind}:\n" + "\n".join(lines) + "\n\nAnswer with the label alone."
    has_single = all(len(label) == 1 for label in labels.values())
    return Options(text, tuple(labels.values()), () if has_single else tuple(end_ids))


def options_by_question(questions: Sequence[Question], tokenizer: Tokenizer, end_ids: Sequence[int]) -> list[Options]:
    """The options of each question. Raises ``RequestError``."""
    return [options_of(question, tokenizer, end_ids, f"questions[{index}]") for index, question in enumerate(questions)]


def check_choices(question: ChoiceQuestion, field: str) -> None:
    """Raises ``RequestError`` if two choices are the same."""
    values = [(type(each.value), each.value) for each in question.choices]
    for place, value in enumerate(values):
        if value in values[:place]:
            raise RequestError(f"{field} has the value {value[1]!r:.80} twice", param=field)


def shown(value: str | bool) -> str:
    """A choice's value as text."""
    return value if isinstance(value, str) else "true" if value else "false"


def question_parts(question: Question, options: Options, path: str) -> list[dict[str, Any]]:
    """A question as parts of a message. Raises ``RequestError``."""
    given = question.instructions
    if isinstance(given, str):
        return [_text(given + options.text)]
    return [*(json_as_text(part, f"{path}.instructions[{index}]") for index, part in enumerate(given)),
            _text(options.text)]  # fmt: skip


def _text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def json_as_text(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A part without marks for a cache; its JSON as text. Raises ``RequestError``."""
    plain = {name: value for name, value in part.items() if name != "prompt_cache_breakpoint"}
    if plain.get("type") != "input_json":
        return plain
    if unknown := plain.keys() - {"type", "data"}:
        raise RequestError(f"Unknown parameter: {path}.{min(unknown)}.", param=f"{path}.{min(unknown)}")
    data = plain.get("data")
    if not isinstance(data, dict | list) or not all(isinstance(each, dict) for each in data if isinstance(data, list)):
        raise RequestError(f"{path}.data must be an object or an array of objects.", param=f"{path}.data")
    return _text(msgspec.json.encode(data).decode())


def with_question(
    content: str | Sequence[Any] | None, parts: Sequence[dict[str, Any]]
) -> str | list[dict[str, Any]]:  # fmt: skip
    """The user's last message with a question at its end: templates may refuse two messages of one role."""
    first, *rest = parts
    if isinstance(content, str) and first.get("type") == "input_text" and not rest:
        return f"{content}\n\n{first['text']}"
    given = [_text(content)] if isinstance(content, str) else list(content or ())
    if given and first.get("type") == "input_text":
        return [*given, {**first, "text": f"\n\n{first['text']}"}, *rest]
    return [*given, *parts]


def content_start(tokenizer: Tokenizer, answer_format: AnswerFormat, prompt_token_ids: Sequence[int]) -> list[int]:
    """The tokens between a prompt's end and the answer's content, without reasoning: harmony's header, or the tag that
    closes the reasoning which the template has opened."""
    if answer_format.harmony:
        ids = special_ids(tokenizer)
        assert ids is not None
        return [ids.channel, *tokenizer.encode("final", add_special_tokens=False), ids.message]
    tags = answer_format.tags
    if answer_format.reasoning and reasoning_start(tokenizer, prompt_token_ids, tags) == "open":
        text = f"\n{tags.closing}\n\n" if tags == THINK else tags.closing
        return tokenizer.encode(text, add_special_tokens=False)
    return []
