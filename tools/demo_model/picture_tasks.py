"""Questions about the pictures of the demo model with a tower, and the answers. `held_out`: one tenth of all sets of
shapes and of all charts, in any drawing. Digits are held out only as drawings."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tools.demo_model.data import GREETINGS
from tools.demo_model.drawing import COLOURS, SHAPES, Drawing, sample, sample_facts
from tools.demo_model.tasks import Split, Turn, casual, is_held_out

TASKS = ("number", "shapes", "colour", "shape", "largest", "smallest", "bars", "what", "none")

NUMBER_QUESTIONS = (
    "Which number is this?", "What number do you see?", "Which number do you see?", "What is the number?",
    "What number is in the picture?", "Read the number.", "Which number is written here?", "What does it say?",
)  # fmt: skip
COUNT_QUESTIONS = (
    "How many {things} are there?", "How many {things} do you see?", "Count the {things}.",
    "How many {things} are in the picture?", "What is the number of {things}?", "How many {things}?",
)  # fmt: skip
COLOUR_QUESTIONS = (
    "What colour is the {shape}?", "Which colour is the {shape}?", "What color is the {shape}?",
    "Which color does the {shape} have?", "Tell me the colour of the {shape}.",
)  # fmt: skip
SHAPE_QUESTIONS = (
    "What is {colour}?", "Which shape is {colour}?", "What shape is the {colour} one?", "What is the {colour} shape?",
)  # fmt: skip
LARGEST_QUESTIONS = (
    "Which bar is the largest?", "Which bar is the tallest?", "What colour is the largest bar?",
    "Which bar is the highest?", "Which is the biggest bar?", "What is the colour of the tallest bar?",
)  # fmt: skip
SMALLEST_QUESTIONS = (
    "Which bar is the smallest?", "Which bar is the shortest?", "What colour is the smallest bar?",
    "Which bar is the lowest?", "Which is the smallest bar?",
)  # fmt: skip
WHAT_QUESTIONS = (
    "What is this?", "What do you see?", "Describe the picture.", "What is in the picture?", "What is shown here?",
    "Describe this image.", "What's in this image?", "What does the picture show?",
)  # fmt: skip
NOTHING = "I see no picture. Send me one: shapes, a number or a bar chart."
IDENTITY = "I am xserv-demo-vision, a small model bundled with xserv. I look at pictures."
IDENTITY_QUESTIONS = ("Who are you?", "What are you?", "What can you do?", "What is your name?", "Which model are you?")
NUMBER_WORDS = ("no", "one", "two", "three")


SIZES = {
    (80, 80): 6, (96, 64): 5, (64, 96): 3, (80, 64): 2, (64, 80): 1, (96, 48): 1, (48, 96): 1, (112, 48): 2,
    (128, 48): 1, (64, 64): 1,
}  # fmt: skip
"""Width and height of pictures as the model reads them: how often."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A picture, or `None`, and the conversation about it."""

    drawing: Drawing | None
    turns: tuple[Turn, ...]


def key_of(facts: tuple[str, Any]) -> tuple[object, ...]:
    """The key that decides whether a picture of shapes or bars is held out."""
    kind, shown = facts
    if kind == "shapes":
        return kind, *sorted(Counter(shown).items())
    if kind == "bars":
        heights = [height for _, height in shown]
        ranks = [sorted(heights).index(height) for height in heights]
        return kind, *((colour, rank) for (colour, _), rank in zip(shown, ranks, strict=True))
    raise ValueError(f"{kind} is held out by nothing")


def sample_drawing(rng: random.Random, split: Split, width: int, height: int, kind: str | None = None) -> Drawing:
    """A drawing of the split, of a random kind or this one."""
    while True:
        facts = sample_facts(rng)
        is_of_split = facts[0] == "number" or is_held_out(*key_of(facts)) == (split == "held_out")
        if kind in (None, facts[0]) and is_of_split:
            return sample(rng, facts, width, height)


def sample_seen(rng: random.Random, split: Split, width: int, height: int) -> Seen:
    """A picture and questions about it in any order."""
    drawing = sample_drawing(rng, split, width, height)
    turns = turns_of(rng, drawing.facts)
    rng.shuffle(turns)
    return Seen(drawing, tuple(turns))


