"""The loop around a chat session, on a terminal or on a pipe.

Only answers go to stdout; all other text goes to stderr. On a pipe each line is a message
(also one that begins with a slash), and each answer ends with a newline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from runtime import collector
from runtime.commands import later
from runtime.commands.chat_session import COMMANDS, ChatSession, run_slash
from runtime.commands.group import one_line
from runtime.errors import XservError
from runtime.llm import LLM, LoRARequest

_toolkit, _completion = later("prompt_toolkit"), later("prompt_toolkit.completion")
_history, _output = later("prompt_toolkit.history"), later("prompt_toolkit.output")


def run(
    arguments: dict[str, Any], given: dict[str, Any], *, system: str | None, calculates: bool,
    pictures: Sequence[Path], lora_request: LoRARequest | None = None,
) -> None:  # fmt: skip
    """Chats with the model of these arguments of `LLM`, by the sampling parameters that were given."""
    is_terminal = sys.stdin.isatty()
    with LLM(**arguments) as llm:
        session = ChatSession(
            llm, system=system, given=given, on_reasoning=show_reasoning, calculates=calculates,
            on_call=show_call, lora_request=lora_request,
        )  # fmt: skip
        collector.resume()
        for path in pictures:
            session.attach(path)
        if not session.has_template:
            say("the model has no chat template: it goes on with your text (--chat-template FILE gives it one)")
        if is_terminal:
            facts = llm.client.info
            context = f"{facts.max_model_len} tokens of context"
            say(f"{facts.model_name} on {facts.device}, {context}. /help lists the commands.")
            talk(session, terminal_reader())
        elif not read_pipe(session):
            raise typer.Exit(1)


def say(text: str) -> None:
    """Prints text that is not the model's."""
    print(text, file=sys.stderr, flush=True)


def show_reasoning(text: str) -> None:
    """Shows reasoning, dimmed, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m")
        sys.stderr.flush()


def show_call(text: str) -> None:
    """Shows a tool call and its result on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m\n{text}\n\x1b[0m")
        sys.stderr.flush()


def show_answer(session: ChatSession, message: str) -> bool:
    """Streams one answer to stdout, and a newline; False if it failed, with the reason on stderr."""
    try:
        with closing(session.answer(message)) as pieces:
            for number, text in enumerate(pieces):
                if number == 0 and session.stats.num_reasoning_tokens:
                    show_reasoning("\n\n")
                sys.stdout.write(text)
                sys.stdout.flush()
    except XservError as error:
        say(f"error: {one_line(error)}")
        return False
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if session.stats.num_dropped_turns:
        say(f"(the context is full: the oldest {session.stats.num_dropped_turns} turns were forgotten)")
    if session.stats.finish_reason == "length":
        say("(the answer was cut at its most tokens)")
    return True


def read_pipe(session: ChatSession) -> bool:
    """Sends each line of stdin as a message, without empty ones; False if an answer failed."""
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    all_answered = True
    for line in sys.stdin:
        if line.strip():
            all_answered &= show_answer(session, line.rstrip("\r\n"))
    return all_answered


def talk(session: ChatSession, read: Callable[[], str]) -> None:
    """Reads until /exit or the end of input. Ctrl-C only clears the line or stops the answer."""
    while True:
        try:
            message: str | None = read().strip()
            if not message:
                continue
            if message.startswith("/"):
                reply = run_slash(session, message)
                if reply.text:
                    say(reply.text)
                if reply.is_exit:
                    return
                message = reply.message
            if message:
                show_answer(session, message)
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        except XservError as error:
            say(f"error: {one_line(error)}")


def terminal_reader() -> Callable[[], str]:
    """Reads messages with line editing and a persistent history."""
    path = history_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    session = _toolkit.PromptSession(
        history=_history.FileHistory(str(path)),
        completer=_completion.WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        output=_output.create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
    )

    def read() -> str:
        lines = [session.prompt("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(session.prompt(". "))
        return "\n".join(lines)

    return read


def history_file() -> Path:
    """`$XDG_STATE_HOME/xserv/chat_history`, by default under `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "xserv" / "chat_history"
