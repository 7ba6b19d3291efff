"""The program `xserv`, which is `python -m runtime.cli`: chat, generate, serve, tokenize, info, kernels, bench.

Typer's own import costs some 70 ms and is most of the start; rich is not used for the help, and everything
else is imported when a command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.commands.bench import bench
from runtime.commands.bench_kernels import COMMANDS as KERNEL_COMMANDS
from runtime.commands.bench_peers import COMMANDS as PEER_COMMANDS
from runtime.commands.bench_scheduling import COMMANDS as SCHEDULING_COMMANDS
from runtime.commands.bench_serve import COMMANDS as SERVE_COMMANDS
from runtime.commands.bench_tokenizer import COMMANDS as TOKENIZER_COMMANDS
from runtime.commands.chat import chat
from runtime.commands.generate import generate
from runtime.commands.group import CommandGroup
from runtime.commands.info import info
from runtime.commands.kernels import kernels
from runtime.commands.options import with_options
from runtime.commands.serve import serve
from runtime.commands.tokenize import tokenize

app = typer.Typer(
    cls=CommandGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback()
def _program(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Chat with a language model, serve it, measure it."""
    assert not debug  # taken out of the arguments by CommandGroup


for _command in (chat, generate, serve, tokenize, info):
    app.command()(with_options(_command))
for _benchmark in PEER_COMMANDS + TOKENIZER_COMMANDS + SERVE_COMMANDS + SCHEDULING_COMMANDS + KERNEL_COMMANDS:
    bench.command()(with_options(_benchmark))
app.add_typer(kernels)
app.add_typer(bench)


def main() -> None:
    """The entry point of the script `xserv`."""
    app()


if __name__ == "__main__":
    main()
