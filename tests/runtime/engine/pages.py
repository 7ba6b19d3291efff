"""A page written by a stranger, found: the bytes of every running sequence's computed slots, compared step by step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.engine.engine import Engine
from runtime.engine.scheduling.sequence import Sequence
from runtime.kv.cache import KVCache
from runtime.kv.forms import KeyValues, Latent


def slot_sums(kv_cache: KVCache) -> NDArray[np.uint64]:
    """A checksum over all layers of each slot's keys and values, `[num_blocks * block_size]`, pool by pool."""
    spec = kv_cache.spec
    firsts = np.cumsum([0, *kv_cache.pool_sizes])
    sums = np.zeros((kv_cache.num_blocks, spec.block_size), np.uint64)
    rng = np.random.default_rng(0)
    for layer in range(spec.num_layers):
        form = spec.of_layer(layer).form
        assert isinstance(form, KeyValues | Latent)
        heads, width = (1, form.width) if isinstance(form, Latent) else (form.num_kv_heads, form.head_dim)
        planes = [tensor.to("cpu").array for tensor in kv_cache.layer(layer)[:2]]  # of latent pages there is one
        if kv_cache.device.kind == "cpu" and not isinstance(form, Latent):
            planes[0] = planes[0].transpose(0, 1, 3, 2)  # all [num_blocks, num_kv_heads, block_size, head_dim ...]
        for pages in planes:
            bits = np.ascontiguousarray(pages[..., :width]).view(f"u{pages.itemsize}").astype(np.uint64)
            weights = rng.integers(0, 2**63, (heads, width), np.uint64) * 2 + 1
            pool = spec.groups[kv_cache.group_of(layer)].pool
            sums[firsts[pool] : firsts[pool + 1]] += np.einsum("nhsd,hd->ns", bits, weights)
    return sums.reshape(-1)


class PageChecker:
    """`check` after each step: what a running sequence has computed before has not changed since, wherever its blocks
    have been meanwhile; only what is computed again after a preemption may differ.

    For the cpu, and for GPUs in exact mode: otherwise a swapped sequence that comes back may find blocks of the same
    tokens that another has computed, with other last bits."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_compared = 0
        self._seen: dict[Sequence, list[NDArray[np.uint64]]] = {}  # by group

    def check(self) -> None:
        engine = self.engine
        engine.executor.synchronize()
        sums = slot_sums(engine.executor.kv_cache)
        block_size = engine.limits.block_size
        seen: dict[Sequence, list[NDArray[np.uint64]]] = {}
        for sequence in engine.scheduler.waiting:
            if sequence in self._seen and sequence.num_computed:  # swapped out
                seen[sequence] = self._seen[sequence]
        for sequence in engine.scheduler.running:
            positions = np.arange(sequence.num_computed)
            tables = [np.array(ids)[positions // block_size] for ids in sequence.blocks]
            seen[sequence] = [sums[blocks * block_size + positions % block_size] for blocks in tables]
            for first, now, before in zip(sequence.first_pages, seen[sequence], self._seen.get(sequence, [])):
                assert len(before) <= len(now), "computed tokens were lost"
                changed = np.flatnonzero(now[: len(before)] != before)
                changed = changed[changed >= first * block_size]  # those before were given up
                assert not changed.size, (
                    f"request {sequence.request.request_id}, choice {sequence.index}: the pages of positions "
                    f"{changed.tolist()} have changed"
                )
                self.num_compared += max(0, len(before) - first * block_size)
        self._seen = seen
