"""Forms of pages: the planes of each, and their shapes in memory.

A page (block) holds ``block_size`` consecutive tokens of one sequence for every KV head of one layer, in separate
planes: keys, values. On the CPU the keys of a page are stored transposed, so that a vector register runs over the
tokens of the page and ``q . K`` needs no horizontal sums, and the values' rows are padded to whole vectors of 16:

- K ``[num_blocks, num_kv_heads, head_dim, block_size]``
- V ``[num_blocks, num_kv_heads, block_size, head_dim rounded up to 16]``

Pages of int8 and fp8 (e4m3) have two planes more, ``k_scale`` and ``v_scale``, float32 ``[num_blocks, num_kv_heads,
block_size]``: the scale of each token's numbers in each head. They are written with the token, so no calibration is
needed.

Latent pages (MLA, https://arxiv.org/abs/2405.04434) have one plane on every device, ``latent``: a row a token, which is
the key of all query heads, and whose last ``num_values`` numbers are their value:

- ``[num_blocks, 1, block_size, width rounded up]``, to 16 on the cpu, to 8 on a GPU

On a GPU, real or emulated, keys and values are ``[num_blocks, num_kv_heads, block_size, head_dim rounded up to 8]``, of
bytes to 16: one head's part of a page is one run of whole 16-byte pieces (`numba_kernels.cuda.kv_cache`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from runtime.dtype import PAGES, STORED, DType, float32
from runtime.errors import InvalidArgumentError

_CPU_VALUE_ROW_MULTIPLE = 16  # float32 lanes of the widest vector: V rows are whole vectors
_GPU_ROW_MULTIPLE = 8  # 16 bytes of the narrowest type wider than a byte
_GPU_ROW_BYTES = 16


class Plane(NamedTuple):
    """One array of a page: its name, and the shape and type of one block of one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PageForm(Protocol):
    """The planes of a layer's pages. Layers whose pages have equal forms share memory (`runtime.kv.groups`)."""

    def planes(self, block_size: int, dtype: DType, is_cpu: bool) -> tuple[Plane, ...]:
        """The planes of one block of one layer, of numbers of this type.

        Raises InvalidArgumentError for a type that such pages do not have."""


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Keys and values of equally wide heads. Raises InvalidArgumentError for a size that is not positive."""

    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim"):
            if (value := getattr(self, name)) < 1:
                raise InvalidArgumentError(f"KVCacheSpec: {name} is {value}, must be at least 1", param=name)

    def planes(self, block_size: int, dtype: DType, is_cpu: bool) -> tuple[Plane, ...]:
        """See `PageForm`."""
        _check(dtype, PAGES)
        tokens = self.num_kv_heads, block_size
        if is_cpu:
            k_shape: tuple[int, ...] = (self.num_kv_heads, self.head_dim, block_size)
            v_shape: tuple[int, ...] = (*tokens, _round_up(self.head_dim, _CPU_VALUE_ROW_MULTIPLE))
        else:
            multiple = _GPU_ROW_BYTES if dtype.itemsize == 1 else _GPU_ROW_MULTIPLE
            k_shape = v_shape = (*tokens, _round_up(self.head_dim, multiple))
        pages = Plane("k", k_shape, dtype), Plane("v", v_shape, dtype)
        if dtype in STORED:
            return pages
        return *pages, Plane("k_scale", tokens, float32), Plane("v_scale", tokens, float32)


@dataclass(frozen=True, slots=True)
class Latent:
    """One row a token, whose last `num_values` numbers are the value."""

    width: int
    num_values: int

    def planes(self, block_size: int, dtype: DType, is_cpu: bool) -> tuple[Plane, ...]:
        """See `PageForm`."""
        _check(dtype, STORED)
        multiple = _CPU_VALUE_ROW_MULTIPLE if is_cpu else _GPU_ROW_MULTIPLE
        return (Plane("latent", (1, block_size, _round_up(self.width, multiple)), dtype),)


def _check(dtype: DType, known: dict[DType, str]) -> None:
    if dtype not in known:
        names = ", ".join(each.name for each in known)
        raise InvalidArgumentError(f"KVCacheSpec: dtype is {dtype.name}, must be one of {names}", param="dtype")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
