"""One chat with a model: a message in, the answer's text out piece by piece. And its /commands: each takes the session
and the rest of the line, and returns a reply; `/help` prints the table at the end. Does not depend on a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from runtime.commands import calculator
from runtime.commands.answers import sampling_params
from runtime.commands.options import SamplingOptions
from runtime.engine.admission import check_generates
from runtime.engine.prompt_images import PreparedImage, place_images, prepare_image
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import InvalidArgumentError, XservError
from runtime.images.decoding import pixels_of
from runtime.llm import LLM, LoRARequest
from runtime.llm.prompts import take_images
from runtime.text.chat import chat_prompt
from runtime.text.content import picture_text
from runtime.text.formats import AnswerFormat

Message = dict[str, Any]
Encoder = Callable[[list[Message]], list[int]]


class Conversation:
    """The system message and the turns since; each turn is a user's message and its answer, if complete."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[list[Message]] = []

    @property
    def is_open(self) -> bool:
        """Whether the last turn waits for its answer."""
        return bool(self.turns) and len(self.turns[-1]) == 1

    def ask(self, content: str | list[dict[str, Any]]) -> None:
        """Opens a turn with a text, or with parts."""
        self.turns.append([{"role": "user", "content": content}])

    def answer(self, text: str) -> None:
        """Closes the last turn."""
        self.turns[-1].append({"role": "assistant", "content": text})

    def take_back(self) -> Any:
        """Removes the last turn and returns its question, or None."""
        return self.turns.pop()[0]["content"] if self.turns else None

    def reset(self) -> None:
        """Drops every turn; the system message stays."""
        self.turns.clear()

    def messages(self, first_turn: int = 0) -> list[Message]:
        """The system message, if there is one, and the turns from `first_turn` on."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(message for turn in self.turns[first_turn:] for message in turn)]

    def fit(self, encode: Encoder, most_tokens: int) -> tuple[list[int], int]:
        """The prompt's ids, at most `most_tokens`, and how many of the oldest turns were dropped for it. Raises
        `InvalidArgumentError` if the last turn alone is too long; only that turn is then removed.
        """
        for first_turn in range(len(self.turns)):
            ids = encode(self.messages(first_turn))
            if len(ids) <= most_tokens:
                del self.turns[:first_turn]
                return ids, first_turn
        self.take_back()
        raise InvalidArgumentError(
            f"the message makes a prompt of {len(ids)} tokens; there is room for {most_tokens}",
            param="message",
        )


MOST_RESERVED_TOKENS = 256
"""Room kept for the answer when nothing says how long it may be (never more than half the context)."""

MOST_CALLS = 8
"""Rounds of calls in one answer."""

MOST_CONTINUED_TOKENS = 128
"""Length of an answer of a model without a chat template, unless something says how long it may be."""


@dataclass(slots=True)
class AnswerStats:
    """Statistics of the last answer; times in seconds."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    num_dropped_turns: int = 0
    finish_reason: str | None = None

    def line(self) -> str:
        """The statistics as one line."""
        later = self.num_output_tokens - 1
        decode_s = self.latency_s - self.ttft_s
        rate = f", {later / decode_s:.1f} tokens/s after it" if later > 0 and decode_s > 0 else ""
        return (
            f"{self.num_prompt_tokens} prompt tokens, {self.num_output_tokens} answered "
            f"({self.finish_reason}), first after {self.ttft_s * 1e3:.0f} ms{rate}"
        )


