"""The served model in Anthropic's shape, for `GET /v1/models` with Anthropic's header."""

from __future__ import annotations

from datetime import UTC, datetime

from server.anthropic_api.objects import MessagesModel, MessagesModelList
from server.service import Service


def listed_model(service: Service, name: str) -> MessagesModel:
    info = service.client.info
    return MessagesModel(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=info.max_model_len,
        max_tokens=info.max_model_len,
    )


def listed_models(service: Service) -> MessagesModelList:
    names = service.model_names
    return MessagesModelList(data=[listed_model(service, name) for name in names], first_id=names[0], last_id=names[-1])
