"""The program `xserv`, which is also `python -m xserv` and `python -m runtime.cli`.

Importing typer takes some 70 ms, most of the start. Help does not use rich, and everything else is imported when a
command uses it (`runtime.commands.later`).
"""

from __future__ import annotations

from runtime.own_packages import exit_if_hidden

exit_if_hidden()

from runtime import collector

collector.hold_off()

from typing import Annotated, Any

import typer

from runtime.commands import later
from runtime.commands.chat import chat
from runtime.commands.generate import generate
from runtime.commands.group import Command, CommandGroup
from runtime.commands.kernels import kernels
from runtime.commands.look import info, perplexity, quantize, tokenize
from runtime.commands.options import with_options
from runtime.commands.run_batch import run_batch
from runtime.commands.serve import deploy, serve
from runtime.commands.vectors import embed, rank

_bench_program = later("runtime.commands.bench.program")
_version = later("runtime.version")

USE, LOOK, MEASURE = "Use a model", "Look at one", "Measure and compile"


class Program(CommandGroup):
    """All commands; those of `bench` are imported when one of them, or the help, is requested."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [*super().list_commands(ctx), "bench"]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name != "bench":
            return super().get_command(ctx, cmd_name)
        command: Any = typer.main.get_command(_bench_program.bench)
        command.rich_help_panel = MEASURE
        return command


app = typer.Typer(
    cls=Program,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"xserv {_version.release()}")
        raise typer.Exit


@app.callback()
def _program(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Chat with a language model, serve it, measure it."""
    assert not debug  # taken out of the arguments by CommandGroup
    assert not version


for _command, _panel, _is_positional in (
    (chat, USE, True),
    (generate, USE, True),
    (serve, USE, False),
    (run_batch, USE, False),
    (deploy, USE, False),
    (embed, USE, False),
    (rank, USE, False),
    (tokenize, LOOK, False),
    (info, LOOK, True),
    (perplexity, LOOK, False),
):
    app.command(cls=Command, rich_help_panel=_panel)(with_options(_command, takes_model=_is_positional))
app.command(cls=Command, rich_help_panel=USE)(quantize)
app.add_typer(kernels, rich_help_panel=MEASURE)


def main() -> None:
    """The entry point of the script `xserv`."""
    app()


if __name__ == "__main__":
    main()
