"""The Starlette application: routes, error handlers, and the service's start and stop.

    app = create_app(client, tokenizer, model_name="xserv-demo", default_sampling={"temperature": 0.7})

No CORS headers are sent and only JSON bodies are read, so a page of another origin cannot use a server on
localhost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from runtime.engine.client import EngineClient
from server.chat import create_chat_completion
from server.completions import create_completion
from server.config import ServerConfig
from server.errors import (
    ApiError,
    handle_api_error,
    handle_client_disconnect,
    handle_http_exception,
    handle_unexpected,
)
from server.models import get_model, health, list_models
from server.service import Service
from tokenizer import Tokenizer


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    *,
    model_name: str | None = None,
    default_sampling: Mapping[str, float | int] | None = None,
    config: ServerConfig | None = None,
) -> Starlette:
    """An application that serves one engine's model.

    client            stays the caller's, who closes it after the application has stopped
    tokenizer         None: prompts and answers are token ids
    model_name        the one name under which the model is asked for; None: the engine's
    default_sampling  what a silent request means, by `SamplingParams`' names: the model's generation config
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service = Service.begin(
            client,
            tokenizer,
            model_name or client.info.model_name,
            default_sampling or {},
            config or ServerConfig(),
        )
        app.state.service = service
        try:
            yield
        finally:
            service.end()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
            Route("/v1/completions", create_completion, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{model_id:path}", get_model),
            Route("/health", health),
        ],
        exception_handlers={
            ApiError: handle_api_error,
            HTTPException: handle_http_exception,
            ClientDisconnect: handle_client_disconnect,
            Exception: handle_unexpected,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app
