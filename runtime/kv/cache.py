"""The storage of the KV pages: their layout in memory, and their size in bytes.

A page (block) holds ``block_size`` consecutive tokens of one sequence for every KV head of one layer, in separate
planes: keys, values. On the CPU the keys of a page are stored transposed, so that a vector register runs over the
tokens of the page and ``q . K`` needs no horizontal sums, and the values' rows are padded to whole vectors of 16:

- K ``[num_blocks, num_kv_heads, head_dim, block_size]``
- V ``[num_blocks, num_kv_heads, block_size, head_dim rounded up to 16]``

Pages of int8 and fp8 (e4m3) have two planes more, ``k_scale`` and ``v_scale``, float32 ``[num_blocks, num_kv_heads,
block_size]``: the scale of each token's numbers in each head. They are written with the token, so no calibration is
needed.

Latent pages (MLA, https://arxiv.org/abs/2405.04434) have one plane on every device, ``latent``: a row a token, which is
the key of all query heads, and whose last ``latent_values`` numbers are their value:

- ``[num_blocks, 1, block_size, head_dim rounded up]``, to 16 on the cpu, to 8 on a GPU

On a GPU, real or emulated, keys and values are ``[num_blocks, num_kv_heads, block_size, head_dim rounded up to 8]``, of
bytes to 16: one head's part of a page is one run of whole 16-byte pieces (`numba_kernels.cuda.kv_cache`).

The cache has as many storages as a group has layers (`runtime.kv.groups`): the i-th layers of all groups share the i-th
storage, where each block belongs to one group at a time. Swapping and transfer move planes, not layers. Layers may keep
pages of another type (`layer_dtypes`); a storage has the planes of every type that its layers have, so that layers of
two types which share one cost the bytes of both.

`HostPages` holds whole blocks in host memory in the same layout, for swapping; `runtime.kv.transfer` moves them. The
engine's block pool knows which blocks belong to which sequence.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import CPU, Device
from runtime.dtype import PAGES, STORED, DType, float32
from runtime.errors import InvalidArgumentError, OutOfMemoryError
from runtime.kv.groups import CacheGroup, cut_layers, of_layers
from runtime.kv.kinds import AnyKind, kind_of_window
from runtime.tensor.tensor import Tensor

if TYPE_CHECKING:
    from runtime.device.pinned import PinnedBlock
    from runtime.device.stream import Event

_CPU_VALUE_ROW_MULTIPLE = 16  # float32 lanes of the widest vector: V rows are whole vectors
_GPU_ROW_MULTIPLE = 8  # 16 bytes of the narrowest type wider than a byte
_GPU_ROW_BYTES = 16
_GPU_BLOCK_SIZES = (8, 16, 32)
_BLOCK_SIZE_MULTIPLE = 8  # float32 lanes of the narrowest vector that the score kernel is built for


class Plane(NamedTuple):
    """One array of a page: its name, and the shape and type of one block of one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of one model's KV cache; the engine chooses the number of blocks.

    Attributes:
        layer_windows: attention window of each layer in tokens, the query's included, None for full; empty: all full.
        layer_dtypes: the type of each layer's pages; empty: all have `dtype`.
        latent_values: the length of a value in latent pages; 0 for separate keys and values.
        own_layers: those of this stage, which alone have pages, or None for all.
        groups: of the layers, by the windows of all.
        planes: of one block, for each storage.

    Raises InvalidArgumentError for a size that is not positive, a wrong number of windows, unknown own layers, a
    ``block_size`` that is not a multiple of 8 (on a GPU: not 8, 16 or 32), or a dtype other than float32, float16,
    bfloat16, int8 and float8_e4m3, of which the last two are not for latent pages.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens a page
    dtype: DType
    device: Device = CPU
    layer_windows: tuple[int | None, ...] = ()
    layer_dtypes: tuple[DType, ...] = ()
    latent_values: int = 0
    own_layers: range | None = None
    groups: tuple[CacheGroup, ...] = field(init=False, repr=False, compare=False)
    planes: tuple[tuple[Plane, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
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
        kinds = STORED if self.latent_values else PAGES
        for name, dtypes in (("dtype", (self.dtype,)), ("layer_dtypes", self.layer_dtypes)):
            if wrong := [dtype.name for dtype in dtypes if dtype not in kinds]:
                names = ", ".join(dtype.name for dtype in kinds)
                raise InvalidArgumentError(f"KVCacheSpec: {name} is {wrong[0]}, must be one of {names}", param=name)
        if len(self.layer_dtypes) not in (0, self.num_layers):
            raise InvalidArgumentError(
                f"KVCacheSpec: layer_dtypes are {len(self.layer_dtypes)}, must be {self.num_layers}",
                param="layer_dtypes",
            )

        windows = self.layer_windows or (None,) * self.num_layers
        if len(windows) != self.num_layers or any(window is not None and window < 1 for window in windows):
            raise InvalidArgumentError(
                f"KVCacheSpec: layer_windows is {windows}, must hold None or at least 1 for each of {self.num_layers} "
                "layers",
                param="layer_windows",
            )
        own = range(self.num_layers) if self.own_layers is None else self.own_layers
        if not 0 <= own.start < own.stop <= self.num_layers or own.step != 1:
            raise InvalidArgumentError(
                f"KVCacheSpec: own_layers is {own}, must be some of {self.num_layers} layers", param="own_layers"
            )
        object.__setattr__(self, "groups", of_layers(cut_layers(tuple(map(kind_of_window, windows))), own))
        planes = tuple(
            tuple(plane for dtype in self.dtypes_of(storage) for plane in self._make_planes(dtype))
            for storage in range(self.num_storages)
        )
        object.__setattr__(self, "planes", planes)

    def dtypes_of(self, storage: int) -> tuple[DType, ...]:
        """The types of pages that a storage's layers have, each once."""
        layers = [group.layers[storage] for group in self.groups if storage < len(group.layers)]
        return tuple(dict.fromkeys(self.dtype_of(layer) for layer in layers))

    def dtype_of(self, layer: int) -> DType:
        """The type of a layer's pages."""
        return self.layer_dtypes[layer] if self.layer_dtypes else self.dtype

    def planes_of(self, layer: int, storage: int) -> slice:
        """The layer's planes among those of its storage."""
        first = 0
        for dtype in self.dtypes_of(storage):
            count = 1 if self.latent_values else 2 if dtype in STORED else 4
            if dtype is self.dtype_of(layer):
                return slice(first, first + count)
            first += count
        raise AssertionError(f"layer {layer} has no planes in storage {storage}")

    def _make_planes(self, dtype: DType) -> tuple[Plane, ...]:
        tokens = self.num_kv_heads, self.block_size
        if self.latent_values:
            multiple = _CPU_VALUE_ROW_MULTIPLE if self.device.kind == "cpu" else _GPU_ROW_MULTIPLE
            return (Plane("latent", (1, self.block_size, _round_up(self.head_dim, multiple)), dtype),)
        if self.device.kind == "cpu":
            k_shape: tuple[int, ...] = (self.num_kv_heads, self.head_dim, self.block_size)
            v_shape: tuple[int, ...] = (*tokens, _round_up(self.head_dim, _CPU_VALUE_ROW_MULTIPLE))
        else:
            multiple = _GPU_ROW_BYTES if dtype.itemsize == 1 else _GPU_ROW_MULTIPLE
            k_shape = v_shape = (*tokens, _round_up(self.head_dim, multiple))
        pages = Plane("k", k_shape, dtype), Plane("v", v_shape, dtype)
        if dtype in STORED:
            return pages
        return *pages, Plane("k_scale", tokens, float32), Plane("v_scale", tokens, float32)

    @property
    def num_storages(self) -> int:
        """Layers of each group, padding included."""
        return len(self.groups[0].layers) + self.groups[0].num_padding

    @property
    def group_kinds(self) -> tuple[AnyKind, ...]:
        """The kind of each group."""
        return tuple(group.kind for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: a page of every layer of one group, padding included."""
        return sum(plane.size_bytes for planes in self.planes for plane in planes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token that all groups hold, padding included."""
        return len(self.groups) * self.bytes_per_block // self.block_size


class KVCache:
    """The pages of every layer on the spec's device, allocated once and zeroed, since kernels read whole pages even if
    they are partly written.

    Attributes:
        spec, num_blocks, device: as given.
        storages: the pages of each storage, plane by plane: ``[num_blocks, ...]`` by the spec's `planes`.
        arrivals: on a GPU, by storage: the events that work on its pages has to wait for (`runtime.kv.transfer`).

    Raises InvalidArgumentError if ``num_blocks`` is not positive, OutOfMemoryError if the device refuses the bytes.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidArgumentError(f"KVCache: num_blocks is {num_blocks}, must be at least 1", param="num_blocks")
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = spec.device
        self.arrivals: dict[int, Event] = {}
        self.storages = [
            tuple(_pages((num_blocks, *plane.shape), plane.dtype, spec.device) for plane in planes)
            for planes in spec.planes
        ]
        self._places = {
            layer: (number, storage, spec.planes_of(layer, storage))
            for number, group in enumerate(spec.groups)
            for storage, layer in enumerate(group.layers)
        }
        if spec.device.kind != "cpu":  # any stream may use them from now on
            from runtime.device.gpu import Gpu

            Gpu.of(spec.device).stream.synchronize()

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
        return self.storages[storage][planes]

    def wait_for_arrivals(self) -> None:
        """As `layer` for all layers: later work on the device's current stream, such as a graph's replay, waits for all
        pending copies of pages."""
        for storage in list(self.arrivals):
            self._wait(storage)

    def _wait(self, storage: int) -> None:
        if (arrival := self.arrivals.pop(storage, None)) is not None:
            from runtime.device.gpu import Gpu

            Gpu.of(self.device).stream.wait(arrival)

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_blocks * self.spec.bytes_per_block


class HostPages:
    """Whole blocks in host memory, allocated once: pinned for a GPU, real or emulated, plain for the CPU.

    Attributes:
        spec: of the cache whose blocks fit here.
        num_slots: blocks that there is room for.
        planes: those of storage 0, those of storage 1 …: each uint8 ``[num_slots, bytes of one page]``.

    Raises InvalidArgumentError if ``num_slots`` is not positive, OutOfMemoryError with the sizes if the machine has
    less memory, or refuses it.
    """

    def __init__(self, spec: KVCacheSpec, num_slots: int) -> None:
        if num_slots < 1:
            raise InvalidArgumentError(f"HostPages: num_slots is {num_slots}, must be at least 1", param="num_slots")
        self.spec = spec
        self.num_slots = num_slots
        needed = f"HostPages: {num_slots} slots of {spec.bytes_per_block} bytes are {self.size_bytes} bytes"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.size_bytes > memory:  # the system may overcommit
            raise OutOfMemoryError(f"{needed}, the machine has {memory}")
        self._pinned: list[PinnedBlock] = []  # they own the planes' bytes
        try:
            self.planes = [self._plane(plane.size_bytes) for planes in spec.planes for plane in planes]
        except MemoryError as error:
            raise OutOfMemoryError(f"{needed}, which were refused: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.spec.bytes_per_block

    def _plane(self, page_bytes: int) -> NDArray[np.uint8]:
        shape = (self.num_slots, page_bytes)
        if self.spec.device.kind == "cpu":
            plane = np.empty(shape, np.uint8)
            plane.fill(0)  # allocates the memory now, and not page by page during the first swaps
            return plane
        from runtime.device.gpu import Gpu  # imports the driver, which the CPU does not need

        self._pinned.append(Gpu.of(self.spec.device).pinned.allocate(math.prod(shape)))
        return self._pinned[-1].array.reshape(shape)


def _pages(shape: tuple[int, ...], dtype: DType, device: Device) -> Tensor:
    if device.kind != "cpu":
        from runtime.device.gpu import Gpu

        pages = Tensor.empty(shape, dtype, device)
        Gpu.of(device).fill(pages.address, 0, pages.size_bytes)
        return pages
    try:
        return Tensor.from_numpy(np.zeros(shape, dtype.numpy))
    except MemoryError as error:
        size = math.prod(shape) * dtype.itemsize
        raise OutOfMemoryError(f"KVCache: {size} bytes for one layer's pages {shape} were refused") from error


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
