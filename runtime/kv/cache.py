"""The storage of the KV pages: which layers have them, where they lie in memory, and their size in bytes.

`runtime.kv.forms` has the forms of pages, `runtime.kv.kinds` which pages a sequence needs. Each form has a pool of
blocks of its own, numbered through all pools: those of the first pool come first. A pool has as many storages as one of
its groups has layers (`runtime.kv.groups`): the i-th layers of all its groups share its i-th storage, where each block
belongs to one group at a time. Swapping and transfer move planes, not layers. Layers may keep pages of another type; a
storage has the planes of every type that its layers have, so that layers of two types which share one cost the bytes of
both.

`HostPages` holds whole blocks in host memory in the same layout, for swapping; `runtime.kv.transfer` moves them. The
engine's block pool knows which blocks belong to which sequence.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.gemm.panels import zeroed_bytes
from runtime.device.context import Event
from runtime.device.device import CPU, Device
from runtime.device.gpu import Gpu
from runtime.device.pinned import PinnedBlock
from runtime.dtype import DType
from runtime.errors import InvalidArgumentError, OutOfMemoryError
from runtime.kv.forms import KeyValues, Latent, PageForm, Plane
from runtime.kv.groups import CacheGroup, cut_layers, of_layers
from runtime.kv.kinds import FULL, AnyKind, kind_of_window
from runtime.tensor.storage import ALIGNMENT_BYTES
from runtime.tensor.tensor import Tensor

_GPU_BLOCK_SIZES = (8, 16, 32)
_BLOCK_SIZE_MULTIPLE = 8  # float32 lanes of the narrowest vector that the score kernel is built for


class LayerCache(NamedTuple):
    """The pages of one layer: their form, their kind, and their type (None: the spec's)."""

    form: PageForm
    kind: AnyKind = FULL
    dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of one model's KV cache; the engine chooses the number of blocks.

    Attributes:
        layers: the pages of each layer; or the earlier layer whose pages it uses, since it has none of its own; or None
            for a layer that uses none.
        block_size: tokens a page.
        dtype: the type of pages, unless a layer has its own.
        own_layers: those of this stage, which alone have pages, or None for all.
        groups: of the layers, by those of all stages.
        planes: of one block, for each storage, pool by pool.
        pool_of_storage: its pool, for each storage.

    Raises InvalidArgumentError if there are no layers, for unknown own layers, a layer that shares the pages of one
    that has none, a ``block_size`` that is not a multiple of 8 (on a GPU: not 8, 16 or 32), or a type that some form of
    page does not have.
    """

    layers: tuple[LayerCache | int | None, ...]
    block_size: int
    dtype: DType
    device: Device = CPU
    own_layers: range | None = None
    groups: tuple[CacheGroup, ...] = field(init=False, repr=False, compare=False)
    planes: tuple[tuple[Plane, ...], ...] = field(init=False, repr=False, compare=False)
    pool_of_storage: tuple[int, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def uniform(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: DType, device: Device = CPU, *,
        layer_windows: tuple[int | None, ...] = (), layer_dtypes: tuple[DType, ...] = (), latent_values: int = 0,
        own_layers: range | None = None,
    ) -> KVCacheSpec:  # fmt: skip
        """The spec of layers whose pages have one form.

        Args:
            layer_windows: attention window of each layer in tokens, the query's included, None for full; empty: all
                full.
            layer_dtypes: the type of each layer's pages; empty: all have `dtype`.
            latent_values: the length of a value in latent pages; 0 for separate keys and values.

        Raises InvalidArgumentError for a size that is not positive, or a wrong number of windows or types.
        """
        windows, dtypes = layer_windows or (None,) * num_layers, layer_dtypes or (None,) * num_layers
        if len(dtypes) != num_layers:
            raise InvalidArgumentError(
                f"KVCacheSpec: layer_dtypes are {len(dtypes)}, must be {num_layers}", param="layer_dtypes"
            )
        if len(windows) != num_layers or any(window is not None and window < 1 for window in windows):
            raise InvalidArgumentError(
                f"KVCacheSpec: layer_windows is {windows}, must hold None or at least 1 for each of {num_layers} "
                "layers",
                param="layer_windows",
            )
        form: PageForm = Latent(head_dim, latent_values) if latent_values else KeyValues(num_kv_heads, head_dim)
        layers = [LayerCache(form, kind_of_window(window), own) for window, own in zip(windows, dtypes)]
        return cls(tuple(layers), block_size, dtype, device, own_layers)

    def __post_init__(self) -> None:
        for name, value in (("num_layers", self.num_layers), ("block_size", self.block_size)):
            if value < 1:
                raise InvalidArgumentError(f"KVCacheSpec: {name} is {value}, must be at least 1", param=name)
        if self.block_size % _BLOCK_SIZE_MULTIPLE:
            raise InvalidArgumentError(
                f"KVCacheSpec: block_size is {self.block_size}, must be a multiple of {_BLOCK_SIZE_MULTIPLE}",
                param="block_size",
            )
        if self.device.kind != "cpu" and self.block_size not in _GPU_BLOCK_SIZES:
            raise InvalidArgumentError(
                f"KVCacheSpec: block_size is {self.block_size}, must be 8, 16 or 32 on {self.device}",
                param="block_size",
            )
        own = range(self.num_layers) if self.own_layers is None else self.own_layers
        if not 0 <= own.start < own.stop <= self.num_layers or own.step != 1:
            raise InvalidArgumentError(
                f"KVCacheSpec: own_layers is {own}, must be some of {self.num_layers} layers", param="own_layers"
            )
        for layer in self.layers_with_pages:
            source = self.source_of(layer)
            if not 0 <= source <= layer or not isinstance(self.layers[source], LayerCache) or source not in own:
                raise InvalidArgumentError(
                    f"KVCacheSpec: layer {layer} uses the pages of layer {source}, which must have pages of its own, "
                    f"among layers {own.start} to {layer}",
                    param="layers",
                )
        kept = [layer if isinstance(layer, LayerCache) else None for layer in self.layers]
        groups = of_layers(
            cut_layers([layer and layer.kind for layer in kept], [layer and layer.form for layer in kept]), own
        )
        object.__setattr__(self, "groups", groups)
        sizes = {group.pool: len(group.layers) + group.num_padding for group in groups}
        places = [(pool, storage) for pool in sorted(sizes) for storage in range(sizes[pool])]
        planes = [
            tuple(plane for own in self._contents(*place) for plane in own.form.planes(
                self.block_size, own.dtype or self.dtype, self.device.kind == "cpu"
            ))
            for place in places
        ]  # fmt: skip
        object.__setattr__(self, "planes", tuple(planes))
        object.__setattr__(self, "pool_of_storage", tuple(pool for pool, _ in places))

    @property
    def num_layers(self) -> int:
        """Those without pages of their own included."""
        return len(self.layers)

    @property
    def layers_with_pages(self) -> list[int]:
        """Those of this stage that use pages, their own or another's."""
        own = range(self.num_layers) if self.own_layers is None else self.own_layers
        return [layer for layer in own if self.layers[layer] is not None]

    def source_of(self, layer: int) -> int:
        """The layer whose pages this layer uses, mostly itself."""
        kept = self.layers[layer]
        return kept if isinstance(kept, int) else layer

    def of_layer(self, layer: int) -> LayerCache:
        """The pages that a layer uses, with their type."""
        kept = self.layers[self.source_of(layer)]
        assert isinstance(kept, LayerCache)
        return kept._replace(dtype=kept.dtype or self.dtype)

    def _contents(self, pool: int, storage: int) -> tuple[LayerCache, ...]:
        """The forms and types of pages that a storage's layers have, each once."""
        groups = [group for group in self.groups if group.pool == pool and storage < len(group.layers)]
        kept = [self.of_layer(group.layers[storage])._replace(kind=FULL) for group in groups]
        return tuple(dict.fromkeys(kept))

    def place_of(self, layer: int) -> tuple[int, int, slice]:
        """A layer's group and storage, and its planes among those of the storage."""
        source = self.source_of(layer)
        number, group = next(each for each in enumerate(self.groups) if source in each[1].layers)
        inside, first, own = group.layers.index(source), 0, self.of_layer(source)._replace(kind=FULL)
        for each in self._contents(group.pool, inside):
            count = len(each.form.planes(self.block_size, each.dtype or self.dtype, self.device.kind == "cpu"))
            if each == own:
                break
            first += count
        return number, self.pool_of_storage.index(group.pool) + inside, slice(first, first + count)

    @property
    def group_kinds(self) -> tuple[AnyKind, ...]:
        """The kind of each group."""
        return tuple(group.kind for group in self.groups)

    @property
    def group_pools(self) -> tuple[int, ...]:
        """The pool of each group."""
        return tuple(group.pool for group in self.groups)

    @property
    def pool_of_plane(self) -> list[int]:
        """By plane of all storages: its pool."""
        return [pool for pool, planes in zip(self.pool_of_storage, self.planes, strict=True) for _ in planes]

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """By pool: bytes of one block, a page of every layer of one group, padding included."""
        found = [0] * (max(self.group_pools) + 1)
        for pool, planes in zip(self.pool_of_storage, self.planes, strict=True):
            found[pool] += sum(plane.size_bytes for plane in planes)
        return tuple(found)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token that all groups of pages of tokens hold, padding included."""
        return sum(self.block_bytes[each.pool] for each in self.groups if each.kind.follows_tokens) // self.block_size

    @property
    def state_bytes(self) -> int:
        """Bytes of one page of each group of states."""
        return sum(self.block_bytes[each.pool] for each in self.groups if not each.kind.follows_tokens)

    def most_states(self, pool_sizes: Sequence[int]) -> int | None:
        """How many sequences' states fit pools of so many pages; None without states."""
        pages = Counter[int]()  # by pool: those of a sequence's states
        for pool, kind in zip(self.group_pools, self.group_kinds):
            pages[pool] += 0 if kind.follows_tokens else kind.table_pages(1, self.block_size)
        return min((pool_sizes[pool] // count for pool, count in pages.items() if count), default=None)


class KVCache:
    """The pages of every layer on the spec's device, allocated once and zeroed, since kernels read whole pages even if
    they are partly written.

    Attributes:
        spec, device: as given.
        pool_sizes: blocks of each pool; `num_blocks` of all.
        storages: the pages of each storage, plane by plane: ``[blocks of its pool, ...]`` by the spec's `planes`.
        arrivals: on a GPU, by storage: the events that work on its pages has to wait for (`runtime.kv.transfer`).

    Raises InvalidArgumentError unless ``num_blocks`` has a positive number for each pool (or is the one number),
    OutOfMemoryError if the device refuses the bytes.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int | Sequence[int]) -> None:
        self.spec = spec
        self.pool_sizes = _sizes("KVCache: num_blocks", spec, num_blocks)
        self.num_blocks = sum(self.pool_sizes)
        self.device = spec.device
        self.arrivals: dict[int, Event] = {}
        self.storages: list[tuple[Tensor, ...]] = []
        self._places = {layer: spec.place_of(layer) for layer in spec.layers_with_pages}
        self._passed: Callable[[int], None] | None = None
        self.allocate()

    def allocate(self) -> None:
        """Allocates the pages anew, zeroed, after `free`. Raises OutOfMemoryError."""
        spec = self.spec
        found = [
            [((self.pool_sizes[pool], *plane.shape), plane.dtype) for plane in planes]
            for pool, planes in zip(spec.pool_of_storage, spec.planes, strict=True)
        ]
        if spec.device.kind == "cpu":
            rest = iter(_host_pages([plane for planes in found for plane in planes]))
            self.storages = [tuple(next(rest) for _ in planes) for planes in found]
            return
        self.storages = [tuple(_device_pages(shape, dtype, spec.device) for shape, dtype in planes) for planes in found]
        Gpu.of(spec.device).stream.synchronize()  # any stream may use them from now on

    def free(self) -> None:
        """Lets the pages go. No work may be queued, and none recorded, that uses them."""
        self.arrivals.clear()
        self.storages = []

    def group_of(self, layer: int) -> int:
        """The group whose block tables and slots the layer uses."""
        return self._places[layer][0]

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Layer ``index``'s pages, plane by plane: K, V and, if they are quantised, the scales of both; or the one
        plane of latent pages. Each is ``[num_blocks, ...]`` by the spec's `planes`.

        Later work on the device's current stream waits for the pending copies of these pages. A recorded graph does not
        call this: see `wait_for_arrivals`.
        """
        _, storage, planes = self._places[index]
        if self.arrivals:
            self._wait(storage)
        if self._passed is not None:
            self._passed(index)
        return self.storages[storage][planes]

    @contextmanager
    def followed_by(self, passed: Callable[[int], None] | None) -> Iterator[None]:
        """Until the block ends, ``passed`` is called with each layer whose pages are asked for: the work of the layers
        before it is launched, or recorded, by then."""
        self._passed = passed
        try:
            yield
        finally:
            self._passed = None

    def wait_for_arrivals(self) -> None:
        """As `layer` for all layers: later work on the device's current stream, such as a graph's replay, waits for all
        pending copies of pages."""
        for storage in list(self.arrivals):
            self._wait(storage)

    def _wait(self, storage: int) -> None:
        if (arrival := self.arrivals.pop(storage, None)) is not None:
            Gpu.of(self.device).stream.wait(arrival)

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        return _size_of(self.spec, self.pool_sizes)


class HostPages:
    """Whole blocks in host memory, allocated once: pinned for a GPU, real or emulated, plain for the CPU.

    Attributes:
        spec: of the cache whose blocks fit here.
        pool_sizes: blocks of each pool that there is room for.
        planes: those of storage 0, those of storage 1 …: each uint8 ``[slots of its pool, bytes of one page]``.

    Raises InvalidArgumentError unless ``num_slots`` has a positive number for each pool (or is the one number),
    OutOfMemoryError with the sizes if the machine has less memory, or refuses it.
    """

    def __init__(self, spec: KVCacheSpec, num_slots: int | Sequence[int]) -> None:
        self.spec = spec
        self.pool_sizes = _sizes("HostPages: num_slots", spec, num_slots)
        slots = " and ".join(f"{count} slots of {size} bytes" for count, size in zip(self.pool_sizes, spec.block_bytes))
        needed = f"HostPages: {slots} are {self.size_bytes} bytes"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.size_bytes > memory:  # the system may overcommit
            raise OutOfMemoryError(f"{needed}, the machine has {memory}")
        self._pinned: list[PinnedBlock] = []  # they own the planes' bytes
        try:
            self.planes = [
                self._plane(self.pool_sizes[pool], plane.size_bytes)
                for pool, planes in zip(spec.pool_of_storage, spec.planes, strict=True)
                for plane in planes
            ]
        except MemoryError as error:
            raise OutOfMemoryError(f"{needed}, which were refused: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots."""
        return _size_of(self.spec, self.pool_sizes)

    def _plane(self, num_slots: int, page_bytes: int) -> NDArray[np.uint8]:
        shape = (num_slots, page_bytes)
        if self.spec.device.kind == "cpu":
            plane = np.empty(shape, np.uint8)
            plane.fill(0)  # allocates the memory now, and not page by page during the first swaps
            return plane
        self._pinned.append(Gpu.of(self.spec.device).pinned.allocate(math.prod(shape)))
        return self._pinned[-1].array.reshape(shape)


def _device_pages(shape: tuple[int, ...], dtype: DType, device: Device) -> Tensor:
    pages = Tensor.empty(shape, dtype, device)
    Gpu.of(device).fill(pages.address, 0, pages.size_bytes)
    return pages


def _host_pages(planes: Sequence[tuple[tuple[int, ...], DType]]) -> list[Tensor]:
    """All layers' planes (shape, type) in one memory, so that huge pages hold those of short caches, too. Each begins
    with a cache line: states are stored around the caches, in whole lines."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in planes]
    starts = list(accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0))
    try:
        memory = zeroed_bytes(starts[-1])
    except (MemoryError, OSError, OverflowError) as error:
        raise OutOfMemoryError(f"KVCache: {starts[-1]} bytes of pages were refused") from error
    return [
        Tensor.from_numpy(memory[start : start + size].view(dtype.numpy).reshape(shape))
        for start, size, (shape, dtype) in zip(starts, sizes, planes)
    ]


def _sizes(what: str, spec: KVCacheSpec, given: int | Sequence[int]) -> tuple[int, ...]:
    """The number of each pool."""
    sizes, num_pools = (given,) if isinstance(given, int) else tuple(given), len(spec.block_bytes)
    param = what.split()[-1]
    if len(sizes) != num_pools:
        raise InvalidArgumentError(f"{what} has {len(sizes)} numbers, must have one for {num_pools} pools", param=param)
    if min(sizes) < 1:
        raise InvalidArgumentError(f"{what} is {min(sizes)}, must be at least 1", param=param)
    return sizes


def _size_of(spec: KVCacheSpec, pool_sizes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(pool_sizes, spec.block_bytes, strict=True))
