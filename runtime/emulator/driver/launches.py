"""The driver's functions that launch kernels: their checks, the reading of arguments, and the work that runs later."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.architectures import (
    MAX_BLOCK,
    MAX_GRID,
    MAX_PORTABLE_CLUSTER,
    MAX_THREADS_PER_BLOCK,
)
from runtime.emulator.driver.modules import Function, ModuleFunctions
from runtime.emulator.driver.state import R, Refused, entry
from runtime.emulator.driver.work_queues import Work
from runtime.emulator.execution.counters import Counters
from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import Checks, launch
from runtime.emulator.races.stream_order import Overlap, missing_event

Dim3 = tuple[int, int, int]

_NODE = cu.CUgraphNodeType
_ID = cu.CUlaunchAttributeID


@dataclass(eq=False, slots=True)
class KernelLaunch:
    """A kernel with its configuration and its arguments; never changed.

    Attributes:
        parameters: the arguments as the kernel's parameter space holds them.
        is_dependent: whether it may begin before the work ahead of it has ended.
    """

    driver: LaunchFunctions
    function: Function
    grid: Dim3
    block: Dim3
    shared_bytes: int
    cluster: Dim3
    parameters: bytes
    is_dependent: bool = False

    node_type = _NODE.CU_GRAPH_NODE_TYPE_KERNEL

    @property
    def label(self) -> str:
        return self.function.label

    def run(self, work: Work) -> None:
        self.driver.run_kernel(self, work)


@dataclass(frozen=True, slots=True)
class LaunchAttributes:
    """Attributes of a CUlaunchConfig."""

    cluster: Dim3 = (1, 1, 1)
    is_dependent: bool = False


def read_attributes(config: Any) -> LaunchAttributes:
    """The attributes of a launch. Raises Refused for one that is not emulated."""
    if not config.numAttrs:
        return LaunchAttributes()
    cluster, is_dependent = (1, 1, 1), False
    for attribute in config.attrs[: config.numAttrs]:
        kind, value = attribute.id, attribute.value
        if kind == _ID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            cluster = (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
        elif kind == _ID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            is_dependent = bool(value.programmaticStreamSerializationAllowed)
        else:
            raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, f"launch attribute {kind!r} is not emulated")
    return LaunchAttributes(cluster, is_dependent)


def pack_parameters(function: Function, kernel_params: Any, extra: Any) -> bytes:
    """A launch's arguments as parameter bytes, in two of the forms that `cuda.bindings` takes: the address of an array
    of pointers to the values, or a pair of tuples, values and ctypes."""
    if extra:
        raise Refused(R.CUDA_ERROR_NOT_SUPPORTED, "arguments in `extra` are not emulated")
    sizes, offsets = function.sizes, function.offsets
    if not sizes:
        return b""
    if isinstance(kernel_params, tuple):
        return _from_values(function, *kernel_params)
    if not kernel_params:
        raise _wrong_count(function, 0)
    pointers = struct.unpack(f"{len(sizes)}Q", ctypes.string_at(kernel_params, 8 * len(sizes)))
    read = ctypes.string_at
    data = bytearray(function.parameter_bytes)
    for pointer, offset, size in zip(pointers, offsets, sizes):
        if not pointer:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"a null pointer among the arguments of {function.label}")
        data[offset : offset + size] = read(pointer, size)
    return bytes(data)


def _wrong_count(function: Function, count: int) -> Refused:
    return Refused(R.CUDA_ERROR_INVALID_VALUE, f"{count} arguments: {function.label} takes {len(function.sizes)}")


def _from_values(function: Function, values: tuple[Any, ...], kinds: tuple[Any, ...]) -> bytes:
    if len(values) != len(function.sizes) or len(kinds) != len(values):
        raise _wrong_count(function, len(values))
    data = bytearray(function.parameter_bytes)
    for value, kind, offset, size in zip(values, kinds, function.offsets, function.sizes):
        raw = bytes(kind(value))
        if len(raw) != size:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"an argument of {len(raw)} bytes for a parameter of {size}")
        data[offset : offset + size] = raw
    return bytes(data)


def overlap_of(kernel_launch: KernelLaunch) -> Overlap:
    """A launch's dependence on the previous kernel."""
    if not kernel_launch.is_dependent:
        return Overlap.KERNEL
    return Overlap.WAITING if kernel_launch.function.waits_for_dependency else Overlap.UNORDERED


