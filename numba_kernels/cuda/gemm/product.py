"""A matrix product to be planned, and the machine that is to compute it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.packing import packing_of
from numba_kernels.split_k import SEGMENTS

NOT_PLAIN = "multiplies factors of one type, and gates nothing"
LATENCY_S = 0.8e-6  # of device memory under load
ISSUES_A_SECOND = 2.5 * 1.7e9  # of a multiprocessor that unpacks: four a clock at most; an estimate
MAX_SIZE = 2**31 - 1  # of m, n and k: kernels count in 32 bits


AnyTile = TypeVar("AnyTile")


def unpacking_s(weight_bytes: int, instructions: int, num_multiprocessors: int) -> float:
    """Seconds of unpacking a weight by a loop with so many warp instructions for 4 KB."""
    return weight_bytes / 4096 * instructions / (num_multiprocessors * ISSUES_A_SECOND)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The epilogue: operations on the sums before they are rounded; a bias is added if its address is not 0.

    Attributes:
        has_residual: whether a residual is given when it is launched. If False, none may be.
        is_aligned: whether y, bias and residual begin on 16-byte bounds.
        activation: of a gated unit, "silu" or "gelu_tanh": the weight [2 n, k] holds gate and up, one after the other,
            and y is ``activation(gate) * up``. There is no bias and no residual then. Else "".
    """

    has_residual: bool = True
    is_aligned: bool = False
    activation: str = ""


@dataclass(frozen=True, slots=True)
class Product:
    """``y[m, n] = x[m, k] . weight[n, k]^T + bias + residual``, and the facts about its arrays.

    Attributes:
        m, n, k: the sizes, each from 0 on.
        x: the dtype of x, "f32", "f16" or "bf16".
        weight: the format of the weight, a dtype or a packing's name; each tier reads some. "" means x's dtype.
        out: the dtype of y and the residual, x's or "f32"; "" means x's.
        epilogue: of the sums.
        is_weight_layout: whether the weight is [n, k]; else it is [k, n].
        is_aligned: whether x and weight begin on 16-byte bounds. (Rows that do not are seen from the sizes.)
        exact: whether a row of y must have the same bits whatever m is.
        num_segments: where K is cut (`numba_kernels.split_k`): y is float32 [num_segments, m, n] then, the segments'
            sums, and there is no bias and no residual. 0 if K is not cut.
        whole: (n, k) of the weight of which this is a rank's shard, or None. An exact product's
            kernel, and so the order of its sums, is chosen by these.

    Raises:
        ValueError: for an unsupported dtype or size, and for segments of a product that cannot have them.
    """

    m: int
    n: int
    k: int
    x: str
    weight: str = ""
    out: str = ""
    epilogue: Epilogue = Epilogue()
    is_weight_layout: bool = True
    is_aligned: bool = True
    exact: bool = False
    num_segments: int = 0
    whole: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.x not in DTYPES:
            raise ValueError(f"gemm: dtype is {self.x!r}, must be one of {', '.join(DTYPES)}")
        if self.out not in ("", self.x, "f32"):
            raise ValueError(f"gemm: out_dtype is {self.out!r}, must be {self.x!r} or 'f32'")
        for name in ("m", "n", "k"):
            if not 0 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"gemm: {name} is {getattr(self, name)}, must be 0 to {MAX_SIZE}")
        object.__setattr__(self, "weight", self.weight or self.x)
        object.__setattr__(self, "out", self.out or self.x)
        if self.num_segments:
            is_plain_sum = self.out == "f32" and not self.epilogue.has_residual and not self.epilogue.activation
            if SEGMENTS % self.num_segments or not (self.is_weight_layout and is_plain_sum):
                raise ValueError(f"gemm: K cannot be cut into segments: {self}")
        lengths = (self.k,) if self.is_weight_layout else (self.k, self.n)
        is_aligned = self.is_aligned and all(length % VECTOR_WIDTH[self.x] == 0 for length in lengths)
        object.__setattr__(self, "is_aligned", is_aligned)

    @property
    def is_plain(self) -> bool:
        """Whether the weight is of x's dtype, and y is no gated unit."""
        return self.weight == self.x and not self.epilogue.activation

    @property
    def deciding(self) -> Product:
        """The product that chooses the tier of an exact product: a single row, times the whole weight."""
        n, k = self.whole or (self.n, self.k)
        return replace(self, m=1, n=n, k=k, whole=None)

    @property
    def weight_rows(self) -> int:
        """n, or for a gated unit twice that."""
        return 2 * self.n if self.epilogue.activation else self.n

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, scales included."""
        packing = packing_of(self.weight)
        if packing is not None:
            return packing.size_bytes(self.weight_rows, self.k, self.x)
        return ITEM_BYTES[self.x] * self.weight_rows * self.k


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of an architecture's product with the most bandwidth, and the device's multiprocessors and clusters.

    Attributes:
        arch: "sm_90a".
        num_multiprocessors: of the device: small products take smaller tiles to fill it.
        max_clusters: (blocks a cluster, clusters that run at once where a multiprocessor holds one block).
        memory_bytes, cache_bytes: read from device memory, and from the second-level cache.
        tensor_flops: by `mma.sync` of 16-bit factors.
        float_flops: float32 multiply-adds, two each.
    """

    arch: str
    num_multiprocessors: int
    max_clusters: tuple[tuple[int, int], ...]
    memory_bytes: float
    cache_bytes: float
    tensor_flops: float
    float_flops: float

    @property
    def sustained_bytes(self) -> float:
        """Bytes a second from device memory for a kernel that starts with no loads in flight, measured on an H200."""
        return 0.8 * self.memory_bytes

    def clusters_at_once(self, num_blocks: int) -> int:
        """Clusters of so many blocks that run at once; without a query, as many as multiprocessors allow."""
        return dict(self.max_clusters).get(num_blocks, max(1, self.num_multiprocessors // num_blocks))


RATES = {
    "sm_80": (2.0e12, 4.5e12, 312e12, 19.5e12),
    "sm_86": (0.94e12, 3.0e12, 71e12, 35.6e12),
    "sm_89": (1.0e12, 5.0e12, 165e12, 82.6e12),
    "sm_90a": (4.8e12, 6.5e12, 600e12, 67e12),
    "sm_100a": (8.0e12, 10e12, 600e12, 80e12),
    "sm_120a": (1.8e12, 6.0e12, 210e12, 105e12),
}
"""Data sheets; the caches, and `mma.sync` on Hopper and Blackwell, are estimates."""


@functools.cache
def machine_of(
    arch: str = "sm_80", num_multiprocessors: int = 132, max_clusters: tuple[tuple[int, int], ...] = ()
) -> Machine:
    """The machine of an architecture; an unknown one is taken for sm_80."""
    return Machine(arch, num_multiprocessors, max_clusters, *RATES.get(arch, RATES["sm_80"]))


def tile_named(tiles: Sequence[AnyTile], name: str) -> AnyTile | None:
    """A tier's tile, or None for "". Raises ValueError for another name."""
    if not name:
        return None
    known = {str(tile): tile for tile in tiles}
    if name not in known:
        raise ValueError(f"gemm: tile is {name!r}, must be one of {', '.join(known)}")
    return known[name]
