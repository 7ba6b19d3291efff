"""A model whose layers have pages of two forms is served from two pools, with the bits of a lone run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.registry import load_model
from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.limits import resolve
from runtime.kv.kinds import FULL, Window
from tests.models.driver import logits_of
from tests.runtime.engine.test_fuzz import Answers, fuzz
from tests.runtime.engine.test_toy_state import CONFIG as TOY
from tests.runtime.engine.test_toy_state import known_family
from tests.runtime.engine.test_window_groups import answers, build, make_requests
from tests.runtime.engine.two_forms.two_forms import WINDOW

CONFIG = TOY | {"architectures": ["TwoFormsForCausalLM"], "model_type": "two_forms"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The model, whose family is beside this file."""
    with known_family("two_forms", monkeypatch):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        yield tmp_path


def test_neither_pool_nor_swap_nor_preemption_changes_a_bit(folder: Path) -> None:
    requests = make_requests(24)
    expected: Any = None
    for settings in (
        {"num_blocks": 400, "enable_prefix_caching": False, "max_num_seqs": 1},
        {"num_blocks": 600},
        {"num_blocks": 34, "overlap": "on", "preemption": "swap", "swap_space_bytes": 1 << 22},
        {"num_blocks": 34, "decode_graphs": "off", "preemption": "recompute"},
    ):
        engine = build(folder, **settings)
        limits, info, stats = engine.limits, engine.info, engine.stats
        assert (limits.cache_kinds, limits.cache_pools) == ((FULL, Window(WINDOW)), (0, 1))
        assert limits.block_bytes[0] == 2 * limits.block_bytes[1], "heads twice as wide"
        assert limits.pool_sizes[0] >= 160 // 8
        assert info.kv_cache_bytes == engine.executor.kv_cache.size_bytes
        expected = expected or answers(engine, requests)
        assert answers(engine, requests) == expected, settings
        if "swap_space_bytes" in settings:
            assert min(stats().num_swaps, stats().swapped_in_blocks, stats().prefix_cache_hits) > 0
            assert engine.host_pool is not None
            assert limits.num_host_blocks == engine.host_pool.num_slots == sum(limits.host_pool_sizes)
        elif settings["num_blocks"] == 34:
            assert stats().num_preemptions > stats().num_swaps == 0
        elif "max_num_seqs" not in settings:
            assert stats().prefix_cache_hits > 0
        engine.close()


def test_random_load_leaves_every_page_its_owner(folder: Path) -> None:
    lone = build(folder, num_blocks=200, max_num_seqs=2, enable_prefix_caching=False)
    engine = build(folder, num_blocks=34, overlap="on", preemption="swap", swap_space_bytes=1 << 18)
    pages = fuzz(engine, Answers(lone), num_steps=100, seed=3, failure_rate=0.01)
    assert min(engine.stats().num_swaps, engine.stats().prefix_cache_hits) > 0
    assert pages.num_compared > 100 * 100


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_two_pools_on_a_gpu(folder: Path) -> None:
    gpu: dict[str, Any] = {"device": "emulated:sm_80", "exact": True, "num_blocks": 60}
    requests = make_requests(3, 80)
    engine = build(folder, **gpu)
    expected = answers(engine, requests)
    engine.close()
    small = build(folder, **{**gpu, "num_blocks": 30}, preemption="swap", swap_space_bytes=1 << 20)
    assert answers(small, requests) == expected
    small.close()


def sizes(**settings: Any) -> tuple[int, ...]:
    """Of a pool for full layers of 300 bytes a block, and one for windows of 32 tokens of 100 bytes."""
    limits = resolve(
        EngineConfig(**{"block_size": 8, "max_model_len": 256, "max_num_seqs": 4, **settings}),
        max_position_embeddings=512, bytes_per_block=(300, 100), available_bytes=1 << 20,
        cache_kinds=(FULL, Window(32), Window(32)), cache_pools=(0, 1, 1),
    )  # fmt: skip
    assert limits.block_bytes == (300, 100)
    return limits.pool_sizes


def test_one_budget_is_split_by_what_sequences_need() -> None:
    longest = (32, 2 * 5)  # pages of 256 tokens; of a window
    least = 300 * longest[0] + 100 * longest[1]
    assert sizes(kv_cache_bytes=least) == longest
    with pytest.raises(RequestError, match=f"256 tokens needs 42 KV blocks of 8 tokens .{least:,} bytes"):
        sizes(kv_cache_bytes=least - 1)
    full, windowed = sizes(kv_cache_bytes=10 * least)
    assert 0 <= 10 * least - 300 * full - 100 * windowed < 100, "all of it is used"
    assert (full - 32) / (windowed - 10) == pytest.approx(16 / 10, abs=0.05), "as a sequence of four windows needs them"
    assert sum(sizes(num_blocks=100)) == 100
    assert sizes() == (4 * 32, 4 * 10 + 2 * 2 * 64), "four sequences, and the chunks of two steps"


def test_swap_space_has_blocks_of_each_pool_or_none() -> None:
    limits = resolve(
        EngineConfig(block_size=8, max_model_len=256, num_blocks=100, swap_space_bytes=9999),
        max_position_embeddings=512, bytes_per_block=(300, 100), available_bytes=1 << 20,
        cache_kinds=(FULL, Window(32)), cache_pools=(0, 1),
    )  # fmt: skip
    counts = limits.host_pool_sizes
    assert 9999 - 400 < 300 * counts[0] + 100 * counts[1] <= 9999
    full, windowed = limits.pool_sizes
    assert abs(counts[0] - counts[1] * full / windowed) <= 1 + full / windowed, "as the pools, to a block"


def test_a_prompt_in_chunks_has_the_logits_of_one_in_one_piece(folder: Path) -> None:
    model, ids = load_model(folder, device="cpu", load_format="dummy"), range(1, 60)
    assert (logits_of(model, ids, [16, 1, 25, 17]) == logits_of(model, ids)).all()
