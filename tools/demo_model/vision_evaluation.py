"""`eval_demo_model --vision`: scores the demo model with a tower on held-out drawings.

Each question is a conversation of its own, with the original picture; the engine resizes, cuts and renders. An answer
is right if it equals the expected one.
"""

from __future__ import annotations

import random
from typing import Any

from runtime import LLM, SamplingParams
from tools.demo_model import picture_tasks
from tools.demo_model.picture_tasks import Seen
from tools.demo_model.tasks import Score

MAX_ANSWER_TOKENS = 64
GOAL, LEAST = 95.0, 90.0
"""Percent of all questions, and of each task."""


def evaluate(llm: LLM, num: int, seed: int) -> tuple[list[Score], list[str]]:
    """Scores of `num` questions of each task, and a line for each wrong answer."""
    asked = {task: [seen for seen, _ in found] for task, found in picture_tasks.held_out(num, seed).items()}
    rng = random.Random(f"none/{seed}")
    asked["none"] = [picture_tasks.sample_unseen(rng) for _ in range(num)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    scores, wrong = [], []
    for task, questions in asked.items():
        outputs = llm.chat([messages_of(seen) for seen in questions], params, use_tqdm=False)
        num_right = 0
        for seen, output in zip(questions, outputs, strict=True):
            (turn,), text = seen.turns, output.outputs[0].text
            if text == turn.answer:
                num_right += 1
            else:
                wrong.append(f"{task}: {turn.question!r} gave {text!r}, not {turn.answer!r}")
        scores.append(Score(task, num_right, len(questions)))
    return scores, wrong


def messages_of(seen: Seen) -> list[dict[str, Any]]:
    """The first question about a picture, or without one."""
    question = seen.turns[0].question
    if seen.drawing is None:
        return [{"role": "user", "content": question}]
    picture = {"type": "image", "image": seen.drawing.image}
    return [{"role": "user", "content": [picture, {"type": "text", "text": question}]}]


def missed_goals(scores: list[Score]) -> list[str]:
    """The missed goals of `GOAL` or `LEAST`."""
    overall = Score("overall", sum(s.num_right for s in scores), sum(s.num_questions for s in scores))
    goals = [(overall, GOAL), *((score, LEAST) for score in scores)]
    return [f"{s.task}: {s.percent:.1f} % is under {goal:.0f} %" for s, goal in goals if not s.percent >= goal]
