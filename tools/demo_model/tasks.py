"""The conversations that the demo model is trained on, and how its answers are scored. Pure Python, seeded.

Every question has a key (its operands, its words, or its wording). A hash of the key decides, once and for
all, whether the question may be trained on or is held out for evaluation, so the two never meet:

- sums and differences: one tenth of all pairs of operands, in either order and in any phrasing;
- sorting, reversing, counting letters, refusals about things: one tenth of the words, whole;
- counting, capitals, greetings and identity: one tenth of the (range or country, phrasing) combinations.

Answers are terse and fixed in form, so that exact match is meaningful. The module does not depend on tokens.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tools.demo_model import data

Split = Literal["train", "held_out"]
Message = dict[str, str]

HELD_OUT_ONE_IN = 10
SYSTEM_SHARE = 0.15
PSEUDO_WORD_SHARE = 0.5
MIXED_SHARES = {1: 0.7, 3: 0.25}  # digits of one operand: how often the other has one or two, in either order
ONSETS: tuple[str, ...] = (*"bcdfghjklmnprstvwz", "ch", "br", "st", "tr", "sh")
VOWELS, CODAS = "aeiou", "nrstlmkd"


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its only right answer."""

    task: str
    question: str
    answer: str


def is_held_out(*key: object) -> bool:
    """Whether the question with this key belongs to the evaluation; the same on every machine and run."""
    return zlib.crc32("|".join(map(str, key)).encode()) % HELD_OUT_ONE_IN == 0


def is_exact(turn: Turn, text: str) -> bool:
    """Whether `text`, less its outer white space, is the answer."""
    return text.strip() == turn.answer


# ---- arithmetic ------------------------------------------------------------------------------------------


def _number(rng: random.Random, digits: int) -> int:
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def _operands(rng: random.Random, split: Split, operator: str, digits: int) -> tuple[int, int]:
    """Two operands, the longer of `digits` digits; both have two if `digits` is two and the question is held out."""
    while True:
        other = digits
        if split == "train" and digits in MIXED_SHARES and rng.random() < MIXED_SHARES[digits]:
            other = rng.randint(1, 2)
        a, b = _number(rng, digits), _number(rng, other)
        if rng.random() < 0.5:
            a, b = b, a
        if is_held_out(operator, min(a, b), max(a, b)) == (split == "held_out"):
            return a, b


def _sum(digits: int) -> Sampler:
    def sample(rng: random.Random, split: Split) -> tuple[str, str]:
        a, b = _operands(rng, split, "+", digits)
        return casual(rng, rng.choice(data.SUM_PHRASINGS).format(a=a, b=b)), str(a + b)

    return sample


def _difference(digits: int) -> Sampler:
    def sample(rng: random.Random, split: Split) -> tuple[str, str]:
        a, b = _operands(rng, split, "-", digits)
        if a < b and rng.random() < 0.4:
            a, b = b, a
        phrasings = data.DIFFERENCE_PHRASINGS
        if a >= b and rng.random() < 0.1:
            phrasings = data.POSITIVE_DIFFERENCE_PHRASINGS
        return casual(rng, rng.choice(phrasings).format(a=a, b=b)), str(a - b)

    return sample


# ---- words -----------------------------------------------------------------------------------------------


def _pseudo_word(rng: random.Random) -> str:
    """Two to ten letters, pronounceable and meaningless, so that the model learns spelling, not words."""

    def ending() -> str:
        return rng.choice(VOWELS) + (rng.choice(CODAS) if rng.random() < 0.4 else "")

    word = rng.choice(ONSETS) + ending()
    while rng.random() < 0.6:
        word += rng.choice((*ONSETS, "")) + ending()
    return word[:10]


def _word(rng: random.Random, split: Split, pseudo_share: float = PSEUDO_WORD_SHARE) -> str:
    """A word of the split; pseudo-words are only for training."""
    while True:
        word = _pseudo_word(rng) if split == "train" and rng.random() < pseudo_share else rng.choice(data.WORDS)
        if is_held_out("word", word) == (split == "held_out"):
            return word


