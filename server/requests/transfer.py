"""vLLM's `kv_transfer_params`, with which a proxy has one server compute a prompt and another continue it.

    proxy → first server    do_remote_decode: compute the prompt and one token
    first server → proxy    a lease, and where its pages can be had
    proxy → second server   the same, with do_remote_prefill: take the pages and answer

The lease is the answer's `remote_engine_id`: it cannot be guessed and serves once. No address is spoken to that the
operator has not named (`--kv-transfer-peer`), and no server that does not know the key.
"""

from __future__ import annotations

import re
import secrets

from runtime.engine.messages import Source
from server.errors import ApiError, invalid
from server.openai_api.schema import GenerationRequest, KVTransferParams
from server.service import Service

_FIELD = "kv_transfer_params"
_LEASE = re.compile(r"[0-9a-f]{64}")
_SCHEME = "tcp"


def transfer_of(
    service: Service, asked: GenerationRequest, *, num_prompts: int, num_choices: int, max_tokens: int | None
) -> tuple[str, Source | None]:
    """The lease under which the pages are to be offered, or the pages that are to be taken; "" and None without either.
    Raises `ApiError` 400."""
    given = asked.kv_transfer_params
    if given is None or not (given.do_remote_decode or given.do_remote_prefill):
        return "", None
    if not any(each.startswith(_SCHEME) for each in service.client.info.transfer_addresses):
        raise _wrong("", "this server hands no requests over: start it with --kv-transfer-address")
    if given.do_remote_decode and given.do_remote_prefill:
        raise _wrong("do_remote_decode", "do_remote_prefill is true, too: a server does one of both.")
    if num_prompts != 1:
        raise _wrong("", f"a request must have one prompt, got {num_prompts}.")
    return ("", _source(service, given)) if given.do_remote_prefill else (_lease(asked, num_choices, max_tokens), None)


def _lease(asked: GenerationRequest, num_choices: int, max_tokens: int | None) -> str:
    if max_tokens != 1:
        raise _wrong("do_remote_decode", f"max_tokens must be 1, got {max_tokens}: another server writes the answer.")
    if num_choices != 1:
        raise _wrong("do_remote_decode", f"n must be 1, got {num_choices}: the other server makes the choices.")
    if asked.stream:
        raise _wrong("do_remote_decode", "stream must be false: the answer has the pages' place.")
    return f"{_SCHEME}:{secrets.token_hex(32)}"


def _source(service: Service, given: KVTransferParams) -> Source:
    peers = service.config.kv_transfer_peers
    peer = f"{given.remote_host}:{given.remote_port}"
    if peer not in peers:
        known = ", ".join(peers) or "none"
        raise _wrong("remote_host", f"{peer:.80} is no peer of this server; --kv-transfer-peer names {known}.")
    if given.remote_engine_id is None or not _LEASE.fullmatch(given.remote_engine_id):
        raise _wrong("remote_engine_id", "it must be the lease that the other server has answered.")
    blocks = given.remote_block_ids
    if not blocks or blocks != list(range(len(blocks))):
        raise _wrong("remote_block_ids", "they must be those that the other server has answered.")
    return Source(f"{_SCHEME}:{peer}", f"{_SCHEME}:{given.remote_engine_id}", blocks, is_foreign=True)


def answer_of(offered: Source) -> KVTransferParams:
    """The params with which another server takes what is offered."""
    host, _, port = offered.address.removeprefix(f"{_SCHEME}:").rpartition(":")
    return KVTransferParams(
        do_remote_prefill=True,
        do_remote_decode=False,
        remote_engine_id=offered.lease.removeprefix(f"{_SCHEME}:"),
        remote_block_ids=offered.block_ids,
        remote_host=host,
        remote_port=int(port),
        tp_size=1,
    )


def _wrong(field: str, message: str) -> ApiError:
    place = f"{_FIELD}.{field}" if field else _FIELD
    return invalid(place, f"{place}: {message}")
