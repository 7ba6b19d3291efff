"""The models of a server, by name: `app.state.host` of a server of several."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from starlette.types import Scope

from runtime.engine.make_client import StartingClient
from runtime.engine.messages import EngineState
from server.config import ServerConfig, ServerConfigError
from server.errors import ApiError
from server.hosting.facts import ModelFacts
from server.hosting.hosted import HostedModel, StartEngine
from server.hosting.memory import budgets, default_cache_bytes, expected_bytes, place_of
from server.hosting.pool import ModelPool, size
from server.hosting.settings import ModelSettings
from server.names import UNTAGGED
from server.service import AppState

logger = logging.getLogger("xserv.server")

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
        self, settings: Sequence[ModelSettings], config: ServerConfig, server: AppState,
        start_engine: StartEngine = StartingClient,
    ) -> None:  # fmt: skip
        """``server``: the state of the server around them. Raises `ServerConfigError` if no model fits, and the errors
        of a device that is not there."""
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
            self.models.append(HostedModel(own, known, place, expected, server, all_names, start_engine))
        self._check_room(room)
        self.pool = ModelPool(
            self.models, room, most=config.models_max, wait_s=config.model_wait_s, drain_s=config.drain_timeout_s
        )
        self.created = int(time.time())
        self.started = asyncio.Event()
        self.failed: list[HostedModel] = []
        self._owners = {name: model for model in self.models for name in model.all_names}

    @property
    def state(self) -> EngineState:
        """The best state of a loaded model's engine; "ready" while none is loaded."""
        states = [each.engine_state for each in self.models if each.status == "loaded"]
        usual: tuple[EngineState, ...] = ("ready", "starting", "down")
        return next((each for each in usual if each in states), "ready")

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
        """The model that a request names, perhaps with the tag ":latest". Raises `ApiError` 404, with the names that
        there are."""
        if (model := self.find(name) or self.find(name.removesuffix(UNTAGGED))) is not None:
            return model
        names = [each for model in self.models for each in model.all_names]
        more = len(names) - MOST_LISTED_NAMES
        listed = ", ".join(map(repr, names[:MOST_LISTED_NAMES])) + (f" and {more} more" if more > 0 else "")
        message = f"The model {name[:200]!r} does not exist; this server has {listed}."
        raise ApiError(404, message, param="model", code="model_not_found")

    def _check_room(self, room: Mapping[str, int]) -> None:
        """Warns of models that can never be loaded. Raises `ServerConfigError` if none can."""
        too_large = [each for each in self.models if each.expected_bytes > room[each.place]]
        if len(too_large) == len(self.models):
            least = min(too_large, key=lambda each: each.expected_bytes)
            raise ServerConfigError(f"--models-memory is too small for every model: {_excess(least, room)}")
        for each in too_large:
            logger.warning("requests are refused, since --models-memory is too small: %s", _excess(each, room))

    async def load_first(self) -> None:
        """Loads the models of the start, in their order, as far as they fit."""
        for model in self.models:
            if model.settings.at_start and self.pool.fits(model):
                try:
                    await self.pool.load(model)
                except ApiError:
                    self.failed.append(model)
        self.started.set()


def _excess(model: HostedModel, room: Mapping[str, int]) -> str:
    needed, budget = size(model.expected_bytes), size(room[model.place])
    return f"the model {model.name!r} needs {needed} of {model.place}, where models may take {budget}"
