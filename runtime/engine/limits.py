"""The engine's limits, and how many KV blocks it gets.

``resolve`` turns an ``EngineConfig``, with the model's numbers, into the ``EngineLimits`` that the scheduler works
with, or raises ``RequestError`` with the numbers that do not fit.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.engine.config import (
    DEFAULT_MAX_WAITING_TOKENS,
    DecodeGraphsMode,
    EngineConfig,
    Overlap,
    SchedulingConfig,
)
from runtime.engine.errors import RequestError
from runtime.kv.kinds import FULL, AnyKind, blocks_of_sequence, window_of

logger = logging.getLogger("xserv.engine")

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Default upper limit of the KV cache in bytes (never more than a quarter of free memory)."""

GPU_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 2048, 512
"""Default upper limit of tokens in a step. On two cores a prompt of 2,000 tokens takes as long in steps of 512 as in
one, with 1 M weights and with 600 M; other streams stall for a quarter of the time."""

USUAL_WINDOWS, USUAL_WINDOW = 4, 1024
"""Memory is split over pools for sequences as long as this many windows (of the longest, or of this length)."""

USUAL_PROMPT = 8192
"""Memory is split for prompts of this many tokens, each with a recurrent state, within `BYTES_BESIDE_STATES`."""

BYTES_BESIDE_STATES = 3, 5
"""The least and the most bytes of keys and values beside each byte of recurrent states: states take a sixth, and up to
a quarter where a state takes the bytes of many tokens."""


