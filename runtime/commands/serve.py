"""`xserv serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.commands.options import EngineOptions


def serve(
    engine: EngineOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in the API; default: the folder's (bundled: xserv-demo).")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Longest queue; beyond it the answer is 429.", min=1)] = 1024,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body; beyond it the answer is 413.", min=1)] = 8
    * 1024
    * 1024,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have after SIGTERM.", min=0.0)
    ] = 10.0,
) -> None:
    """Serve a model at /v1/chat/completions and /v1/completions."""
    from server import run

    run.serve(
        host=host,
        port=port,
        served_model_name=served_model_name,
        max_waiting=max_waiting,
        max_body_bytes=max_body_bytes,
        drain_timeout_s=drain_timeout,
        **engine.arguments(),
    )