def _sort(rng: random.Random, split: Split) -> tuple[str, str]:
    words: set[str] = set()
    num_words = rng.randint(3, 5)
    while len(words) < num_words:
        word = _word(rng, split)
        if words and split == "train" and rng.random() < 0.15:  # a shared beginning, so that later letters matter
            word = rng.choice(sorted(words))[: rng.randint(1, 2)] + word
            if is_held_out("word", word):
                continue
        words.add(word)
    shown = rng.sample(sorted(words), num_words)
    style = rng.random()
    if style < 0.6:
        listed = ", ".join(shown)
    elif style < 0.8:
        listed = " ".join(shown)
    else:
        listed = ", ".join(shown[:-1]) + " and " + shown[-1]
    return casual(rng, rng.choice(data.SORT_PHRASINGS).format(words=listed)), ", ".join(sorted(words))


def _reverse(rng: random.Random, split: Split) -> tuple[str, str]:
    word = _word(rng, split)
    return casual(rng, rng.choice(data.REVERSE_PHRASINGS).format(word=word)), word[::-1]


def _letters(rng: random.Random, split: Split) -> tuple[str, str]:
    word = _word(rng, split)
    return casual(rng, rng.choice(data.LETTERS_PHRASINGS).format(word=word)), str(len(word))


# ---- the rest --------------------------------------------------------------------------------------------


def _count(rng: random.Random, split: Split) -> tuple[str, str]:
    while True:
        low = rng.randint(0, 20) if rng.random() < 0.6 else rng.randint(0, 188)
        high = low + rng.randint(2, 11)
        is_up = rng.random() < 0.7
        phrasing = rng.choice(data.COUNT_UP_PHRASINGS if is_up else data.COUNT_DOWN_PHRASINGS)
        if is_held_out("count", low, high, is_up) == (split == "held_out"):
            break
    numbers = list(range(low, high + 1))
    if not is_up:
        numbers.reverse()
    question = phrasing.format(a=numbers[0], b=numbers[-1])
    return casual(rng, question), " ".join(map(str, numbers))


def _capital(rng: random.Random, split: Split) -> tuple[str, str]:
    while True:
        country, phrasing = rng.choice(list(data.CAPITALS)), rng.choice(data.CAPITAL_PHRASINGS)
        if is_held_out("capital", country, phrasing) == (split == "held_out"):
            return casual(rng, phrasing.format(country=country)), data.CAPITALS[country]


def _fixed(name: str, answers: dict[str, tuple[str, ...]], endings: tuple[str, ...]) -> Sampler:
    def sample(rng: random.Random, split: Split) -> tuple[str, str]:
        while True:
            answer = rng.choice(list(answers))
            question = rng.choice(answers[answer]) + rng.choice(endings)
            if is_held_out(name, question) == (split == "held_out"):
                return (question.lower() if rng.random() < 0.25 else question), answer

    return sample


def _refusal(rng: random.Random, split: Split) -> tuple[str, str]:
    while True:
        phrasing = rng.choice(data.REFUSED_PHRASINGS)
        word, country = _word(rng, split, pseudo_share=0.1), rng.choice(list(data.CAPITALS))
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        question = phrasing.format(word=word, country=country, a=a, b=b)
        if "{word}" in phrasing or is_held_out("refusal", question) == (split == "held_out"):
            return casual(rng, question), data.REFUSAL


def casual(rng: random.Random, question: str) -> str:
    """The question as people type it: at times in lower case, without its full stop, or politely."""
    style = rng.random()
    if style < 0.25:
        question = question.lower()
    style = rng.random()
    if style < 0.25:
        question = question.rstrip(".?")
    elif style < 0.28:
        question = question.rstrip(".?") + ", please" + question[len(question.rstrip(".?")) :]
    elif style < 0.31 and question[0].isalpha():
        question = "Please " + question[0].lower() + question[1:]
    return question.rstrip()


Sampler = Callable[[random.Random, Split], tuple[str, str]]

