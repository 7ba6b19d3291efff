"""The flags of the HTTP server: one for every field of `ServerConfig`, under its name, with its default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from runtime.commands.options import flag_class, headings_of, values_of
from server.config import HEADINGS, OPTIONS, ServerConfig

if TYPE_CHECKING:
    from runtime.commands.options import AnyFlags as _ServerFlags
else:
    _ServerFlags = flag_class("_ServerFlags", OPTIONS, HEADINGS)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(_ServerFlags):
    """Limits, keys and operations of the server; the meanings are `ServerConfig`'s."""

    HEADINGS: ClassVar = headings_of(OPTIONS)

    def config(self) -> ServerConfig:
        """Raises `ServerConfigError`."""
        return ServerConfig(**values_of(self, OPTIONS))
