"""The parts of other files' objects that a file needs whose own objects those contain: types without circles."""

from __future__ import annotations

from typing import Any, Protocol


class DividedAllocations(Protocol):
    """The blocks of a machine's divided allocations (driver/pool_blocks.py), as the machine sees them."""

    def divide(self, address: int, size_bytes: int) -> None: ...
    def forget(self, address: int) -> None: ...
    def begin(self, address: int, size_bytes: int, span_bytes: int) -> None: ...
    def end(self, address: int, span_bytes: int) -> None: ...
    def check(self, address: int, size_bytes: int, action: str) -> None: ...
    def describe(self, address: int) -> str | None: ...


class CapturedStream(Protocol):
    """A stream (driver/state.py), as a capture sees it."""

    context: Any
    is_blocking: bool
    capture: Any
    dependencies: list[Any]


class LoadedModule(Protocol):
    """A module (driver/modules.py), as its context sees it."""

    def unload(self) -> None: ...