# task: (its sampler, its share of the training turns in parts of a hundred)
TASKS: dict[str, tuple[Sampler, int]] = {
    "sum_1": (_sum(1), 3),
    "sum_2": (_sum(2), 15),
    "sum_3": (_sum(3), 13),
    "difference_1": (_difference(1), 3),
    "difference_2": (_difference(2), 17),
    "difference_3": (_difference(3), 17),
    "sort": (_sort, 8),
    "reverse": (_reverse, 7),
    "letters": (_letters, 3),
    "count": (_count, 3),
    "capital": (_capital, 5),
    "greeting": (_fixed("greeting", data.GREETINGS, data.GREETING_ENDINGS), 2),
    "identity": (_fixed("identity", data.IDENTITIES, data.IDENTITY_ENDINGS), 2),
    "refusal": (_refusal, 2),
}
GOALS = {"sum_2": 95.0, "difference_2": 95.0, "overall": 90.0}
"""Percent of right answers."""


def sample_turn(rng: random.Random, task: str, split: Split) -> Turn:
    """One question of `task` from the given side of the hold-out."""
    question, answer = TASKS[task][0](rng, split)
    return Turn(task, question, answer)


def sample_conversation(rng: random.Random, num_turns: int) -> tuple[str | None, list[Turn]]:
    """A training conversation of mixed tasks: an optional system message and `num_turns` turns.

    One conversation in four stays with one task throughout.
    """
    system = rng.choice(data.SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else None
    tasks = rng.choices(list(TASKS), weights=[share for _, share in TASKS.values()], k=num_turns)
    if rng.random() < 0.25:
        tasks = [tasks[0]] * num_turns
    return system, [sample_turn(rng, task, "train") for task in tasks]


def to_messages(system: str | None, turns: Iterable[Turn]) -> list[Message]:
    """The conversation as chat messages, answers included."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


# ---- evaluation ------------------------------------------------------------------------------------------


def held_out_questions(task: str, num: int, seed: int) -> list[Turn]:
    """`num` different held-out questions of a task, fewer if it has fewer; the seed chooses them."""
    rng = random.Random(f"{task}/{seed}")
    turns: dict[str, Turn] = {}
    for _ in range(20 * num):
        turn = sample_turn(rng, task, "held_out")
        turns.setdefault(turn.question, turn)
        if len(turns) == num:
            break
    return list(turns.values())


@dataclass(frozen=True, slots=True)
class Score:
    """Exact matches among the questions of one task."""

    task: str
    num_right: int
    num_questions: int

    @property
    def percent(self) -> float:
        return 100.0 * self.num_right / self.num_questions


def score(turns: Iterable[Turn], texts: Iterable[str]) -> list[Score]:
    """One `Score` per task in the order of `TASKS`, then the one over all questions, named `overall`."""
    counts: dict[str, list[int]] = {}
    for turn, text in zip(turns, texts, strict=True):
        count = counts.setdefault(turn.task, [0, 0])
        count[0] += is_exact(turn, text)
        count[1] += 1
    scores = [Score(task, *counts[task]) for task in TASKS if task in counts]
    return [*scores, overall(scores)]


def overall(scores: Iterable[Score]) -> Score:
    """The score over all questions."""
    own = [score for score in scores if score.task != "overall"]
    return Score("overall", sum(s.num_right for s in own), sum(s.num_questions for s in own))


def format_scores(scores: Iterable[Score]) -> str:
    """The scores as a Markdown table."""
    rows = [f"| {s.task} | {s.num_questions} | {s.percent:.1f} |" for s in scores]
    return "\n".join(["| task | questions | exact match, % |", "|---|---:|---:|", *rows])


def missed_goals(scores: list[Score], goals: dict[str, float]) -> list[str]:
    """The missed goals of those in percent by task, and "overall"."""
    found = {each.task: each.percent for each in (overall(scores), *scores)}
    missed = {task: goal for task, goal in goals.items() if task in found and not found[task] >= goal}
    return [f"{task}: {found[task]:.1f} % is under {goal:.0f} %" for task, goal in missed.items()]
