"""Measurements of generations as their outputs arrive: time to the first token, between tokens, and per phase.

Every choice counts as a request of its own, as in vLLM, whose `n` fans out. All times are by the server's clock, except
`RequestTimes`, which are by the engine's; both are `time.monotonic()` of one machine. The names, their meanings and
their buckets are those of vLLM's documentation ("Production metrics")."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from runtime.engine.messages import EngineOutput, RequestTimes
from runtime.engine.sampling_params import SamplingParams
from server.transport.key_holders import Use

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
LENGTHS = ()
"""The buckets of token counts: `one_two_five` up to the model's length."""

OF_REQUESTS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN_SECONDS),
    ("inter_token_latency_seconds", "Time between two tokens.", TOKEN_SECONDS),
    ("time_per_output_token_seconds", "The older name of inter_token_latency_seconds.", TOKEN_SECONDS),
    ("request_time_per_output_token_seconds", "A request's mean time per token after its first.", TOKEN_SECONDS),
    ("e2e_request_latency_seconds", "From a request's arrival to its end.", REQUEST_SECONDS),
    ("request_queue_time_seconds", "Time spent waiting.", REQUEST_SECONDS),
    ("request_inference_time_seconds", "Time spent running.", REQUEST_SECONDS),
    ("request_prefill_time_seconds", "Time spent on the prompt.", REQUEST_SECONDS),
    ("request_decode_time_seconds", "Time from the first token to the last.", REQUEST_SECONDS),
    ("request_prompt_tokens", "Prompt tokens of a request.", LENGTHS),
    ("request_generation_tokens", "Tokens generated for a request.", LENGTHS),
    ("request_params_n", "The parameter n of a request.", (1, 2, 5, 10, 20)),
    ("request_params_max_tokens", "The parameter max_tokens.", LENGTHS),
)
"""Each histogram of requests: name, help text, buckets."""

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
    """Measurements of generations, one observation per choice or token; `histograms`: those of `OF_REQUESTS`."""

    def __init__(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        self.histograms = {name: Histogram(bounds or lengths) for name, _, bounds in OF_REQUESTS}
        self.time_to_first_token = self.histograms["time_to_first_token_seconds"]
        self.inter_token_latency = self.histograms["inter_token_latency_seconds"]
        self.histograms["time_per_output_token_seconds"] = self.inter_token_latency
        self.success = dict.fromkeys(FINISHED_REASONS, 0)
        self.num_malformed_headers = 0

    def finish(self, reason: str, e2e_s: float, output: EngineOutput, num_tokens: int, params: SamplingParams) -> None:
        """A choice has ended with this output. Times that it never reached are not observed."""
        self.success[reason] += 1
        seen: dict[str, float | None] = {
            "e2e_request_latency_seconds": e2e_s,
            "request_prompt_tokens": output.num_prompt_tokens,
            "request_generation_tokens": num_tokens,
            "request_params_n": params.n,
            "request_params_max_tokens": params.max_tokens,
        }
        times = output.times
        if times is not None and times.first_scheduled_s is not None:
            seen["request_queue_time_seconds"] = times.first_scheduled_s - times.arrival_s
            if times.first_token_s is not None and times.last_token_s is not None:
                decode_s = times.last_token_s - times.first_token_s
                seen["request_prefill_time_seconds"] = times.first_token_s - times.first_scheduled_s
                seen["request_decode_time_seconds"] = decode_s
                seen["request_inference_time_seconds"] = times.last_token_s - times.first_scheduled_s
                if num_tokens > 1:
                    seen["request_time_per_output_token_seconds"] = decode_s / (num_tokens - 1)
        for name, value in seen.items():
            if value is not None:
                self.histograms[name].observe(value)


class RequestMeter:
    """Measures one request's generation as its outputs arrive: time to the first token, between tokens, and per phase.
    `observe` takes every output of every choice, in order; `finish` the last one again, with its finish reason.

    use            of its key's limits, which its tokens count against, or None
    first_token_s  when the first token of any choice came; None before
    times          the engine's, of the choice that ended last
    reasons        the number of choices by finish reason
    """

    __slots__ = (
        "_last",
        "_metrics",
        "_num_tokens",
        "_stopped",
        "_use",
        "arrival_s",
        "first_token_s",
        "params",
        "reasons",
        "times",
    )

    def __init__(
        self, metrics: GenerationMetrics, params: SamplingParams, arrival_s: float, use: Use | None = None
    ) -> None:
        self._use = use
        self.params = params
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.times: RequestTimes | None = None
        self.reasons: dict[str, int] = {}
        self._metrics = metrics
        self._last: dict[tuple[str, int], float] = {}
        self._num_tokens: dict[tuple[str, int], int] = {}
        self._stopped: set[tuple[str, int]] = set()

    def observe(self, output: EngineOutput) -> None:
        choice = (output.request_id, output.index)
        if output.new_token_ids:
            now = time.monotonic()
            last = self._last.get(choice)
            if last is None:
                self._metrics.time_to_first_token.observe(now - self.arrival_s)
                self._num_tokens[choice] = 0
                if self.first_token_s is None:
                    self.first_token_s = now
            else:
                self._metrics.inter_token_latency.observe(now - last)
            self._last[choice] = now
            self._num_tokens[choice] += len(output.new_token_ids)
            if self._use is not None:
                self._use.drawn(len(output.new_token_ids))
                if last is None and output.index == 0:
                    self._use.found(output.num_cached_tokens or 0)

    def stop(self, request_id: str, index: int) -> None:
        """A stop string ended the choice; overrides the engine's reason."""
        self._stopped.add((request_id, index))

    def mended(self, num_headers: int) -> None:
        """Counts malformed headers of a choice's messages."""
        self._metrics.num_malformed_headers += num_headers

    def finish(self, output: EngineOutput) -> None:
        """Takes the last output of a choice."""
        choice = (output.request_id, output.index)
        reason: str = "stop" if choice in self._stopped else output.finish_reason or ""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.times = output.times or self.times
        e2e_s, num_tokens = time.monotonic() - self.arrival_s, self._num_tokens.pop(choice, 0)
        self._metrics.finish(reason, e2e_s, output, num_tokens, self.params)
        self._last.pop(choice, None)
