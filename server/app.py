"""The Starlette application of one model: routes, error handlers, the layers around them, and the service's start and
stop. `server.hosting.application` has that of several.

    app = create_app(client, tokenizer, model_name="xserv-demo")

From the outside in: the gate (ids, Host and Origin, draining, log, metrics), CORS if origins are allowed, API keys if
there are any, Starlette. No CORS headers are sent by default and only JSON bodies are read, so a page of another origin
cannot use a server on localhost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, ExceptionHandler, Scope

from models.configuration.generation_config import recommended_sampling
from runtime.engine.process.client import EngineClient
from server.adapters import Adapters
from server.config import ServerConfig
from server.description.openapi import description
from server.description.operations import Json, routes
from server.errors import ApiError, handle_api_error, handle_client_disconnect, handle_http_exception, handle_unexpected
from server.loading import LoadedModel
from server.observing.logs import LogWriter, log_access
from server.observing.metrics import Gauges, HttpMetrics, Metrics
from server.observing.tracing import Tracing
from server.responses_api.folder import folder_of, tenants_secret
from server.service import AppState, Service, Shared
from server.transport.auth import ApiKeys, Authentication
from server.transport.exchange import Exchange, Lifecycle
from server.transport.gate import Gate, Observer, Refusals
from server.transport.origins import Cors, OriginRules
from server.transport.path_table import PathTable
from tokenizer import Tokenizer

EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = {
    ApiError: handle_api_error,
    HTTPException: handle_http_exception,
    ClientDisconnect: handle_client_disconnect,
    Exception: handle_unexpected,
}


class ServerApplication(Starlette):
    """Starlette inside our own layers: what a server of one model and one of several have in common.

    model_names  the names in requests
    log_writer   counts the lost lines for the metrics
    tracing      observes every answer; the caller closes it
    lifecycle    whether it drains, and how many requests are open
    keys, admin_keys  the API keys, for reloading their files

    Raises `ServerConfigError` for API keys that cannot be read.
    """

    state: AppState

    def __init__(
        self,
        model_names: Sequence[str],
        routes: Sequence[BaseRoute],
        config: ServerConfig | None = None,
        *,
        log_writer: LogWriter | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(routes=routes, exception_handlers=EXCEPTION_HANDLERS, lifespan=_lifespan)
        self.router = PathTable(self.router)
        self.model_names = tuple(model_names)
        self.config = config or ServerConfig()
        responses = folder_of(self.config)
        secret = None if responses is None else tenants_secret(responses)
        self.keys = ApiKeys.of(self.config, secret)
        self.admin_keys = ApiKeys((), self.config.admin_key_files, secret)
        self.lifecycle = Lifecycle()
        self.http_metrics = HttpMetrics(self.keys)
        self.observers: tuple[Observer, ...] = (self._count, log_access, *(() if tracing is None else (tracing,)))
        self.gauges = self._gauges(log_writer)
        self.state = AppState()
        self.state.lifecycle = self.lifecycle
        self.state.admin_keys = self.admin_keys

    def description(self) -> Json:
        """`/openapi.json`. Raises `ApiError` until a model is loaded."""
        raise NotImplementedError

    def begin(self) -> None:
        """Called on the event loop when it begins to serve."""
        raise NotImplementedError

    def end(self) -> None:
        """Called when it has served its last request."""
        raise NotImplementedError

    def _gauges(self, log_writer: LogWriter | None) -> Gauges:
        gauges: Gauges = {
            "open_requests": ("Requests whose answer is not over.", lambda: self.lifecycle.num_open),
            "draining": ("1 while the server ends.", lambda: self.lifecycle.is_draining),
        }
        if log_writer is not None:
            gauges["lost_log_lines"] = ("Lines that could not be written.", lambda: log_writer.num_lost)
        return gauges

    def _count(self, exchange: Exchange, scope: Scope, route: str, duration_s: float) -> None:
        self.http_metrics.finish(route, scope["method"], exchange.status, duration_s)

    def build_middleware_stack(self) -> ASGIApp:
        config = self.config
        app = super().build_middleware_stack()
        if self.keys.is_required:
            app = Authentication(app, self.keys, self.admin_keys)
        app = Refusals(app)
        if config.allowed_origins:
            app = Cors(app, config.allowed_origins)
        rules = OriginRules(config.allowed_hosts, config.allowed_origins)
        return Gate(app, self.lifecycle, rules, self.endpoint_paths(), self.observers)

    def endpoint_paths(self) -> Mapping[Any, str]:
        """The names of routes in logs and metrics, by their endpoints."""
        return {route.endpoint: route.path for route in self.routes if isinstance(route, Route)}


class Application(ServerApplication):
    """A server of one model. It answers probes and the page from its start, and accepts requests after `take_up`. The
    arguments are `ServerApplication`'s; answers have the first of the names."""

    def __init__(
        self,
        model_names: Sequence[str],
        config: ServerConfig | None = None,
        *,
        log_writer: LogWriter | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(model_names, routes(), config, log_writer=log_writer, tracing=tracing)
        self.state.metrics = Metrics(self.model_names[0], self.http_metrics, self.gauges)
        self.state.registry = self.state.metrics.registry
        self._model: LoadedModel | None = None
        self._is_running = False

    def take_up(self, model: LoadedModel) -> None:
        """Sets the loaded model: requests are accepted from now on, or from the application's start. Call it once, on
        the event loop if that runs."""
        self._model = model
        if self._is_running:
            self._begin_service()

    def description(self) -> Json:
        service = self.state.service
        info, fills_in = service.client.info, service.fill_in is not None
        return description(service.all_names, info.vocab_size, reads_images=info.images is not None, fills_in=fills_in)

    def begin(self) -> None:
        self._is_running = True
        self._begin_service()

    def end(self) -> None:
        if (service := self.state.found_service) is not None:
            service.end()
            self.state.shared.end()

    def _begin_service(self) -> None:
        if self._model is not None:
            self.state.shared = Shared(self.config)
            self.state.metrics.attach(self._model.client)
            self.state.service = Service(self._model, self.model_names, self.config, self.state)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    *,
    model_name: str | Sequence[str] | None = None,
    default_sampling: Mapping[str, float | int] | None = None,
    config: ServerConfig | None = None,
    log_writer: LogWriter | None = None,
    tracing: Tracing | None = None,
) -> Application:
    """An application that serves one engine's model, from its start on.

    client            the caller closes it after the application has stopped
    tokenizer         None if prompts and answers are token ids
    model_name        the model's name, or names, in requests; the engine's by default
    default_sampling  defaults by `SamplingParams`' names; those of the model's files by default

    Other arguments and errors are `Application`'s, and `Adapters.of`'s.
    """
    names = (model_name,) if isinstance(model_name, str) else tuple(model_name or ())
    app = Application(names or (client.info.model_name,), config, log_writer=log_writer, tracing=tracing)
    if default_sampling is None:
        folder = client.info.model_path
        default_sampling = recommended_sampling(folder) if folder else {}
    adapters = Adapters.of(client, app.model_names, app.config)
    app.take_up(LoadedModel(client, tokenizer, default_sampling, adapters))
    return app


@asynccontextmanager
async def _lifespan(app: ServerApplication) -> AsyncIterator[None]:
    app.begin()
    try:
        yield
    finally:
        app.end()
