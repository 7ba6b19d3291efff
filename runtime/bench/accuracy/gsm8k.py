"""Word problems in GSM8K's format: a file of them, the prompt with worked examples, and the number of an answer.

A line of the file is `{"question": "...", "answer": "worked out in steps\n#### 42"}` (Cobbe et al. 2021,
https://arxiv.org/abs/2110.14168). An answer is scored by two rules, both reported, as in lm-eval:

    strict      the number after the first `####`
    flexible    the last number in the text
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from runtime.errors import InvalidArgumentError

SAMPLE = Path(__file__).with_name("word_problems.jsonl")
SHOTS = Path(__file__).with_name("worked_problems.jsonl")
"""Problems of our own, in the same format: they show that it runs, and compare servers on models that can do them."""

STOP = ("Question:", "\n\n")
"""Ends an answer to the prompt of `as_text`."""

_MARKED = re.compile(r"####\s*\$?\s*(-?\$?[\d.,]+)")
_NUMBER = re.compile(r"-?\$?\d[\d.,]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its worked answer."""

    question: str
    answer: str

    @property
    def number(self) -> Decimal:
        """The right answer."""
        number = strict_number(self.answer)
        assert number is not None
        return number


def read_problems(path: Path, most: int | None = None) -> list[Problem]:
    """The first problems of a file. Raises `InvalidArgumentError` with file and line."""
    found: list[Problem] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path} is no text in UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except ValueError:
            raise InvalidArgumentError(f"{path}:{number} is no JSON object: {line[:60]!r}") from None
        question, answer = (entry.get("question"), entry.get("answer")) if isinstance(entry, dict) else (None, None)
        if not (isinstance(question, str) and isinstance(answer, str) and question and answer):
            raise InvalidArgumentError(f"{path}:{number} must have the texts 'question' and 'answer'")
        problem = Problem(question, answer)
        if strict_number(problem.answer) is None:
            raise InvalidArgumentError(f"{path}:{number}: its answer must end with '#### ' and a number")
        found.append(problem)
        if len(found) == most:
            break
    if not found:
        raise InvalidArgumentError(f"{path} has no problem")
    return found


def as_text(problem: Problem, shots: Sequence[Problem]) -> str:
    """The prompt of a completion: worked examples, then the question."""
    worked = [f"Question: {shot.question}\nAnswer: {shot.answer}" for shot in shots]
    return "\n\n".join([*worked, f"Question: {problem.question}\nAnswer:"])


def as_messages(problem: Problem, shots: Sequence[Problem]) -> list[dict[str, str]]:
    """The same as a chat: each example is a turn."""
    turns = [(role, text) for shot in shots for role, text in (("user", shot.question), ("assistant", shot.answer))]
    return [{"role": role, "content": text} for role, text in [*turns, ("user", problem.question)]]


def strict_number(text: str) -> Decimal | None:
    """The number after the first `####`, or None."""
    found = _MARKED.search(text)
    return _value(found[1]) if found else None


def flexible_number(text: str) -> Decimal | None:
    """The last number of a text; None if there is none."""
    found = _NUMBER.findall(text)
    return _value(found[-1]) if found else None


def _value(text: str) -> Decimal | None:
    """1,234.00 and $1234 are 1234; a full stop at the end of the sentence is not part of the number."""
    try:
        return Decimal(text.replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
