"""The metrics of `GET /metrics`: vLLM's names with vLLM's labels and buckets, so that its dashboards work, and the same
under `xserv:`, with metrics of this server's own.

Nothing is global: a server has a `Metrics` with its own registry. Observations cost a bisection and two additions;
labels and text are made on request. The label `engine` is the number of an engine, each with its own counts; the
server's counts have number 0. Belongs to the event loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from runtime.engine.errors import EngineDeadError
from runtime.engine.messages import ITERATION_TOKEN_BOUNDS, MISS_REASONS, EngineInfo, EngineStats, RoutingStats
from runtime.engine.process.client import EngineClient
from server.observing.meter import OF_REQUESTS, GenerationMetrics, Histogram
from server.transport.auth import ApiKeys
from server.transport.key_holders import KeyHolder

PREFIXES = ("vllm:", "xserv:")

HTTP_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
Table = tuple[tuple[Kind, str, str, str], ...]
"""The kind, the name, the help text and the field of `EngineStats` of each metric of the engines."""

OF_ENGINES: Table = (
    (GAUGE, "num_requests_running", "Number of requests in model execution batches.", "num_running"),
    (GAUGE, "num_requests_waiting", "Number of requests waiting to be processed.", "num_waiting"),
    (GAUGE, "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "kv_cache_usage"),
    (COUNTER, "prefix_cache_queries", "Tokens that were looked up in the prefix cache.", "prefix_cache_queries"),
    (COUNTER, "prefix_cache_hits", "Tokens that were found in the prefix cache.", "prefix_cache_hits"),
    (COUNTER, "num_preemptions", "Cumulative number of preemptions.", "num_preemptions"),
    (COUNTER, "prompt_tokens", "Number of prefill tokens processed.", "prompt_tokens"),
    (COUNTER, "generation_tokens", "Number of generation tokens processed.", "generation_tokens"),
)
OF_SPECULATION: Table = (
    (COUNTER, "num_drafts", "Proposals, of one sequence in one step each.", "num_drafts"),
    (COUNTER, "num_draft_tokens", "Tokens that were proposed and tried.", "num_draft_tokens"),
    (COUNTER, "num_accepted_tokens", "Tried tokens that were drawn.", "num_accepted_tokens"),
)
OWN: Table = (
    (GAUGE, "num_blocks", "KV blocks.", "num_blocks"),
    (GAUGE, "num_free_blocks", "KV blocks that nobody uses.", "num_free_blocks"),
    (GAUGE, "num_requests_paused", "Requests that wait for their clients to read.", "num_paused"),
    (GAUGE, "num_cached_blocks", "Free KV blocks that can be found again.", "num_cached_blocks"),
    (COUNTER, "num_steps", "Steps of the engine.", "num_steps"),
    (COUNTER, "num_swaps", "Preemptions that swapped.", "num_swaps"),
    (COUNTER, "prefix_cache_evictions", "Cached blocks given up for others.", "prefix_cache_evictions"),
    (COUNTER, "prefix_cache_restored", "Tokens read back from the folder of prefixes.", "prefix_cache_restored"),
    (COUNTER, "decode_graph_steps", "Steps of decodes that ran as a recorded graph.", "num_graph_steps"),
    (COUNTER, "recorded_forward_steps", "Other steps whose pass was recorded before.", "num_forward_steps"),
    (COUNTER, "failed_decode_graphs", "Recordings of steps that failed.", "num_failed_graphs"),
)
OF_TRANSFERS: Table = (
    (COUNTER, "transfers_sent", "Requests whose pages were offered to other engines.", "num_offered"),
    (COUNTER, "transfers_received", "Requests that came with another engine's pages.", "num_arrived"),
    (COUNTER, "transfers_lost", "Requests whose pages did not come, and were computed.", "num_lost_transfers"),
    (COUNTER, "transfer_sent_bytes", "Bytes of pages sent to other engines.", "transfer_sent_bytes"),
    (COUNTER, "transfer_received_bytes", "Bytes of other engines' pages.", "transfer_received_bytes"),
    (GAUGE, "transfers_open", "Offers and arrivals that are not over.", "num_open_transfers"),
)
OF_ROUTER: Table = (
    (COUNTER, "router_found_tokens", "Tokens of prompts that their engine was taken to have.", "num_found_tokens"),
    (COUNTER, "router_moved_requests", "Requests that left a busy engine that had their prefix.", "num_moved"),
    (COUNTER, "router_untaken_digests", "Blocks that the router had no room to know of.", "num_untaken"),
    (GAUGE, "router_digests", "Blocks of engines that the router knows of.", "num_digests"),
    (COUNTER, "handed_over_requests", "Requests that another engine has continued.", "num_handed_over"),
    (COUNTER, "recomputed_requests", "Requests begun again elsewhere, since their engine died.", "num_recomputed"),
)


Gauges = dict[str, tuple[str, Callable[[], float]]]
"""Numbers of the server by name: help text and getter."""


OF_KEYS: Table = (
    (GAUGE, "key_open_requests", "Requests of an API key's holder whose answers are not over.", "num_open"),
    (COUNTER, "key_requests", "Requests that began.", "num_requests"),
    (COUNTER, "key_prompt_tokens", "Tokens of their prompts.", "num_prompt_tokens"),
    (COUNTER, "key_cached_tokens", "Of these, tokens that were found in the prefix cache.", "num_cached_tokens"),
    (COUNTER, "key_generation_tokens", "Tokens of their answers.", "num_output_tokens"),
)
"""The same of `KeyHolder`. There are as many labels as keys, each a name or a digest."""


class HttpMetrics:
    """Answers by route, method and status, and the usage of holders of keys; the routes are the application's, so that
    clients cannot add labels."""

    def __init__(self, keys: ApiKeys | None = None) -> None:
        self.keys = keys
        self.requests: dict[tuple[str, str, int], int] = {}
        self.seconds: dict[str, Histogram] = {}

    def finish(self, route: str, method: str, status: int, seconds: float) -> None:
        key = (route, method, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        if (histogram := self.seconds.get(route)) is None:
            histogram = self.seconds[route] = Histogram(HTTP_SECONDS)
        histogram.observe(seconds)


class Metrics(Collector):
    """All of a server's metrics, and the registry that holds them. Those of the engine and of requests begin with
    `attach`.

    http    of the server's answers; None: they are counted elsewhere, for several models together
    gauges  further numbers of the server, by name (under `xserv:`): help text and getter
    """

    def __init__(
        self,
        model_name: str,
        http: HttpMetrics | None,
        gauges: dict[str, tuple[str, Callable[[], float]]] | None = None,
    ) -> None:
        self.http = http
        self.registry = CollectorRegistry(auto_describe=False)
        self._client: EngineClient | None = None
        self._generation: GenerationMetrics | None = None
        self._model_name = model_name
        self._gauges = gauges or {}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def attach(self, client: EngineClient) -> None:
        """Sets the engine of the loaded model."""
        self._client, self._generation = client, GenerationMetrics(client.info.max_model_len)

    @property
    def generation(self) -> GenerationMetrics:
        assert self._generation is not None, "no engine is attached"
        return self._generation

    def collect(self) -> Iterator[Metric]:
        """Every family under both prefixes, then the server's own."""
        engines = () if self._client is None else self._client.engines
        found: _Found = {}
        for number, client in enumerate(engines):
            with suppress(EngineDeadError):
                found[str(number)] = client.stats(), client.info
        for prefix in PREFIXES:
            if found:
                yield from self._engine_families(prefix, found)
            if self._generation is not None:
                yield from self._request_families(prefix, self._generation)
        up = {str(number): float(str(number) in found) for number in range(max(1, len(engines)))}
        yield self._family(GAUGE, "xserv:engine_up", "1 while the engine answers.", up)
        if found:
            yield from self._tabled(OWN, "xserv:", found)
        if any(info.transfer_addresses for _, info in found.values()):
            yield from self._tabled(OF_TRANSFERS, "xserv:", found)
        help_text = "Tokens that were looked up in the prefix cache and not found."
        missed = (
            ((engine, reason), count)
            for engine, (stats, _) in found.items()
            for reason, count in zip(MISS_REASONS, stats.prefix_cache_missed)
        )
        yield self._labelled(COUNTER, "xserv:prefix_cache_missed", help_text, ("engine", "reason"), missed)
        if any(info.ranks for _, info in found.values()):
            yield from self._rank_families(found)
        if self._client is not None and (routing := self._client.routing) is not None:
            yield from self._routing_families(routing)
        if self._generation is not None:
            help_text = "Headers of harmony's messages that were mended."
            mended = {"0": self._generation.num_malformed_headers}
            yield self._family(COUNTER, "xserv:malformed_headers", help_text, mended)
        for name, (help_text, get) in self._gauges.items():
            yield self._family(GAUGE, f"xserv:{name}", help_text, {"0": get()})
        if self.http is not None:
            yield from http_families(self.http)

    def _engine_families(self, prefix: str, found: _Found) -> Iterator[Metric]:
        yield from self._tabled(OF_ENGINES, prefix, found)
        if any(stats.accepted_by_position for stats, _ in found.values()):
            yield from self._tabled(OF_SPECULATION, f"{prefix}spec_decode_", found)
            name = f"{prefix}spec_decode_num_accepted_tokens_per_pos"
            help_text = "The same by their place in the proposal."
            accepted = (
                ((engine, str(position)), count)
                for engine, (stats, _) in found.items()
                for position, count in enumerate(stats.accepted_by_position)
            )
            yield self._labelled(COUNTER, name, help_text, ("engine", "position"), accepted)
        iterations = {}
        for engine, (stats, _) in found.items():
            iteration = iterations[engine] = Histogram(ITERATION_TOKEN_BOUNDS)
            iteration.counts = list(stats.iteration_token_counts) or iteration.counts
            iteration.total = float(stats.iteration_tokens)
        yield self._histogram(f"{prefix}iteration_tokens_total", "Tokens per engine step.", iterations)
        yield _infos(f"{prefix}cache_config_info", "The KV cache.", found)

    def _request_families(self, prefix: str, measured: GenerationMetrics) -> Iterator[Metric]:
        name, help_text = f"{prefix}request_success", "Requests that have ended, by the reason."
        success = ((("0", reason), count) for reason, count in measured.success.items())
        yield self._labelled(COUNTER, name, help_text, ("engine", "finished_reason"), success)
        for name, help_text, _ in OF_REQUESTS:
            yield self._histogram(prefix + name, help_text, {"0": measured.histograms[name]})

    def _rank_families(self, found: _Found) -> Iterator[Metric]:
        labels = ("engine", "rank", "stage")
        for name, help_text, field in (
            ("rank_weight_bytes", "Bytes of the rank's part of the weights.", "weight_bytes"),
            ("rank_kv_cache_bytes", "Bytes of the rank's part of the KV cache.", "kv_cache_bytes"),
        ):
            held = (
                ((engine, str(rank.number), str(rank.stage)), getattr(rank, field))
                for engine, (_, info) in found.items()
                for rank in info.ranks
            )
            yield self._labelled(GAUGE, f"xserv:{name}", help_text, labels, held)
        for name, help_text, field in (
            ("rank_step_seconds", "Time that the rank was in steps (on the cpu).", "rank_step_s"),
            ("rank_waited_seconds", "The part of it in which it waited for another stage.", "rank_waited_s"),
        ):
            spent = (
                ((engine, str(rank.number), str(rank.stage)), seconds)
                for engine, (stats, info) in found.items()
                for rank, seconds in zip(info.ranks, getattr(stats, field))
            )
            yield self._labelled(COUNTER, f"xserv:{name}", help_text, labels, spent)

    def _routing_families(self, routing: RoutingStats) -> Iterator[Metric]:
        routed = {str(number): float(count) for number, count in enumerate(routing.num_requests)}
        help_text = "Requests that were sent to the engine."
        yield self._family(COUNTER, "xserv:routed_requests", help_text, routed)
        for kind, name, help_text, field in OF_ROUTER:
            yield self._family(kind, f"xserv:{name}", help_text, {"0": getattr(routing, field)})

    def _tabled(self, table: Table, prefix: str, found: _Found) -> Iterator[Metric]:
        for kind, name, help_text, field in table:
            values = {engine: getattr(stats, field) for engine, (stats, _) in found.items()}
            yield self._family(kind, prefix + name, help_text, values)

    def _family(self, kind: Kind, name: str, help_text: str, values: Mapping[str, float]) -> Metric:
        """A metric with a value for each engine."""
        return self._labelled(
            kind, name, help_text, ("engine",), (((engine,), each) for engine, each in values.items())
        )

    def _labelled(
        self, kind: Kind, name: str, help_text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], Any]]
    ) -> Metric:
        family = kind(name, help_text, labels=["model_name", *labels])
        for values, value in samples:
            family.add_metric([self._model_name, *values], value)
        return family

    def _histogram(self, name: str, help_text: str, histograms: Mapping[str, Histogram]) -> Metric:
        """A histogram for each engine."""
        family = HistogramMetricFamily(name, help_text, labels=["model_name", "engine"])
        for engine, histogram in histograms.items():
            _add(family, [self._model_name, engine], histogram)
        return family


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    bounds = [*(floatToGoString(bound) for bound in histogram.bounds), "+Inf"]  # type: ignore[no-untyped-call]
    family.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)


