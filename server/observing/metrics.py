"""The metrics of `GET /metrics`: vLLM's names with vLLM's labels and buckets, so that its dashboards work, and the same
under `xserv:`, with metrics of this server's own.

Nothing is global: a server has a `Metrics` with its own registry. Observations cost a bisection and two additions;
names, labels and text are made on request. The label `engine` is the number of an engine, each with its own counts; the
server's counts have number 0. Belongs to the event loop's thread.

The names, their meanings and their buckets are those of vLLM's documentation ("Production metrics")."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from runtime.engine.errors import EngineDeadError
from runtime.engine.messages import ITERATION_TOKEN_BOUNDS, EngineInfo, EngineStats, RequestTimes, RoutingStats
from runtime.engine.process.client import EngineClient
from runtime.engine.sampling_params import SamplingParams

PREFIXES = ("vllm:", "xserv:")

TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
HTTP_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)

FINISHED_REASONS = ("stop", "length", "abort", "error")


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    bounds: list[float] = []
    decade = 1
    while decade <= most:
        bounds += [mantissa * decade for mantissa in (1, 2, 5) if mantissa * decade <= most]
        decade *= 10
    return tuple(bounds)


class Histogram:
    """A histogram: the number of values in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class GenerationMetrics:
    """Measurements of generations, one observation per choice or token."""

    def __init__(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        self.time_to_first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS)
        self.request_time_per_output_token = Histogram(TOKEN_SECONDS)
        self.e2e_request_latency = Histogram(REQUEST_SECONDS)
        self.request_queue_time = Histogram(REQUEST_SECONDS)
        self.request_inference_time = Histogram(REQUEST_SECONDS)
        self.request_prefill_time = Histogram(REQUEST_SECONDS)
        self.request_decode_time = Histogram(REQUEST_SECONDS)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.request_params_n = Histogram((1, 2, 5, 10, 20))
        self.request_params_max_tokens = Histogram(lengths)
        self.success = dict.fromkeys(FINISHED_REASONS, 0)
        self.num_malformed_headers = 0

    def finish(
        self,
        reason: str,
        *,
        e2e_s: float,
        times: RequestTimes | None,
        num_prompt_tokens: int,
        num_tokens: int,
        params: SamplingParams,
    ) -> None:
        """A choice has ended. Times that it never reached are not observed."""
        self.success[reason] += 1
        self.e2e_request_latency.observe(e2e_s)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_generation_tokens.observe(num_tokens)
        self.request_params_n.observe(params.n)
        if params.max_tokens is not None:
            self.request_params_max_tokens.observe(params.max_tokens)
        if times is None or times.first_scheduled_s is None:
            return
        self.request_queue_time.observe(times.first_scheduled_s - times.arrival_s)
        if times.first_token_s is None or times.last_token_s is None:
            return
        decode_s = times.last_token_s - times.first_token_s
        self.request_prefill_time.observe(times.first_token_s - times.first_scheduled_s)
        self.request_decode_time.observe(decode_s)
        self.request_inference_time.observe(times.last_token_s - times.first_scheduled_s)
        if num_tokens > 1:
            self.request_time_per_output_token.observe(decode_s / (num_tokens - 1))