class ChatSession:
    """A conversation with `llm`.

    Without a chat template (`has_template`) the model continues the text: its prompt is the conversation so far, each
    message on a line of its own.

    given         fields of `SamplingParams` that override the model's defaults
    calculates    the model may call a calculator, whose results it then reads
    on_call       called with each tool call and its result
    on_reasoning  called with the model's reasoning as it streams; the conversation does not keep it
    lora_request  the adapter that answers, or None
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        given: dict[str, Any] | None = None,
        on_reasoning: Callable[[str], None] = lambda text: None,
        calculates: bool = False,
        on_call: Callable[[str], None] = lambda text: None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        check_generates(llm.client.info)
        self.lora_request = lora_request
        self.llm = llm
        self.on_call = on_call
        self.tools = [calculator.TOOL] if calculates else None
        self.on_reasoning = on_reasoning
        self.has_template = llm.tokenizer is None or llm.tokenizer.has_chat_template
        answer_format = AnswerFormat.of(llm.tokenizer)
        self.answer_format = answer_format if calculates else replace(answer_format, tools=None)
        self.conversation = Conversation(system)
        self.attached: list[PreparedImage] = []
        self.given: dict[str, Any] = {}
        self.stats = AnswerStats()
        self.set_sampling(given or {})
        self.encode([{"role": "user", "content": "?"}])  # raises at once if the model cannot chat

    def set_sampling(self, given: dict[str, Any]) -> None:
        """Replaces the overriding fields; raises `RequestError`, and changes nothing, when one is wrong."""
        params = self.params(given)
        if params.n != 1:
            raise InvalidArgumentError(f"n={params.n}: a chat has one answer", param="n")
        self.given = given

    def params(self, given: dict[str, Any]) -> SamplingParams:
        """`given` over the model's defaults. A continued text gets an end of its own."""
        return sampling_params(self.llm, given, max_tokens=None if self.has_template else MOST_CONTINUED_TOKENS)

    def attach(self, path: str | Path) -> None:
        """Attaches a picture to the next message. Raises `ImageError`, or `InvalidArgumentError` without a vision
        model."""
        support = self.llm.client.info.images
        if support is None or not self.has_template:
            why = "the model reads no images" if support is None else "the model has no chat template"
            raise InvalidArgumentError(f"{path}: {why}", param="image")
        self.attached.append(prepare_image(pixels_of(Path(path).expanduser()), support.rule))

    def take_back(self) -> str | None:
        """Removes the last turn and returns its text; its pictures are attached again. None if there is no turn."""
        content: str | list[dict[str, Any]] | None = self.conversation.take_back()
        if not isinstance(content, list):
            return content
        self.attached = [part["image"] for part in content if part["type"] == "image"]
        return "".join(part["text"] for part in content if part["type"] == "text")

    def encode(self, messages: list[Message]) -> list[int]:
        """The prompt's token ids, including its pictures'."""
        plain, images = take_images(messages)
        ids = self._encode(plain)
        support = self.llm.client.info.images
        return ids if support is None or not images else place_images(ids, images, support)[0]

    def _prompt(self, messages: list[Message], ids: list[int]) -> Any:
        """The prompt for `LLM.stream`; `ids`: the result of `encode`."""
        plain, images = take_images(messages)
        return {"prompt_token_ids": self._encode(plain), "images": images} if images else ids

    def _encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt's token ids, by the model's chat template; without one, those of the text so far."""
        if self.has_template:
            answer_format = self.answer_format
            return chat_prompt(
                self.llm.tokenizer, messages, tools=self.tools, harmony=answer_format.renders_harmony,
                told_tools=answer_format.tools if answer_format.tells_tools and self.tools else None,
                picture_text=picture_text(self.llm.tokenizer, self.llm.client.info.images),
            )  # fmt: skip
        text = ""
        for message in messages:
            text += message["content"] if message["role"] == "assistant" else f"\n{message['content']}"
        return self.llm.get_tokenizer().encode(text.removeprefix("\n"))

    def answer(self, text: str) -> Generator[str, None, None]:
        """Sends the message, and yields the answer's text as it streams.

        Turns that no longer fit the context are dropped, oldest first (`stats.num_dropped_turns`). If the caller stops
        an answer (by closing the iterator, or by an exception such as KeyboardInterrupt), its text so far stays in the
        conversation; without any text its question is removed, too.
        """
        if self.conversation.is_open:  # an interrupt came between two states
            self.conversation.take_back()
        params = self.params(self.given)
        context = self.llm.client.info.max_model_len
        reserved = min(params.max_tokens or MOST_RESERVED_TOKENS, context // 2)
        images = [{"type": "image", "image": image} for image in self.attached]
        self.conversation.ask([*images, {"type": "text", "text": text}] if images else text)
        ids, num_dropped = self.conversation.fit(self.encode, context - reserved)
        self.attached = []
        self.stats = AnswerStats(num_prompt_tokens=len(ids), num_dropped_turns=num_dropped)
        pieces: list[str] = []
        start = time.perf_counter()
        messages = self.conversation.messages()
        prompt = self._prompt(messages, ids)
        try:
            for _ in range(MOST_CALLS + 1):
                calls: list[dict[str, Any]] = []
                thoughts: list[str] = []
                for text in self._say(prompt, params, start, thoughts, calls):
                    pieces.append(text)
                    yield text
                if not calls:
                    break
                messages = [*messages, *self._called("".join(thoughts), calls)]
                prompt = self._prompt(messages, self.encode(messages))
        finally:
            self.stats.finish_reason = self.stats.finish_reason or "stopped"
            if pieces or self.stats.finish_reason in ("stop", "length"):
                self.conversation.answer("".join(pieces))
            else:
                self.conversation.take_back()

    def _say(
        self, prompt: Any, params: SamplingParams, start: float, thoughts: list[str], calls: list[dict[str, Any]]
    ) -> Generator[str, None, None]:
        """Streams one reply of the model; its reasoning and calls are added to ``thoughts`` and ``calls``."""
        deltas = self.llm.stream(prompt, params, answer_format=self.answer_format, lora_request=self.lora_request)
        with closing(deltas):
            for delta in deltas:
                now = time.perf_counter() - start
                if delta.token_ids and not self.stats.num_output_tokens:
                    self.stats.ttft_s = now
                self.stats.latency_s = now
                self.stats.num_output_tokens += len(delta.token_ids)
                self.stats.finish_reason = delta.finish_reason
                if delta.finish_reason == "error":
                    raise XservError("the engine could not finish the answer; its log says why")
                self.stats.num_reasoning_tokens += delta.num_reasoning_tokens
                if delta.reasoning:
                    thoughts.append(delta.reasoning)
                    self.on_reasoning(delta.reasoning)
                for piece in delta.tool_calls:
                    if piece.name is not None:
                        function = {"name": piece.name, "arguments": ""}
                        calls.append({"id": piece.id, "type": "function", "function": function})
                    calls[piece.index]["function"]["arguments"] += piece.arguments
                if delta.text:
                    yield delta.text

    def _called(self, thought: str, calls: list[dict[str, Any]]) -> list[Message]:
        """The model's message with its calls, and a message with the result of each."""
        spoken: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        messages = [spoken | {"reasoning_content": thought} if thought else spoken]
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            result = calculator.answer(name, arguments)
            self.on_call(f"{name}({arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return messages


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a /command: a text for the user, an exit, or a message for the model."""

    text: str = ""
    is_exit: bool = False
    message: str | None = None


def run_slash(session: ChatSession, line: str) -> Reply:
    """Runs one line that begins with a slash; `InvalidArgumentError` for an unknown one or a wrong value."""
    name, _, rest = line.strip().partition(" ")
    if name not in COMMANDS:
        raise InvalidArgumentError(f"there is no {name}; /help lists what there is", param="command")
    return COMMANDS[name][1](session, rest.strip())


def _help(session: ChatSession, rest: str) -> Reply:
    lines = [f"{name:<9}{description}" for name, (description, _) in COMMANDS.items()]
    return Reply("\n".join([*lines, "Ctrl-C stops an answer, Ctrl-D leaves; a line that ends with \\ goes on."]))


def _reset(session: ChatSession, rest: str) -> Reply:
    session.conversation.reset()
    return Reply("the conversation begins anew")


def _system(session: ChatSession, rest: str) -> Reply:
    if not rest:
        return Reply(session.conversation.system or "there is no system message; /system TEXT sets one")
    session.conversation.system = None if rest == "-" else rest
    return Reply("no system message" if rest == "-" else "system message set")


def _set(session: ChatSession, rest: str) -> Reply:
    every_hint = get_type_hints(SamplingOptions)
    hints = {field.name: every_hint[field.name] for field in fields(SamplingOptions)}
    if not rest:
        lines = [f"{name} = {value}" for name, value in session.given.items()]
        return Reply("\n".join(lines) or f"nothing is set; names: {', '.join(hints)}")
    name, _, text = rest.replace("=", " ", 1).partition(" ")
    name = name.strip().removeprefix("--").replace("-", "_")
    if name not in hints:
        raise InvalidArgumentError(f"there is no {name!r} to set; names: {', '.join(hints)}", param=name)
    given = {key: value for key, value in session.given.items() if key != name}
    if (text := text.strip()) not in ("", "default"):
        given[name] = _value(name, hints[name], text)
    session.set_sampling(given)
    return Reply(f"{name} = {given[name]}" if name in given else f"{name} is the model's own again")


def _value(name: str, hint: Any, text: str) -> Any:
    kind = get_args(hint)[0]  # each hint is `T | None`
    try:
        if kind is bool:
            return {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}[text.lower()]
        if kind in (int, float):
            return kind(text)
        if kind == list[int]:
            return [int(part) for part in text.replace(",", " ").split()]
        return [text]
    except (ValueError, KeyError):
        raise InvalidArgumentError(f"{name} {text!r} is no {getattr(kind, '__name__', kind)}", param=name) from None


def _stats(session: ChatSession, rest: str) -> Reply:
    engine = session.llm.client.stats()
    context = session.llm.client.info.max_model_len
    used = session.stats.num_prompt_tokens + session.stats.num_output_tokens
    return Reply(
        f"last answer: {session.stats.line()}\n"
        f"context: {used} of {context} tokens, {len(session.conversation.turns)} turns\n"
        f"engine: {engine.num_steps} steps, {engine.prompt_tokens} prompt tokens, "
        f"{engine.generation_tokens} generated, KV cache {engine.kv_cache_usage:.1%} used"
    )


def _image(session: ChatSession, rest: str) -> Reply:
    if not rest:
        return Reply(f"{len(session.attached)} pictures go with the next message; /image FILE adds one")
    session.attach(rest)
    return Reply(f"{rest} goes with the next message")


def _retry(session: ChatSession, rest: str) -> Reply:
    message = session.take_back()
    return Reply(message=message) if message is not None else Reply("there is nothing to ask again")


def _exit(session: ChatSession, rest: str) -> Reply:
    return Reply(is_exit=True)


COMMANDS: dict[str, tuple[str, Callable[[ChatSession, str], Reply]]] = {
    "/help": ("this list", _help),
    "/reset": ("forget the conversation; the system message stays", _reset),
    "/system": ("show the system message; /system TEXT sets it, /system - removes it", _system),
    "/set": ("show the sampling parameters; /set temperature 0.7, /set temperature default", _set),
    "/stats": ("the last answer's tokens and times, the context, the engine", _stats),
    "/image": ("/image FILE adds a picture to the next message, for a model that reads them", _image),
    "/retry": ("ask the last question again", _retry),
    "/exit": ("leave", _exit),
    "/quit": ("leave", _exit),
}
