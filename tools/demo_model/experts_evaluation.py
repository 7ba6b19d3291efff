"""`eval_demo_model --experts`: scores the demo model with experts on held-out exercises: answers and calls.

Each exercise is a conversation of its own, rendered by the engine, in a setting drawn like those of training. A call is
right if the function, the arguments' JSON and the channel are; the model then gets its result, and the answer must be
right as well.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from runtime import LLM, SamplingParams
from runtime.text.harmony.message import HarmonyMessage, special_ids
from runtime.text.harmony.reader import MessageParser
from tools.demo_model import harmony_tasks
from tools.demo_model.harmony_tasks import Exercise, Setting
from tools.demo_model.tasks import Score

MAX_ANSWER_TOKENS = 96
# name: task, whether there is a tool
KINDS = {
    "sum": ("sum", False), "difference": ("difference", False), "sum, with a tool": ("sum", True),
    "difference, with a tool": ("difference", True), "call": ("tool", True), "declined": ("declined", False),
    "talk": ("talk", False),
}  # fmt: skip
GOALS = {"sum": 90.0, "sum, with a tool": 90.0, "call": 95.0}


@dataclass(frozen=True, slots=True)
class Asked:
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


def evaluate(llm: LLM, num: int, seed: int) -> tuple[list[Score], list[str]]:
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
        right.setdefault("answer behind a call", []).append(is_right)
        if not is_right:
            wrong.append(f"answer behind a call: {each.exercise.question!r} gave {messages}, not {expected[-1]}")
    return [Score(kind, sum(found), len(found)) for kind, found in right.items()], wrong


def missed_goals(scores: list[Score]) -> list[str]:
    """The missed goals of `GOALS`."""
    return [
        f"{s.task}: {s.percent:.1f} % is under {GOALS[s.task]:.0f} %"
        for s in scores
        if s.task in GOALS and not s.percent >= GOALS[s.task]
    ]


def _answers(llm: LLM, prompts: list[list[int]]) -> list[list[HarmonyMessage]]:
    """Greedy answers to the prompts."""
    tokenizer = llm.get_tokenizer()
    ids = special_ids(tokenizer)
    assert ids is not None
    params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    found = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
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
