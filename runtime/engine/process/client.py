"""``EngineClient``: the only interface to the engine, in this process or in another.

client.submit(request, sink)   # raises before admission; then outputs go to the sink
client.cancel(request_id)
client.stats(), client.info
client.close()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.errors import EngineDeadError
from runtime.engine.messages import (
    EngineInfo,
    EngineRequest,
    EngineState,
    EngineStats,
    ImageItem,
    RoutingStats,
    StepView,
)
from runtime.engine.process.delivery import OutputSink


class EngineClient(Protocol):
    """The interface that the server, the commands and ``LLM`` have to the engine, or to several. All methods are
    thread-safe."""

    @property
    def info(self) -> EngineInfo:
        """Static facts about the model and the limits."""
        ...

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Admit a request to the waiting queue; returns at once.

        Each of its ``params.n`` choices ends with exactly one output that has a ``finish_reason``; after the
        last of them the sink is not called again.

        Raises, before admission: ``ContextLengthExceededError`` (the prompt leaves no room for one token),
        ``RequestError`` (any other wrong field; an id that is in use), ``QueueFullError``, ``EngineDeadError``.
        """
        ...

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it. Its blocks are free within one step, and each open choice that this ends
        gets a last output with ``finish_reason="abort"``. Unknown and finished ones are ignored."""
        ...

    def pause(self, request_id: str) -> None:
        """Pause a request whose outputs are not being read: within a step or two no more come, and its blocks are
        freed. It can still be cancelled. Unknown and finished ones are ignored."""
        ...

    def resume(self, request_id: str) -> None:
        """Resume a paused request; its outputs are the same as without the pause."""
        ...

    @property
    def state(self) -> EngineState:
        """Whether requests are accepted."""
        ...

    @property
    def engines(self) -> Sequence[EngineClient]:
        """The engines that share the requests, in the order of their numbers; a single engine is its own."""
        return (self,)

    @property
    def routing(self) -> RoutingStats | None:
        """Counters of the router of several engines; None for one engine."""
        return None

    def stats(self) -> EngineStats:
        """A snapshot, at most about a second old; never waits for a step. Raises ``EngineDeadError`` if the engine has
        died."""
        ...

    def watch(self, sink: Callable[[StepView], None]) -> Callable[[], None]:
        """Call the sink with every step from now on, on any thread; it must not block. Returns an idempotent function
        that stops it. Costs nothing without watchers."""
        ...

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The raw logits after each of these tokens, ``[num_tokens, vocab_size]`` float32; waits for them.

        Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        ...

    def embed(
        self,
        token_ids: Sequence[int],
        pooling: str = "last",
        images: Sequence[ImageItem] = (),
        cache_salt: str | None = None,
    ) -> Future[NDArray[np.float32]]:
        """The hidden states after the final norm, pooled ("last", "mean"): ``[hidden_size]`` float32, of any length.

        ``images`` are the prompt's; encoded images are shared within a ``cache_salt``.

        Returns at once; a cancelled future costs no further forward pass. Raises ``RequestError``,
        ``QueueFullError``, ``EngineDeadError``; the future, ``EmbeddingError`` and ``EngineDeadError``.
        """
        ...

    def reset_prefix_cache(self) -> Future[NDArray[np.float32]]:
        """Drop the prefixes that no running request holds, in the host's memory as well; held ones remain cached.
        Returns at once; the future's numbers are the blocks that were dropped and those that are held. Raises
        ``EngineDeadError``, as the future does, and ``QueueFullError``."""
        ...

    def wait_until_started(self) -> None:
        """Returns when requests are first accepted; before that only ``state`` and ``close`` may be used. Raises the
        errors of the engine's start."""
        return

    def close(self, drain: bool = False) -> None:
        """Stop the engine. With ``drain`` the open requests finish first, paused ones included, otherwise they end with
        "abort". New requests are refused at once. Returns when the engine has stopped. Idempotent."""
        ...


class Origin:
    """Detects use in a forked child. Checked before any lock is taken, which might be held for ever in the child."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises ``EngineDeadError`` in a forked child."""
        if not self.is_here:
            raise EngineDeadError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} was forked from that, and a fork "
                "has no engine: make an LLM in the child, or start the child with multiprocessing's 'spawn' method"
            )
