"""Questions that a classifier answers, instead of a model that chats (`runtime/text/decisions.py`).

- A model of inference, with the labels "entailment" and "contradiction": the input is the premise, a predicate's
  instructions are the hypothesis. An option's hypothesis is the instructions with its value instead of "{}", or after
  them. As transformers' zero-shot classification: true is entailment against contradiction, and options compete by
  entailment.
- A model of one label, such as a reranker: a predicate is the relevance of the input to the instructions.
- Other models: the options of a choice or a score are among the labels. The instructions are not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine.errors import RequestError
from runtime.errors import XservError
from runtime.pooling import PoolingInfo, ScoreActivation, activated
from runtime.text.content import plain_content, text_of
from runtime.text.decisions import (
    ChoiceQuestion,
    DecisionAnswer,
    PredicateQuestion,
    Question,
    by_shares,
    check_choices,
    json_as_text,
    shown,
)
from runtime.text.pooled_texts import pair_of
from tokenizer import Tokenizer

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Reading:
    """A question for a classifier.

    pairs       the texts that are read as one input each: two, or the input alone
    labels      the numbers of the options' labels, if it has the input alone
    entailment, contradiction  the labels' numbers of a model of inference
    """

    question: Question
    pairs: list[tuple[str, str | None]]
    labels: tuple[int, ...] = ()
    entailment: int | None = None
    contradiction: int | None = None

    def answer(self, scores: Sequence[Scores], pooling: PoolingInfo) -> DecisionAnswer:
        """By the labels' scores of each pair. Raises ``XservError`` if these are not numbers."""
        if any(np.isnan(each).any() for each in scores):
            raise XservError("the model's scores are not numbers")
        if self.labels:
            logs = _log_probabilities(scores[0], pooling.activation)[list(self.labels)]
            weights = np.exp(logs - logs.max())
            return by_shares(self.question, (weights / weights.sum()).tolist(), float(np.exp(logs.max())))
        if self.entailment is None:
            true = _sigmoid(float(scores[0][0]))
            return by_shares(self.question, [true, 1 - true], max(true, 1 - true))
        shares = [activated(each, "softmax").astype(np.float64) for each in scores]
        if isinstance(self.question, PredicateQuestion):
            if self.contradiction is None:
                true = float(shares[0][self.entailment])
                return by_shares(self.question, [true, 1 - true], max(true, 1 - true))
            true = _sigmoid(float(scores[0][self.entailment] - scores[0][self.contradiction]))
            sure = float(max(shares[0][self.entailment], shares[0][self.contradiction]))
            return by_shares(self.question, [true, 1 - true], sure)
        entailed = np.array([each[self.entailment] for each in scores], np.float64)
        weights = np.exp(entailed - entailed.max())
        best = int(np.argmax(entailed))
        return by_shares(self.question, (weights / weights.sum()).tolist(), float(shares[best][self.entailment]))


def _log_probabilities(scores: Scores, activation: ScoreActivation) -> NDArray[np.float64]:
    """The labels' log probabilities; scores without an activation compete as a softmax's do."""
    x = scores.astype(np.float64)
    if activation == "sigmoid":
        return np.asarray(-np.logaddexp(0.0, -x))
    return np.asarray(x - np.logaddexp.reduce(x))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def text_of_input(given: Any, path: str) -> str:
    """A text, or the texts of messages. Raises ``RequestError``."""
    if isinstance(given, str):
        return given
    texts = []
    for index, message in enumerate(given):
        content = message.get("content")
        where = f"{path}[{index}].content"
        if content is None:
            raise RequestError(f"{where} is missing: a classifier reads texts, not calls", param=where)
        texts.append(_plain(content, where))
    return "\n\n".join(texts)


def _plain(content: Any, path: str) -> str:
    if isinstance(content, (list, tuple)):
        content = [json_as_text(part, f"{path}[{at}]") if isinstance(part, dict) else part
                   for at, part in enumerate(content)]  # fmt: skip
    return text_of(plain_content(content, path))


def reading_of(question: Question, text: str, pooling: PoolingInfo, path: str) -> Reading:
    """How the model reads the question in the field ``path`` about the text. Raises ``RequestError``."""
    names = [label.lower() for label in pooling.labels]
    entailment = next((place for place, name in enumerate(names) if name.startswith("entail")), None)
    options = _options(question)
    if isinstance(question, ChoiceQuestion):
        check_choices(question, f"{path}.choices")
    if entailment is not None:
        denied = ("contradict", "not_entail", "not entail")
        contradiction = next((place for place, name in enumerate(names) if name.startswith(denied)), None)
        said = _plain(question.instructions, f"{path}.instructions")
        hypotheses = [said] if options is None else [_hypothesis(said, each) for each in options]
        return Reading(question, [(text, each) for each in hypotheses], (), entailment, contradiction)
    if options is None:
        if len(names) == 1:
            return Reading(question, [(_plain(question.instructions, f"{path}.instructions"), text)])
        raise RequestError(
            f"{path}: a predicate needs a model that chats, one of inference, or one with a single label; this one's"
            f" labels are {_listed(pooling.labels)}",
            param=path,
        )
    field = f"{path}.{'choices' if isinstance(question, ChoiceQuestion) else 'levels'}"
    for each in options:
        if each.lower() not in names:
            problem = f"{field} has {each!r:.80}, which is none of the model's labels {_listed(pooling.labels)}"
            raise RequestError(problem, param=field)
    return Reading(question, [(text, None)], tuple(names.index(each.lower()) for each in options))


def read_by_classifier(
    tokenizer: Tokenizer, pooling: PoolingInfo, first: str, second: str | None
) -> tuple[list[int], int | None]:  # fmt: skip
    """The ids of one text, or of two, and the first of the second's type, or None."""
    return (tokenizer.encode(first), None) if second is None else pair_of(tokenizer, pooling, first, second)


def _options(question: Question) -> list[str] | None:
    """None for a predicate."""
    if isinstance(question, PredicateQuestion):
        return None
    if isinstance(question, ChoiceQuestion):
        return [shown(each.value) for each in question.choices]
    return [each.label for each in question.levels]


def _hypothesis(instructions: str, option: str) -> str:
    return instructions.replace("{}", option) if "{}" in instructions else f"{instructions} {option}"


def _listed(labels: Sequence[str]) -> str:
    rest = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    return ", ".join(map(repr, labels[:8])) + rest
