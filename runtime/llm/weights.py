"""Pausing, sleeping and new weights, as methods of ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from models.checkpoints.given_weights import arrays_of, shared_path, shared_weights
from runtime.engine.errors import RequestError
from runtime.engine.option_names import known_options
from runtime.engine.process.client import EngineClient
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.weights.commands import (
    Command,
    EngineCondition,
    FolderWeights,
    GivenArrays,
    PauseAll,
    PauseMode,
    ResumeAll,
    SharedWeights,
    Sleep,
    UpdateMode,
    WakeTag,
    WakeUp,
    check_version,
)

Weights = str | Path | Mapping[str, Any] | Iterable[tuple[str, Any]]
"""A folder or GGUF file; or arrays of numpy, torch or anything else with DLPack, by the names of the model's files."""


class ChangingWeights:
    """All methods wait until they are done, and may be called from any thread; a refused call changes nothing."""

    client: EngineClient

    @known_options()
    def update_weights(
        self,
        weights: Weights | None = None,
        *,
        shared_memory: str | int | None = None,
        weight_version: str | None = None,
        mode: UpdateMode = "wait",
    ) -> EngineCondition:
        """Serve other weights of the same model, all of its tensors by the names of its files, as if started with them.
        Refused ones (missing tensors, other shapes, NaN) change nothing.

        weights         a folder, a GGUF file, or arrays, which are copied, and rounded to the engine's float type
        shared_memory   a name of ``shared_weights``, or an inherited descriptor
        weight_version  told in answers; default: the current number plus 1
        mode            "wait" finishes begun requests on the old weights, "abort" ends them, "restart" begins them anew
                        but ends streams; what a pause keeps begins anew

        Both versions need memory at once, unless ``sleep(level=2)`` came first. Also raises ``ModelLoadError`` and
        ``OutOfMemoryError``.
        """
        if weight_version is not None:
            check_version(weight_version)
        if (weights is None) == (shared_memory is None):
            raise RequestError("give weights or shared_memory, one of them", param="weights")
        if shared_memory is not None:
            return self.client.update_weights(SharedWeights(str(_place_of(shared_memory))), weight_version, mode)
        assert weights is not None
        if isinstance(weights, (str, Path)):
            path = Path(weights).expanduser().resolve()
            return self.client.update_weights(FolderWeights(str(path)), weight_version, mode)
        arrays = arrays_of(weights)
        if isinstance(self.client, ThreadEngineClient) and not self.client.info.ranks:
            return self.client.update_weights(GivenArrays(arrays), weight_version, mode)
        with shared_weights(arrays) as name:
            return self.client.update_weights(SharedWeights(str(shared_path(name))), weight_version, mode)

    @property
    def weight_version(self) -> str:
        """The version of the weights; "0" at the start."""
        return self.client.weight_version

    @known_options()
    def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> EngineCondition:
        """Level 1 frees the KV cache and a GPU's weights, which come back from pinned memory or files; level 2
        all weights; 0 only pauses. ``mode`` as in ``pause_generation``."""
        return self._order(Sleep(level, mode))

    @known_options()
    def wake_up(self, tags: Sequence[WakeTag] | None = None) -> EngineCondition:
        """Take memory again and end a pause; or only "weights", "kv_cache" or "scheduling"."""
        return self._order(WakeUp(tuple(tags or ())))

    @known_options()
    def is_sleeping(self) -> bool:
        """Whether it sleeps."""
        return self.client.condition().is_sleeping

    @known_options()
    def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> EngineCondition:
        """Compute nothing until ``resume_generation``. Open requests end ("abort"), are finished first ("wait"), or go
        on later ("keep"); new ones wait."""
        return self._order(PauseAll(mode, clear_cache))

    @known_options()
    def resume_generation(self) -> EngineCondition:
        """End a pause."""
        return self._order(ResumeAll())

    @known_options()
    def is_paused(self) -> bool:
        """Whether it is paused."""
        return self.client.condition().is_paused

    def _order(self, command: Command) -> EngineCondition:
        return EngineCondition.of(self.client.order(command).result())


def _place_of(shared_memory: str | int) -> Path:
    """The path of a shared memory that any process of this user can open. Raises ``RequestError``."""
    if isinstance(shared_memory, str):
        return shared_path(shared_memory)
    try:
        os.fstat(shared_memory)
    except (OSError, TypeError, OverflowError) as error:
        problem = f"shared_memory is {shared_memory!r:.80}, no open descriptor: {error}"
        raise RequestError(problem, param="shared_memory") from None
    return Path(f"/proc/{os.getpid()}/fd/{shared_memory}")
