"""The routes of a server of several models: those that it answers itself, and those that it hands to a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from server.code_colours import render
from server.description.docs_page import get_description, get_docs
from server.description.operations import OPERATIONS, Operation
from server.hosting import overview
from server.hosting.forward import Forward
from server.observing import live
from server.ollama_api import models as ollama_models
from server.openai_api import models
from server.requests.answering import cancel_request
from server.responses_api import endpoints as responses
from server.static_page import get_page
from server.vllm_api import operating

_READS = (400, 404, 408, 413, 415)

OWN: dict[Any, Any] = {
    models.list_models: overview.list_models,
    models.get_model: overview.get_model,
    ollama_models.list_tags: overview.list_tags,
    ollama_models.list_loaded: overview.list_loaded,
    ollama_models.show: overview.show,
    operating.get_load: overview.get_load,
    operating.get_server_info: overview.get_server_info,
    operating.health: overview.health,
    operating.ready: overview.ready,
    operating.ping: overview.ping,
    **{
        shared: shared
        for shared in (
            models.get_version, operating.metrics, get_description, get_docs, get_page, render, cancel_request,
            ollama_models.get_api_version, responses.get_response, responses.delete_response,
            responses.cancel_response, responses.list_input_items,
        )
    },
}  # fmt: skip
"""The endpoints of one model that a server of several answers itself, and how."""

_ANSWERS: dict[Any, Any] = {
    models.list_models: models.ModelList, operating.get_server_info: overview.HostInfo,
}  # fmt: skip

_ADDED = (
    Operation("get", "/models", overview.list_models, "The served models", answer=models.ModelList),
    Operation("post", "/models/load", overview.load_model, "Load a model", overview.ModelRequest, overview.Done,
              errors=(*_READS, 503)),
    Operation("post", "/models/unload", overview.unload_model, "Unload a model", overview.ModelRequest, overview.Done,
              errors=_READS),
)  # fmt: skip


def _of_several(operation: Operation) -> Operation:
    answer = _ANSWERS.get(operation.endpoint, operation.answer)
    if operation.endpoint in OWN:
        return replace(operation, endpoint=OWN[operation.endpoint], answer=answer)
    forward = Forward(operation, is_held=operation.endpoint is not live.watch_engine)
    return replace(operation, endpoint=forward, errors=tuple(sorted({*operation.errors, 404, 503})))


OPERATIONS_OF_SEVERAL = (*_ADDED, *map(_of_several, OPERATIONS))
ENDPOINT_PATHS = {operation.endpoint: operation.path for operation in OPERATIONS}
"""The route of each endpoint that a request may have reached inside of its model's application."""
