"""Settings of an executor for logits, beside the request's own parameters."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.engine.config import LogprobsMode
from runtime.engine.logits.processors import Processor


@dataclass(frozen=True, slots=True)
class LogitsSettings:
    """The engine's logits processors, and what is told as a token's log probability."""

    processors: tuple[Processor, ...] = ()
    logprobs_mode: LogprobsMode = "raw_logprobs"

    @property
    def tells_processed(self) -> bool:
        """Whether log probabilities are told of the logits that tokens are drawn by."""
        return self.logprobs_mode in ("processed_logprobs", "processed_logits")

    @property
    def tells_logits(self) -> bool:
        """Whether logits are told instead of log probabilities."""
        return self.logprobs_mode in ("raw_logits", "processed_logits")


PLAIN = LogitsSettings()
