"""The program `xserv`, which is `python -m runtime.cli`: chat, generate, serve, tokenize, info, kernels, bench.

Typer's own import costs some 70 ms and is most of the start; rich is not used for the help, and everything
else is imported when a command runs.
"""

from __future__ import annotations

from runtime.own_packages import exit_if_hidden

exit_if_hidden()

from typing import Annotated, Any

import typer

from runtime.commands.chat import chat
from runtime.commands.generate import generate
from runtime.commands.group import CommandGroup
from runtime.commands.info import info
from runtime.commands.kernels import kernels
from runtime.commands.options import with_options
from runtime.commands.serve import serve
from runtime.commands.tokenize import tokenize


class Program(CommandGroup):
    """All commands; those of `bench` are imported when one of them, or the help, is asked for."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [*super().list_commands(ctx), "bench"]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name != "bench":
            return super().get_command(ctx, cmd_name)
        from runtime.commands.benchmarks import bench

        return typer.main.get_command(bench)


app = typer.Typer(
    cls=Program, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback()
def _program(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Chat with a language model, serve it, measure it."""
    assert not debug  # taken out of the arguments by CommandGroup


for _command in (chat, generate, serve, tokenize, info):
    app.command()(with_options(_command))
app.add_typer(kernels)


def main() -> None:
    """The entry point of the script `xserv`."""
    app()


if __name__ == "__main__":
    main()
