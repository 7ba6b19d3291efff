"""The inputs of recordings: memory on the host and on the device for the arrays of a step, and of its samples, whose
addresses a recording holds. A step writes what has changed since the last one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import NO_LONG_CHUNKS, STEP_FIELDS, Batch, LongChunks, fields_of
from runtime.dtype import DType, uint8
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.layout import StepLayout
from runtime.engine.steps.recorder import Recorder
from runtime.kv.cache import KVCache
from runtime.sampling_arrays import SAMPLING_FIELDS, SampledTokens, SamplingArrays
from runtime.sampling_table import KERNEL_COLUMNS, PENALTIES
from runtime.tensor.storage import ALIGNMENT_BYTES, Storage
from runtime.tensor.tensor import Tensor
from runtime.tensor.views import contiguous_strides

MOST_LISTED = 1 << 16
"""Entries that each list of a recording's samples may have: of penalties, of biases, of chains."""

PADDING: dict[str, int | float] = {name: each.padding for name, each in STEP_FIELDS.items()}
PADDING |= {name: column.neutral for name, column in KERNEL_COLUMNS.items()}
"""The contents of padding: no token is stored, and samples are greedy, without anything else (0)."""
DEVICE_TYPES = {name: np.dtype(np.int64 if dtype == np.uint64 else dtype) for name, dtype, _ in SAMPLING_FIELDS}
"""The types of samples' arrays on a device: tensors have no uint64, so seeds are int64."""
_LISTS = {name for name, _, size in SAMPLING_FIELDS if size == "any"}


class SamplingShape(NamedTuple):
    """The fixed properties of a recording of samples.

    num_samples    rows of logits
    room           ids that each list may have
    has_penalties  of some sample; without any, a kernel that is told so need not look
    has_chains     some sample has a chain
    """

    num_samples: int
    room: int
    has_penalties: bool
    has_chains: bool

    @property
    def num_results(self) -> int:
        """Numbers that `ops.sample_into` writes."""
        return (3 if self.has_chains else 2) * self.num_samples + 1


def room_for(samples: SamplingArrays) -> int:
    """The number of entries in the longest of its lists."""
    return max(len(getattr(samples, name)) for name in _LISTS)


def shape_of(samples: SamplingArrays, num_samples: int) -> SamplingShape:
    """For at least ``num_samples``; room for ids is 0 or a power of two, at least 256."""
    longest = room_for(samples)
    room = max(256, 1 << (longest - 1).bit_length()) if longest else 1
    has_penalties = any((getattr(samples, name) != neutral).any() for name, neutral in PENALTIES.items())
    return SamplingShape(num_samples, room, has_penalties, samples.has_chains)


