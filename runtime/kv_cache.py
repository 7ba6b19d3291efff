"""The storage of the KV pages: what a page looks like in memory, and how many bytes it costs.

A page (block) holds ``block_size`` consecutive tokens of one sequence for every KV head of one layer. On cpu the keys
of a page are stored transposed, so that a vector register runs over the tokens of the page and ``q . K`` needs no
horizontal sums, and the values' rows are padded to whole vectors of 16:

- K ``[num_blocks, num_kv_heads, head_dim, block_size]``
- V ``[num_blocks, num_kv_heads, block_size, padded_head_dim]``

Who owns which block is not known here: that is the engine's block pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.device.device import Device
from runtime.dtype import DType, bfloat16, float16, float32
from runtime.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedError
from runtime.tensor import Tensor

_VALUE_ROW_MULTIPLE = 16  # float32 lanes of the widest vector: V rows are whole vectors
_BLOCK_SIZE_MULTIPLE = 8  # float32 lanes of the narrowest vector that the score kernel is built for


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of one model's KV cache; the number of blocks is the engine's choice.

    Raises InvalidArgumentError for a size that is not positive, a ``block_size`` that is no multiple of 8, or a dtype
    other than float32, float16 and bfloat16.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens a page
    dtype: DType

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
        if self.dtype not in (float32, float16, bfloat16):
            raise InvalidArgumentError(
                f"KVCacheSpec: dtype is {self.dtype.name}, must be float32, float16 or bfloat16", param="dtype"
            )

    @property
    def padded_head_dim(self) -> int:
        """Elements of one stored value row."""
        return -(-self.head_dim // _VALUE_ROW_MULTIPLE) * _VALUE_ROW_MULTIPLE

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = self.block_size * self.num_kv_heads * (self.head_dim + self.padded_head_dim)
        return self.num_layers * elements * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, keys and values."""
        return self.bytes_per_block // self.block_size


class KVCache:
    """The pages of every layer, allocated once and zeroed.

    Raises InvalidArgumentError when ``num_blocks`` is not positive, UnsupportedError for a device other than cpu,
    OutOfMemoryError when the machine refuses the bytes.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: Device) -> None:
        if num_blocks < 1:
            raise InvalidArgumentError(f"KVCache: num_blocks is {num_blocks}, must be at least 1", param="num_blocks")
        if device.type != "cpu":
            raise UnsupportedError(f"KVCache: device is {device}, only cpu has KV pages so far")
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = device
        heads = (num_blocks, spec.num_kv_heads)
        self._layers = [
            (
                _zeros((*heads, spec.head_dim, spec.block_size), spec),
                _zeros((*heads, spec.block_size, spec.padded_head_dim), spec),
            )
            for _ in range(spec.num_layers)
        ]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Layer ``index``'s pages: K ``[num_blocks, num_kv_heads, head_dim, block_size]`` and V
        ``[num_blocks, num_kv_heads, block_size, padded_head_dim]``."""
        return self._layers[index]

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_blocks * self.spec.bytes_per_block


def _zeros(shape: tuple[int, ...], spec: KVCacheSpec) -> Tensor:
    try:
        return Tensor.from_numpy(np.zeros(shape, spec.dtype.numpy))
    except MemoryError as error:
        size = int(np.prod(shape, dtype=np.int64)) * spec.dtype.itemsize
        raise OutOfMemoryError(f"KVCache: {size} bytes for one layer's pages {shape} were refused") from error
