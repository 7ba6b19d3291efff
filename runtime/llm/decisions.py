"""The prompts of ``LLM.decide``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from runtime.llm.outputs import DecisionOutput, RequestOutput
from runtime.llm.prompts import Prompt
from runtime.text.content import plain_data
from runtime.text.decisions import (
    MOST_QUESTIONS,
    Beginning,
    Options,
    Question,
    answer,
    question_parts,
    with_question,
)

Conversation = Sequence[Mapping[str, Any]]
DecisionInput = str | Conversation
"""A text or a conversation."""

Complete = Callable[[list[Prompt], SamplingParams], list[RequestOutput]]


def questions_of(questions: Sequence[Any]) -> list[Question]:
    """Questions given as dicts, or as an SDK's objects. Raises ``RequestError``."""
    if not isinstance(questions, (list, tuple)):
        raise RequestError(f"questions must be a list, got {type(questions).__name__}", param="questions")
    if not 1 <= len(questions) <= MOST_QUESTIONS:
        problem = f"questions must have 1 to {MOST_QUESTIONS} entries, got {len(questions)}"
        raise RequestError(problem, param="questions")
    found = []
    for index, question in enumerate(questions):
        try:
            found.append(msgspec.convert(plain_data(question), Question))
        except msgspec.ValidationError as error:
            raise RequestError(f"questions[{index}]: {error}", param=f"questions[{index}]") from None
    return found


def asked_in(
    conversation: Sequence[Mapping[str, Any]], question: Question, options: Options, path: str
) -> Conversation:
    """The conversation with the question at its end. Raises ``RequestError``."""
    parts = question_parts(question, options, path)
    *before, last = conversation
    if last.get("role") == "user":
        return [*before, {**last, "content": with_question(last.get("content"), parts)}]
    return [*conversation, {"role": "user", "content": parts}]


@dataclass(slots=True)
class AskedQuestion:
    """A question's prompt and options; ``found`` are the log probabilities of its labels' tokens, as they come."""

    prompt: dict[str, Any]
    options: Options
    found: dict[Beginning, dict[int, float]] = field(default_factory=dict)
    num_cached_tokens: int = 0


Row = tuple[AskedQuestion, Beginning, Sequence[int]]
"""A question after the beginning of a label, and the tokens whose log probabilities are needed there."""


@dataclass(slots=True)
class Decisions:
    """All questions about all inputs.

    prompts  by input and question
    """

    questions: list[Question]
    prompts: list[list[AskedQuestion]]

    def rounds(self) -> Iterator[list[Row]]:
        """The prompts that are asked at once: the first question brings an input into the cache, the others bring
        their own ends, and then come beginnings of labels."""
        named = [[(asked, asked.options.named()) for asked in each] for each in self.prompts]
        yield [(asked, (), ids[()]) for each in named for asked, ids in each[:1]]
        yield [(asked, (), ids[()]) for each in named for asked, ids in each[1:]]
        yield [(asked, given, own) for each in named for asked, ids in each for given, own in ids.items() if given]

    def ask(self, complete: Complete) -> None:
        """Asks all. Raises as ``LLM.generate`` does."""
        for rows in self.rounds():
            if not rows:
                continue
            params = SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False,
                logprob_token_ids=list(dict.fromkeys(token_id for _, _, ids in rows for token_id in ids)),
            )  # fmt: skip
            prompts: list[Prompt] = [
                {**asked.prompt, "prompt_token_ids": [*asked.prompt["prompt_token_ids"], *given]}
                for asked, given, _ in rows
            ]
            for (asked, given, _), output in zip(rows, complete(prompts, params), strict=True):
                choice = output.outputs[0]
                if choice.logprobs is None or not choice.logprobs:
                    raise RequestError(choice.error or "the engine has stopped")
                asked.found[given] = {token_id: each.logprob for token_id, each in choice.logprobs[0].items()}
                asked.num_cached_tokens += 0 if given else output.num_cached_tokens or 0

    def outputs(self, new_id: Callable[[], str], refusal_threshold: float) -> list[DecisionOutput]:
        """One an input."""
        return [
            DecisionOutput(
                new_id(),
                [
                    answer(question, asked.options.logprobs(asked.found), refusal_threshold)
                    for question, asked in zip(self.questions, each, strict=True)
                ],
                sum(len(asked.prompt["prompt_token_ids"]) for asked in each),
                sum(asked.num_cached_tokens for asked in each),
            )
            for each in self.prompts
        ]