def tokens_beside_state(state_tokens: float) -> float:
    """How many cached tokens are planned for each cached state that takes the bytes of ``state_tokens``."""
    least, most = BYTES_BESIDE_STATES
    return min(max(least * state_tokens, USUAL_PROMPT), most * state_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The numbers that the engine runs with. One request at ``max_model_len`` always fits ``num_blocks``, and every
    running sequence can decode in each step: ``max_num_seqs <= max_num_batched_tokens``. ``num_host_blocks`` is the
    swap space in blocks; ``cache_kinds`` and ``cache_pools`` are the kind and the pool of each cache group,
    ``pool_sizes`` and ``host_pool_sizes`` the blocks of each pool, ``block_bytes`` the bytes of one of them that the
    engine's own rank swaps. ``longrope_threshold`` is the model's, or None if no sequence can be longer. ``most_whole``
    tokens of images that may not be cut fit a step and the pools; None if there are none. A step tries at most
    ``pending_tokens`` draft tokens of a sequence with recurrent states."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    max_waiting: int
    max_waiting_tokens: int = DEFAULT_MAX_WAITING_TOKENS
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0
    cache_kinds: tuple[AnyKind, ...] = (FULL,)
    cache_pools: tuple[int, ...] = ()
    pool_sizes: tuple[int, ...] = ()
    host_pool_sizes: tuple[int, ...] = ()
    block_bytes: tuple[int, ...] = (1,)
    longrope_threshold: int | None = None
    most_whole: int | None = None
    pending_tokens: int = 0
    exact: bool = False
    overlap: Overlap = "auto"
    decode_graphs: DecodeGraphsMode = "auto"
    has_logits_processors: bool = False

    def __post_init__(self) -> None:
        for name, total in (("pool_sizes", self.num_blocks), ("host_pool_sizes", self.num_host_blocks)):
            if not getattr(self, name):
                object.__setattr__(self, name, (total,))
            assert sum(getattr(self, name)) == total, f"{name} are {getattr(self, name)}, {total} in all"

    def table_width(self, num_tokens: int) -> int:
        """Entries of the block table of a sequence of so many tokens, in each group: one for every page of tokens,
        whether the group has such pages or states."""
        tables = (kind.table_pages(num_tokens, self.block_size) for kind in self.cache_kinds)
        return max(-(-num_tokens // self.block_size), *tables)


def resolve(
    config: EngineConfig,
    *,
    max_position_embeddings: int,
    bytes_per_block: int | Sequence[int],
    draft_bytes_per_block: int = 0,
    available_bytes: int,
    is_gpu: bool = False,
    has_own_memory: bool = False,
    cache_kinds: tuple[AnyKind, ...] = (FULL,),
    cache_pools: Sequence[int] = (),
    longrope_threshold: int | None = None,
    whole_tokens: int | None = None,
) -> EngineLimits:
    """The limits for a model with these positions, bytes in one KV block (all layers of a cache group) of each pool,
    kinds and pools of cache groups, and ``longrope_threshold``.

    One budget, of bytes or of ``config.num_blocks``, is split over the pools: each has the blocks of the longest
    sequence and of a state that the prefix cache keeps, and the rest has as many sequences of a usual length as fit
    (`USUAL_WINDOWS`, `tokens_beside_state`).

    ``whole_tokens`` counts those of an image that one step computes, beside the decodes of all other sequences; None
    means that images may be cut. ``draft_bytes_per_block`` is the size of a draft model's block beside each block.
    ``available_bytes`` are free on the device; ``has_own_memory`` means that they are a real GPU's, of which the KV
    cache may take nine tenths by default. An emulated GPU (``is_gpu``) has none of its own.

    Raises ``RequestError`` if ``max_model_len`` exceeds the model's positions, an image exceeds a step, a requested KV
    cache size exceeds the free memory, or the KV cache cannot hold one request of that length.
    """
    block_size = config.block_size
    block_bytes = (bytes_per_block,) if isinstance(bytes_per_block, int) else tuple(bytes_per_block)
    pools = tuple(cache_pools) or (0,) * len(cache_kinds)
    full_bytes = [size + draft_bytes_per_block for size in block_bytes]
    max_num_batched_tokens, max_num_seqs = _step_limits(config, whole_tokens, is_gpu=is_gpu)
    most_whole = max_num_batched_tokens - max_num_seqs + 1
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise RequestError(
            f"max_model_len={config.max_model_len} exceeds the model's {max_position_embeddings} positions",
            param="max_model_len",
        )
    wanted_len = config.max_model_len or max_position_embeddings
    chunk = (whole_tokens or 1) if config.batching == "stall-free" else None  # the others compute prompts whole

    def blocks_for(num_tokens: int, chunk: int | None = chunk) -> list[int]:
        """By pool: the most blocks that a sequence needs at once."""
        of_pools = [[kind for kind, own in zip(cache_kinds, pools) if own == pool] for pool in range(len(block_bytes))]
        return [blocks_of_sequence(num_tokens, kinds, block_size, chunk=chunk) for kinds in of_pools]

    num_kept = [0] * len(block_bytes)  # by pool: the blocks of one state that the prefix cache keeps
    for pool, kind in zip(pools, cache_kinds):
        num_kept[pool] += config.enable_prefix_caching and not kind.follows_tokens

    def longest(num_tokens: int) -> list[int]:
        """By pool: the blocks of such a sequence, and of a kept state."""
        return [own + kept for own, kept in zip(blocks_for(num_tokens), num_kept)]

    def cost(num_tokens: int) -> int:
        return _product(longest(num_tokens), costs)

    costs, most = full_bytes, None
    if config.num_blocks is not None:
        budget, costs = config.num_blocks, [1] * len(block_bytes)
    elif config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    else:
        if has_own_memory:
            budget = available_bytes * 9 // 10
        else:
            num_engines = config.data_parallel_size if config.distributed_executor_backend == "mp" else 1
            budget = min(DEFAULT_KV_CACHE_BYTES, available_bytes // 4 // num_engines)
        chunk_pages = 2 * -(-max_num_batched_tokens // block_size)  # of the running step and of the next
        most = [config.max_num_seqs * count for count in blocks_for(wanted_len)]
        for pool, kind in zip(pools, cache_kinds):
            if not kind.follows_tokens:
                most[pool] += 2 * config.max_num_seqs  # states after prompts and prefixes
            elif not kind.is_whole:
                most[pool] += chunk_pages
    max_model_len = wanted_len
    if cost(wanted_len) > budget:
        max_model_len = bisect_right(range(wanted_len), budget, key=cost) - 1
    usual = USUAL_WINDOWS * max((window_of(kind) or 0 for kind in cache_kinds), default=0) or USUAL_WINDOW
    usual = max(1, min(max_model_len, usual))
    states = {pool for pool, kind in zip(pools, cache_kinds) if not kind.follows_tokens}
    if config.num_blocks is None and states and (token_pools := set(pools) - states):
        of_states = sum(blocks_for(1)[pool] * full_bytes[pool] for pool in states)
        a_page = sum(blocks_for(1)[pool] * full_bytes[pool] for pool in token_pools)
        usual = max(usual, round(tokens_beside_state(of_states / a_page * block_size)))
    pool_sizes = _split(budget, costs, longest(max_model_len), blocks_for(usual), most)
    num_blocks, num_bytes = sum(pool_sizes), _product(pool_sizes, full_bytes)
    if num_bytes > available_bytes:
        raise RequestError(
            f"a KV cache of {num_blocks} blocks takes {num_bytes:,} bytes, but only "
            f"{available_bytes:,} are free on the device: lower kv_cache_memory_bytes or num_blocks",
            param="num_blocks" if config.num_blocks is not None else "kv_cache_memory_bytes",
        )
    if max_model_len < wanted_len:
        max_model_len -= max_model_len % block_size
        if config.max_model_len is not None or max_model_len < 1:
            length = -(-wanted_len // block_size) * block_size if config.max_model_len is not None else block_size
            needed = blocks_for(length)
            if _product(needed, costs) <= budget:  # all fits but the state
                needed = longest(length)
                raise RequestError(
                    f"enable_prefix_caching=True keeps a state beside a request of {length} tokens, {sum(needed)} KV "
                    f"blocks ({_product(needed, full_bytes):,} bytes) in all, but the KV cache has {num_blocks}: lower "
                    "max_model_len, raise kv_cache_memory_bytes or set enable_prefix_caching=False",
                    param="enable_prefix_caching",
                )
            raise RequestError(
                f"a request of {length} tokens needs {sum(needed)} KV blocks of {block_size} tokens "
                f"({_product(needed, full_bytes):,} bytes), but the KV cache has {num_blocks} ({num_bytes:,} bytes): "
                "lower max_model_len or raise kv_cache_memory_bytes",
                param="kv_cache_memory_bytes",
            )
    if whole_tokens is not None and chunk is not None:

        def is_too_long(count: int) -> bool:
            needed = blocks_for(max_model_len, max(chunk, count))
            return any(own > size for own, size in zip(needed, pool_sizes))

        most_whole = bisect_left(range(most_whole + 1), True, key=is_too_long) - 1
    host_pool_sizes = _host_pools(config.swap_space_bytes, pool_sizes, block_bytes)
    return EngineLimits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        scheduling=config.scheduling,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=sum(host_pool_sizes),
        cache_kinds=cache_kinds,
        cache_pools=pools,
        pool_sizes=tuple(pool_sizes),
        host_pool_sizes=tuple(host_pool_sizes),
        block_bytes=block_bytes,
        longrope_threshold=longrope_threshold
        if longrope_threshold is not None and max_model_len > longrope_threshold
        else None,
        most_whole=None if whole_tokens is None else most_whole,
        pending_tokens=config.pending_tokens,
        exact=config.exact,
        overlap=config.overlap,
        decode_graphs=config.decode_graphs,
        has_logits_processors=bool(config.logits_processors),
    )


def _step_limits(config: EngineConfig, whole_tokens: int | None, *, is_gpu: bool) -> tuple[int, int]:
    """The most tokens and sequences of a step. Raises ``RequestError`` if an image exceeds it."""
    max_num_batched_tokens = config.max_num_batched_tokens
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(GPU_BATCHED_TOKENS if is_gpu else CPU_BATCHED_TOKENS, config.max_num_seqs)
        if whole_tokens is not None:
            max_num_batched_tokens = max(max_num_batched_tokens, whole_tokens + config.max_num_seqs - 1)
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    most_whole = max_num_batched_tokens - max_num_seqs + 1
    if whole_tokens is not None and whole_tokens > most_whole:
        raise RequestError(
            f"max_num_batched_tokens={max_num_batched_tokens} is below {whole_tokens + max_num_seqs - 1}: one step "
            f"computes a picture's {whole_tokens} tokens beside the decodes of max_num_seqs={max_num_seqs} less 1",
            param="max_num_batched_tokens",
        )
    return max_num_batched_tokens, max_num_seqs


def _split(
    budget: int, costs: Sequence[int], longest: Sequence[int], usual: Sequence[int], most: Sequence[int] | None
) -> list[int]:
    """The blocks of each pool, at most ``most``, that together cost ``budget``: those of the longest sequence, then
    equally many sequences of a usual length, and then what fits."""
    share, rest = _product(usual, costs), max(0, budget - _product(longest, costs))
    sizes = [first + rest * count // share for first, count in zip(longest, usual)]
    if most is not None:
        sizes = [min(size, own) for size, own in zip(sizes, most)]
    for pool, each in enumerate(costs):
        count = max(0, budget - _product(sizes, costs)) // each
        sizes[pool] += count if most is None else min(count, most[pool] - sizes[pool])
    return sizes


def _host_pools(num_bytes: int, pool_sizes: Sequence[int], block_bytes: Sequence[int]) -> list[int]:
    """The blocks of each pool in so many bytes of swap space; none if a pool would have none."""
    host_pool_sizes = [num_bytes * size // max(1, _product(pool_sizes, block_bytes)) for size in pool_sizes]
    if not all(host_pool_sizes):
        if any(host_pool_sizes):
            logger.warning("swapping is off: swap_space_bytes=%d has no block of each pool", num_bytes)
        host_pool_sizes = [0] * len(pool_sizes)
    return host_pool_sizes


def _product(counts: Sequence[int], each: Sequence[int]) -> int:
    return sum(count * one for count, one in zip(counts, each, strict=True))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be taken without swapping (an estimate within the cgroup's limit). The page cache
    counts as free: it may hold a model's weights after they were packed. ``root`` holds proc and sys."""
    meminfo = root / "proc/meminfo"
    available = 0
    if meminfo.exists():
        available = 1024 * _field(meminfo, "MemAvailable:")
    if available == 0:  # not Linux: half of the installed memory
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = root / "sys/fs/cgroup"
    limit, used, parts = group / "memory.max", group / "memory.current", group / "memory.stat"
    if limit.exists() and used.exists() and (text := limit.read_text(encoding="utf-8").strip()) != "max":
        reclaimable = _field(parts, "inactive_file") if parts.exists() else 0
        available = min(available, max(0, int(text) - int(used.read_text(encoding="utf-8")) + reclaimable))
    return available


def _field(file: Path, name: str) -> int:
    """The number after `name` in a file of lines of names and numbers; 0 without such a line."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.split(maxsplit=1)[:1] == [name]:
            return int(line.split()[1])
    return 0
