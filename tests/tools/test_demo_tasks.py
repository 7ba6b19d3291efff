"""The demo model's conversations: seeded, truthful, no held-out question in training. Needs nothing."""

from __future__ import annotations

import random
import re

import pytest

from tools.demo_model import data, tasks
from tools.demo_model.tasks import Turn


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_questions_are_seeded_and_never_trained(task: str) -> None:
    held_out = tasks.held_out_questions(task, 100, seed=0)
    assert held_out == tasks.held_out_questions(task, 100, seed=0)
    assert held_out != tasks.held_out_questions(task, 100, seed=1)
    rng = random.Random(0)
    trained = {tasks.sample_turn(rng, task, "train").question.lower() for _ in range(3000)}
    assert not trained & {turn.question.lower() for turn in held_out}


@pytest.mark.parametrize("task", ["sum_2", "sum_3", "difference_2", "difference_3"])
def test_operands_are_held_out_in_either_order(task: str) -> None:
    rng = random.Random(1)

    def pairs(turns: list[Turn]) -> set[tuple[int, ...]]:
        return {tuple(sorted(map(int, re.findall(r"\d+", turn.question)))) for turn in turns}

    trained = pairs([tasks.sample_turn(rng, task, "train") for _ in range(5000)])
    assert not trained & pairs(tasks.held_out_questions(task, 300, seed=0))


def test_answers_to_arithmetic_are_right() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        turn = tasks.sample_turn(rng, "difference_2", "train")
        if match := re.fullmatch(r".*?(\d+) ?(?:-|minus|less) ?(\d+)\D*", turn.question):
            assert turn.answer == str(int(match[1]) - int(match[2])), turn
        elif match := re.search(r"(?:subtract|take) (\d+) (?:away )?from (\d+)", turn.question.lower()):
            assert turn.answer == str(int(match[2]) - int(match[1])), turn
        turn = tasks.sample_turn(rng, "sum_3", "train")
        assert int(turn.answer) == sum(map(int, re.findall(r"\d+", turn.question))), turn


def test_answers_about_words_are_right() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        turn = tasks.sample_turn(rng, "sort", "train")
        words = turn.answer.split(", ")
        assert words == sorted(set(words)), turn
        assert all(word in turn.question for word in words), turn
        turn = tasks.sample_turn(rng, "reverse", "train")
        assert turn.answer[::-1] in turn.question, turn


def test_conversations_are_seeded_and_render_as_messages() -> None:
    system, turns = tasks.sample_conversation(random.Random(4), 40)
    assert (system, turns) == tasks.sample_conversation(random.Random(4), 40)
    messages = tasks.to_messages("Be brief.", turns)
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 40]
    assert all(message["content"] == message["content"].strip() != "" for message in messages)


def test_scores_and_goals() -> None:
    turns = [Turn("sum_2", "17+25", "42")] * 10 + [Turn("capital", "Capital of France?", "Paris")] * 10
    scores = tasks.score(turns, [" 42\n"] * 9 + ["43"] + ["Paris"] * 10)
    assert [(s.task, s.num_right, s.num_questions) for s in scores] == [
        ("sum_2", 9, 10),
        ("capital", 10, 10),
        ("overall", 19, 20),
    ]
    assert tasks.missed_goals(scores, tasks.GOALS) == ["sum_2: 90.0 % is under 95 %"]
    assert tasks.missed_goals(tasks.score(turns, ["42"] * 10 + ["Paris"] * 10), tasks.GOALS) == []
    assert "| overall | 20 | 95.0 |" in tasks.format_scores(scores)


def test_every_fact_and_word_is_well_formed() -> None:
    assert len(data.CAPITALS) >= 60
    assert len(set(data.WORDS)) == len(data.WORDS)
    assert all(word.isascii() and word.islower() and 2 <= len(word) <= 10 for word in data.WORDS)
