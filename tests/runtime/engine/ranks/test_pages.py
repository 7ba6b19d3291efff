"""Blocks of several ranks are read and written whole from rank 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.engine.make_engine import build_engine
from runtime.engine.ranks import pages as rank_pages
from runtime.engine.ranks.executor import ParallelExecutor
from runtime.engine.ranks.pages import RankPages
from tests.runtime.engine.storing_engine import SETTINGS
from tests.runtime.engine.test_stored_prefixes import write_full

EMULATED = pytest.param("emulated:sm_80", marks=[pytest.mark.emulator, pytest.mark.exhaustive])


def _read(known: list[NDArray[np.uint8]], plane: int, target: NDArray[np.uint8]) -> None:
    np.copyto(target, known[plane])


@pytest.mark.parametrize("device", ["cpu", EMULATED])
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_blocks_are_those_of_all_ranks(
    split: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "device": device, "num_blocks": 12}
    model = write_full(tmp_path / "model")
    alone = build_engine(model, **settings)
    whole = sum(alone.executor.kv_cache.spec.block_bytes)  # type: ignore[attr-defined]
    alone.close()
    engine = build_engine(model, **settings, **{split: 2})
    try:
        assert isinstance(engine.executor, ParallelExecutor)
        pages = RankPages(engine.executor)
        assert sum(pages.page_bytes[0]) == whole
        rng = np.random.default_rng(0)
        known = [rng.integers(0, 256, (5, size), np.uint8) for size in pages.page_bytes[0]]
        for most in (1 << 20, 1):  # bytes of a message
            monkeypatch.setattr(rank_pages, "MOST_BYTES", most)
            for first in (2, 6):
                pages.fill(0, first, 5, partial(_read, known))
            for ids, rows in (([4, 3, 8], [2, 1, 2]), ([2], [0])):
                found = pages.copy_out(0, ids)
                assert all(np.array_equal(ours, theirs[rows]) for ours, theirs in zip(found, known, strict=True))
            known = [255 - each for each in known]
    finally:
        engine.close()
