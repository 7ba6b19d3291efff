"""Commands to a running engine: to pause, to sleep, to take other weights. Plain structs, which cross the socket to the
engine's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.checks import check_one_of, is_integer
from runtime.engine.errors import RequestError

PauseMode = Literal["abort", "wait", "keep"]
"""Open requests end with "abort", are finished first, or stop and go on later."""

UpdateMode = Literal["wait", "abort", "restart"]
"""Open requests are finished on the old weights, end with "abort", or begin anew on the new ones."""

WakeTag = Literal["weights", "kv_cache", "scheduling"]

FIRST_VERSION = "0"
"""The version of the weights that an engine starts with."""

MOST_VERSION_CHARACTERS = 200


class FolderWeights(msgspec.Struct, frozen=True, tag=True):
    """The weights in a folder, or in a GGUF file."""

    path: str


class SharedWeights(msgspec.Struct, frozen=True, tag=True):
    """The weights in shared memory (`models.checkpoints.given_weights`), by its path."""

    path: str


@dataclass(frozen=True, slots=True)
class GivenArrays:
    """Arrays of this process, by the names of the model's files. They are read once, and not kept."""

    arrays: Mapping[str, NDArray[Any]]


SentWeights = FolderWeights | SharedWeights
WeightSource = SentWeights | GivenArrays


class PauseAll(msgspec.Struct, frozen=True, tag=True):
    """Start no step until `ResumeAll`; requests that come meanwhile wait. ``clears_cache``: drop the prefix cache."""

    mode: PauseMode = "abort"
    clears_cache: bool = True


class ResumeAll(msgspec.Struct, frozen=True, tag=True):
    """End a pause."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Free memory: with level 1 the KV cache, and a GPU's weights, which come back from pinned memory of the host, as
    far as their files have them as the GPU does; with level 2 the weights in any case. Level 0 is a pause that frees
    nothing."""

    level: int = 1
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Take memory again: all, or what the tags name. Steps run once weights and KV cache are there."""

    tags: tuple[WakeTag, ...] = ()


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    """Read other weights of the same model beside those that serve."""

    source: SentWeights


class UseWeights(msgspec.Struct, frozen=True, tag=True):
    """From now on serve the weights that were read last, under this version."""

    version: str
    mode: UpdateMode = "wait"


class DropWeights(msgspec.Struct, frozen=True, tag=True):
    """Forget the weights that were read last."""


class TellState(msgspec.Struct, frozen=True, tag=True):
    """Change nothing."""


Command = PauseAll | ResumeAll | Sleep | WakeUp | LoadWeights | UseWeights | DropWeights | TellState


class EngineCondition(NamedTuple):
    """The answer to a command: the engine's state after it, and how many requests it ended and began anew.

    is_paused     by `PauseAll`
    sleep_level   0 while it is awake
    has_weights, has_pages  whether these are in memory
    weight_version          that an update has given; empty after other commands
    """

    is_paused: bool
    sleep_level: int
    has_weights: bool
    has_pages: bool
    num_ended: int = 0
    num_restarted: int = 0
    weight_version: str = ""

    @classmethod
    def of(cls, numbers: NDArray[np.float32]) -> EngineCondition:
        paused, level, weights, pages, ended, restarted = (int(each) for each in numbers)
        return cls(bool(paused), level, bool(weights), bool(pages), ended, restarted)

    @property
    def numbers(self) -> NDArray[np.float32]:
        return np.array(self[:-1], np.float32)

    @property
    def is_sleeping(self) -> bool:
        return self.sleep_level > 0


def check_command(command: Command) -> None:
    """Raises ``RequestError`` for a field that is out of range."""
    match command:
        case PauseAll(mode):
            check_one_of("mode", mode, get_args(PauseMode))
        case Sleep(level, mode):
            if not is_integer(level) or not 0 <= level <= 2:
                raise RequestError(f"level must be 0, 1 or 2, got {level!r:.80}", param="level")
            check_one_of("mode", mode, get_args(PauseMode))
        case WakeUp(tags):
            for tag in tags:
                check_one_of("tags", tag, get_args(WakeTag))
        case LoadWeights(source):
            if not Path(source.path).exists():
                raise RequestError(f"weights: {source.path} is not there", param="weights")
        case UseWeights(version, mode):
            check_one_of("mode", mode, get_args(UpdateMode))
            check_version(version)


def next_version(version: str) -> str:
    """The version after this one. Raises ``RequestError`` if this is no number."""
    if not version.isdecimal():
        raise RequestError(
            f"weight_version is {version!r:.80}, no number that could be counted on: give the next one",
            param="weight_version",
        )
    return str(int(version) + 1)


def check_version(version: str) -> None:
    """Raises ``RequestError`` unless it is a printable text of at most ``MOST_VERSION_CHARACTERS``, not empty."""
    if not isinstance(version, str) or not 0 < len(version) <= MOST_VERSION_CHARACTERS or not version.isprintable():
        raise RequestError(
            f"weight_version must be a text of 1 to {MOST_VERSION_CHARACTERS} printable characters, got"
            f" {version!r:.80}",
            param="weight_version",
        )
