"""Finds the route of a request by a table of methods and paths; starlette tries one route after the other."""

from __future__ import annotations

from inspect import iscoroutinefunction

from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Receive, Scope, Send


class PathTable(Router):
    """Routes without parameters are in the table, if their endpoints are coroutine functions; others, and what is no
    route, are left to starlette."""

    def __init__(self, router: Router) -> None:
        """Takes the place of an application's router."""
        super().__init__(router.routes, redirect_slashes=False)
        self.lifespan_context = router.lifespan_context
        self._table: dict[tuple[str, str], Route] = {}
        for route in router.routes:
            if isinstance(route, Route) and "{" not in route.path and iscoroutinefunction(route.endpoint):
                for method in route.methods or ():
                    if _first(router.routes, method, route.path) is route:
                        self._table[method, route.path] = route

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http" and not scope.get("root_path"):
            route = self._table.get((scope["method"], scope["path"]))
        if route is None:
            await super().app(scope, receive, send)
            return
        scope["router"], scope["route"], scope["endpoint"] = self, route, route.endpoint
        scope["path_params"] = {}
        response = await route.endpoint(Request(scope, receive, send))  # errors are the application's
        await response(scope, receive, send)


def _first(routes: list[BaseRoute], method: str, path: str) -> BaseRoute | None:
    """The route that starlette would take."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    return next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
