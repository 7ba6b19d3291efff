"""`GET /v1/models`, `GET /v1/models/{id}` and `GET /version`. Anthropic's clients, recognised by their header, get
Anthropic's shape."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.version import release
from server.anthropic_api.models import listed_model, listed_models
from server.dialect import dialect_of
from server.openai_api.answers import Model, ModelList, Version
from server.service import Service


def _model(service: Service, name: str) -> Model:
    return Model(
        id=name,
        created=service.created,
        max_model_len=service.client.info.max_model_len,
    )


async def list_models(request: Request) -> Response:
    service: Service = request.app.state.service
    is_anthropic = dialect_of(request.scope) == "anthropic"
    models = (
        listed_models(service)
        if is_anthropic
        else ModelList(data=[_model(service, name) for name in service.model_names])
    )
    return Response(msgspec.json.encode(models), media_type="application/json")


async def get_model(request: Request) -> Response:
    """404 unless it is a name of the served model. The id may hold slashes, as hub ids do."""
    service: Service = request.app.state.service
    name = request.path_params["model_id"]
    service.check_model(name)
    model = listed_model(service, name) if dialect_of(request.scope) == "anthropic" else _model(service, name)
    return Response(msgspec.json.encode(model), media_type="application/json")


async def get_version(request: Request) -> Response:
    """The server's version."""
    return Response(msgspec.json.encode(Version(release())), media_type="application/json")
