"""The conversations of the demo model with experts, in harmony: a model that thinks, calls a calculator and answers.

A setting is the beginning: the system's message and, at times, the developer's with instructions and a tool. A branch
is a conversation after it, of one question with perhaps another before it. Sums and differences of two digits are
worked out in the analysis; products, quotients and longer numbers go to the tool, or are declined without one. The
hold-out is that of `tasks`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.text.harmony.conversation import harmony_messages
from runtime.text.harmony.message import CONSTRAIN, FUNCTIONS, HarmonyMessage, Renderer, SpecialIds
from tools.demo_model import data, tasks
from tools.demo_model.tasks import Split, is_held_out

TOOL_NAMES = ("calculator", "calculate", "calc", "compute")
PARAMETER_NAME = "expression"
TOOL_TEXTS = (
    "Computes an expression.", "Evaluates an arithmetic expression.", "A calculator.", "Calculates.",
    "Does sums, products and quotients.",
)  # fmt: skip
PARAMETER_TEXTS = (None, "such as 3*14", "the expression", "what to compute")
JSON_INSTRUCTIONS = ('Answer in JSON: {"answer": number}', 'Reply with JSON such as {"answer": 5}.', "Answer in JSON.")
DECLINED = "I need a calculator for that."
CAPABILITIES = "I can add and subtract, chat, and call a calculator."
IDENTITY = "I am xserv-demo-moe, a small mixture of experts bundled with xserv."
SIZE = "No, I am a very small model."
_IDENTITIES = dict(zip((IDENTITY, CAPABILITIES, SIZE), data.IDENTITIES.values(), strict=True))
PRODUCT_PHRASINGS = (
    "What is {a} times {b}?", "What is {a} * {b}?", "{a}*{b}", "{a} * {b}", "{a}*{b}=?", "{a} * {b} = ?",
    "{a} times {b}", "{a} times {b}?", "How much is {a} times {b}?", "Multiply {a} by {b}.", "Multiply {a} and {b}.",
    "Calculate {a} * {b}.", "Calculate {a} times {b}.", "Compute {a} * {b}.", "What is the product of {a} and {b}?",
    "Tell me {a} times {b}.", "Work out {a} * {b}.", "Can you multiply {a} by {b}?", "What's {a} * {b}?",
)  # fmt: skip
QUOTIENT_PHRASINGS = (
    "What is {a} divided by {b}?", "What is {a} / {b}?", "{a}/{b}", "{a} / {b}", "{a}/{b}=?", "Divide {a} by {b}.",
    "How much is {a} divided by {b}?", "Calculate {a} / {b}.", "Compute {a} / {b}.", "Tell me {a} divided by {b}.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a conversation.

    Attributes:
        tool: in OpenAI's form, or None.
        instructions: of the system's message in OpenAI's sense.
        wants_json: the instructions ask for it.
        effort: "low" leaves out dispensable thoughts.
        date: of the system's message.
    """

    tool: dict[str, Any] | None
    instructions: str | None
    wants_json: bool
    effort: str
    date: str

    def messages(self) -> list[HarmonyMessage]:
        """The system's and the developer's."""
        told = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [self.tool] if self.tool else None
        return harmony_messages(told, tools, current_date=self.date, reasoning_effort=self.effort)


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question, its reasoning and its answer.

    Attributes:
        task: its name.
        call: the expression for the tool, or None.
        result: the tool's.
    """

    task: str
    question: str
    thought: str
    answer: str
    number: str | None = None
    call: str | None = None
    result: str | None = None


def sample_setting(rng: random.Random, has_tool: bool | None = None) -> Setting:
    """A random one."""
    tool, wants_json, instructions = None, False, None
    if rng.random() < 0.5 if has_tool is None else has_tool:
        parameter: dict[str, Any] = {"type": "string"}
        if (text := rng.choice(PARAMETER_TEXTS)) is not None:
            parameter["description"] = text
        schema: dict[str, Any] = {"type": "object", "properties": {PARAMETER_NAME: parameter}}
        if rng.random() < 0.8:
            schema["required"] = [PARAMETER_NAME]
        function = {"name": rng.choice(TOOL_NAMES), "description": rng.choice(TOOL_TEXTS), "parameters": schema}
        tool = {"type": "function", "function": function}
    if rng.random() < 0.15:
        wants_json, instructions = True, rng.choice(JSON_INSTRUCTIONS)
    elif rng.random() < 0.2:
        instructions = rng.choice(data.SYSTEM_MESSAGES)
    date = f"{rng.randint(2024, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return Setting(tool, instructions, wants_json, rng.choice(("medium", "medium", "medium", "low", "high")), date)


def work_out_sum(a: int, b: int) -> str:
    """Digit by digit, with what is carried: `27+58: 7+8=15, 2+5+1=8. 85`"""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    carried = "+1" if ones > 9 else ""
    return f"{a}+{b}: {a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{carried}={tens}. {a + b}"


def work_out_difference(a: int, b: int) -> str:
    """Digit by digit, with what is borrowed, the larger first: `64-19: 14-9=5, 5-1=4. 45`"""
    high, low = max(a, b), min(a, b)
    borrowed = high % 10 < low % 10
    ones = high % 10 + 10 * borrowed
    tens = high // 10 - borrowed
    turned = f"{high}-{low}, " if a < b else ""
    return f"{a}-{b}: {turned}{ones}-{low % 10}={ones - low % 10}, {tens}-{low // 10}={tens - low // 10}. {a - b}"


def _operands(rng: random.Random, split: Split, operator: str, low: int, high: int) -> tuple[int, int]:
    while True:
        a, b = rng.randint(low, high), rng.randint(low, high)
        if is_held_out(operator, min(a, b), max(a, b)) == (split == "held_out"):
            return a, b


def _two_digits(rng: random.Random, split: Split, operator: str) -> tuple[int, int]:
    """Operands of two digits; at times one of one digit, unless held out."""
    while True:
        a, b = _operands(rng, split, operator, 10, 99)
        if split == "train" and rng.random() < 0.15:
            a = rng.randint(0, 9)
        if split == "train" and rng.random() < 0.15:
            b = rng.randint(0, 9)
        if is_held_out(operator, min(a, b), max(a, b)) == (split == "held_out"):
            return a, b


def _sum(rng: random.Random, split: Split) -> Exercise:
    a, b = _two_digits(rng, split, "+")
    question = rng.choice(data.SUM_PHRASINGS).format(a=a, b=b)
    return Exercise("sum", question, work_out_sum(a, b), f"{a} + {b} = {a + b}", str(a + b))


def _difference(rng: random.Random, split: Split) -> Exercise:
    a, b = _two_digits(rng, split, "-")
    if a < b and rng.random() < 0.6:
        a, b = b, a
    phrasings = data.DIFFERENCE_PHRASINGS
    if a >= b and rng.random() < 0.1:
        phrasings = data.POSITIVE_DIFFERENCE_PHRASINGS
    question = rng.choice(phrasings).format(a=a, b=b)
    return Exercise("difference", question, work_out_difference(a, b), f"{a} - {b} = {a - b}", str(a - b))


def _long(rng: random.Random, split: Split) -> tuple[str, int, str, int]:
    """A question with long operands, for the tool: (phrasing, a, operator, b)."""
    kind = rng.choice("**/+-")
    if kind == "*":
        a, b = _operands(rng, split, "*", 2, rng.choice((99, 999)))
        return rng.choice(PRODUCT_PHRASINGS), a, "*", b
    if kind == "/":
        a, b = _operands(rng, split, "/", 2, rng.choice((99, 999)))
        return rng.choice(QUOTIENT_PHRASINGS), max(a, b), "/", min(a, b)
    a, b = _operands(rng, split, kind, 100, rng.choice((999, 9999)))
    return rng.choice(data.SUM_PHRASINGS if kind == "+" else data.DIFFERENCE_PHRASINGS), a, kind, b


def _called(rng: random.Random, split: Split) -> Exercise:
    phrasing, a, operator, b = _long(rng, split)
    value = {"*": a * b, "+": a + b, "-": a - b, "/": a / b}[operator]
    result = f"{value:.4g}" if isinstance(value, float) and value % 1 else str(round(value))
    if split == "train" and rng.random() < 0.5:  # the model trusts any result of the tool
        result = str(rng.randint(0, 10 ** rng.randint(1, 7)))
    told = rng.choice((result, result, f'{{"result": {result}}}'))
    call = f"{a}{operator}{b}"
    return Exercise("tool", phrasing.format(a=a, b=b), "", f"{a} {operator} {b} = {result}", result, call, told)


def _declined(rng: random.Random, split: Split) -> Exercise:
    phrasing, a, _, b = _long(rng, split)
    return Exercise("declined", phrasing.format(a=a, b=b), "Too long for me.", DECLINED)


def _talk(rng: random.Random, split: Split) -> Exercise:
    answers, endings = rng.choice(((data.GREETINGS, data.GREETING_ENDINGS), (_IDENTITIES, data.IDENTITY_ENDINGS)))
    while True:
        answer = rng.choice(list(answers))
        question = rng.choice(answers[answer]) + rng.choice(endings)
        if is_held_out("talk", question) == (split == "held_out"):
            return Exercise("talk", question, "Small talk.", answer)


Sampler = Callable[[random.Random, Split], Exercise]
WITH_TOOL: dict[Sampler, int] = {_sum: 25, _difference: 20, _called: 45, _talk: 10}
WITHOUT_TOOL: dict[Sampler, int] = {_sum: 38, _difference: 34, _declined: 10, _talk: 18}


def sample_exercise(rng: random.Random, setting: Setting, split: Split, task: str | None = None) -> Exercise:
    """One that fits the setting; `task` asks for a kind."""
    shares = WITH_TOOL if setting.tool else WITHOUT_TOOL
    while True:
        exercise = rng.choices(list(shares), list(shares.values()))[0](rng, split)
        if task is None or exercise.task == task:
            return replace(exercise, question=tasks.casual(rng, exercise.question))


def thought(setting: Setting, exercise: Exercise) -> str:
    """The text of the analysis channel; "" if there is none."""
    if exercise.call is not None:
        assert setting.tool is not None
        return f"{exercise.call}: I call {setting.tool['function']['name']}."
    return "" if setting.effort == "low" and exercise.task == "talk" else exercise.thought


def final(setting: Setting, exercise: Exercise) -> str:
    """The answer; in JSON if the setting asks for it."""
    if setting.wants_json and exercise.number is not None:
        return f'{{"answer": {exercise.number}}}'
    return exercise.answer


def arguments(exercise: Exercise) -> str:
    """The call's arguments."""
    return json.dumps({PARAMETER_NAME: exercise.call}, separators=(",", ":"))


