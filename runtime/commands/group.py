"""The exit of every command: status 0; or one line on stderr, and status 2 (usage, model, request) or 1. The layout of
its help: options and commands under headings (``rich_help_panel``), without rich, which is slow to import. And streams
that are closed, not UTF-8, or closed during the run."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from runtime.commands import later
from runtime.errors import DeviceError, InvalidArgumentError, UnsupportedError, XservError

_model_errors = later("models.errors")
_tokenizer_errors = later("tokenizer.errors")

MOST_CHARACTERS = 1000


class Command(TyperCommand):
    """A command whose help has its options under their headings, those of its own first. An argument without a metavar
    is shown as the words that it may be, or by its name."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for each in self._arguments():
            each.metavar = each.metavar or "|".join(getattr(each.type, "choices", ())) or str(each.name).upper()

    def _arguments(self) -> list[Any]:
        return [each for each in self.params if each.param_type_name == "argument"]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options' place, then the arguments, in brackets those that may be left out."""
        shown = [
            each.metavar if each.required or each.metavar.startswith("[") else f"[{each.metavar}]"
            for each in self._arguments()
        ]
        return [str(self.options_metavar), *shown]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        _write(formatter, sections)


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for heading, rows in sections.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)


class CommandGroup(TyperGroup):
    """The commands; errors become one line. `--debug`, anywhere before a `--`, shows the traceback."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        width = formatter.width - 6 - max(map(len, names))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            command: Any = self.get_command(ctx, name)
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(heading, []).append((name, command.get_short_help_str(width)))
        _write(formatter, sections)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments, is_debug = _without_debug(list(sys.argv[1:] if args is None else args))
        prepare_streams()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while modules were imported
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            status = super().main(
                arguments or ["--help"],
                prog_name or "xserv",
                complete_var,
                False,
                windows_expand_args,
                **extra,
            )
            sys.stdout.flush()  # raises where it cannot be written: a closed pipe, or a full disk
        except Exception as error:
            if is_debug:
                raise
            give_up_output()
            with suppress(OSError):  # stderr may be closed, too
                print(f"xserv: error: {one_line(error)}{_about_names(arguments)}", file=sys.stderr, flush=True)
            status = exit_status(error)
        if not standalone_mode:
            return status
        sys.exit(status if isinstance(status, int) else 0)


def _about_names(arguments: list[str]) -> str:
    """A hint for vLLM's syntax of several names after the option; here the second is an argument of the command."""
    option = "--served-model-name"
    first, second = [*arguments, "", "", ""][arguments.index(option) + 1 :][:2] if option in arguments else ("", "")
    if not second or second.startswith("-"):
        return ""
    return f" ({second!r} is no part of {option}; separate several names by commas: {option} {first},{second})"


def exit_status(error: Exception) -> int:
    """2 for a wrong request of the user, 1 for a failure."""
    if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # typer's usage errors
        return int(error.exit_code)
    usage = (
        InvalidArgumentError,
        UnsupportedError,
        DeviceError,
        _model_errors.ModelLoadError,
        _tokenizer_errors.TokenizerError,
    )
    return 2 if isinstance(error, usage) else 1


def one_line(error: Exception) -> str:
    """The error on one line. Unexpected errors are named by their class, as bugs."""
    if isinstance(error, typer.Abort):
        text = "interrupted"
    elif hasattr(error, "format_message"):  # typer's
        text = error.format_message()
    elif isinstance(error, (XservError, _tokenizer_errors.TokenizerError)):
        text = str(error)
    elif isinstance(error, BrokenPipeError):
        text = "nobody reads the output any more"
    elif isinstance(error, OSError) and not error.strerror:
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = f"internal error: {type(error).__name__}: {error} (--debug shows where)"
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… (--debug shows all)"


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end


class ClosedOutput(io.TextIOBase):
    """The stdout of a process started without one (`>&-`): writing to it is an error."""

    def write(self, text: str) -> int:
        raise OSError("stdout is closed: nothing can be written")


def prepare_streams() -> None:
    """Prepares the streams for any language. In an ASCII locale (`LC_ALL=POSIX`) they are UTF-8, as in Python itself;
    characters that another encoding lacks are written as `\\xe9`. File descriptors 0 to 2 never belong to another
    file."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if type(stream) is not io.TextIOWrapper or stream.encoding is None:
            continue
        is_ascii = stream.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968", "646")
        errors = "surrogateescape" if stream is sys.stdin else "backslashreplace"
        stream.reconfigure(encoding="utf-8" if is_ascii else None, errors=errors)


def give_up_output() -> None:
    """Drops pending output after such an error, so that the interpreter's exit does not retry."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
