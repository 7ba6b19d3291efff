"""The table of paths finds the routes that starlette would."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.testclient import TestClient

from server.description.operations import routes
from server.hosting.operations import OPERATIONS_OF_SEVERAL
from server.transport.path_table import PathTable


def scope_of(method: str, path: str) -> dict[str, object]:
    return {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}


@pytest.mark.parametrize("given", [routes(), routes(OPERATIONS_OF_SEVERAL)], ids=["one model", "several"])
def test_the_table_has_starlettes_routes(given: list[BaseRoute]) -> None:
    table = PathTable(Starlette(routes=given).router)._table
    for (method, path), route in table.items():
        assert "{" not in path
        assert route is next(each for each in given if each.matches(scope_of(method, path))[0] is Match.FULL)


def test_every_route_of_one_model_without_parameters_is_in_the_table() -> None:
    paths = {each.path for each in routes() if isinstance(each, Route) and "{" not in each.path}
    assert {path for _, path in PathTable(Starlette(routes=routes()).router)._table} == paths


async def told(request: Request) -> Response:
    return PlainTextResponse(f"{request['route'].path} {request['endpoint'].__name__} {request.path_params}")


async def fails(request: Request) -> Response:
    raise HTTPException(418, "a teapot")


def sync(request: Request) -> Response:
    return PlainTextResponse("sync")


def _mounted(path: str) -> Mount:
    return Mount(path, routes=[Route("/inner", told)])


GIVEN: list[BaseRoute] = [
    Route("/a", told, methods=["POST"]), Route("/a", told), Route("/b/{name}", told), Route("/b/first", fails),
    Route("/fails", fails), Route("/sync", sync), _mounted("/mounted"),
]  # fmt: skip
ASKED = [
    ("POST", "/a"), ("GET", "/a"), ("HEAD", "/a"), ("DELETE", "/a"), ("GET", "/b/first"), ("GET", "/b/x"),
    ("GET", "/fails"), ("GET", "/sync"), ("GET", "/mounted/inner"), ("GET", "/none"), ("GET", "/%61"), ("GET", "/a/"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ASKED)
def test_it_answers_as_starlette(method: str, path: str) -> None:
    usual, tabled = Starlette(routes=GIVEN), Starlette(routes=GIVEN)
    usual.router.redirect_slashes = False
    tabled.router = PathTable(tabled.router)
    theirs, ours = (TestClient(each).request(method, path) for each in (usual, tabled))
    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
    assert dict(ours.headers) == dict(theirs.headers)


def test_a_root_path_is_left_to_starlette() -> None:
    app = Starlette(routes=GIVEN)
    app.router = PathTable(app.router)
    assert TestClient(app, root_path="/prefix").get("/prefix/a").text == "/a told {}"
