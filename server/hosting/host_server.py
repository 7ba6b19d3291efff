"""The HTTP server of several models."""

from __future__ import annotations

import asyncio

from server.hosting.application import HostApplication
from server.http_server import HttpServer
from server.loading import ServerStartError


class HostServer(HttpServer):
    """Takes requests once the models of the start are loaded; ends if none of them can be."""

    app: HostApplication

    def __init__(self, app: HostApplication) -> None:
        super().__init__(app, app.hosted.pool)
        self._announcing: asyncio.Task[None] | None = None

    @property
    def served(self) -> str:
        return ", ".join(self.app.model_names)

    def begin_loading(self, loop: asyncio.AbstractEventLoop) -> None:
        self._announcing = loop.create_task(self._announce())

    async def _announce(self) -> None:
        host = self.app.hosted
        await host.started.wait()
        if host.failed and len(host.failed) == len(host.models):
            names = ", ".join(repr(each.name) for each in host.failed)
            self.fail(ServerStartError(f"no model could be loaded ({names}); the log says why"))
        elif not self.should_exit:
            self.announce()
