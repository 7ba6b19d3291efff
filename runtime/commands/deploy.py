"""`xserv deploy ray`: the server as a Ray Serve application, scaled and routed to by Ray."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from runtime.commands.options import EngineOptions
from runtime.commands.server_options import ServerOptions


def deploy(
    target: Annotated[Literal["ray"], typer.Argument(help="Where: on a cluster with Ray Serve.", show_default=False)],
    engine: EngineOptions,
    server: ServerOptions,
    ray_address: Annotated[str, typer.Option(metavar="auto|HOST:PORT", help="The cluster.")] = "auto",
    host: Annotated[str, typer.Option(help="Address that Ray Serve's proxies listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Their port.", min=1, max=65535)] = 8000,
    min_replicas: Annotated[int, typer.Option(help="Least replicas.", min=1)] = 1,
    max_replicas: Annotated[int | None, typer.Option(help="Most replicas; default: as many as least.")] = None,
    target_requests: Annotated[int, typer.Option(help="Open requests of a replica that scaling aims at.", min=1)] = 64,
    num_cpus: Annotated[int, typer.Option(help="Processors of a replica.", min=1)] = 1,
    down: Annotated[bool, typer.Option("--down", help="Take it down again.")] = False,
) -> None:
    """Serve a model by replicas on a Ray cluster, and return when they serve."""
    from server.ray_serve import Deployment, remove
    from server.ray_serve import deploy as run

    assert target == "ray"
    if down:
        remove(ray_address)
        return
    options = engine.arguments()
    model = options.pop("model", None)
    deployment = Deployment(
        model=model,
        engine_options=options,
        config=server.config(),
        min_replicas=min_replicas,
        max_replicas=max_replicas or min_replicas,
        target_requests=target_requests,
        num_cpus=num_cpus,
    )
    run(deployment, address=ray_address, host=host, port=port)
    print(f"Serving at http://{host}:{port}/v1", flush=True)
