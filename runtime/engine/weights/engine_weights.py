"""An engine's weights and pages as `Pauses` changes them: what follows for its caches, images, adapters and drafter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import msgspec

from models.errors import ModelLoadError
from runtime.engine.adapters import Adapters
from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest
from runtime.engine.open_requests import OpenRequests
from runtime.engine.open_steps import OpenSteps
from runtime.engine.picture_queue import PictureQueue
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.fresh_pages import FreshPages
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request
from runtime.engine.speculation.evidence import SpeculationCounters
from runtime.engine.speculation.speculator import Speculator
from runtime.engine.steps.embedder import Embedder
from runtime.engine.steps.executor import Executor
from runtime.engine.transfer.hand_overs import HandOvers
from runtime.engine.weights.commands import GivenArrays, WeightSource
from runtime.errors import XservError
from runtime.kv.page_store import PageStore


class Owner(Protocol):
    """The engine."""

    info: EngineInfo
    pool: BlockPool
    scheduler: Scheduler
    executor: Executor
    embedder: Embedder
    opened: OpenRequests
    steps: OpenSteps
    pictures: PictureQueue | None
    adapters: Adapters | None
    hand_overs: HandOvers | None
    fresh_pages: FreshPages | None

    def use(self, speculator: Speculator | None) -> None: ...
    def prepare(self, request: EngineRequest, *, is_prepared: bool = False) -> Request: ...
    def await_parts(self, request: Request) -> None: ...
    def encode_pictures(self, outputs: list[EngineOutput]) -> None: ...


class EngineWeights:
    """See `Parts`. Does not keep the engine, so that a closed one frees its memory with its last reference.

    fingerprint_of  of pages that weights of a source compute; None without a store of prefixes
    open_store      opens the store of pages of a fingerprint
    new_drafter     makes the speculator anew, for the model that runs; None if its drafter does not read the model
    """

    def __init__(self, engine: Owner) -> None:
        self._engine: Owner = weakref.proxy(engine)
        self.fingerprint_of: Callable[[WeightSource], str] | None = None
        self.open_store: Callable[[str], PageStore] | None = None
        self.new_drafter: Callable[[], Speculator | None] | None = None
        self._counters: SpeculationCounters | None = None  # of the drafter before
        self._fingerprint = ""  # of the weights that were read last

    @property
    def holds_weights_on_host(self) -> bool:
        return self._engine.info.device == "cpu"

    def finish_steps(self, outputs: list[EngineOutput]) -> None:
        steps = self._engine.steps
        while steps.open:
            steps.finish(steps.open[0], outputs)

    def finish_embeddings(self) -> None:
        while self._engine.embedder.has_work:
            self._engine.embedder.advance()

    def load_weights(self, source: WeightSource) -> None:
        before = None if self.fingerprint_of is None else self.fingerprint_of(source)
        self._engine.executor.load_weights(source)
        if self.fingerprint_of is not None and before is not None:
            if not isinstance(source, GivenArrays) and self.fingerprint_of(source) != before:
                self.drop_loaded()
                raise ModelLoadError(f"{source.path}: the weights changed while they were read")
            self._fingerprint = before

    def drop_loaded(self) -> None:
        self._engine.executor.drop_loaded()

    def use_weights(self) -> None:
        if self._engine.pictures is not None:
            self._engine.pictures.forget()
        self._without_drafter()
        self._engine.executor.use_weights()
        self._with_new_parts()
        if (stored := self._engine.scheduler.stored) is not None:
            assert self.open_store is not None, "it has a store"
            stored.use(self.open_store, self._fingerprint)

    def drop_prefixes(self) -> None:
        if self._engine.hand_overs is not None:
            self._engine.hand_overs.reserved.clear()
        if (stored := self._engine.scheduler.stored) is not None:
            stored.settle()
        self._engine.pool.drop_prefixes()

    def free_weights(self, *, keeps_copy: bool) -> None:
        if self._engine.pictures is not None:
            self._engine.pictures.forget(keeps_held=True)
        self._without_drafter()
        if keeps_copy:
            self._engine.executor.keep_weights()
        self._engine.executor.free_memory(weights=True)
        if not keeps_copy:
            self._engine.executor.forget_kept_weights()

    def free_pages(self) -> None:
        self._engine.executor.free_memory(weights=False)

    def reload_weights(self) -> None:
        self._engine.executor.reload_weights()
        self._with_new_parts()

    def allocate_pages(self) -> None:
        self._engine.executor.allocate_pages()
        if self._engine.fresh_pages is not None:
            self._engine.fresh_pages.begin()

    def begin_again(self, request: Request) -> list[EngineOutput]:
        engine, source = self._engine, request.asked
        assert source is not None, "others end"
        try:
            fresh = engine.prepare(msgspec.structs.replace(source, source=None), is_prepared=True)
        except XservError as error:
            return engine.opened.end(request, "error", str(error))
        if engine.hand_overs is not None:
            engine.hand_overs.forget(request)
        told = engine.opened.begin_again(request, fresh)
        if engine.hand_overs is not None:
            engine.hand_overs.admit(fresh)
        engine.await_parts(fresh)
        return told

    def _without_drafter(self) -> None:
        """A drafter that reads the model would keep it."""
        if self.new_drafter is not None and (speculator := self._engine.steps.speculator) is not None:
            self._counters = speculator.counters
            self._engine.use(None)

    def _with_new_parts(self) -> None:
        """Adapters and drafter of the model that runs now."""
        engine = self._engine
        if engine.adapters is not None:
            maps = engine.executor.adapters
            assert maps is not None, "the model is of the same kind"
            engine.adapters.use(maps)
        if self.new_drafter is not None:
            made = self.new_drafter()
            if made is not None and self._counters is not None:
                made.policy.acceptance.counters = self._counters
            engine.use(made)
