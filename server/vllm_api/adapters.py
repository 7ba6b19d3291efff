"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, vLLM's: adapters that come and go while the server runs.
Off unless the operator names a folder that they must lie in (`--lora-root`)."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.adapters import Adapters
from server.errors import ApiError, engine_errors
from server.service import Service
from server.transport.body import decode_body, read_body


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/load_lora_adapter`: an adapter becomes a model's name.

    lora_name     the name in requests
    lora_path     its folder, in the server's root for adapters: relative to that, or absolute
    load_inplace  it may replace an adapter of this name; open requests keep the old one
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/unload_lora_adapter`: the name is no model's any more; open requests go on.

    lora_int_id  vLLM's number, which is not read
    """

    lora_name: str
    lora_int_id: int | None = None


async def load_adapter(request: Request) -> Response:
    service: Service = request.app.state.service
    adapters = _allowed(service)
    asked = decode_body(await read_body(request, service.config), LoadAdapterRequest, service.config)
    with engine_errors():
        await adapters.load(asked.lora_name, asked.lora_path, is_new=not asked.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    service: Service = request.app.state.service
    adapters = _allowed(service)
    asked = decode_body(await read_body(request, service.config), UnloadAdapterRequest, service.config)
    if not adapters.unload(asked.lora_name):
        raise ApiError(
            404, f"The adapter {asked.lora_name[:200]!r} is not loaded.", param="lora_name", code="model_not_found"
        )
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _allowed(service: Service) -> Adapters:
    if service.adapters.root is None:
        message = "Adapters are not loaded by requests: start the server with --enable-lora and --lora-root DIR."
        raise ApiError(403, message, code="adapter_loading_off")
    return service.adapters
