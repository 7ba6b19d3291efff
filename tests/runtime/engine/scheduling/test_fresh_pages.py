"""Empty pages get memory in the order in which they are taken."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.dtype import float32
from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import engine_of
from runtime.engine.scheduling import fresh_pages
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.fresh_pages import FreshPages
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.kv.kinds import FULL
from runtime.kv.page_bytes import PageBytes
from tests.models.folders import GOLDENS


class RecordedPages:
    """Two planes of pages in one pool, and one in another."""

    page_bytes = ((8, 4), (16,))

    def __init__(self) -> None:
        self.entered: list[tuple[int, int, int, int]] = []

    def enter(self, *piece: int) -> None:
        self.entered.append(piece)  # type: ignore[arg-type]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> RecordedPages:
    monkeypatch.setattr(fresh_pages, "AHEAD_BYTES", 48)
    monkeypatch.setattr(fresh_pages, "PIECE_BYTES", 16)
    monkeypatch.setattr(fresh_pages, "available_memory_bytes", lambda: 4 * 48)
    return RecordedPages()


def enter_all(fresh: FreshPages) -> None:
    while fresh.is_wanted:
        fresh.allocate_some()


def test_pages_that_are_taken_next_get_memory(pages: RecordedPages) -> None:
    pool = BlockPool((10, 2), 4, pools=(0, 1), kinds=(FULL, FULL))
    fresh = FreshPages(pages, pool)  # type: ignore[arg-type]
    enter_all(fresh)
    assert sorted(pages.entered) == [(0, 0, 0, 2), (0, 0, 2, 4), (0, 1, 0, 4), (1, 0, 0, 1), (1, 0, 1, 2)]
    assert [first for pool_of, _, first, _ in pages.entered if pool_of == 0] == [0, 0, 2], "the first pages first"
    pages.entered.clear()
    taken = pool.allocate(3)
    enter_all(fresh)
    assert sorted(pages.entered) == [(0, 0, 4, 6), (0, 0, 6, 7), (0, 1, 4, 7)]
    pages.entered.clear()
    pool.release(taken)
    pool.allocate(2)
    assert not fresh.is_wanted, "pages that come back have memory"
    pool.allocate(8)
    enter_all(fresh)
    assert sorted(pages.entered) == [(0, 0, 7, 9), (0, 0, 9, 10), (0, 1, 7, 10)], "no more than there are"


def test_an_engine_that_wakes_gives_its_pages_memory_again() -> None:
    engine = engine_of(str(GOLDENS / "llama_default"), EngineConfig(num_blocks=16, load_format="dummy"))
    fresh = engine.fresh_pages
    assert fresh is not None
    enter_all(fresh)
    engine.weights.free_pages()
    engine.weights.allocate_pages()
    assert fresh.is_wanted, "the cache was allocated anew"
    engine.close()


def test_pages_get_none_where_little_is_free(pages: RecordedPages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_pages, "available_memory_bytes", lambda: 4 * 48 - 1)
    fresh = FreshPages(pages, BlockPool((10, 2), 4, pools=(0, 1), kinds=(FULL, FULL)))  # type: ignore[arg-type]
    enter_all(fresh)
    assert sorted(pages.entered) == [(1, 0, 0, 1), (1, 0, 1, 2)], "the other pool's are fewer bytes"


def test_memory_changes_no_page() -> None:
    spec = KVCacheSpec.uniform(1, 1, 16, 16, float32)
    cache = KVCache(spec, 64)
    for tensor in cache.storages[0]:
        tensor.array[...] = np.arange(tensor.array.size).reshape(tensor.array.shape)
    before = [tensor.array.copy() for tensor in cache.storages[0]]
    enter_all(FreshPages(PageBytes(cache), BlockPool(64, 16)))
    for tensor, expected in zip(cache.storages[0], before):
        np.testing.assert_array_equal(tensor.array, expected)
