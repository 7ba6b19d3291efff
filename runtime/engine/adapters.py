"""The adapters of an engine: read from their folders, kept in host memory, and written to the device's slots for the
requests that ask for them.

An adapter is its content: its digest is the key of its pages in the prefix cache, so that a folder with other numbers
under an old name meets no old page. A request waits until its adapter lies in a slot, and holds that until it ends.
Requests get slots in the order of arrival: one that finds none free is not overtaken by others with adapters. A paused
request loses its slot to one that needs it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.messages import AdapterRef
from runtime.engine.scheduling.sequence import ReadAdapter, Request
from runtime.engine.steps.executor import Executor
from runtime.errors import XservError
from runtime.linear.low_rank import LowRankMaps

logger = logging.getLogger("xserv.engine")

T = TypeVar("T")

Reader = Callable[[Path], ReadAdapter]
"""Reads a folder, names the modules as the model does; raises an `XservError`."""


class Adapters:
    """``num_slots`` on the device, at most ``most_kept`` in host memory. `load` and `prepare` are thread-safe; the rest
    belongs to the engine's loop."""

    def __init__(
        self, maps: LowRankMaps, read: Reader, executor: Executor, most_kept: int,
        is_parked: Callable[[Request], bool],
    ) -> None:  # fmt: skip
        """``is_parked``: whether a request is paused, and no step that may still be started has it."""
        self.maps, self._is_parked = maps, is_parked
        self._read, self._executor, self._most_kept = read, executor, most_kept
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[ReadAdapter]] = OrderedDict()  # by digest, the one used last at the end
        self._pool = ThreadPoolExecutor(1, "xserv-adapter")
        self._is_closed = False
        self._slots: OrderedDict[int, bytes] = OrderedDict((slot, b"") for slot in range(maps.num_slots))
        self._holders: dict[int, set[Request]] = {slot: set() for slot in self._slots}
        self._waiting: deque[Request] = deque()
        self.num_writes = 0

    def __len__(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    def load(self, name: str, path: str) -> Future[NDArray[np.float32]]:
        """Reads an adapter in another thread, checks it against the model, and keeps it. The result is its digest's 32
        bytes, as numbers; or the future raises ``RequestError``. Both raise ``EngineDeadError`` once it is closed."""
        return self._submit(partial(self._load, name, path))

    def _load(self, name: str, path: str) -> NDArray[np.float32]:
        try:
            found = self._checked(Path(path))
        except XservError as error:
            raise RequestError(f"adapter {name!r:.80}: {error}", param="lora_path") from None
        done: Future[ReadAdapter] = Future()
        done.set_result(found)
        with self._lock:
            self._keep(found.digest, done)
        return np.frombuffer(bytes.fromhex(found.digest), np.uint8).astype(np.float32)

    def prepare(self, ref: AdapterRef) -> Future[ReadAdapter]:
        """The adapter of a request, read in another thread unless it is kept."""
        with self._lock:
            loaded = self._kept.get(ref.digest)
            if loaded is None or (loaded.done() and loaded.exception() is not None):
                loaded = self._submit(partial(self._reread, ref))
            self._keep(ref.digest, loaded)
        return loaded

    def changes_tower(self, request: Request) -> bool:
        """Whether a request's adapter, which has been read, changes the tower of images."""
        assert request.adapter is not None, "the request has no adapter"
        return not self.maps.of_towers.isdisjoint(request.adapter.result().pairs)

    def add(self, request: Request) -> None:
        """Enqueue a request that needs its adapter."""
        self._waiting.append(request)

    def resume(self, request: Request) -> None:
        """Enqueue a request that has lost its slot while it was paused; others keep theirs."""
        if request.awaits_adapter and request not in self._waiting:
            self._waiting.append(request)

    def use(self, maps: LowRankMaps) -> None:
        """The model has other slots from now on, all of them empty. No request is computed."""
        if maps.modules.keys() >= self.maps.modules.keys():  # else these are one stage's; modules stay the same
            self.maps = maps
        for slot in self._slots:
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        """Those that hold it wait for another one once they go on."""
        for request in self._holders[slot]:
            request.adapter_slot, request.awaits_adapter = -1, True
        self._holders[slot].clear()
        self._slots[slot] = b""

    def release(self, request: Request) -> None:
        """Release the slot of a request that has ended."""
        if request.adapter is None:
            return
        if request.adapter_slot >= 0:
            self._holders[request.adapter_slot].discard(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def advance(self, start: Callable[[Request], None], fail: Callable[[Request, str], None]) -> None:
        """Calls ``start`` with each request whose adapter lies in a slot now, ``fail`` with each whose adapter cannot
        be had, and why."""
        are_left = True
        for request in list(self._waiting):
            loaded = request.adapter
            assert loaded is not None, "it waits for one"
            if not loaded.done():
                continue  # others do not wait for the disk
            error = loaded.exception()
            if error is not None:
                self._waiting.remove(request)
                is_known = isinstance(error, XservError)
                if not is_known:
                    logger.error("the adapter of request %s", request.request_id, exc_info=error)
                fail(request, str(error) if is_known else "its adapter could not be read")
                continue
            slot = self._slot_of(request.adapter_digest, loaded.result()) if are_left else None
            if slot is None:
                are_left = False
                continue
            self._waiting.remove(request)
            self._holders[slot].add(request)
            self._slots.move_to_end(slot)
            request.adapter_slot = slot
            start(request)

    def wait(self, timeout_s: float) -> None:
        """Wait at most so long until one more adapter is read."""
        loading = [each.adapter for each in self._waiting if each.adapter is not None and not each.adapter.done()]
        wait(loading, timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Read no more; what waits to be read raises ``EngineDeadError``."""
        self._is_closed = True
        self._pool.shutdown(wait=False)

    def _submit(self, read: Callable[[], T]) -> Future[T]:
        def run() -> T:
            if self._is_closed:
                raise EngineDeadError("the engine was closed before the adapter was read")
            return read()

        try:
            return self._pool.submit(run)
        except RuntimeError:  # the pool was shut down
            raise EngineDeadError("the engine is closed or closing") from None

    def _slot_of(self, wanted: bytes, adapter: ReadAdapter) -> int | None:
        """The slot with the adapter's content, written if it was in none; None if all others are held."""
        for slot, digest in self._slots.items():
            if digest == wanted:
                return slot
        free = next((slot for slot in self._slots if not self._holders[slot]), None)
        if free is None:
            free = next((slot for slot in self._slots if all(map(self._is_parked, self._holders[slot]))), None)
        if free is None:
            return None
        self._empty(free)
        self._executor.write_adapter(free, adapter.pairs)
        self._slots[free] = wanted
        self.num_writes += 1
        return free

    def _keep(self, digest: str, loaded: Future[ReadAdapter]) -> None:
        self._kept[digest] = loaded
        self._kept.move_to_end(digest)
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)

    def _checked(self, path: Path) -> ReadAdapter:
        found = self._read(path)
        self.maps.check(found.pairs)
        return found

    def _reread(self, ref: AdapterRef) -> ReadAdapter:
        found = self._checked(Path(ref.path))
        if found.digest != ref.digest:
            raise RequestError(
                f"adapter {ref.name!r:.80}: {ref.path} has other content than when it was loaded: load it again",
                param="model",
            )
        return found
