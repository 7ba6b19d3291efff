"""Measures one request's generation as its outputs arrive: time to the first token, between tokens, and per phase.

Every choice counts as a request of its own, as in vLLM, whose `n` fans out. All times are by the server's clock, except
`RequestTimes`, which are by the engine's; both are `time.monotonic()` of one machine."""

from __future__ import annotations

import time

from runtime.engine.messages import EngineOutput, RequestTimes
from runtime.engine.sampling_params import SamplingParams
from server.observing.metrics import GenerationMetrics


class RequestMeter:
    """`observe` takes every output of every choice, in order; `finish` the last one again, with its finish reason.

    first_token_s  when the first token of any choice came; None before
    times          the engine's, of the choice that ended last
    reasons        the number of choices by finish reason
    """

    __slots__ = (
        "_last",
        "_metrics",
        "_num_tokens",
        "_stopped",
        "arrival_s",
        "first_token_s",
        "params",
        "reasons",
        "times",
    )

    def __init__(self, metrics: GenerationMetrics, params: SamplingParams, arrival_s: float) -> None:
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
        self._metrics.finish(
            reason,
            e2e_s=time.monotonic() - self.arrival_s,
            times=output.times,
            num_prompt_tokens=output.num_prompt_tokens,
            num_tokens=self._num_tokens.pop(choice, 0),
            params=self.params,
        )
        self._last.pop(choice, None)
