"""Moves KV blocks on a GPU: batches of copies on a separate stream, a storage at a time.

The stream waits for all work on the device's own stream, so that pages are read as the previous steps left them and are
not overwritten while those read them. An event after each storage's copies goes to `KVCache.arrivals`: the device's
stream waits for it when the forward pass uses the pages of its first layer, so that its kernels neither read pages too
early nor write pages too early.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence

from runtime.device.gpu import Gpu
from runtime.device.stream import Event, Stream
from runtime.errors import DeviceError
from runtime.kv.cache import HostPages, KVCache
from runtime.kv.runs import Moves, Wave


class GpuMover:
    """Queues copies; `move` returns at once. It owns its memory, which must live as long as it does."""

    def __init__(self, kv_cache: KVCache, host_pages: HostPages | None) -> None:
        spec = kv_cache.spec
        self._kv_cache = kv_cache
        self._host_pages = host_pages
        self.swap_bytes = self.num_driver_calls = 0
        self.swap_s = 0.0
        self._page_bytes = [[plane.size_bytes for plane in planes] for planes in spec.planes]
        self._pages = [tensor.address for planes in kv_cache.storages for tensor in planes]
        self._host = [] if host_pages is None else [plane.ctypes.data for plane in host_pages.planes]
        self._gpu = Gpu.of(kv_cache.device)
        self._stream: Stream | None = None  # made on first use: the emulator checks more with a second one
        self._arrivals = [self._gpu.new_event() for _ in spec.planes]
        self._pools = spec.pool_of_storage
        self._timed: deque[tuple[Event, Event, int]] = deque()  # start, end, bytes swapped between them

    def move(self, moves: Sequence[Moves], swap_bytes: int) -> None:
        if self._stream is None:
            self._stream = self._gpu.new_stream()
        stream = self._stream
        stream.wait(self._gpu.stream.record())
        start = stream.record(is_timed=True) if swap_bytes else None
        for storage, (arrival, pool) in enumerate(zip(self._arrivals, self._pools, strict=True)):
            swap_out, swap_in, copies = moves[pool]
            self._copy(storage, self._pages, self._host, swap_out, stream)
            self._copy(storage, self._host, self._pages, swap_in, stream)
            self._copy(storage, self._pages, self._pages, copies, stream)
            if swap_out or swap_in or copies:
                self._kv_cache.arrivals[storage] = arrival.record(stream)
        if start is not None:
            self._timed.append((start, stream.record(is_timed=True), swap_bytes))
        self.collect()

    def _copy(self, storage: int, sources: list[int], targets: list[int], waves: list[Wave], stream: Stream) -> None:
        first = sum(map(len, self._page_bytes[:storage]))
        for wave in waves:
            to: list[int] = []
            origin: list[int] = []
            sizes: list[int] = []
            for plane, size in enumerate(self._page_bytes[storage], first):
                source_base, target_base = sources[plane], targets[plane]
                for source, target, num_pages in wave:
                    origin.append(source_base + source * size)
                    to.append(target_base + target * size)
                    sizes.append(num_pages * size)
            self._gpu.copy_batch(to, origin, sizes, stream=stream)
            self.num_driver_calls += 1

    def collect(self) -> None:
        while self._timed and self._timed[0][1].is_done():
            start, end, size = self._timed.popleft()
            self.swap_s += end.elapsed_ms(start) / 1e3
            self.swap_bytes += size

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if (stream := getattr(self, "_stream", None)) and not is_over():
            with contextlib.suppress(DeviceError):  # of a device whose kernel failed, which is reported elsewhere
                stream.synchronize()
