"""`xserv serve` and `xserv deploy ray`: the HTTP server here, and as a Ray Serve application."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import typer

from runtime.commands import later
from runtime.commands.options import EngineOptions, flag_class, headings_of, values_of
from runtime.engine.config import DEFAULT_MAX_WAITING_TOKENS
from server.config import HEADINGS, OPTIONS, ServerConfig

_ServerFlags: Any = flag_class("_ServerFlags", OPTIONS, HEADINGS)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(_ServerFlags):  # type: ignore[misc]
    """Limits, keys and operations of the server; the meanings are `ServerConfig`'s."""

    HEADINGS: ClassVar = headings_of(OPTIONS)

    def config(self) -> ServerConfig:
        """Raises `ServerConfigError`."""
        return ServerConfig(**values_of(self, OPTIONS))


_spawning = later("runtime.engine.process.spawning")
_serve = later("server.serve")
_ray_serve = later("server.ray_serve")


def serve(
    engine: EngineOptions,
    server: ServerOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[NAME=]MODEL]...",
            help="The same as --model; one server has several.",
            show_default=False,
        ),
    ] = None,
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
    """Serve models: the APIs of OpenAI, Anthropic and Ollama, and a chat page."""
    options = engine.arguments()
    model = options.pop("model", None)
    if models and model is not None:
        raise typer.BadParameter(f"the model {models[0]!r} is given beside --model {model!r}")
    config = server.config()
    has_one_process = not in_process and ray_address is None and options.get("data_parallel_size", 1) == 1
    is_several = len(models or ()) > 1 or config.models_config
    with ExitStack() as stack:
        waiting = None
        if has_one_process and not is_several:  # its modules are imported while the server's are
            waiting = stack.enter_context(_spawning.WaitingProcess())
        _serve.serve(
            model or models or None,
            host=host,
            port=port,
            served_model_name=served_model_name,
            config=config,
            chat_template=chat_template,
            max_waiting=max_waiting or server.max_connections,
            max_waiting_tokens=max_waiting_tokens,
            in_process=in_process,
            hang_timeout_s=hang_timeout,
            ray_address=ray_address,
            waiting=waiting,
            **options,
        )


def deploy(
    target: Annotated[Literal["ray"], typer.Argument(help="A cluster with Ray Serve.", show_default=False)],
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
    assert target == "ray"
    if down:
        _ray_serve.remove(ray_address)
        return
    options = engine.arguments()
    model = options.pop("model", None)
    deployment = _ray_serve.Deployment(
        model=model,
        engine_options=options,
        config=server.config(),
        min_replicas=min_replicas,
        max_replicas=max_replicas or min_replicas,
        target_requests=target_requests,
        num_cpus=num_cpus,
    )
    _ray_serve.deploy(deployment, address=ray_address, host=host, port=port)
    print(f"Serving at http://{host}:{port}/v1", flush=True)
