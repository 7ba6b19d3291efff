"""Running a kernel over a grid: arguments and state laid out, OS threads set to it, a fault made into an exception."""

from __future__ import annotations

import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from enum import IntFlag
from typing import Any

import numpy as np

from runtime.collector import NO_COLLECTION
from runtime.emulator.async_copies.proxy import proxy_bytes
from runtime.emulator.execution import counters
from runtime.emulator.execution.counters import Counters, TrafficCounts, traffic_of
from runtime.emulator.execution.fault import EmulatorFault, Fault, FaultKind
from runtime.emulator.execution.fault_text import LaunchShape, describe, kind_of, who_waits
from runtime.emulator.execution.state import (
    CHECK_ASYNC,
    CHECK_MEMORY,
    CHECK_RACES,
    CHECK_UNINITIALIZED,
    COUNT_MEMORY,
    Launch,
)
from runtime.emulator.execution.warp_scheduler import (
    FAULTED,
    NEEDS_SLOT,
    Grid,
    Shape,
    SlotBuffer,
    abandon,
    lay_out,
    round_up,
    run_clusters,
)
from runtime.emulator.memory.device_memory import Machine, Mapping
from runtime.emulator.races.clocks import TABLE_ENTRIES, Entry, Races
from runtime.emulator.translation.operations import compile_operation, compiled
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


