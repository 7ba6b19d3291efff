"""One of the models of a server: its settings, its engine while it has one, and the application that answers for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.applications import Starlette

from runtime.engine.errors import EngineDeadError
from runtime.engine.make_client import StartingClient
from runtime.engine.messages import AdapterRef, EngineInfo, EngineState
from runtime.engine.weights.commands import Sleep, WakeUp
from runtime.errors import XservError
from server.adapters import parse_modules
from server.app import EXCEPTION_HANDLERS
from server.config import ServerConfig
from server.description.operations import routes
from server.hosting.facts import ModelFacts, Purpose, purpose_of
from server.hosting.places import HOST
from server.hosting.settings import ModelSettings
from server.loading import LoadedModel, load, warm_up
from server.observing.metrics import Metrics
from server.openai_api.models import ModelStatus
from server.service import AppState, Service, Shared
from server.transport.path_table import PathTable

logger = logging.getLogger("xserv.server")

StartEngine = Callable[..., StartingClient]


class ModelApplication(Starlette):
    """The routes for one model, inside of the layers of `HostApplication`, whose state is `server`."""

    state: AppState

    def __init__(self, name: str, config: ServerConfig, server: AppState) -> None:
        super().__init__(routes=routes(), exception_handlers=EXCEPTION_HANDLERS)
        self.router = PathTable(self.router)
        self.config = config
        self.state = AppState()
        self.state.lifecycle, self.state.admin_keys = server.lifecycle, server.admin_keys
        self.state.metrics = Metrics(name, None)


class HostedModel:
    """Belongs to the event loop's thread, but for `load` and `close`.

    place          the device whose memory it takes
    expected_bytes of that: what it will take; what it took once it was loaded
    status         all but "unloaded" hold memory
    is_leaving     new requests wait until it was unloaded for another model
    num_open       requests that hold it; waiting: places of those that wait for it; is_coming: it is loaded for them
    keep_alive_s   how long it stays without requests; a request may change that
    expires_s      when it goes, by `time.monotonic()`; None while it is used, or stays
    last_used_s    when its latest request ended
    has_failed     its last loading
    taken_names    of all models: no adapter may have one
    """

    def __init__(
        self, settings: ModelSettings, facts: ModelFacts, place: str, expected_bytes: int, server: AppState,
        taken_names: Sequence[str] = (), start_engine: StartEngine = StartingClient,
    ) -> None:  # fmt: skip
        self.settings, self.facts, self.place = settings, facts, place
        self.names, self.name = settings.names, settings.names[0]
        self._taken_names = taken_names or settings.names
        self._modules = parse_modules(settings.config.lora_modules)
        self.app = ModelApplication(self.name, settings.config, server)
        self.expected_bytes = expected_bytes
        self.status: ModelStatus = "unloaded"
        self.is_leaving = self.has_failed = False
        self.can_sleep = True  # as far as is known
        self.num_open = 0
        self.waiting: list[asyncio.Future[None]] = []
        self.is_coming = False
        self.keep_alive_s = settings.keep_alive_s
        self.expires_s: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.last_used_s = 0.0
        self.retry_s, self.retry_delay_s = 0.0, 0.0  # when a failed loading is tried again, and how long after it
        self.num_loads = self.num_failed_loads = self.num_evictions = 0
        self._start_engine = start_engine
        self._lock = threading.Lock()
        self._engine: StartingClient | None = None
        self._model: LoadedModel | None = None
        self._is_closed = self._is_asleep = self._has_copy = False

    @property
    def service(self) -> Service | None:
        """Its state since it was first loaded, also while it is unloaded."""
        return self.app.state.found_service

    @property
    def info(self) -> EngineInfo | None:
        """Facts of its engine, also while it is unloaded; None before it was first loaded."""
        return None if self._model is None else self._model.client.info

    @property
    def all_names(self) -> list[str]:
        """Its names and its adapters'."""
        service = self.service
        return [*self.names, *(self._modules if service is None else (each.name for each in service.adapters.all))]

    def adapter(self, name: str) -> AdapterRef | None:
        """Its adapter of this name; without a digest before it was first loaded."""
        if self.service is not None:
            return self.service.adapters.get(name)
        return AdapterRef(name=name, path=self._modules[name], digest="") if name in self._modules else None

    @property
    def purpose(self) -> Purpose | None:
        info = self.info
        return self.facts.purpose if info is None else purpose_of(info)

    @property
    def max_model_len(self) -> int | None:
        info = self.info
        return self.facts.max_model_len if info is None else info.max_model_len

    @property
    def held_bytes(self) -> int:
        """Memory that it takes of its device, or is about to."""
        return self.holds(self.place)

    def holds(self, place: str, status: ModelStatus | None = None) -> int:
        """Memory that it takes of a place, or would take with another status. Asleep it has its weights on the host,
        where a GPU's stay when it wakes."""
        status = status or self.status
        keeps_copy = status == "sleeping" or (status != "unloaded" and self._has_copy and self.place != HOST)
        if place == HOST and keeps_copy and self.info is not None:
            return self.info.weight_bytes
        return 0 if status in ("unloaded", "sleeping") or place != self.place else self.expected_bytes

    @property
    def is_there(self) -> bool:
        """Whether a request can have it at once."""
        return self.status == "loaded" and not self.is_leaving

    @property
    def is_idle(self) -> bool:
        """Whether it could go without anyone's waiting for it."""
        return self.status == "loaded" and self.num_open == 0 and not self.waiting

    @property
    def shown_status(self) -> ModelStatus:
        """Its status; of a loaded one "loading" while its engine, which died, is started again, and "sleeping" while
        that was told to sleep."""
        if self.status != "loaded" or self.service is None:
            return self.status
        if self.engine_state != "ready":
            return "loading"
        return "loaded" if self.service.awake.is_set() else "sleeping"

    @property
    def engine_state(self) -> EngineState | None:
        """Its engine's state; None before it is first loaded."""
        return None if self._model is None else self._model.client.state

    def load(self) -> LoadedModel:
        """Starts its engine, wakes it, or starts it again, and waits for its first answer. On any thread. Raises what
        `server.loading.load` does; then it is unloaded."""
        model = self._model
        if model is not None and self._is_asleep:
            self._is_asleep = False
            try:
                model.client.order(WakeUp()).result()
            except XservError as error:
                logger.warning("the model %r cannot be woken, and is started again: %s", self.name, error)
                self.unload(0.0)
            else:
                return model
        if model is not None and model.client.state == "unloaded":
            try:
                model.client.reload()
                warm_up(model.client)
            except BaseException:
                with suppress(EngineDeadError):
                    model.client.unload(0.0)
                raise
            return model
        settings = self.settings
        engine = self._start_engine(settings.model, **settings.engine_options)
        with self._lock:
            self._engine, is_closed = engine, self._is_closed
        if is_closed:
            engine.close()
        try:
            return load(engine, self._taken_names, settings.config, settings.chat_template)
        except BaseException:
            engine.close()
            raise

    def take_up(self, model: LoadedModel, shared: Shared) -> None:
        """Makes its service with what `load` returned, unless it has one already. The engine is awake."""
        if self._model is not model:
            self._model, state = model, self.app.state
            if self.service is not None:
                self.service.end()
            state.shared = shared
            state.metrics.attach(model.client)
            state.service = Service(model, self.names, self.settings.config, state)
        assert self.service is not None
        self.service.note_sleep(is_asleep=False)

    def unload(self, drain_timeout_s: float) -> None:
        """Ends its engine. On any thread. One that has died, and is being started again, is ended for good."""
        assert self._model is not None
        assert self._engine is not None
        self._is_asleep = self._has_copy = False
        try:
            self._model.client.unload(drain_timeout_s)
        except EngineDeadError:
            self._engine.close()

    def sleep(self) -> bool:
        """Has its engine keep the weights in host memory, and nothing else. On any thread. False if it cannot; then it
        is unloaded."""
        assert self._model is not None
        try:
            self._model.client.order(Sleep(level=1, mode="wait")).result()
        except XservError as error:
            logger.info("the model %r cannot sleep: %s", self.name, error)
            self.can_sleep = False
            self.unload(0.0)
            return False
        self._is_asleep = self._has_copy = True
        return True

    def close(self) -> None:
        """Ends its engine for good. On any thread; idempotent."""
        with self._lock:
            self._is_closed, engine = True, self._engine
        if engine is not None:
            engine.close()
