"""Plain data of kernels before they are compiled, and of launches.

A `Specialisation` is a Numba kernel with every compile-time number settled; its machine code depends otherwise only on
the architecture. A `plan` function of a family turns shapes, dtypes and a compute capability into a `Launch`.
`runtime.device` compiles and launches them.

Elementwise kernels cut arrays into accesses, and accesses into blocks: an access is 16 bytes wide where sizes and
addresses allow it, else one element; blocks beyond the largest grid are looped over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numba_kernels.cuda.intrinsics.element_types import VECTOR_WIDTH

Dim3 = tuple[int, int, int]


class _TensorMap:
    """See `TENSOR_MAP`."""

    def __repr__(self) -> str:
        return "tensor_map"


TENSOR_MAP = _TensorMap()
"""The type of an argument that is a tensor map by value: 128 bytes (`runtime.device.tensor_map`). The kernel sees the
uint64 address of its copy among the parameters, which needs no fence."""


@dataclass(frozen=True, slots=True, eq=False)
class Specialisation:
    """One kernel for one choice of types and constants. Compared by identity: factories are cached.

    Attributes:
        name: unique among all kernels, made of the family and the constants: ``rms_norm_bf16_h1024``.
        kernel: the ``@cuda.jit`` function; `.py_func` is compiled.
        argument_types: numba types, in order. Device memory is passed as ``types.CPointer(...)`` or ``uint64``; a
            tensor map is `TENSOR_MAP`.
        max_threads: threads a block at most (``.maxntid``).
        min_blocks: blocks a multiprocessor at least (``.minnctapersm``), 0 where it is left to ptxas.
        constants: of the closure, for the reports: ``{"dtype": "bf16", "head_dim": 64}``.
        min_capability: the lowest compute capability that has its instructions, as 80 or 90.
        replaced_from: the compute capability from which on plans take another kernel instead, or 0.
        needs_arch_features: whether it holds instructions of one architecture only (wgmma, setmaxnreg: ``sm_90a``).
        spills_on: architectures that have too few registers or too little shared memory: plans leave it out there.
        uses_float64: whether float64 is meant; it is slow on most GPUs, so that elsewhere it is a mistake.
        fastmath: whether ptx may use approximate division and square root, and flush subnormals.
    """

    name: str
    kernel: Any
    argument_types: tuple[Any, ...]
    max_threads: int
    min_blocks: int = 0
    constants: dict[str, Any] = field(default_factory=dict)
    min_capability: int = 80
    replaced_from: int = 0
    needs_arch_features: bool = False
    spills_on: tuple[str, ...] = ()
    uses_float64: bool = False
    fastmath: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A specialisation and its launch configuration; arguments are given when it is launched.

    Attributes:
        shared_bytes: dynamic shared memory.
        cluster: blocks a cluster.
        is_dependent: whether it may start before the previous kernel has ended (programmatic dependent launch);
            then the kernel executes ``griddepcontrol.wait`` before it touches memory.
        starts_late: it waits for the previous kernel by itself, but must not start before its end: its blocks would
            crowd on the multiprocessors that are free first, or it reads early what that kernel writes.
        maps: (number of an argument of type `TENSOR_MAP`, layout): `Gpu.launch` takes the tensor's address there and
            makes the map. Arguments of that type which are not named here are given as maps.
        more_maps: the same of arguments that are addresses: `Gpu.launch` appends these maps to the arguments.
        num_shrinking: blocks, first of the grid, that compute low-rank sums of adapters (`adapters.riding`).
        team_warps: the warps of a team, if the block's last warp expands such sums.
    """

    specialisation: Specialisation
    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    is_dependent: bool = False
    starts_late: bool = False
    maps: tuple[tuple[int, TensorMapLayout], ...] = ()
    more_maps: tuple[tuple[int, TensorMapLayout], ...] = ()
    num_shrinking: int = 0
    team_warps: int = 0


@dataclass(frozen=True, slots=True)
class TensorMapLayout:
    """A tensor in device memory as the TMA walks over it, all but its address; innermost dimension first.

    Attributes:
        dtype: "bf16", "f16" or "f32".
        shape: elements, 1 to 5 dimensions.
        strides: bytes, of all dimensions but the innermost; multiples of 16.
        box: elements that one copy moves; at most 256 a dimension.
        swizzle_bytes: 0, 32, 64 or 128: bytes of a row of the box in shared memory, if swizzled.
        offset: bytes from the address that is given to the tensor; a multiple of 16.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0
    offset: int = 0


HALF_SHARED_BYTES = {"sm_90a": 111 << 10, "sm_100a": 111 << 10, "sm_120a": 48 << 10}
"""Architectures with dependent launches, and the dynamic shared memory of a block that, with its static memory, leaves
half of a multiprocessor to the next kernel of a decode step."""

THREADS = 256  # of a block, at most
MAX_BLOCKS = 8192  # of a flat grid: enough to fill any GPU several times
MAX_GRID_ROWS = 65535  # the y axis of a grid


def access_width(dtype: str, size: int, alignment: int = 16) -> int:
    """Elements an access: the vector width where rows of `size` and addresses of `alignment` bytes allow it, or 1."""
    return VECTOR_WIDTH[dtype] if size % VECTOR_WIDTH[dtype] == 0 and alignment % 16 == 0 else 1


def flat_grid(num_accesses: int) -> Dim3:
    """The grid of blocks of `THREADS` that goes over `num_accesses` in a loop."""
    return (min(MAX_BLOCKS, max(1, -(-num_accesses // THREADS))), 1, 1)


def row_grid(num_rows: int, accesses_a_row: int) -> tuple[Dim3, Dim3]:
    """(grid, block): x goes over the accesses of a row, y over the rows, in a loop."""
    threads = min(THREADS, max(32, -(-accesses_a_row // 32) * 32))
    return (max(1, -(-accesses_a_row // threads)), min(num_rows, MAX_GRID_ROWS), 1), (threads, 1, 1)
