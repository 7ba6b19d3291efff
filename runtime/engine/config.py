"""The engine's limits, and how many KV blocks it gets.

``EngineConfig`` is what the user asks for; ``resolve`` turns it, with the model's numbers, into the
``EngineLimits`` that the scheduler works with, or raises ``RequestError`` with the numbers that do not fit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import is_integer

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Most bytes the KV cache takes unless the user names a size (never more than a quarter of free memory)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asks for. None: chosen from the model and the free memory.

    max_model_len           most tokens of prompt and output together; None: the model's positions, or what
                            the KV cache can hold if that is less
    max_num_seqs            most sequences in one step
    max_num_batched_tokens  most tokens in one step
    block_size              tokens in one KV block
    num_blocks, kv_cache_bytes  size of the KV cache, one of the two
    max_waiting             most requests in the waiting queue
    seed                    of the generator that draws seeds for requests without one; None: from the OS
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_waiting: int = 1024
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_waiting"):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "num_blocks", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.seed is not None and not is_integer(self.seed):
            raise RequestError(f"seed must be an integer or None, got {self.seed!r}", param="seed")
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise RequestError("give num_blocks or kv_cache_bytes, not both", param="num_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The numbers the engine runs with. One request at ``max_model_len`` always fits ``num_blocks``, and
    every running sequence can decode in each step: ``max_num_seqs <= max_num_batched_tokens``."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    max_waiting: int


def resolve(
    config: EngineConfig,
    *,
    max_position_embeddings: int,
    bytes_per_block: int,
    available_bytes: int,
    has_own_memory: bool = False,
) -> EngineLimits:
    """The limits for a model with this many positions and this many bytes in one KV block (all layers).

    ``available_bytes`` are free on the device; ``has_own_memory`` says that they are a GPU's, of which the KV cache may
    take nine tenths unless the user names a size.

    Raises ``RequestError`` when ``max_model_len`` exceeds the model's positions or the KV cache cannot hold
    one request of that length.
    """
    block_size = config.block_size
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise RequestError(
            f"max_model_len={config.max_model_len} exceeds the model's {max_position_embeddings} positions",
            param="max_model_len",
        )
    wanted_len = config.max_model_len or max_position_embeddings
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // bytes_per_block
    else:
        if has_own_memory:
            budget = available_bytes * 9 // 10
        else:
            budget = min(DEFAULT_KV_CACHE_BYTES, available_bytes // 4)
        num_blocks = min(budget // bytes_per_block, config.max_num_seqs * -(-wanted_len // block_size))
    max_model_len = wanted_len
    if num_blocks * block_size < wanted_len:
        if config.max_model_len is not None or num_blocks == 0:
            needed = -(-wanted_len // block_size) if config.max_model_len is not None else 1
            raise RequestError(
                f"a request of {needed * block_size} tokens needs {needed} KV blocks of {block_size} tokens "
                f"({needed * bytes_per_block:,} bytes), but the KV cache has {num_blocks}: lower "
                "max_model_len or raise kv_cache_bytes",
                param="kv_cache_bytes",
            )
        max_model_len = num_blocks * block_size
    return EngineLimits(
        max_model_len=max_model_len,
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        max_waiting=config.max_waiting,
    )


def available_memory_bytes() -> int:
    """Bytes of host memory that can be taken without swapping (an estimate; the cgroup's limit counts)."""
    meminfo = Path("/proc/meminfo")
    available = 0
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if available == 0:  # not Linux: half of what is installed
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def _positive(name: str, value: object) -> None:
    if not is_integer(value) or value < 1:  # type: ignore[operator]
        raise RequestError(f"{name} must be a positive integer, got {value!r}", param=name)
