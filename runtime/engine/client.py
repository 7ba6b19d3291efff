"""``EngineClient``: the only way to the engine, whether it runs in this process or in another.

    client.submit(request, sink)   # typed errors here, before admission; then outputs go to the sink
    client.cancel(request_id)
    client.stats(), client.info
    client.close()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats

OutputSink = Callable[[EngineOutput], None]
"""Receives a request's outputs, in order. Called on the engine's thread: it must not block (hand over to a queue
or ``loop.call_soon_threadsafe``). What it raises is logged and cancels its own request; nobody else notices."""


class EngineClient(Protocol):
    """What the server, the commands and ``LLM`` know of the engine. All methods are thread-safe."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts about the model and the limits."""
        ...

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Admit a request to the waiting queue; returns at once.

        Each of its ``params.n`` choices ends with exactly one output that has a ``finish_reason``; after the
        last of them the sink is not called again.

        Raises, before anything is admitted: ``ContextLengthExceededError`` (the prompt leaves no room for one
        token), ``RequestError`` (any other wrong field; an id that is in use), ``QueueFullError``,
        ``EngineDeadError``.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a request: its blocks are free within one step, each open choice gets a last output with
        ``finish_reason="abort"``. Unknown and finished ids are ignored."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot; never waits for a step. Raises ``EngineDeadError`` when the engine's loop has died."""
        ...

    def close(self, drain: bool = False) -> None:
        """Stop the engine; with ``drain``, after the open requests have finished, else these end with "abort".
        New requests are refused at once. Returns when the engine has stopped; may be called again."""
        ...
