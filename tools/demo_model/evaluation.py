"""How many held-out questions the demo models with experts and with a tower answer right, for `eval_demo_model`.

A model with experts: each exercise is a conversation of its own, rendered by the engine, in a setting drawn like those
of training. A call is right if the function, the arguments' JSON and the channel are; the model then gets its result,
and the answer must be right as well. A model with a tower: each question is a conversation with the original picture;
the engine resizes, cuts and renders.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from runtime import LLM, SamplingParams
from runtime.text.harmony.message import HarmonyMessage, special_ids
from runtime.text.harmony.reader import MessageParser
from tools.demo_model import harmony_tasks, picture_tasks
from tools.demo_model.harmony_tasks import Exercise, Setting
from tools.demo_model.picture_tasks import Seen
from tools.demo_model.tasks import Score

PARAMS = SamplingParams(temperature=0.0, max_tokens=96)
# name: task, whether there is a tool
KINDS = {
    "sum": ("sum", False), "difference": ("difference", False), "sum, with a tool": ("sum", True),
    "difference, with a tool": ("difference", True), "call": ("tool", True), "declined": ("declined", False),
    "talk": ("talk", False),
}  # fmt: skip
EXPERTS_GOALS = {"sum": 90.0, "sum, with a tool": 90.0, "call": 95.0}
VISION_GOALS = {"overall": 95.0, **dict.fromkeys(picture_tasks.TASKS, 90.0)}


class Asked(NamedTuple):
    """An exercise in its setting, and its kind."""

    kind: str
    setting: Setting
    exercise: Exercise


def held_out(num: int, seed: int) -> list[Asked]:
    """`num` of each kind."""
    found = []
    for kind, (task, has_tool) in KINDS.items():
        rng = random.Random(f"{kind}/{seed}")
        for _ in range(num):
            setting = harmony_tasks.sample_setting(rng, has_tool)
            found.append(Asked(kind, setting, harmony_tasks.sample_exercise(rng, setting, "held_out", task)))
    return found


def evaluate_experts(llm: LLM, num: int, seed: int) -> tuple[list[Score], list[str]]:
    """Scores by kind, including answers after a call, and a line for each wrong one."""
    tokenizer = llm.get_tokenizer()
    ids = special_ids(tokenizer)
    assert ids is not None
    writer = harmony_tasks.Writer(tokenizer, ids)
    asked = held_out(num, seed)
    prompts = [writer.prompt(each.setting, each.exercise) for each in asked]
    answers = _answers(llm, prompts)
    right: dict[str, list[bool]] = {}
    wrong, called = [], []
    for each, prompt, messages in zip(asked, prompts, answers, strict=True):
        expected = harmony_tasks.solution(each.setting, each.exercise)
        if each.exercise.call is None:
            is_right = bool(messages) and _is_same(messages[-1], expected[-1])
        else:
            (call,) = (message for message in expected if message.recipient and message.role == "assistant")
            is_right = bool(messages) and _is_call(messages[-1], call)
            if is_right:
                called.append((each, [*prompt, *writer.told(each.setting, each.exercise)]))
        right.setdefault(each.kind, []).append(is_right)
        if not is_right:
            wrong.append(f"{each.kind}: {each.exercise.question!r} gave {messages}, not {expected}")
    for (each, _), messages in zip(called, _answers(llm, [prompt for _, prompt in called]), strict=True):
        expected = harmony_tasks.solution(each.setting, each.exercise)
        is_right = bool(messages) and _is_same(messages[-1], expected[-1])
        right.setdefault("answer after a call", []).append(is_right)
        if not is_right:
            wrong.append(f"answer after a call: {each.exercise.question!r} gave {messages}, not {expected[-1]}")
    return [Score(kind, sum(found), len(found)) for kind, found in right.items()], wrong


def _answers(llm: LLM, prompts: list[list[int]]) -> list[list[HarmonyMessage]]:
    """Greedy answers to the prompts."""
    tokenizer = llm.get_tokenizer()
    ids = special_ids(tokenizer)
    assert ids is not None
    found = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False):
        parser = MessageParser(tokenizer, ids)
        parser.push(output.outputs[0].token_ids)
        found.append(parser.finish())
    return found


def _is_same(message: HarmonyMessage, expected: HarmonyMessage) -> bool:
    return (message.channel, message.recipient, message.content) == ("final", None, expected.content)


def _is_call(message: HarmonyMessage, expected: HarmonyMessage) -> bool:
    try:
        given = json.loads(message.content)
    except ValueError:
        return False
    is_same = (message.channel, message.recipient) == (expected.channel, expected.recipient)
    return is_same and given == json.loads(expected.content)


def evaluate_vision(llm: LLM, num: int, seed: int) -> tuple[list[Score], list[str]]:
    """Scores of `num` questions of each task, and a line for each wrong answer."""
    asked = {task: [seen for seen, _ in found] for task, found in picture_tasks.held_out(num, seed).items()}
    rng = random.Random(f"none/{seed}")
    asked["none"] = [picture_tasks.sample_unseen(rng) for _ in range(num)]
    scores, wrong = [], []
    for task, questions in asked.items():
        outputs = llm.chat([messages_of(seen) for seen in questions], PARAMS, use_tqdm=False)
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
