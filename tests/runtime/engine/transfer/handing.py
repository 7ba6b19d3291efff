"""Two engines in this process, of which the first hands its requests over to the second."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import Begun, EngineOutput, EngineRequest, Source, TransferSettings
from runtime.engine.transfer.joining import join_others
from runtime.engine.transfer.transport import Transport

SECRET = b"k" * 32


@contextmanager
def joined_engine(
    model: Path | None, scheme: str = "unix", *, secret: bytes = SECRET, library: str = "tcp", **settings: Any
) -> Iterator[Engine]:
    """An engine that others can pull from."""
    engine = build_engine(model, **settings)
    transfer = TransferSettings(secret=secret, host="127.0.0.1" if scheme == "tcp" else "", library=library)
    names = {each.name for each in fields(EngineConfig)}
    join_others(engine, EngineConfig(**{name: value for name, value in settings.items() if name in names}), transfer)
    try:
        yield engine
    finally:
        engine.close()


def leased(request: EngineRequest, scheme: str, *, may_relay: bool = False) -> EngineRequest:
    return msgspec.structs.replace(request, lease=f"{scheme}:{secrets.token_hex(32)}", may_relay=may_relay)


class Late:
    """A transport that finds late, by chance, that pages were sent: nobody pulls them during a relay here."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self._chance, self.num_asked = transport, random.Random(1), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def has_sent(self, lease: str) -> bool:
        self.num_asked += 1
        return self._chance.random() < 0.3


def continued(request: EngineRequest, outputs: Sequence[EngineOutput], address: str | None) -> EngineRequest:
    """The rest of a request after these outputs, with the pages of the engine at this address."""
    begun = []
    for index in range(request.params.n):
        own = [each for each in outputs if each.index == index]
        tokens = [token for each in own for token in each.new_token_ids]
        mus = [each.mirostat_mu for each in own if each.mirostat_mu is not None]
        begun.append(Begun(tokens, mus[-1] if mus else None, any(each.finish_reason is not None for each in own)))
    source = None if address is None else Source(address, request.lease)
    return msgspec.structs.replace(request, lease="", begun=begun, source=source)


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[EngineOutput]]:
    """The outputs of each request, without those that announce pages."""
    for each in requests:
        engine.add(each)
    found: dict[str, list[EngineOutput]] = {each.request_id: [] for each in requests}
    while engine.has_work:
        for output in engine.step():
            if output.is_last or output.new_token_ids:
                found[output.request_id].append(output)
        engine.rest()
    engine.check_invariants()
    return found


def answered_alone(model: Path, requests: Sequence[EngineRequest], **settings: Any) -> dict[tuple[str, int], Any]:
    """The answers of an engine that runs one request at a time and shares no prefixes."""
    alone = build_engine(model, **{**settings, "max_num_seqs": 1, "enable_prefix_caching": False})
    try:
        return said(run(alone, requests), requests)
    finally:
        alone.close()


def address_of(engine: Engine, scheme: str) -> str:
    return next(each for each in engine.info.transfer_addresses if each.startswith(scheme))


def handed_over(
    first: Engine, second: Engine, requests: Sequence[EngineRequest], scheme: str, every: int = 2
) -> dict[str, list[EngineOutput]]:
    """The outputs of requests that the second engine continues. Each ``every``-th is relayed, if it has one choice."""
    assert first.hand_overs is not None
    late = first.hand_overs.transports[scheme] = Late(first.hand_overs.transports[scheme])
    asked = [leased(each, scheme, may_relay=number % every == every - 1) for number, each in enumerate(requests)]
    begun = run(first, [each for each in asked if not each.may_relay])
    for each in asked:
        if each.may_relay:
            begun |= run(first, [each])
    assert late.num_asked > 0 or len(requests) < 2 * every
    first.hand_overs.transports[scheme] = late.transport
    rest = [
        continued(each, begun[each.request_id], address_of(first, scheme))
        for each in asked
        if any(output.is_handed_over for output in begun[each.request_id])
    ]
    for each in asked:  # as a fleet does with the pages of those that have ended
        if each.request_id not in {other.request_id for other in rest}:
            first.hand_overs.drop(each.lease)
    ended = run(second, rest)
    return {each.request_id: [*begun[each.request_id], *ended.get(each.request_id, [])] for each in asked}


def said(outputs: dict[str, list[EngineOutput]], requests: Sequence[EngineRequest]) -> dict[tuple[str, int], Any]:
    """By request and choice: ids, bits of their log probabilities, and how it ended."""
    return {
        (each.request_id, index): (
            [
                pair
                for output in outputs[each.request_id]
                if output.index == index
                for pair in zip(output.new_token_ids, output.logprobs or output.new_token_ids)
            ],
            [o.finish_reason for o in outputs[each.request_id] if o.index == index and o.finish_reason is not None],
        )
        for each in requests
        for index in range(each.params.n)
    }
