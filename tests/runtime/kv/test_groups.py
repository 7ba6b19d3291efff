"""How layers are cut into groups, and what a sequence needs of their pages: compared with counting positions."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.dtype import float32
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.kv.groups import cut_layers
from runtime.kv.kinds import FULL, Window, blocks_of_sequence, kind_of_window


def pattern(num_layers: int, period: int, window: int | None = 512) -> tuple[int | None, ...]:
    """Every ``period``-th layer sees all, as in Gemma 3 (6), Gemma 2 (2), OLMo 3 (4)."""
    return tuple(None if (layer + 1) % period == 0 else window for layer in range(num_layers))


@pytest.mark.parametrize(
    ("windows", "size", "num_full", "num_windowed", "num_padding"),
    [
        (pattern(32, 33), 32, 0, 1, 0),  # all windowed
        ((None,) * 28, 28, 1, 0, 0),
        (pattern(26, 6), 4, 1, 6, 2),  # Gemma 3 1B
        (pattern(34, 6), 5, 1, 6, 1),  # 4B
        (pattern(48, 6), 8, 1, 5, 0),  # 12B
        (pattern(26, 2), 13, 1, 1, 0),  # Gemma 2
        (pattern(32, 4), 8, 1, 3, 0),  # OLMo 3
        ((*(None,) * 21, *(4096,) * 7), 7, 3, 1, 0),  # Qwen 2 with max_window_layers
        ((*(None,) * 5, *(8,) * 6), 6, 1, 1, 1),
        ((8, 16, None), 1, 1, 2, 0),
    ],
)
def test_layers_of_known_models(
    windows: tuple[int | None, ...], size: int, num_full: int, num_windowed: int, num_padding: int
) -> None:
    groups = cut_layers(tuple(map(kind_of_window, windows)))
    assert [group.kind is FULL for group in groups] == [True] * num_full + [False] * num_windowed
    assert {len(group.layers) + group.num_padding for group in groups} == {size}
    assert sum(group.num_padding for group in groups) == num_padding
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(kind_of_window(windows[layer]) == group.kind for group in groups for layer in group.layers)
    assert all(group.layers == tuple(sorted(group.layers)) for group in groups)


def test_pages_that_a_window_touches() -> None:
    for window in range(1, 12):
        for num_tokens in range(40):
            seen = range(max(0, num_tokens - window + 1), num_tokens + 1)  # by the next token
            assert Window(window).first_page(num_tokens, 4) == seen[0] // 4
            for chunk in (1, 3, 8):
                most = max(
                    len({p // 4 for p in range(max(0, first - window + 1), min(first + chunk, num_tokens))})
                    for first in range(num_tokens + 1)
                )
                bound = blocks_of_sequence(num_tokens, (Window(window),), 4, chunk=chunk)
                assert most <= bound <= most + (num_tokens < window + chunk + 4), (window, num_tokens, chunk)
        for page in range(5):
            past = Window(window).gives_up_at(page, 4)
            assert Window(window).first_page(past - 1, 4) == page < Window(window).first_page(past, 4)
    assert FULL.first_page(10**6, 16) == 0
    assert FULL.gives_up_at(0, 16) > 10**9
    assert blocks_of_sequence(100, (FULL, Window(8), Window(8)), 16, chunk=None) == 3 * 7


def test_layers_of_all_groups_share_storages() -> None:
    spec = KVCacheSpec.uniform(6, 2, 8, 8, float32, layer_windows=(16, None, 16, 16, None, 16))
    assert [group.layers for group in spec.groups] == [(1, 4), (0, 3), (2, 5)]
    assert (len(spec.planes), spec.group_kinds) == (2, (FULL, Window(16), Window(16)))
    assert spec.block_bytes[0] == 2 * (2 * 8 * 8 + 2 * 8 * 16) * 4  # K, and V with rows of whole vectors
    cache = KVCache(spec, 4)
    assert [cache.group_of(layer) for layer in range(6)] == [1, 0, 2, 1, 0, 2]
    assert cache.size_bytes == 4 * spec.block_bytes[0]
    for layers in ((0, 1, 2), (3, 4, 5)):
        pages = [cache.layer(layer)[0].array for layer in layers]
        assert all(np.shares_memory(pages[0], other) for other in pages)
    assert not np.shares_memory(cache.layer(0)[0].array, cache.layer(3)[0].array)


@pytest.mark.parametrize("windows", [(8,), (8, 0), (8, None, 8)])
def test_windows_must_be_those_of_the_layers(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"layer_windows is .* for each of 2 layers") as caught:
        KVCacheSpec.uniform(2, 2, 8, 8, float32, layer_windows=windows)
    assert caught.value.param == "layer_windows"
