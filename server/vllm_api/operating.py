"""`GET /load`, `/server_info` and `/tokenizer_info`, and `POST /reset_prefix_cache`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError, QueueFullError
from runtime.version import release
from server.errors import from_engine, invalid
from server.service import Service
from server.transport.json_answer import JsonAnswer
from server.vllm_api.schema import CacheReset, ServerInfo, ServerLoad, TokenizerInfo

_NOT_TOLD = frozenset({"api_keys", "api_key_files", "ssl_certfile", "ssl_keyfile", "log_file", "otlp_endpoint"})
"""Settings that are secrets, or lead to them, or tell about the machine."""


async def get_load(request: Request) -> Response:
    service: Service = request.app.state.service
    return _json(ServerLoad(service.lifecycle.num_open - 1))


async def get_server_info(request: Request) -> Response:
    """Limits and settings, without paths of files."""
    service: Service = request.app.state.service
    engine = msgspec.to_builtins(service.client.info)
    for name in ("model_path", "type"):
        engine.pop(name, None)
    server = {name: value for name, value in asdict(service.config).items() if name not in _NOT_TOLD}
    return _json(ServerInfo(release(), list(service.model_names), engine, server))


async def get_tokenizer_info(request: Request) -> Response:
    service: Service = request.app.state.service
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise invalid(None, "This model has no tokenizer.", "unsupported_parameter")
    named = tokenizer.special_tokens_map
    return _json(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            vocab_size=tokenizer.vocab_size,
            model_max_length=service.client.info.max_model_len,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            pad_token=named.get("pad_token"),
            unk_token=named.get("unk_token"),
            chat_template=tokenizer.chat_template() if tokenizer.has_chat_template else None,
        )
    )


async def reset_prefix_cache(request: Request) -> Response:
    """Drops cached prefixes that no running request uses, also those in host memory."""
    service: Service = request.app.state.service
    try:
        future = service.client.reset_prefix_cache()
        dropped, held = (int(count) for count in await asyncio.wrap_future(future))
    except (EngineDeadError, QueueFullError) as error:
        raise from_engine(error, {}) from None
    return _json(CacheReset(dropped, held))


def _json(answer: msgspec.Struct) -> Response:
    return JsonAnswer(answer)
