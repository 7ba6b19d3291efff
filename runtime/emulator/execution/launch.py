"""Running a kernel over a grid: arguments and state laid out, OS threads set to it, a fault made into an exception."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np

from runtime.device.collection import NO_COLLECTION
from runtime.emulator.async_copies.proxy import proxy_bytes
from runtime.emulator.execution import counters, warp_state
from runtime.emulator.execution.counters import Counters
from runtime.emulator.execution.deadlock import who_waits
from runtime.emulator.execution.fault import RECORD_FIELDS, EmulatorFault, FaultKind, message_of
from runtime.emulator.execution.residency import Slot, SlotShape, lay_out
from runtime.emulator.execution.traffic import TRAFFIC_FIELDS, traffic_of
from runtime.emulator.execution.warp_scheduler import (
    FAULTED,
    NEEDS_SLOT,
    Q_COUNT,
    Q_FACTOR,
    Q_SHIFT,
    QUEUE_FIELDS,
    abandon,
    run_clusters,
)
from runtime.emulator.execution.warp_state import (
    CHECK_ASYNC,
    CHECK_MEMORY,
    CHECK_RACES,
    CHECK_UNINITIALIZED,
    COUNT_MEMORY,
)
from runtime.emulator.memory.device_memory import Machine
from runtime.emulator.memory.fault_description import LaunchShape, explain, is_memory_fault, kind_of
from runtime.emulator.races.launch_memory import RaceMemory
from runtime.emulator.translation.operations import compile_operation
from runtime.emulator.translation.program import LoadedKernel, Program, load
from runtime.errors import InvalidArgumentError

__all__ = ["Checks", "LoadedKernel", "Program", "launch", "load"]

Dim3 = tuple[int, int, int]


class Checks(IntFlag):
    """Checks of a launch, and its counting of traffic."""

    NONE = 0
    MEMORY = CHECK_MEMORY
    UNINITIALIZED = CHECK_UNINITIALIZED
    RACES = CHECK_RACES
    ASYNC = CHECK_ASYNC
    TRAFFIC = COUNT_MEMORY
    ALL = CHECK_MEMORY | CHECK_UNINITIALIZED | CHECK_RACES | CHECK_ASYNC


_MAX_THREADS = 1024
_WORK_FOR_COMPANY = 1 << 16
"""A grid with fewer instructions to run, without loops, is not worth a second OS thread."""
_MAX_SLOTS = 4096
_SLOTS_WITH_SEED = 4
_NUM_SMS = 132


@dataclass(slots=True)
class _Worker:
    """Data of one OS thread of a launch."""

    fields: Any  # the launch array
    record: Any  # the fault record
    counts: Any
    traffic: Any
    slots: list[Slot]
    random: Any


def _dim3(name: str, value: Dim3) -> Dim3:
    x, y, z = value
    if min(x, y, z) < 1:
        raise InvalidArgumentError(f"launch: {name} {value}: each must be at least 1", param=name)
    return x, y, z


def launch(
    kernel: LoadedKernel,
    machine: Machine,
    grid: Dim3,
    block: Dim3,
    shared_bytes: int,
    parameters: bytes,
    cluster: Dim3 = (1, 1, 1),
    *,
    checks: Checks,
    variables: Mapping[str, int] | None = None,
    is_dependent: bool = False,
    stream_order: int = 0,
    seed: int = 0,
    num_threads: int = 2,
) -> Counters:
    """Runs a kernel to its end.

    Args:
        kernel: of a loaded program.
        machine: whose memory it works on.
        grid, block, cluster: blocks, threads a block, blocks a cluster.
        shared_bytes: dynamic shared memory.
        parameters: the parameters' bytes, each at its own alignment.
        checks: the checks to make.
        variables: addresses of the program's .global and .const variables, from `Program.place` for this machine.
        is_dependent: a programmatic dependent launch: memory may be touched only after griddepcontrol.wait.
        stream_order: address of the stream checker's data (races/stream_touch.py), or 0 without it.
        seed: 0 runs blocks and warps in their natural order, anything else shuffles both.
        num_threads: OS threads to use, where blocks do not communicate.

    Raises:
        InvalidArgumentError: sizes that no GPU takes, or that do not fit each other.
        EmulatorFault: the kernel's fault.
        UnsupportedInstruction: for an instruction that the emulator lacks.
    """
    grid, block, cluster = _dim3("grid", grid), _dim3("block", block), _dim3("cluster", cluster)
    threads = math.prod(block)
    if threads > _MAX_THREADS:
        raise InvalidArgumentError(f"launch: block {block} has {threads} threads, at most 1024", param="block")
    if any(count % size for count, size in zip(grid, cluster)):
        raise InvalidArgumentError(f"launch: grid {grid} is no multiple of cluster {cluster}", param="grid")
    if shared_bytes < 0:
        raise InvalidArgumentError(f"launch: shared_bytes is {shared_bytes}", param="shared_bytes")
    if len(parameters) != kernel.parameter_bytes:
        raise InvalidArgumentError(
            f"launch: {kernel.name} takes {kernel.parameter_bytes} parameter bytes, not {len(parameters)}",
            param="parameters",
        )
    run = _Run(kernel, machine, grid, block, cluster, shared_bytes, parameters, checks, variables or {}, is_dependent)
    run.stream_order = stream_order
    return run.run(seed, num_threads)


class _Run:
    """One launch."""

    def __init__(
        self, kernel: LoadedKernel, machine: Machine, grid: Dim3, block: Dim3, cluster: Dim3, shared_bytes: int,
        parameters: bytes, checks: Checks, variables: Mapping[str, int], is_dependent: bool,
    ) -> None:  # fmt: skip
        self.kernel, self.machine = kernel, machine
        self.grid, self.block, self.cluster = grid, block, cluster
        self.translation = kernel.translation
        self.cluster_size = math.prod(cluster)
        self.num_clusters = math.prod(grid) // self.cluster_size
        self.num_warps = -(-math.prod(block) // 32)
        self.checks, self.is_dependent, self.stream_order = checks, is_dependent, 0
        self.dynamic_bytes = shared_bytes
        self.shared_total = kernel.shared.total_bytes(shared_bytes)
        has_shadow = bool(checks & (Checks.MEMORY | Checks.UNINITIALIZED))
        self.shape = SlotShape(
            self.cluster_size,
            self.num_warps,
            self.translation.register_bytes,
            self.shared_total,
            has_shadow,
            kernel.local_bytes,
            proxy_bytes(self.shared_total) if kernel.needs_proxy and checks & Checks.ASYNC else 0,
            self.translation.reads_undefined,
        )
        self._shadow = np.frombuffer(kernel.shared.shadow(shared_bytes), dtype=np.uint8)
        self._shape = self.shape.as_array(self._shadow.ctypes.data)
        self._parameters = np.frombuffer(parameters + bytes(16), dtype=np.uint8)
        missing = [name for name in kernel.variables if name not in variables]
        if missing:
            raise InvalidArgumentError(f"launch: no address for variable {missing[0]}", param="variables")
        self._symbols = np.array([variables[name] for name in kernel.variables] or [0], dtype=np.int64)
        self._queue = np.zeros(QUEUE_FIELDS, dtype=np.int64)
        others = machine.regions()[1:]
        self._regions = np.array([len(others), *(value for region in others for value in region)], dtype=np.int64)

    def run(self, seed: int, num_threads: int) -> Counters:
        work = self.num_clusters * self.cluster_size * self.num_warps * len(self.kernel.kernel.instructions)
        alone = self.kernel.communicates or work < _WORK_FOR_COMPANY or self.num_clusters < 2
        if alone or self.checks & Checks.RACES:
            num_threads = 1
        self._queue[Q_COUNT] = self.num_clusters
        self._queue[Q_FACTOR], self._queue[Q_SHIFT] = _order(self.num_clusters, seed)
        races = None
        if self.checks & Checks.RACES:
            races = RaceMemory(
                self.machine,
                shift=self.kernel.race_shift,
                num_warps=self.num_warps,
                cluster_size=self.cluster_size,
                num_blocks=self.num_clusters * self.cluster_size,
                shared_bytes=self.shared_total,
                num_threads=num_threads,
            )
        try:
            workers = [self._worker(index, seed, races) for index in range(num_threads)]
            if num_threads == 1:
                self._work(workers[0])
            else:
                _on_threads(self._work, workers)
            for worker in workers:
                if worker.record[0]:
                    fault = self._exception(worker)
                    for other in workers:
                        abandon(np.array([slot.address for slot in other.slots], dtype=np.int64))
                    raise fault
            counts = sum(worker.counts for worker in workers)
            found = counters.expand(self.kernel.kernel.instructions, self.translation.chunks, counts)
            if self.checks & Checks.TRAFFIC:
                found.traffic = traffic_of(sum(worker.traffic for worker in workers))
            return found
        finally:
            if races is not None:
                races.close()

    def _worker(self, index: int, seed: int, races: RaceMemory | None) -> _Worker:
        fields = np.zeros(warp_state.LAUNCH_FIELDS, dtype=np.int64)
        record = np.zeros(RECORD_FIELDS, dtype=np.int64)
        counts = np.zeros(2 * len(self.translation.chunks) + 1, dtype=np.int64)
        traffic = np.zeros(len(self.kernel.kernel.instructions) * TRAFFIC_FIELDS, dtype=np.int64)
        fields[warp_state.LAUNCH_PARAMETERS] = self._parameters.ctypes.data
        fields[warp_state.LAUNCH_PARAMETER_BYTES] = len(self._parameters) - 16
        fields[warp_state.LAUNCH_GRID_X : warp_state.LAUNCH_GRID_Z + 1] = self.grid
        fields[warp_state.LAUNCH_BLOCK_X : warp_state.LAUNCH_BLOCK_Z + 1] = self.block
        fields[warp_state.LAUNCH_CLUSTER_X : warp_state.LAUNCH_CLUSTER_Z + 1] = self.cluster
        fields[warp_state.LAUNCH_NUM_WARPS] = self.num_warps
        fields[warp_state.LAUNCH_THREADS] = math.prod(self.block)
        fields[warp_state.LAUNCH_CLUSTER_SIZE] = self.cluster_size
        fields[warp_state.LAUNCH_SHARED_BYTES] = self.kernel.shared.static_bytes + self.dynamic_bytes
        fields[warp_state.LAUNCH_DYNAMIC_SHARED_BYTES] = self.dynamic_bytes
        fields[warp_state.LAUNCH_CHECKS] = int(self.checks)
        fields[warp_state.LAUNCH_SEED] = seed
        fields[warp_state.LAUNCH_FAULT] = record.ctypes.data
        fields[warp_state.LAUNCH_COUNTERS] = counts.ctypes.data
        if self.checks & Checks.TRAFFIC:
            fields[warp_state.LAUNCH_TRAFFIC] = traffic.ctypes.data
        fields[warp_state.LAUNCH_REGIONS] = self._regions.ctypes.data if self._regions[0] else 0
        if self.kernel.leaves_work:
            fields[warp_state.LAUNCH_CLOSE_WARP] = compile_operation("close_warp")
            fields[warp_state.LAUNCH_CLOSE_BLOCK] = compile_operation("close_block")
        fields[warp_state.LAUNCH_ARENA] = self.machine.base
        fields[warp_state.LAUNCH_ARENA_BYTES] = self.machine.span
        fields[warp_state.LAUNCH_ARENA_SHADOW] = self.machine.base + self.machine.shadow_delta
        fields[warp_state.LAUNCH_LOCAL_BYTES] = self.kernel.local_bytes
        fields[warp_state.LAUNCH_THREAD_INDEX] = index
        fields[warp_state.LAUNCH_SYMBOLS] = self._symbols.ctypes.data
        fields[warp_state.LAUNCH_NUM_SMS] = _NUM_SMS
        fields[warp_state.LAUNCH_DEPENDENT] = int(self.is_dependent)
        fields[warp_state.LAUNCH_STREAM_ORDER] = self.stream_order
        fields[warp_state.LAUNCH_GLOBAL_RACES] = races.address(index) if races is not None else 0
        random = np.array([(seed * 0x9E3779B97F4A7C15 + index + 1) % (1 << 63) if seed else 0], dtype=np.int64)
        slots = [Slot(self.shape) for _ in range(min(self.num_clusters, _SLOTS_WITH_SEED if seed else 1))]
        worker = _Worker(fields, record, counts, traffic, slots, random)
        for slot in slots:
            lay_out(slot.address, fields.ctypes.data, self._shape)
        return worker

    def _work(self, worker: _Worker) -> None:
        while True:
            addresses = np.array([slot.address for slot in worker.slots], dtype=np.int64)
            state = run_clusters(
                self._queue.ctypes.data,
                worker.fields.ctypes.data,
                self.translation.code.address,
                addresses,
                len(addresses),
                self._shape,
                self.shared_total,
                worker.random,
            )
            if state != NEEDS_SLOT or len(worker.slots) == _MAX_SLOTS:
                assert state != NEEDS_SLOT, f"{_MAX_SLOTS} clusters poll at once"
                assert (state == FAULTED) == bool(worker.record[0])
                return
            worker.slots.append(Slot(self.shape))
            lay_out(worker.slots[-1].address, worker.fields.ctypes.data, self._shape)

    def _exception(self, worker: _Worker) -> EmulatorFault:
        kind, site, lane, warp, linear, address = (int(value) for value in worker.record[:6])
        fault = FaultKind(kind)
        detail = message_of(fault, worker.record)
        if is_memory_fault(fault):
            fault = kind_of(fault, worker.record, self.machine)
            shape = LaunchShape(self.grid, self.block, self.cluster, self.dynamic_bytes)
            detail = explain(fault, worker.record, self.machine, self.kernel.shared, shape)
        if fault == FaultKind.ASSERT:
            message, file = (self._text_at(int(place)) for place in worker.record[6:8])
            detail = f"assertion {message!r} failed ({file}:{int(worker.record[8])})"
        if fault == FaultKind.DEADLOCK:
            detail += "".join(f"\n  {line}" for line in who_waits(worker.slots, self.kernel))
        instructions = self.kernel.kernel.instructions
        line = instructions[site].line if 0 <= site < len(instructions) else 0
        thread = 32 * warp + lane
        width, height, _ = self.block
        grid_x, grid_y, _ = self.grid
        return EmulatorFault(
            fault,
            detail,
            kernel=self.kernel.name,
            line=line,
            text=self.kernel.module.lines[line - 1] if line else "",
            block=(linear % grid_x, linear // grid_x % grid_y, linear // (grid_x * grid_y)),
            thread=(thread % width, thread // width % height, thread // (width * height)),
            address=address,
        )

    def _text_at(self, address: int) -> str:
        """A string of the kernel's, up to its closing zero."""
        allocation = self.machine.allocation_of(address)
        if allocation is None:
            return f"text at {address:#x}"
        return self.machine.read(address, allocation.end - address).split(b"\0")[0].decode(errors="replace")


def _order(count: int, seed: int) -> tuple[int, int]:
    """A permutation of the clusters, number → (number · factor + shift) mod count; the natural one for seed 0."""
    if seed == 0 or count == 1:
        return 1, 0
    random = np.random.default_rng(seed)
    factor = int(random.integers(1, min(count, 1 << 30)))
    while math.gcd(factor, count) != 1:
        factor += 1
    return factor, int(random.integers(0, count))


@functools.cache
def _pool(process: int, count: int) -> ThreadPoolExecutor:
    """Threads outlive a launch; a forked process needs its own."""
    return ThreadPoolExecutor(count, thread_name_prefix="emulator")


def _on_threads(work: Any, workers: list[_Worker]) -> None:
    pool = _pool(os.getpid(), len(workers) - 1)
    with NO_COLLECTION:  # finalisers run here would wait for the driver's lock, which the launch holds
        others = [pool.submit(work, worker) for worker in workers[1:]]
        work(workers[0])
        for other in others:
            other.result()
