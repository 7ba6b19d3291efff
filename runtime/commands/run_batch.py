"""`xserv run-batch`: a file of requests in OpenAI's batch format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime.commands import later
from runtime.commands.options import EngineOptions
from runtime.commands.serve import ServerOptions
from runtime.progress import ON_STDERR, SILENT

_run_batch = later("server.run_batch")


def run_batch(
    input_file: Annotated[Path, typer.Argument(metavar="INPUT.jsonl", help="A request a line.")],
    output_file: Annotated[
        Path, typer.Argument(metavar="OUTPUT.jsonl", help="Gets an answer a line; a run that was killed goes on there.")
    ],
    engine: EngineOptions,
    server: ServerOptions,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1, max=3000)] = 256,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]", help="Name in the requests; default: the folder's.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="PATH", help="Jinja template, a file or itself; default: the model's.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="No process of its own for the engine; for debugging.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Answer the requests of a file, in order, in OpenAI's batch format."""
    num_written, num_errors = _run_batch.run_batch(
        input_file,
        output_file,
        concurrency=concurrency,
        config=server.config(),
        served_model_name=served_model_name,
        chat_template=chat_template,
        in_process=in_process,
        reporter=SILENT if quiet else ON_STDERR,
        **engine.arguments(),
    )
    print(f"{output_file}: {num_written} {'answer' if num_written == 1 else 'answers'} written, errors: {num_errors}")