class _Worker:
    """Data of one OS thread of a launch."""

    def __init__(self, kernel: LoadedKernel, shape: Shape) -> None:
        self.launch, self.fault = Launch.new(), Fault.new()
        self.counts = np.zeros(2 * len(kernel.translation.chunks) + 1, dtype=np.int64)
        self.traffic = np.zeros(len(kernel.kernel.instructions) * TrafficCounts.size_words, dtype=np.int64)
        self.seed = np.zeros(1, dtype=np.int64)
        self._shape, self._slots = shape, list[SlotBuffer]()
        self.slots = np.zeros(0, dtype=np.int64)  # their addresses

    def add_slot(self) -> None:
        self._slots.append(SlotBuffer(self._shape))
        compiled(lay_out)(self._slots[-1].address, self.launch.pointer, self._shape.pointer)
        self.slots = np.array([slot.address for slot in self._slots], dtype=np.int64)

    def abandon(self) -> None:
        compiled(abandon)(self.slots.ctypes.data, len(self.slots))


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
    variables: dict[str, int] | None = None,
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
        stream_order: address of the stream checker's data (races/clocks.py), or 0 without it.
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
        parameters: bytes, checks: Checks, variables: dict[str, int], is_dependent: bool,
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
        self._shadow = np.frombuffer(kernel.shared.shadow(shared_bytes), dtype=np.uint8)
        has_shadow = bool(checks & (Checks.MEMORY | Checks.UNINITIALIZED))
        shape = self.shape = Shape.new()
        shape.num_blocks, shape.num_warps = self.cluster_size, self.num_warps
        shape.registers, shape.shared = round_up(self.translation.register_bytes), round_up(self.shared_total)
        shape.local = round_up(32 * kernel.local_bytes)
        shape.shared_shadow, shape.local_shadow = has_shadow * shape.shared, has_shadow * shape.local
        if kernel.needs_proxy and checks & Checks.ASYNC:
            shape.proxy = round_up(proxy_bytes(self.shared_total))
        shape.shadow_image, shape.clears_registers = self._shadow.ctypes.data, self.translation.reads_undefined
        self._parameters = np.frombuffer(parameters + bytes(16), dtype=np.uint8)
        missing = [name for name in kernel.variables if name not in variables]
        if missing:
            raise InvalidArgumentError(f"launch: no address for variable {missing[0]}", param="variables")
        self._symbols = np.array([variables[name] for name in kernel.variables] or [0], dtype=np.int64)
        self._grid = Grid.new()
        others = machine.regions()[1:]
        self._regions = np.array([len(others), *(value for region in others for value in region)], dtype=np.int64)

    def run(self, seed: int, num_threads: int) -> Counters:
        work = self.num_clusters * self.cluster_size * self.num_warps * len(self.kernel.kernel.instructions)
        alone = self.kernel.communicates or work < _WORK_FOR_COMPANY or self.num_clusters < 2
        if alone or self.checks & Checks.RACES:
            num_threads = 1
        self._grid.count = self.num_clusters
        self._grid.factor, self._grid.shift = _order(self.num_clusters, seed)
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
                if worker.fault.kind:
                    fault = self._exception(worker)
                    for other in workers:
                        other.abandon()
                    raise fault
            counts = sum(worker.counts for worker in workers)
            found = counters.expand(self.kernel.kernel.instructions, self.translation.chunks, counts)
            if self.checks & Checks.TRAFFIC:
                found.traffic = traffic_of(np.sum([worker.traffic for worker in workers], axis=0).tolist())
            return found
        finally:
            if races is not None:
                races.close()

    def _worker(self, index: int, seed: int, races: RaceMemory | None) -> _Worker:
        worker = _Worker(self.kernel, self.shape)
        launch = worker.launch
        launch.parameters, launch.parameter_bytes = self._parameters.ctypes.data, len(self._parameters) - 16
        launch.grid_x, launch.grid_y, launch.grid_z = self.grid
        launch.block_x, launch.block_y, launch.block_z = self.block
        launch.cluster_x, launch.cluster_y, launch.cluster_z = self.cluster
        launch.num_warps, launch.num_threads = self.num_warps, math.prod(self.block)
        launch.cluster_size = self.cluster_size
        launch.shared_bytes = self.kernel.shared.static_bytes + self.dynamic_bytes
        launch.dynamic_shared_bytes = self.dynamic_bytes
        launch.checks = int(self.checks)
        launch.fault, launch.counters = worker.fault.pointer, worker.counts.ctypes.data
        launch.traffic = worker.traffic.ctypes.data if self.checks & Checks.TRAFFIC else 0
        launch.regions = self._regions.ctypes.data if self._regions[0] else 0
        if self.kernel.leaves_work:
            launch.close_warp = compile_operation("close_warp")
            launch.close_block = compile_operation("close_block")
        launch.arena, launch.arena_bytes = self.machine.base, self.machine.span
        launch.arena_shadow = self.machine.base + self.machine.shadow_delta
        launch.local_bytes = self.kernel.local_bytes
        launch.symbols = self._symbols.ctypes.data
        launch.num_sms = _NUM_SMS
        launch.is_dependent = int(self.is_dependent)
        launch.stream_order = self.stream_order
        launch.races = races.address(index) if races is not None else 0
        worker.seed[0] = (seed * 0x9E3779B97F4A7C15 + index + 1) % (1 << 63) if seed else 0
        for _ in range(min(self.num_clusters, _SLOTS_WITH_SEED if seed else 1)):
            worker.add_slot()
        return worker

    def _work(self, worker: _Worker) -> None:
        run = compiled(run_clusters)
        while True:
            state = run(
                self._grid.pointer, worker.launch.pointer, self.translation.code.address, worker.slots.ctypes.data,
                len(worker.slots), self.shape.pointer, self.shared_total, worker.seed.ctypes.data,
            )  # fmt: skip
            if state != NEEDS_SLOT or len(worker.slots) == _MAX_SLOTS:
                assert state != NEEDS_SLOT, f"{_MAX_SLOTS} clusters poll at once"
                assert (state == FAULTED) == bool(worker.fault.kind)
                return
            worker.add_slot()

    def _exception(self, worker: _Worker) -> EmulatorFault:
        fault = worker.fault
        site, linear = fault.site, fault.block
        kind = kind_of(FaultKind(fault.kind), fault, self.machine)
        shape = LaunchShape(self.grid, self.block, self.cluster, self.dynamic_bytes)
        detail = describe(kind, fault, self.machine, self.kernel.shared, shape)
        if kind == FaultKind.ASSERT:
            message, file = self._text_at(fault.a), self._text_at(fault.b)
            detail = f"assertion {message!r} failed ({file}:{fault.c})"
        if kind == FaultKind.DEADLOCK:
            detail += "".join(f"\n  {line}" for line in who_waits(worker.slots.tolist(), self.kernel))
        instructions = self.kernel.kernel.instructions
        line = instructions[site].line if 0 <= site < len(instructions) else 0
        thread = 32 * fault.warp + fault.lane
        width, height, _ = self.block
        grid_x, grid_y, _ = self.grid
        return EmulatorFault(
            kind,
            detail,
            kernel=self.kernel.name,
            line=line,
            text=self.kernel.module.lines[line - 1] if line else "",
            block=(linear % grid_x, linear // grid_x % grid_y, linear // (grid_x * grid_y)),
            thread=(thread % width, thread // width % height, thread // (width * height)),
            address=fault.address,
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


_RACE_BYTES = 1 << 40
_CLOCK_LIMIT = 1 << 30


class RaceMemory:
    """The race checker's data of one launch: one record for each OS thread, and the machine's global shadow.

    Args:
        machine: whose memory the kernel runs on.
        shift: of `granule_shift`.
        num_warps: of a block.
        cluster_size: blocks a cluster.
        num_blocks: of the grid.
        shared_bytes: of a block, as `Block.shared_bytes`.
        num_threads: OS threads.
    """

    def __init__(
        self, machine: Machine, *, shift: int, num_warps: int, cluster_size: int, num_blocks: int, shared_bytes: int,
        num_threads: int,
    ) -> None:  # fmt: skip
        self._machine = machine
        machine.race_clock = clock = 0 if machine.race_clock > _CLOCK_LIMIT else machine.race_clock
        if clock == 0:
            machine.race_shadows.clear()
        granules = machine.span >> shift
        if shift not in machine.race_shadows:
            machine.race_shadows[shift] = Mapping(granules * 24)
        shadow = machine.race_shadows[shift].address
        self._mapping = Mapping(_RACE_BYTES)
        self._addresses = []
        width = num_warps * cluster_size
        for thread in range(num_threads):
            address = self._mapping.address + thread * (_RACE_BYTES // num_threads)
            races = Races(address)
            races.base = races.clock = clock
            races.table = address + Races.size_bytes
            races.scratch = races.table + (TABLE_ENTRIES + 1) * Entry.size_bytes
            races.next = (races.scratch + (width + 15) * 12 + 63) // 64 * 64
            races.agents, races.width, races.shift = num_blocks * num_warps, width, shift
            races.global_writes, races.global_reads = shadow, shadow + granules * 8
            races.shared_granules = (shared_bytes >> shift) + 1
            self._addresses.append(address)

    def address(self, thread: int) -> int:
        """The value of `Launch.races` for an OS thread."""
        return self._addresses[thread]

    def close(self) -> None:
        """Ends the launch: its writes are ordered before the next."""
        for address in self._addresses:
            self._machine.race_clock = max(self._machine.race_clock, Races(address).clock)
        self._addresses = []
        self._mapping.close()