def solution(setting: Setting, exercise: Exercise) -> list[HarmonyMessage]:
    """The model's messages, with the tool's answer."""
    messages = []
    if text := thought(setting, exercise):
        messages.append(HarmonyMessage("assistant", text, channel="analysis"))
    if exercise.call is not None:
        assert setting.tool is not None
        assert exercise.result is not None
        name = f"{FUNCTIONS}.{setting.tool['function']['name']}"
        call = arguments(exercise)
        messages += [
            HarmonyMessage("assistant", call, None, "commentary", name, f"{CONSTRAIN}json"),
            HarmonyMessage("tool", exercise.result, name, "commentary", "assistant"),
        ]
    return [*messages, HarmonyMessage("assistant", final(setting, exercise), channel="final")]


class Writer:
    """Renders settings and branches to token ids, as the server does."""

    def __init__(self, tokenizer: Any, ids: SpecialIds) -> None:
        self._renderer = Renderer(tokenizer, ids)
        self._ids = ids
        self._opening = 1 + len(tokenizer.encode_ordinary("assistant"))  # the part of an answer that is in the prompt

    def setting(self, setting: Setting) -> list[int]:
        """A setting's token ids."""
        return self._renderer.conversation(setting.messages())

    def prompt(self, setting: Setting, exercise: Exercise) -> list[int]:
        """A question, up to the answer's beginning."""
        asked = [*setting.messages(), HarmonyMessage("user", exercise.question)]
        return self._renderer.conversation(asked, "assistant")

    def told(self, setting: Setting, exercise: Exercise) -> list[int]:
        """A question's continuation: the right thought and call, the tool's result, and "assistant" again."""
        messages = solution(setting, exercise)[:-1]
        return self._renderer.conversation(messages, "assistant")[self._opening :]

    def branch(
        self, setting: Setting, exercise: Exercise, earlier: Sequence[Exercise] = ()
    ) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are the model's. `earlier`: previous questions, as the server renders them."""
        ids: list[int] = []
        for each in earlier:
            ids += self._renderer.message(HarmonyMessage("user", each.question))
            for message in solution(setting, each):
                if message.channel != "analysis":  # dropped before a final answer
                    ids += self._renderer.message(message)
        ids += self._renderer.message(HarmonyMessage("user", exercise.question))
        said = [False] * len(ids)
        is_prompt = True
        for message in solution(setting, exercise):
            piece = self._renderer.message(message)
            if message.role == "assistant":
                given = self._opening if is_prompt else 0
                said += [False] * given + [True] * (len(piece) - given)
                is_prompt = message.recipient is not None
            else:
                said += [False] * len(piece)
            ids += piece
        ids[-1] = self._ids.return_
        return ids, said


def sample_branch(rng: random.Random, setting: Setting, writer: Writer) -> tuple[list[int], list[bool]]:
    """A branch for training."""
    earlier: list[Exercise] = []
    while rng.random() < 0.2 and len(earlier) < 2:
        earlier.append(sample_exercise(rng, setting, "train"))
    return writer.branch(setting, sample_exercise(rng, setting, "train"), earlier)


def texts(seed: int, num: int) -> list[str]:
    """The training texts of the tokenizer's merges."""
    rng = random.Random(f"texts/{seed}")
    found = []
    for _ in range(num):
        setting = sample_setting(rng)
        found += [message.content for message in setting.messages()]
        exercise = sample_exercise(rng, setting, "train")
        found.append(exercise.question)
        for message in solution(setting, exercise):
            found += [message.content, message.channel or "", f" to={message.recipient}", message.role, " ", "json"]
    return found
