"""`xserv bench tokenizer`: how fast text becomes ids, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from runtime.commands.report import ReportOptions
from runtime.text_files import read_text_file


def tokenizer(
    output: ReportOptions,
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH|HUB_ID]...", help="Tokenizers; default: the bundled model's.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="A text; default: Python's own reference and library."),
    ] = None,
    num_rounds: Annotated[int, typer.Option(help="Timed rounds, the sides in turns.")] = 7,
    long_characters: Annotated[int, typer.Option(help="Characters of the longest text without words.")] = 1_000_000,
    loads: Annotated[int, typer.Option(help="Processes that load each tokenizer.")] = 3,
) -> None:
    """Encoding and decoding, one thread, beside tokenizers and tiktoken where installed; the same ids, or no time."""
    from models.checkpoints.hub import resolve_model
    from runtime.bench.tokenizers.bench_tokenizer import as_lines, bench_tokenizer

    chosen: list[str | None] = [*folders] if folders else [None]
    files = [Path(resolve_model(folder)) / "tokenizer.json" for folder in chosen]
    report = bench_tokenizer(
        files,
        texts=dict(_named_text(each) for each in text) if text else None,
        num_rounds=num_rounds,
        long_characters=long_characters,
        loads=loads,
        report_progress=lambda line: print(line, file=sys.stderr),
    )
    output.deliver(report, "\n".join(as_lines(report)))


def _named_text(argument: str) -> tuple[str, str]:
    name, separator, file = argument.partition("=")
    if not separator or not Path(file).is_file():
        raise typer.BadParameter(f"--text must be NAME=FILE of a file that is there, got {argument!r}")
    return name, read_text_file(file)


COMMANDS = (tokenizer,)