class LaunchFunctions(ModuleFunctions):
    """cuLaunchKernelEx, cuOccupancyMaxActiveClusters

    Attributes:
        checks: of kernels, from the next launch on.
        num_threads: OS threads that a kernel may use.
        is_counting: whether `counters` is kept.
        counters: what each kernel has counted since it was last cleared, by its name.
        num_launches: kernels that have run.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.checks = Checks.ALL
        self.num_threads = 2
        self.is_counting = False
        self.counters: dict[str, Counters] = {}
        self.num_launches = 0

    @entry()
    def cuLaunchKernelEx(self, config: Any, f: Any, kernelParams: Any, extra: Any) -> None:
        function = self.function(f)
        stream = self.stream(config.hStream)
        if stream.context is not function.context:
            raise Refused(R.CUDA_ERROR_INVALID_HANDLE, f"{function.label} and {stream} are of two contexts")
        attributes = read_attributes(config)
        cluster = attributes.cluster
        if function.required_cluster is not None and cluster == (1, 1, 1):
            cluster = function.required_cluster
        operation = KernelLaunch(
            self, function, (config.gridDimX, config.gridDimY, config.gridDimZ),
            (config.blockDimX, config.blockDimY, config.blockDimZ), config.sharedMemBytes, cluster,
            pack_parameters(function, kernelParams, extra), attributes.is_dependent,
        )  # fmt: skip
        self.check_launch(operation)
        if stream.capture is not None:
            self.add_captured(stream, operation, is_programmatic=attributes.is_dependent)
        else:
            self.enqueue(
                stream, operation, (), overlap_of(operation), starts_next_early=function.starts_next_early
            )  # fmt: skip

    @entry(1)
    def cuOccupancyMaxActiveClusters(self, func: Any, config: Any) -> int:
        function, cluster = self.function(func), read_attributes(config).cluster
        threads = config.blockDimX * config.blockDimY * config.blockDimZ
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self._check_cluster(function, grid, cluster)
        per_sm = self.blocks_per_sm_of(function, threads, config.sharedMemBytes)
        return function.context.device.model.clusters_at_once(cluster[0] * cluster[1] * cluster[2], per_sm)

    def check_launch(self, asked: KernelLaunch) -> None:
        """Refuses a configuration as the driver does; valid ones are remembered."""
        function = asked.function
        key = (asked.grid, asked.block, asked.shared_bytes, asked.cluster)
        if key in function.checked:
            return
        grid, block, cluster = asked.grid, asked.block, asked.cluster
        self._check_shape(function, grid, block)
        if asked.shared_bytes < 0 or asked.shared_bytes > function.max_dynamic_shared_bytes:
            raise Refused(
                R.CUDA_ERROR_INVALID_VALUE,
                f"{asked.shared_bytes} bytes of dynamic shared memory: {function.label} may have "
                f"{function.max_dynamic_shared_bytes} (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)",
            )
        if cluster != (1, 1, 1) or function.required_cluster is not None:
            self._check_cluster(function, grid, cluster)
        function.checked.add(key)

    @staticmethod
    def _check_shape(function: Function, grid: Dim3, block: Dim3) -> None:
        for what, dims, limits in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
            if not all(1 <= value <= limit for value, limit in zip(dims, limits)):
                raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"a {what} of {dims}: 1 to {limits}")
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS_PER_BLOCK or threads > function.max_threads:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{threads} threads a block: at most {function.max_threads}")
        if function.required_block is not None and block != function.required_block:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"a block of {block}: {function.required_block} is required")

    @staticmethod
    def _check_cluster(function: Function, grid: Dim3, cluster: Dim3) -> None:
        model = function.context.device.model
        if not model.has_clusters:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{model.device_name} has no clusters")
        if function.required_cluster is not None and cluster != function.required_cluster:
            required = function.required_cluster
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"a cluster of {cluster}: {required} is required")
        size = cluster[0] * cluster[1] * cluster[2]
        if not 1 <= size <= MAX_PORTABLE_CLUSTER or min(cluster) < 1:
            most = MAX_PORTABLE_CLUSTER
            raise Refused(R.CUDA_ERROR_INVALID_CLUSTER_SIZE, f"a cluster of {cluster}: at most {most} blocks")
        if any(blocks % extent for blocks, extent in zip(grid, cluster)):
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"a grid of {grid} is no multiple of its clusters of {cluster}")

    def run_kernel(self, kernel_launch: KernelLaunch, work: Work) -> None:
        """Runs a queued launch. Raises EmulatorFault."""
        function = kernel_launch.function
        machine = function.context.machine
        self.num_launches += 1
        order = self.order.launch_fields(work, machine)
        try:
            counted = self._run(kernel_launch, 0 if order is None else order.pointer)
        except EmulatorFault as fault:
            if fault.kind != FaultKind.MISSING_EVENT:
                raise
            conflict = self.order.conflict_at(work, machine, fault.address)
            assert conflict is not None
            raise missing_event(self.order, work, conflict, machine=machine, fault=fault) from None
        if self.is_counting:
            before = self.counters.get(function.name)
            self.counters[function.name] = counted if before is None else before + counted

    def _run(self, kernel_launch: KernelLaunch, stream_order: int) -> Counters:
        function = kernel_launch.function
        return launch(
            self.prepare(function),
            function.context.machine,
            kernel_launch.grid,
            kernel_launch.block,
            kernel_launch.shared_bytes,
            kernel_launch.parameters,
            kernel_launch.cluster,
            checks=self.checks,
            variables=function.module.variables,
            is_dependent=kernel_launch.is_dependent,
            stream_order=stream_order,
            seed=self.seed and self.seed * 1_000_003 + self.num_launches,
            num_threads=self.num_threads,
        )
