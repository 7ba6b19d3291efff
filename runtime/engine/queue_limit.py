"""Checks that the waiting queue has room for one more request: by requests and by their tokens."""

from __future__ import annotations

from runtime.engine.errors import QueueFullError
from runtime.engine.messages import EngineInfo

RETRY_AFTER_S = 1.0
"""Retry-after seconds of a refused request: about the time in which a busy engine starts several requests."""


def check_room(info: EngineInfo, num_waiting: int, num_waiting_tokens: int, num_prompt_tokens: int) -> None:
    """Raises ``QueueFullError`` if the queue, of so many requests and prompt tokens, has no room for this prompt. An
    empty queue takes any prompt."""
    if num_waiting >= info.max_waiting:
        raise QueueFullError(info.max_waiting, RETRY_AFTER_S)
    if num_waiting and num_waiting_tokens + num_prompt_tokens > info.max_waiting_tokens:
        raise QueueFullError(info.max_waiting_tokens, RETRY_AFTER_S, "tokens")
