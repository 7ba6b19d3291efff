"""The Starlette application of several models: a router that finds each request's model, has it loaded, and hands the
request to that model's own application. The layers around it are the server's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from runtime.engine.make_client import StartingClient
from server.app import ServerApplication
from server.config import ServerConfig
from server.description.openapi import description
from server.description.operations import Json, routes
from server.hosting.host import Host
from server.hosting.hosted import HostedModel, StartEngine
from server.hosting.operations import ENDPOINT_PATHS, OPERATIONS_OF_SEVERAL
from server.hosting.settings import ModelSettings
from server.observing.logs import LogWriter
from server.observing.metrics import COUNTER, GAUGE, Kind, SeveralMetrics, http_families
from server.observing.tracing import Tracing
from server.service import Shared

ANY_VOCABULARY = 2**31 - 1
"""The size of the vocabulary in the description, before a model was loaded."""

OF_MODELS: tuple[tuple[Kind, str, str, Callable[[HostedModel], float]], ...] = (
    (GAUGE, "model_loaded", "1 while the model is loaded.", lambda each: each.shown_status == "loaded"),
    (GAUGE, "model_memory_bytes", "Memory that the model takes of its device.", lambda each: each.held_bytes),
    (GAUGE, "model_requests", "Requests that hold the model.", lambda each: each.num_open),
    (GAUGE, "model_requests_waiting", "Requests that wait for its loading.", lambda each: len(each.waiting)),
    (COUNTER, "model_loads", "How often the model was loaded.", lambda each: each.num_loads),
    (COUNTER, "model_failed_loads", "How often that failed.", lambda each: each.num_failed_loads),
    (COUNTER, "model_evictions", "How often it made room for another.", lambda each: each.num_evictions),
)
"""The kind, the name, the help text and the value of each metric of the models' loading."""


class HostApplication(ServerApplication):
    """A server of several models, which accepts requests from its start. The caller closes `hosted.pool`.

    settings      of the models; the first answers requests that name none, if it can
    start_engine  with `StartingClient`'s arguments

    The other arguments are `ServerApplication`'s. Raises its errors and `Host`'s.
    """

    def __init__(
        self,
        settings: Sequence[ModelSettings],
        config: ServerConfig,
        *,
        log_writer: LogWriter | None = None,
        tracing: Tracing | None = None,
        start_engine: StartEngine = StartingClient,
    ) -> None:
        names = [each.names[0] for each in settings]
        super().__init__(names, routes(OPERATIONS_OF_SEVERAL), config, log_writer=log_writer, tracing=tracing)
        self.hosted = self.state.host = Host(settings, config, self.state, start_engine)
        metrics = {model.name: model.app.state.metrics for model in self.hosted.models}
        self.state.registry = SeveralMetrics(metrics, self._own_metrics).registry
        self._beginning: asyncio.Task[None] | None = None

    def description(self) -> Json:
        models = self.hosted.models
        infos = [info for model in models if (info := model.info) is not None]
        services = [service for model in models if (service := model.service) is not None]
        return description(
            tuple(name for model in models for name in model.all_names),
            max((info.vocab_size for info in infos), default=ANY_VOCABULARY),
            reads_images=any(info.images is not None for info in infos),
            fills_in=any(service.fill_in is not None for service in services),
            operations=OPERATIONS_OF_SEVERAL,
        )

    def begin(self) -> None:
        self.state.shared = self.hosted.pool.shared = Shared(self.config)
        self._beginning = asyncio.get_running_loop().create_task(self.hosted.load_first())

    def end(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        self.hosted.pool.end()
        self.state.shared.end()

    def endpoint_paths(self) -> Mapping[Any, str]:
        return {**super().endpoint_paths(), **ENDPOINT_PATHS}

    def _own_metrics(self) -> Iterator[Metric]:
        """The metrics of the models' loading, and of the server."""
        for kind, name, help_text, value_of in OF_MODELS:
            family = kind(f"xserv:{name}", help_text, labels=["model_name"])
            for each in self.hosted.models:
                family.add_metric([each.name], float(value_of(each)))
            yield family
        budget = GAUGE("xserv:models_memory_bytes", "Memory that models may take.", labels=["device"])
        for place, count in self.hosted.pool.budgets.items():
            budget.add_metric([place], count)
        yield budget
        for name, (help_text, get) in self.gauges.items():
            gauge = GAUGE(f"xserv:{name}", help_text, labels=["engine"])
            gauge.add_metric(["0"], get())
            yield gauge
        yield from http_families(self.http_metrics)