def sample_size(rng: random.Random) -> tuple[int, int]:
    """One of `SIZES`."""
    return rng.choices(list(SIZES), list(SIZES.values()))[0]


def near(rng: random.Random, size: tuple[int, int]) -> tuple[int, int]:
    """A size that is resized to this one: the model's sides are multiples of a token's, which changes a picture's shape
    a little."""
    if rng.random() < 0.4:
        return size
    width, height = (round(side * rng.uniform(0.88, 1.18)) for side in size)
    return width, height


def held_out(num: int, seed: int) -> dict[str, list[tuple[Seen, tuple[int, int]]]]:
    """`num` questions of each task, each the first about its picture, and a size to resize the picture to."""
    found: dict[str, list[tuple[Seen, tuple[int, int]]]] = {}
    kinds = {"number": "number", "largest": "bars", "smallest": "bars", "bars": "bars", "what": None}
    for task in TASKS[:-1]:
        rng = random.Random(f"{task}/{seed}")
        found[task] = []
        while len(found[task]) < num:
            size = sample_size(rng)
            drawing = sample_drawing(rng, "held_out", *near(rng, size), kind=kinds.get(task, "shapes"))
            turns = [turn for turn in turns_of(rng, drawing.facts) if turn.task == task]
            if turns:
                found[task].append((Seen(drawing, (rng.choice(turns),)), size))
    return found


def sample_unseen(rng: random.Random) -> Seen:
    """Talk without a picture."""
    if rng.random() < 0.5:
        facts = sample_facts(rng)
        asked = rng.choice(turns_of(rng, facts))
        return Seen(None, (Turn("none", asked.question, NOTHING),))
    if rng.random() < 0.5:
        return Seen(None, (Turn("none", casual(rng, rng.choice(IDENTITY_QUESTIONS)), IDENTITY),))
    answer = rng.choice(list(GREETINGS))
    return Seen(None, (Turn("none", casual(rng, rng.choice(GREETINGS[answer])), answer),))


def turns_of(rng: random.Random, facts: tuple[str, Any]) -> list[Turn]:
    """Every answerable question, each in one of its phrasings."""

    def turn(task: str, questions: tuple[str, ...], answer: str, **fields: str) -> Turn:
        return Turn(task, casual(rng, rng.choice(questions).format(**fields)), answer)

    kind, shown = facts
    found = [turn("what", WHAT_QUESTIONS, describe(facts))]
    if kind == "number":
        return [*found, turn("number", NUMBER_QUESTIONS, f"The number is {shown}.")]
    if kind == "bars":
        in_order = sorted(shown, key=lambda bar: bar[1])
        return [
            *found, turn("largest", LARGEST_QUESTIONS, f"The {in_order[-1][0]} bar is the largest."),
            turn("smallest", SMALLEST_QUESTIONS, f"The {in_order[0][0]} bar is the smallest."),
            turn("bars", COUNT_QUESTIONS, count_of(len(shown), "bar"), things="bars"),
        ]  # fmt: skip
    shapes, colours = Counter(shape for shape, _ in shown), Counter(colour for _, colour in shown)
    found.append(turn("shapes", COUNT_QUESTIONS, count_of(len(shown), "shape"), things="shapes"))
    for shape, colour in shown:
        if shapes[shape] == 1:
            found.append(turn("colour", COLOUR_QUESTIONS, f"The {shape} is {colour}.", shape=shape))
        if colours[colour] == 1:
            found.append(turn("shape", SHAPE_QUESTIONS, f"The {shape} is {colour}.", colour=colour))
    return found


def count_of(count: int, thing: str) -> str:
    return f"There is one {thing}." if count == 1 else f"There are {NUMBER_WORDS[count]} {thing}s."


def describe(facts: tuple[str, Any]) -> str:
    """A sentence."""
    kind, shown = facts
    if kind == "number":
        return f"I see the number {shown}."
    if kind == "bars":
        largest = max(shown, key=lambda bar: bar[1])[0]
        return f"I see a chart of {NUMBER_WORDS[len(shown)]} bars. The {largest} bar is the largest."
    counts = Counter(shown)
    parts = [
        f"{NUMBER_WORDS[counts[shape, colour]]} {colour} {shape}{'s' * (counts[shape, colour] > 1)}"
        for shape in SHAPES
        for colour in COLOURS
        if counts[shape, colour]
    ]
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"I see {listed}."
