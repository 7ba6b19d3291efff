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
- of fp8: ``[num_blocks, 1, block_size, bytes of a row]``, scales included (`numba_kernels.latent_rows`)

State pages (`Recurrent`) hold what follows from a number of tokens, however many a page of tokens has.

On a GPU, real or emulated, keys and values are ``[num_blocks, num_kv_heads, block_size, head_dim rounded up to 8]``, of
bytes to 16: one head's part of a page is one run of whole 16-byte pieces (`numba_kernels.cuda.kv_cache`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from numba_kernels.latent_rows import LatentBytes
from runtime.dtype import PAGES, STORED, DType, bfloat16, float8_e4m3, float32, int8, int32
from runtime.errors import InvalidArgumentError

LATENT_PAGES: dict[DType, str] = {dtype: PAGES[dtype] for dtype in (*STORED, float8_e4m3)}
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
        if dtype is int8:
            raise InvalidArgumentError(
                "KVCacheSpec: dtype is int8, must be one of float32, float16, bfloat16, fp8 for rows of latent"
                " attention: use --kv-cache-dtype fp8",
                param="kv_cache_dtype",
            )
        _check(dtype, LATENT_PAGES)
        if dtype is float8_e4m3:
            row = LatentBytes(self.width, self.num_values).row_bytes
            return (Plane("latent", (1, block_size, row), dtype),)
        multiple = _CPU_VALUE_ROW_MULTIPLE if is_cpu else _GPU_ROW_MULTIPLE
        return (Plane("latent", (1, block_size, _round_up(self.width, multiple)), dtype),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """The recurrent state of a layer after some tokens, and what it needs to take ``pending`` more.

    Planes: ``length [1]`` int32, L, the tokens that the state covers; ``inputs [taps - 1 + pending, channels]``, the
    convolution's inputs, of the L-th token in row ``taps - 2``, zeros before the sequence's start, and those of pending
    tokens after it; ``gates [pending, gates]``, what else pending tokens need; ``state``, ``[heads, rows, columns]`` on
    the cpu, ``[heads, columns, rows]`` on a GPU. Without pending tokens, gates or heads their planes are absent.

    Attributes:
        channels, taps: of the convolution.
        gates: numbers of a pending token besides its inputs.
        heads, rows, columns: of the state.
        activations: the type of inputs and gates on a GPU; on the cpu they are float32.
        state_dtype: float32 or bfloat16.
        pending: the most draft tokens of a step.

    Raises InvalidArgumentError for a size that cannot be.
    """

    channels: int
    taps: int
    gates: int = 0
    heads: int = 0
    rows: int = 0
    columns: int = 0
    activations: DType = float32
    state_dtype: DType = float32
    pending: int = 0

    def __post_init__(self) -> None:
        of_state = 1 if self.heads else 0
        least = {"channels": 1, "taps": 2, "gates": 0, "heads": 0, "rows": of_state, "columns": of_state, "pending": 0}
        for name, limit in least.items():
            if (value := getattr(self, name)) < limit:
                raise InvalidArgumentError(f"KVCacheSpec: {name} is {value}, must be at least {limit}", param=name)
        if self.state_dtype not in (float32, bfloat16):
            raise InvalidArgumentError(
                f"KVCacheSpec: state_dtype is {self.state_dtype.name}, must be float32 or bfloat16", param="state_dtype"
            )

    def planes(self, block_size: int, dtype: DType, is_cpu: bool) -> tuple[Plane, ...]:
        """See `PageForm`; neither argument about pages of tokens matters."""
        given = float32 if is_cpu else self.activations
        planes = [Plane("length", (1,), int32), Plane("inputs", (self.taps - 1 + self.pending, self.channels), given)]
        if self.pending and self.gates:
            planes.append(Plane("gates", (self.pending, self.gates), given))
        if self.heads:
            sizes = (self.rows, self.columns) if is_cpu else (self.columns, self.rows)
            planes.append(Plane("state", (self.heads, *sizes), self.state_dtype))
        return tuple(planes)


def _check(dtype: DType, known: dict[DType, str]) -> None:
    if dtype not in known:
        names = ", ".join(each.name for each in known)
        raise InvalidArgumentError(f"KVCacheSpec: dtype is {dtype.name}, must be one of {names}", param="dtype")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