class Shape(NamedTuple):
    """The fixed properties of a recorded step. ``max_seq_len`` is rounded up. ``samples`` is None if it does not
    sample."""

    num_tokens: int
    num_seqs: int
    num_logits: int
    max_query_len: int
    max_seq_len: int
    samples: SamplingShape | None
    is_last_wanted: bool = False
    long_chunks: LongChunks = NO_LONG_CHUNKS
    has_adapters: bool = False

    def arrays(self, num_groups: int, limits: EngineLimits) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Name, type and sizes of each array, in their order in memory."""
        sizes = {
            "token": (self.num_tokens,),
            "chunk": (self.num_seqs,),
            "start": (self.num_seqs + 1,),
            "logit": (self.num_logits,),
            "block": (self.num_seqs, limits.table_width(self.max_seq_len)),
        }
        for name, each in fields_of(is_last_wanted=self.is_last_wanted, has_adapters=self.has_adapters).items():
            yield name, np.dtype(each.dtype), (*((num_groups,) if each.by_group else ()), *sizes[each.per])
        if self.samples is not None:
            for name, _, size in SAMPLING_FIELDS:
                yield name, DEVICE_TYPES[name], (self.samples.num_samples if size == "n" else self.samples.room,)


@dataclass(slots=True, eq=False)
class Inputs:
    """The inputs of one recording: views of the memory that all share.

    arrays      on the host, by name
    batch       on the device
    fields      of the samples, in the order of `ops.sample_into`'s
    size_bytes  to be uploaded
    """

    arrays: dict[str, NDArray[Any]]
    batch: Batch
    fields: list[Tensor]
    size_bytes: int


@dataclass(slots=True)
class StepMemory:
    """The memory for steps of a shape up to ``most``. On a CPU that of the host is the device's."""

    recorder: Recorder
    limits: EngineLimits
    kv_cache: KVCache
    most: Shape
    size_bytes: int = field(init=False)
    _num_groups: int = field(init=False)
    _host: NDArray[np.uint8] = field(init=False)
    _storage: Storage = field(init=False)
    _sent: Inputs | None = None  # the latest, and each of its inputs as it was given
    _given: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises OutOfMemoryError."""
        self._num_groups, size = len(self.kv_cache.spec.group_kinds), 0
        for _, dtype, sizes in self.most.arrays(self._num_groups, self.limits):
            size += _aligned(prod(sizes) * dtype.itemsize)
        host = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
        first = -host.ctypes.data % ALIGNMENT_BYTES
        self.size_bytes, self._host, device = size, host[first : first + size], self.recorder.device
        is_shared = device.kind == "cpu"
        self._storage = Storage.of_array(self._host)[0] if is_shared else Storage.allocate(device, size)

    def inputs(self, shape: Shape) -> Inputs:
        """The arrays of a shape, one after another."""
        arrays: dict[str, NDArray[Any]] = {}
        tensors: dict[str, Tensor] = {}
        at = 0
        for name, dtype, sizes in shape.arrays(self._num_groups, self.limits):
            size_bytes = prod(sizes) * dtype.itemsize
            arrays[name] = self._host[at : at + size_bytes].view(dtype).reshape(sizes)
            kind = DType.parse(dtype)
            tensors[name] = Tensor(self._storage, kind, sizes, contiguous_strides(sizes), at // dtype.itemsize)
            at += _aligned(size_bytes)
        layout = StepLayout(
            arrays, shape.max_query_len, shape.max_seq_len, shape.is_last_wanted, shape.long_chunks, shape.has_adapters
        )
        parts: list[Tensor] = []
        for name, each in layout.fields.items():
            parts += [tensors[name][group] for group in range(self._num_groups)] if each.by_group else [tensors[name]]
        batch = layout.batch_of(parts, exact=self.limits.exact)
        samples = [] if shape.samples is None else [tensors[name] for name, _, _ in SAMPLING_FIELDS]
        return Inputs(arrays, batch, samples, at)

    def write(self, inputs: Inputs, layout: StepLayout, samples: SamplingArrays | None) -> None:
        """Write a step to a recording's inputs, and queue their copy to the device, after pages that are being copied.
        The rest is padding: the tokens of empty sequences, which are not stored, and a sample for each of them. Given
        arrays are not changed afterwards."""
        if inputs is not self._sent:  # others use the same memory
            self._sent = inputs
            self._given.clear()
        lacking = len(inputs.arrays["token_ids"]) - layout.num_tokens
        for name, target in inputs.arrays.items():
            given = layout.arrays[name] if name in layout.arrays else getattr(samples, name)
            if given is self._given.get(name):
                continue
            self._given[name] = given
            if name == "block_tables":
                num_seqs, width = given.shape[1], min(given.shape[2], target.shape[2])
                target[:, :num_seqs, :width] = given[:, :, :width]
                target[:, :num_seqs, width:] = target[:, num_seqs:] = 0
                continue
            count = given.shape[-1]
            target[..., :count] = given.view(np.int64) if name == "seed" else given
            if target.shape[-1] == count or name in _LISTS:
                continue
            if name == "query_start":
                ends = np.minimum(np.arange(1, len(target) - count + 1) * inputs.batch.max_query_len, lacking)
                target[count:] = int(given[-1]) + ends
            elif name in ("logits_indices", "last_start"):
                target[count:] = np.arange(count, len(target))
            else:
                target[..., count:] = PADDING.get(name, 0)
        self.kv_cache.wait_for_arrivals()
        self.recorder.write(Tensor(self._storage, uint8, (inputs.size_bytes,), (1,)), self._host[: inputs.size_bytes])


def read_sampled(sampled: Tensor, count: int, *, has_chains: bool) -> SampledTokens:
    """The first ``count`` samples. Waits for the device. Raises LaunchError if it failed, InvalidArgumentError if an id
    was outside the vocabulary."""
    num_samples = sampled.shape[0] // (3 if has_chains else 2)
    if sampled.device.kind == "cpu":  # its kernels check ids themselves
        results = sampled.array
    else:
        results = sampled.to("cpu").array
        if results[2 * num_samples]:
            ops.check_ids(sampled.device)
    return sampled_of(results, num_samples, slice(count), has_chains=has_chains)


def sampled_of(
    results: NDArray[np.int32], num_samples: int, chosen: slice | NDArray[np.intp], *, has_chains: bool
) -> SampledTokens:
    """Copies of some of the samples that `ops.sample_into` has written."""
    mus = results[2 * num_samples + 1 :].view(np.float32)[chosen].copy() if has_chains else None
    return SampledTokens(results[chosen].copy(), results[num_samples : 2 * num_samples][chosen] == 0, mus)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
