"""The engine's errors: one tree, so that a caller can catch as much or as little as it needs.

    XservError
    ├── InvalidArgumentError (also ValueError)   an argument, a field or a request is wrong
    ├── UnsupportedError                         well formed, but not something this build does
    ├── DeviceError                              a device is missing, or its driver failed
    └── OutOfMemoryError (also MemoryError)      an allocation or a fixed pool is exhausted

Higher modules add their own leaves (`ModelLoadError`, `RequestError` ...). Every message names the operation, the
argument, the offending value and the limit that it broke.
"""

from __future__ import annotations


class XservError(Exception):
    """Root of every error that the engine raises on purpose."""


class InvalidArgumentError(XservError, ValueError):
    """An argument is wrong.

    `param` is the name of the argument or field if one alone is at fault, else None; a server passes it on.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedError(XservError):
    """The request is well formed, but this build does not support it."""


class DeviceError(XservError):
    """A device does not exist, cannot be used, or failed."""


class OutOfMemoryError(XservError, MemoryError):
    """Memory, or a pool of fixed size, is exhausted."""
