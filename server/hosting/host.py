"""The models of a server, by name: `app.state.host` of a server of several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from starlette.types import Scope

from runtime.engine.make_client import StartingClient
from server.adapters import parse_modules
from server.config import ServerConfig
from server.errors import ApiError
from server.hosting.facts import ModelFacts
from server.hosting.hosted import HostedModel, StartEngine
from server.hosting.memory import budgets, default_cache_bytes, expected_bytes, place_of
from server.hosting.pool import ModelPool
from server.hosting.settings import ModelSettings
from server.transport.exchange import Lifecycle

MOST_LISTED_NAMES = 20
"""In an error."""


class Host:
    """Belongs to the event loop's thread.

    models   in the operator's order
    pool     which of them are loaded
    created  when it was made, in seconds since the epoch
    started  set when the models of the start are loaded, or have failed; failed: those that have
    """

    def __init__(
        self, settings: Sequence[ModelSettings], config: ServerConfig, lifecycle: Lifecycle,
        start_engine: StartEngine = StartingClient,
    ) -> None:  # fmt: skip
        """Raises the errors of a device that is not there."""
        facts = [ModelFacts.of(each) for each in settings]
        places = [place_of(each) for each in settings]
        room = budgets(places, config.models_memory_bytes)
        all_names = tuple(chain.from_iterable(each.names for each in settings))
        self.models: list[HostedModel] = []
        for own, known, place in zip(settings, facts, places, strict=True):
            beside = [each for each, other in zip(zip(settings, facts), places, strict=True) if other == place]
            if (cache := default_cache_bytes(own, beside, place, room[place])) is not None:
                own = replace(own, engine_options={**own.engine_options, "kv_cache_bytes": cache})
            expected = expected_bytes(own, known, place, room[place])
            self.models.append(HostedModel(own, known, place, expected, lifecycle, all_names, start_engine))
        self.pool = ModelPool(
            self.models, room, most=config.models_max, wait_s=config.model_wait_s, drain_s=config.drain_timeout_s
        )
        self.created = int(time.time())
        self.started = asyncio.Event()
        self.failed: list[HostedModel] = []
        self._owners = {
            name: model
            for model in self.models
            for name in (*model.names, *parse_modules(model.settings.config.lora_modules))
        }

    @classmethod
    def of(cls, scope: Scope) -> Host:
        host = scope["app"].state.host
        assert isinstance(host, Host)
        return host

    def find(self, name: str) -> HostedModel | None:
        """The model of this name, or with an adapter of it."""
        owner = self._owners.get(name)
        return owner or next((each for each in self.models if each.service and name in each.service.adapters), None)

    def named(self, name: str) -> HostedModel:
        """The same. Raises `ApiError` 404, with the names that there are."""
        if (model := self.find(name)) is not None:
            return model
        names = [each for model in self.models for each in model.all_names]
        more = len(names) - MOST_LISTED_NAMES
        listed = ", ".join(map(repr, names[:MOST_LISTED_NAMES])) + (f" and {more} more" if more > 0 else "")
        message = f"The model {name[:200]!r} does not exist; this server has {listed}."
        raise ApiError(404, message, param="model", code="model_not_found")

    async def load_first(self) -> None:
        """Loads the models of the start, in their order, as far as they fit."""
        for model in self.models:
            if model.settings.at_start and self.pool.fits(model):
                try:
                    await self.pool.load(model)
                except ApiError:
                    self.failed.append(model)
        self.started.set()