def http_families(http: HttpMetrics) -> Iterator[Metric]:
    requests = COUNTER(
        "xserv:http_requests", "Answers, by route, method and status.", labels=["handler", "method", "status"]
    )
    for (route, method, status), count in http.requests.items():
        requests.add_metric([route, method, str(status)], count)
    yield requests
    seconds = HistogramMetricFamily(
        "xserv:http_request_duration_seconds", "From the headers to the answer's end.", labels=["handler"]
    )
    for route, histogram in http.seconds.items():
        _add(seconds, [route], histogram)
    yield seconds
    if http.keys is not None and http.keys.is_required:
        yield from _key_families(http.keys.holders)


def _key_families(holders: Sequence[KeyHolder]) -> Iterator[Metric]:
    for kind, name, help_text, field in OF_KEYS:
        family = kind(f"xserv:{name}", help_text, labels=["key"])
        for holder in holders:
            family.add_metric([holder.name], getattr(holder, field))
        yield family
    refused = COUNTER("xserv:key_refused", "Requests beyond a limit.", labels=["key", "limit"])
    for holder in holders:
        for limit, count in holder.refused.items():
            refused.add_metric([holder.name, limit], count)
    yield refused


class SeveralMetrics(Collector):
    """The metrics of several models, told apart by `model_name`, and the registry that holds them.

    models  of each, by its name
    own     of the server and its models together
    """

    def __init__(self, models: Mapping[str, Metrics], own: Callable[[], Iterable[Metric]]) -> None:
        self._models, self._own = models, own
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """Each family once, with the samples of all models."""
        families: dict[str, Metric] = {}
        for name, metrics in self._models.items():
            for family in metrics.collect():
                samples = [each._replace(labels={"model_name": name, **each.labels}) for each in family.samples]
                known = families.setdefault(family.name, family)
                known.samples = [*(known.samples if known is not family else ()), *samples]
        yield from families.values()
        yield from self._own()


_Found = dict[str, tuple[EngineStats, EngineInfo]]
"""The engines that answer, by their label."""


def _infos(name: str, help_text: str, found: _Found) -> Metric:
    """A gauge that is always 1 and has the information in its labels, as vLLM's."""
    family = GAUGE(name, help_text, labels=["engine", "block_size", "num_gpu_blocks", "cache_dtype"])
    for engine, (_, info) in found.items():
        family.add_metric([engine, str(info.block_size), str(info.num_blocks), info.dtype], 1)
    return family
