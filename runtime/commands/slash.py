"""The /commands of the chat: each takes the session and the rest of the line, and returns a reply.

`/help` prints the table at the end. Does not depend on a terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from runtime.commands.chat_session import ChatSession
from runtime.commands.options import SamplingOptions
from runtime.errors import InvalidArgumentError


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
