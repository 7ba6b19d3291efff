"""`xserv serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.commands.options import EngineOptions
from runtime.commands.server_options import ServerOptions
from runtime.engine.config import DEFAULT_MAX_WAITING_TOKENS


def serve(
    engine: EngineOptions,
    server: ServerOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME]", help="Name in the API; default: the folder's (bundled: xserv-demo). May be repeated."
        ),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="PATH", help="Jinja template, a file or itself; default: the model's.")
    ] = None,
    max_waiting: Annotated[
        int | None,
        typer.Option(help="Longest queue; beyond it the answer is 429. Default: --max-connections.", min=1),
    ] = None,
    max_waiting_tokens: Annotated[
        int, typer.Option(help="Most prompt tokens in the queue; beyond it the answer is 429.", min=1)
    ] = DEFAULT_MAX_WAITING_TOKENS,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="No process of its own for the engine; for debugging.")
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="auto|HOST:PORT", help="Run the engines on the nodes of this Ray cluster (needs the extra ray)."
        ),
    ] = None,
    hang_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which an engine that gets nowhere is started again; default: 600."),
    ] = None,
) -> None:
    """Serve a model at /v1/chat/completions and /v1/completions."""
    from server.serve import serve as run_server

    run_server(
        host=host,
        port=port,
        served_model_name=served_model_name,
        config=server.config(),
        chat_template=chat_template,
        max_waiting=max_waiting or server.max_connections,
        max_waiting_tokens=max_waiting_tokens,
        in_process=in_process,
        hang_timeout_s=hang_timeout,
        ray_address=ray_address,
        **engine.arguments(),
    )