class HttpMetrics:
    """Answers by route, method and status; the routes are the application's, so that clients cannot add labels."""

    def __init__(self) -> None:
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

    gauges  further numbers of the server, by name (under `xserv:`): help text and getter
    """

    def __init__(
        self,
        model_name: str,
        http: HttpMetrics,
        gauges: dict[str, tuple[str, Callable[[], float]]] | None = None,
    ) -> None:
        self.http = http
        self.registry = CollectorRegistry(auto_describe=False)
        self._client: EngineClient | None = None
        self._generation: GenerationMetrics | None = None
        self._model_name = model_name
        self._labels = [model_name, "0"]  # of the server's own metrics
        self._gauges = gauges or {}
        self._started_s = time.time()
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
        yield self._gauges_by_engine("xserv:engine_up", "1 while the engine answers.", up)
        if found:
            yield from self._own_families(found)
        if self._client is not None and (routing := self._client.routing) is not None:
            yield from self._routing_families(routing)
        if self._generation is not None:
            malformed = self._generation.num_malformed_headers
            yield self._counter("xserv:malformed_headers", "Headers of harmony's messages that were mended.", malformed)
        for name, (help_text, get) in self._gauges.items():
            yield self._gauge(f"xserv:{name}", help_text, get())
        yield from self._http_families()

    def _engine_families(self, prefix: str, found: _Found) -> Iterator[Metric]:
        for name, help_text, field in (
            ("num_requests_running", "Number of requests in model execution batches.", "num_running"),
            ("num_requests_waiting", "Number of requests waiting to be processed.", "num_waiting"),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "kv_cache_usage"),
        ):
            yield self._gauges_by_engine(prefix + name, help_text, _values(found, field))
        for name, help_text, field in (
            ("prefix_cache_queries", "Tokens that were looked up in the prefix cache.", "prefix_cache_queries"),
            ("prefix_cache_hits", "Tokens that were found in the prefix cache.", "prefix_cache_hits"),
            ("num_preemptions", "Cumulative number of preemptions.", "num_preemptions"),
            ("prompt_tokens", "Number of prefill tokens processed.", "prompt_tokens"),
            ("generation_tokens", "Number of generation tokens processed.", "generation_tokens"),
        ):
            yield self._counters_by_engine(prefix + name, help_text, _values(found, field))
        if any(stats.accepted_by_position for stats, _ in found.values()):
            yield from self._speculation_families(f"{prefix}spec_decode_", found)
        name = prefix + "iteration_tokens_total"
        iterations = HistogramMetricFamily(name, "Tokens per engine step.", labels=["model_name", "engine"])
        for engine, (stats, _) in found.items():
            iteration = Histogram(ITERATION_TOKEN_BOUNDS)
            iteration.counts = list(stats.iteration_token_counts) or iteration.counts
            iteration.total = float(stats.iteration_tokens)
            _add(iterations, [self._model_name, engine], iteration)
        yield iterations
        yield _infos(f"{prefix}cache_config_info", "The KV cache.", found)

    def _speculation_families(self, prefix: str, found: _Found) -> Iterator[Metric]:
        for name, help_text in (
            ("num_drafts", "Proposals, of one sequence in one step each."),
            ("num_draft_tokens", "Tokens that were proposed and tried."),
            ("num_accepted_tokens", "Tried tokens that were drawn."),
        ):
            yield self._counters_by_engine(prefix + name, help_text, _values(found, name))
        accepted = CounterMetricFamily(
            f"{prefix}num_accepted_tokens_per_pos",
            "The same by their place in the proposal.",
            labels=["model_name", "engine", "position"],
        )
        for engine, (stats, _) in found.items():
            for position, count in enumerate(stats.accepted_by_position):
                accepted.add_metric([self._model_name, engine, str(position)], count)
        yield accepted

    def _request_families(self, prefix: str, measured: GenerationMetrics) -> Iterator[Metric]:
        success = CounterMetricFamily(
            f"{prefix}request_success",
            "Requests that have ended, by the reason.",
            labels=["model_name", "engine", "finished_reason"],
        )
        for reason, count in measured.success.items():
            success.add_metric([*self._labels, reason], count)
        yield success
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "Time to the first token.", measured.time_to_first_token),
            ("inter_token_latency_seconds", "Time between two tokens.", measured.inter_token_latency),
            (
                "time_per_output_token_seconds",
                "The older name of inter_token_latency_seconds.",
                measured.inter_token_latency,
            ),
            (
                "request_time_per_output_token_seconds",
                "A request's mean time per token after its first.",
                measured.request_time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "From a request's arrival to its end.", measured.e2e_request_latency),
            ("request_queue_time_seconds", "Time spent waiting.", measured.request_queue_time),
            ("request_inference_time_seconds", "Time spent running.", measured.request_inference_time),
            ("request_prefill_time_seconds", "Time spent on the prompt.", measured.request_prefill_time),
            ("request_decode_time_seconds", "Time from the first token to the last.", measured.request_decode_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", measured.request_prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a request.", measured.request_generation_tokens),
            ("request_params_n", "The parameter n of a request.", measured.request_params_n),
            ("request_params_max_tokens", "The parameter max_tokens.", measured.request_params_max_tokens),
        ):
            yield self._histogram(prefix + name, help_text, histogram)

    def _own_families(self, found: _Found) -> Iterator[Metric]:
        for name, help_text, field in (
            ("num_blocks", "KV blocks.", "num_blocks"),
            ("num_free_blocks", "KV blocks that nobody uses.", "num_free_blocks"),
            ("num_requests_paused", "Requests that wait for their clients to read.", "num_paused"),
            ("num_cached_blocks", "Free KV blocks that can be found again.", "num_cached_blocks"),
        ):
            yield self._gauges_by_engine(f"xserv:{name}", help_text, _values(found, field))
        for name, help_text, field in (
            ("num_steps", "Steps of the engine.", "num_steps"),
            ("num_swaps", "Preemptions that swapped.", "num_swaps"),
            ("prefix_cache_evictions", "Cached blocks given up for others.", "prefix_cache_evictions"),
            ("decode_graph_steps", "Steps of decodes that ran as a recorded graph.", "num_graph_steps"),
            ("recorded_forward_steps", "Other steps whose pass was recorded before.", "num_forward_steps"),
            ("failed_decode_graphs", "Recordings of steps that failed.", "num_failed_graphs"),
        ):
            yield self._counters_by_engine(f"xserv:{name}", help_text, _values(found, field))
        if any(info.ranks for _, info in found.values()):
            yield from self._rank_families(found)

    def _rank_families(self, found: _Found) -> Iterator[Metric]:
        labels = ["model_name", "engine", "rank", "stage"]
        for name, help_text, field in (
            ("rank_weight_bytes", "Bytes of the rank's part of the weights.", "weight_bytes"),
            ("rank_kv_cache_bytes", "Bytes of the rank's part of the KV cache.", "kv_cache_bytes"),
        ):
            held = GaugeMetricFamily(f"xserv:{name}", help_text, labels=labels)
            for engine, (_, info) in found.items():
                for rank in info.ranks:
                    own = [self._model_name, engine, str(rank.number), str(rank.stage)]
                    held.add_metric(own, getattr(rank, field))
            yield held
        for name, help_text, field in (
            ("rank_step_seconds", "Time that the rank was in steps (on the cpu).", "rank_step_s"),
            ("rank_waited_seconds", "The part of it in which it waited for another stage.", "rank_waited_s"),
        ):
            spent = CounterMetricFamily(f"xserv:{name}", help_text, labels=labels)
            for engine, (stats, info) in found.items():
                for rank, seconds in zip(info.ranks, getattr(stats, field)):
                    spent.add_metric([self._model_name, engine, str(rank.number), str(rank.stage)], seconds)
            yield spent

    def _routing_families(self, routing: RoutingStats) -> Iterator[Metric]:
        routed = {str(number): float(count) for number, count in enumerate(routing.num_requests)}
        yield self._counters_by_engine("xserv:routed_requests", "Requests that were sent to the engine.", routed)
        for name, help_text, value in (
            ("router_found_tokens", "Tokens of prompts that their engine was taken to have.", routing.num_found_tokens),
            ("router_moved_requests", "Requests that left a busy engine that had their prefix.", routing.num_moved),
            ("router_untaken_digests", "Blocks that the router had no room to know of.", routing.num_untaken),
        ):
            yield self._counter(f"xserv:{name}", help_text, value)
        yield self._gauge("xserv:router_digests", "Blocks of engines that the router knows of.", routing.num_digests)

    def _http_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "xserv:http_requests", "Answers, by route, method and status.", labels=["handler", "method", "status"]
        )
        for (route, method, status), count in self.http.requests.items():
            requests.add_metric([route, method, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily(
            "xserv:http_request_duration_seconds", "From the headers to the answer's end.", labels=["handler"]
        )
        for route, histogram in self.http.seconds.items():
            _add(seconds, [route], histogram)
        yield seconds

    def _gauges_by_engine(self, name: str, help_text: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=["model_name", "engine"])
        for engine, value in values.items():
            family.add_metric([self._model_name, engine], value)
        return family

    def _counters_by_engine(self, name: str, help_text: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=["model_name", "engine"])
        for engine, value in values.items():
            family.add_metric([self._model_name, engine], value)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=["model_name", "engine"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=["model_name", "engine"])
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, help_text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, help_text, labels=["model_name", "engine"])
        _add(family, self._labels, histogram)
        return family


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    bounds = [*(floatToGoString(bound) for bound in histogram.bounds), "+Inf"]  # type: ignore[no-untyped-call]
    family.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)


_Found = dict[str, tuple[EngineStats, EngineInfo]]
"""The engines that answer, by their label."""


def _values(found: _Found, field: str) -> dict[str, float]:
    return {engine: getattr(stats, field) for engine, (stats, _) in found.items()}


def _infos(name: str, help_text: str, found: _Found) -> Metric:
    """A gauge that is always 1 and has the information in its labels, as vLLM's."""
    family = GaugeMetricFamily(name, help_text, labels=["engine", "block_size", "num_gpu_blocks", "cache_dtype"])
    for engine, (_, info) in found.items():
        family.add_metric([engine, str(info.block_size), str(info.num_blocks), info.dtype], 1)
    return family
