"""Loads models when a request needs them, and unloads those that were not used for long, or whose room another needs.

A request holds its model until its answer is over. If the model is not loaded, the request waits for room: the pool
unloads idle models, first those of lower priority, then the least recently used. If all of them are answering, it
waits until one is idle; later requests for that one wait, too. Room is made for one model at a time, in order.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from runtime.errors import XservError
from server.errors import ApiError, internal_error
from server.hosting.durations import FOR_EVER
from server.hosting.hosted import HostedModel
from server.hosting.memory import held_bytes
from server.hosting.places import HOST
from server.service import Shared

logger = logging.getLogger("xserv.server")

FIRST_RETRY_S, MOST_RETRY_S = 5.0, 300.0
"""For how long requests for a model that could not be loaded are refused at once; each time twice as long."""


class ModelPool:
    """Belongs to the event loop's thread, but for `close`.

    budgets     bytes of each place
    most        models that are loaded at once, or 0
    wait_s      for how long a request waits for models that answer
    drain_s     for how long a model's last requests may take when it goes
    """

    def __init__(
        self, models: Sequence[HostedModel], budgets: Mapping[str, int], *, most: int = 0, wait_s: float = 300.0,
        drain_s: float = 10.0,
    ) -> None:  # fmt: skip
        self.models, self.budgets, self.most = models, budgets, most
        self.wait_s, self._drain_s = wait_s, drain_s
        self.shared: Shared | None = None
        self._order = asyncio.Lock()
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(max(4, len(models)), thread_name_prefix="xserv-models")
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def held(self, model: HostedModel, keep_alive_s: float | None = None) -> AsyncIterator[None]:
        """The model, loaded, until the block ends; from then on it stays for `keep_alive_s` if that is given. Raises
        `ApiError` 503 if it cannot be loaded."""
        if model.is_there:
            model.num_open += 1
        else:
            await self._come(model)
        self._stop_timer(model)
        try:
            yield
        finally:
            if keep_alive_s is not None:
                model.keep_alive_s = keep_alive_s
            self._let_go(model)

    async def load(self, model: HostedModel) -> None:
        """Loads it, though it may have failed before. Raises `ApiError` 503."""
        model.retry_s = 0.0
        async with self.held(model):
            pass

    async def unload(self, model: HostedModel) -> None:
        """Unloads it, once it is loaded if it is about to be; its open requests have `drain_s` to end, and later ones
        load it again. Returns then."""
        await self._wait_until(lambda: model.status != "loading", math.inf)
        async with self._order:
            if model.status in ("loaded", "sleeping"):
                await self._unload(model)
        self._go_on(model)

    def loaded(self) -> list[HostedModel]:
        """Those that hold memory, or are about to."""
        return [each for each in self.models if each.status != "unloaded"]

    def fits(self, model: HostedModel) -> bool:
        """Whether it fits beside those that are loaded."""
        return self._fits(model, self.loaded())

    def close(self) -> None:
        """Ends all engines. On any thread; idempotent."""
        threads = [self._threads.submit(each.close) for each in self.models]
        for thread in threads:
            thread.result()

    def end(self) -> None:
        """Ends the services, after the last request."""
        for model in self.models:
            self._stop_timer(model)
            if (service := model.service) is not None:
                service.end()

    async def _come(self, model: HostedModel) -> None:
        """Waits until it is loaded and holds it."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(place)
        self._go_on(model)
        try:
            await place
        except asyncio.CancelledError:
            if place in model.waiting:
                model.waiting.remove(place)
            elif not place.cancelled() and place.exception() is None:
                self._let_go(model)
            raise

    def _let_go(self, model: HostedModel) -> None:
        model.num_open -= 1
        model.last_used_s = time.monotonic()
        self._start_timer(model)
        self._tell()

    def _go_on(self, model: HostedModel) -> None:
        """Takes the requests that wait for it, if it is loaded; else has it loaded for them."""
        if model.is_leaving or not model.waiting:
            return
        if model.status == "loaded":
            self._admit(model)
        elif not model.is_coming:
            model.is_coming = True
            self._run(self._bring(model))

    def _admit(self, model: HostedModel) -> None:
        for place in model.waiting:
            if not place.done():  # else its request was cancelled just now
                model.num_open += 1
                place.set_result(None)
        model.waiting.clear()

    async def _bring(self, model: HostedModel) -> None:
        """Makes room for the model and loads it."""
        try:
            async with self._order:
                if model.status != "loaded":
                    left_s = model.retry_s - time.monotonic()
                    if left_s > 0:
                        raise not_loadable(model, left_s)
                    await self._make_room(model)
                    model.status = "loading"
            if model.status == "loading":
                await self._load(model)
        except Exception as caught:
            if not isinstance(caught, ApiError):
                logger.exception("the model %r could not be brought", model.name)
            error = caught if isinstance(caught, ApiError) else internal_error()
            for place in model.waiting:
                if not place.done():
                    place.set_exception(ApiError(error.status, error.message, code=error.code, headers=error.headers))
            model.waiting.clear()
        finally:
            model.is_coming = False
        self._go_on(model)

    async def _load(self, model: HostedModel) -> None:
        begun_s = time.monotonic()
        try:
            loaded = await asyncio.get_running_loop().run_in_executor(self._threads, model.load)
            assert self.shared is not None
            model.take_up(loaded, self.shared)
        except Exception as error:
            model.status = "unloaded"
            model.has_failed, model.num_failed_loads = True, model.num_failed_loads + 1
            model.retry_delay_s = min(max(FIRST_RETRY_S, 2 * model.retry_delay_s), MOST_RETRY_S)
            model.retry_s = time.monotonic() + model.retry_delay_s
            self._tell()
            if isinstance(error, XservError | OSError):
                logger.error("the model %r cannot be loaded: %s", model.name, error)
            else:
                logger.exception("the model %r cannot be loaded", model.name)
            raise not_loadable(model, model.retry_delay_s) from None
        model.status = "loaded"
        model.has_failed, model.retry_delay_s = False, 0.0
        model.num_loads += 1
        info = model.info
        assert info is not None
        model.expected_bytes = held_bytes(info, model.place)
        model.last_used_s = time.monotonic()
        self._admit(model)
        self._start_timer(model)
        self._tell()
        logger.info("the model %r is loaded, after %.2f s", model.name, time.monotonic() - begun_s)

    async def _make_room(self, model: HostedModel) -> None:
        """Unloads others until it fits. Raises `ApiError` 503 if that cannot be, or takes too long."""
        end_s = time.monotonic() + self.wait_s
        while not self._fits(model, self.loaded()):
            holders = [each for each in self.loaded() if each is not model]
            others = [each for each in holders if each.settings.priority > model.settings.priority]
            if not self._fits(model, others):
                raise self._no_room(model, others, is_short=not self._has_memory(model, others))
            is_short = not self._has_memory(model, holders)  # else too many are awake
            lower = [each for each in holders if each not in others]
            may_go = sorted(in_the_way(model, lower, is_short=is_short), key=_eagerness)
            victim = next((each for each in may_go if each.is_idle or each.status == "sleeping"), None)
            if victim is None and time.monotonic() >= end_s:
                raise self._no_room(model, may_go, is_short=is_short)
            victim = victim or may_go[0]
            was = victim.status
            if was == "sleeping":
                await self._unload(victim)
            else:
                await self._leave(victim, end_s)
            if victim.status != was:
                victim.num_evictions += 1
                logger.info("the model %r is %s now, to make room for %r", victim.name, victim.status, model.name)

    def _fits(self, model: HostedModel, others: Sequence[HostedModel]) -> bool:
        """Whether it fits beside these."""
        num_awake = sum(each.status != "sleeping" for each in others if each is not model)
        return not (self.most and num_awake >= self.most) and self._has_memory(model, others)

    def _has_memory(self, model: HostedModel, others: Sequence[HostedModel]) -> bool:
        taken = sum(each.holds(model.place) for each in others if each is not model)
        return taken + model.expected_bytes <= self.budgets[model.place]

    def _no_room(self, model: HostedModel, others: Sequence[HostedModel], *, is_short: bool) -> ApiError:
        """503, with the models that would have to go; ``is_short``: of memory, else too many are awake."""
        takes = f"it takes {size(model.expected_bytes)} of {size(self.budgets[model.place])}"
        holders = in_the_way(model, others, is_short=is_short)
        if not holders:
            reason = f"{takes}, the memory that models may take (--models-memory)"
            return ApiError(503, f"The model {model.name!r} does not fit: {reason}.", code="model_does_not_fit")
        limit = takes if is_short else f"{self.most} models may be loaded at once (--models-max)"
        why = "have a higher priority" if holders[0].settings.priority > model.settings.priority else "are answering"
        held = ((each.name, each.holds(model.place) if is_short else each.held_bytes) for each in holders)
        listed = ", ".join(f"{name!r} ({size(num_bytes)})" for name, num_bytes in held)
        message = f"There is no room for the model {model.name!r}: {limit}. These would have to go and {why}: {listed}."
        return ApiError(503, message, code="no_room_for_model", retry_after_s=10)

    async def _leave(self, model: HostedModel, end_s: float) -> None:
        """Puts the model away once no request holds it, if that is before `end_s`. Requests that come meanwhile
        wait."""
        await self._wait_until(lambda: model.status in ("loaded", "unloaded"), end_s)
        if model.status != "loaded":
            return
        model.is_leaving = True
        try:
            await self._wait_until(lambda: model.num_open == 0, end_s)
            if model.num_open == 0:
                await self._put_away(model)
        finally:
            model.is_leaving = False
            self._go_on(model)

    async def _put_away(self, model: HostedModel) -> None:
        """Has an idle model sleep, if that frees memory of its device and the host has room for its weights; else
        unloads it."""
        beside = sum(each.holds(HOST) for each in self.loaded() if each is not model)
        has_room = beside + model.holds(HOST, "sleeping") <= self.budgets[HOST]
        if not (model.can_sleep and has_room and model.holds(model.place, "sleeping") < model.held_bytes):
            await self._unload(model)
            return
        self._stop_timer(model)
        model.status = "unloading"
        is_asleep = False
        try:
            is_asleep = await asyncio.get_running_loop().run_in_executor(self._threads, model.sleep)
        finally:
            model.status = "sleeping" if is_asleep else "unloaded"
            self._tell()
        logger.info("the model %r is %s", model.name, model.status)

    async def _unload(self, model: HostedModel) -> None:
        self._stop_timer(model)
        model.status = "unloading"
        end_s = time.monotonic() + self._drain_s
        try:
            # a request may hold the model and not have reached the engine, which waits only for those that it has
            await self._wait_until(lambda: model.num_open == 0, end_s)
            left_s = max(0.0, end_s - time.monotonic())
            await asyncio.get_running_loop().run_in_executor(self._threads, model.unload, left_s)
        finally:
            model.status = "unloaded"
            self._tell()
        logger.info("the model %r is unloaded", model.name)

    async def _wait_until(self, is_true: Callable[[], bool], end_s: float) -> None:
        """Returns when it is true, or at the end."""
        while not is_true() and (left_s := end_s - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left_s, 1e6))

    def _start_timer(self, model: HostedModel) -> None:
        """Lets an idle model go after its time."""
        self._stop_timer(model)
        if model.is_idle and model.keep_alive_s != FOR_EVER:
            model.expires_s = time.monotonic() + model.keep_alive_s
            model.timer = asyncio.get_running_loop().call_later(model.keep_alive_s, self._expire, model)

    def _stop_timer(self, model: HostedModel) -> None:
        if model.timer is not None:
            model.timer.cancel()
        model.timer = model.expires_s = None

    def _expire(self, model: HostedModel) -> None:
        timer = model.timer

        async def leave() -> None:
            async with self._order:
                if model.is_idle and model.timer is timer:  # it was not used since
                    await (self._put_away(model) if model.keep_alive_s > 0 else self._unload(model))
            self._go_on(model)

        self._run(leave())

    def _tell(self) -> None:
        """Something has changed: those who wait for room look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def in_the_way(model: HostedModel, others: Sequence[HostedModel], *, is_short: bool) -> list[HostedModel]:
    """Those of the others whose leaving helps the model: they hold memory of its place, if it ``is_short`` of that;
    else they are awake."""
    return [each for each in others if (each.holds(model.place) > 0 if is_short else each.status != "sleeping")]


def _eagerness(model: HostedModel) -> tuple[int, float]:
    """The first to go has the lowest priority, and was not used for the longest time."""
    return model.settings.priority, model.last_used_s


def not_loadable(model: HostedModel, retry_after_s: float) -> ApiError:
    """503; the reason is in the log, since it may name files."""
    message = f"The model {model.name!r} could not be loaded; the server's log says why."
    return ApiError(503, message, code="model_not_loaded", retry_after_s=retry_after_s)


def size(num_bytes: int) -> str:
    """Bytes in a unit that suits them."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024  # type: ignore[assignment]
    return f"{num_bytes:.4g} GiB"
