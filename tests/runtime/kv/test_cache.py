"""What the pages and the room for them in host memory look like, and what they refuse."""

from __future__ import annotations

import operator
import os
from dataclasses import replace

import numpy as np
import pytest

from runtime.dtype import bfloat16, float32, uint8
from runtime.errors import InvalidArgumentError, OutOfMemoryError
from runtime.kv import cache as module
from runtime.kv.cache import HostPages, KVCache, KVCacheSpec, LayerCache
from runtime.kv.forms import KeyValues
from runtime.kv.kinds import FULL, State, Window
from runtime.kv.transfer import KVTransfer

SIZES = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 20, "block_size": 8}


def test_sizes_are_those_of_the_arrays() -> None:
    spec = KVCacheSpec.uniform(**SIZES, dtype=bfloat16)
    cache = KVCache(spec, 5)
    tensors = [tensor for index in range(2) for tensor in cache.layer(index)]
    assert [tensor.shape for tensor in tensors] == [(5, 3, 20, 8), (5, 3, 8, 32)] * 2
    assert not any(tensor.array.any() for tensor in tensors)
    assert cache.size_bytes == sum(tensor.array.nbytes for tensor in tensors)
    assert [plane.size_bytes for plane in spec.planes[0]] == [3 * 20 * 8 * 2, 3 * 8 * 32 * 2]
    assert spec.bytes_per_token * 8 == spec.block_bytes[0]
    host = HostPages(spec, 7)
    assert [plane.shape for plane in host.planes] == [(7, 960), (7, 1536)] * 2
    assert all(plane.dtype == np.uint8 for plane in host.planes)
    assert host.size_bytes == sum(plane.nbytes for plane in host.planes) == 7 * spec.block_bytes[0]


@pytest.mark.parametrize("name", [*SIZES, "dtype", "num_blocks", "num_slots"])
def test_sizes_must_be_positive_and_fit(name: str) -> None:
    wrong = {**SIZES, "dtype": float32, "num_blocks": 1, "num_slots": 1, name: uint8 if name == "dtype" else 0}
    num_blocks, num_slots = wrong.pop("num_blocks"), wrong.pop("num_slots")

    def build() -> None:
        spec = KVCacheSpec.uniform(**wrong)
        KVCache(spec, num_blocks)
        HostPages(spec, num_slots)

    with pytest.raises(InvalidArgumentError, match=f"{name} is") as caught:
        build()
    assert caught.value.param == name


def test_more_host_pages_than_memory_are_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KVCacheSpec.uniform(**SIZES, dtype=float32)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_slots = memory // spec.block_bytes[0] + 1
    sizes = f"{num_slots} slots of {spec.block_bytes[0]} bytes are {num_slots * spec.block_bytes[0]} bytes"
    with pytest.raises(OutOfMemoryError, match=f"{sizes}, the machine has {memory}"):
        HostPages(spec, num_slots)

    def refuse(*arguments: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(module.np, "empty", refuse)
    with pytest.raises(OutOfMemoryError, match=r"3 slots of \d+ bytes are \d+ bytes, which were refused: none left"):
        HostPages(spec, 3)


def test_each_form_of_page_has_a_pool() -> None:
    """As in Gemma 4: windows of wide heads, few wider ones in full layers, and layers that use the pages of others."""
    wide, wider = LayerCache(KeyValues(2, 16), Window(8)), LayerCache(KeyValues(1, 32))
    layers = (wide, wide, wider, 1, 2, wide)
    spec = KVCacheSpec(layers, 8, float32)
    assert [(group.kind, group.layers, group.num_padding, group.pool) for group in spec.groups] == [
        (FULL, (2,), 0, 0),
        (Window(8), (0, 1, 5), 0, 1),
    ]
    assert spec.block_bytes == ((32 * 8 + 8 * 32) * 4, 3 * 2 * (16 * 8 + 8 * 16) * 4)
    assert spec.bytes_per_token == sum(spec.block_bytes) // 8
    cache = KVCache(spec, (3, 5))
    assert [cache.layer(index)[0].shape for index in range(6)] == [
        (5, 2, 16, 8), (5, 2, 16, 8), (3, 1, 32, 8), (5, 2, 16, 8), (3, 1, 32, 8), (5, 2, 16, 8)
    ]  # fmt: skip
    assert [cache.group_of(index) for index in range(6)] == [1, 1, 0, 1, 0, 1]
    assert np.shares_memory(cache.layer(4)[1].array, cache.layer(2)[1].array)
    assert cache.size_bytes == 3 * spec.block_bytes[0] + 5 * spec.block_bytes[1]
    host = HostPages(spec, (1, 2))
    for number, tensor in enumerate((*cache.layer(2), *cache.layer(0))):
        tensor.array[:] = np.arange(tensor.array.size, dtype=np.float32).reshape(tensor.shape) + number
    before = [cache.layer(index)[0].array.copy() for index in (2, 0)]
    transfer = KVTransfer(cache, host)
    transfer.run([(2, 0), (3, 2)], [(2, 4), (0, 1)], [(1, 0), (4, 7)])
    full, windowed = (cache.layer(index)[0].array for index in (2, 0))
    np.testing.assert_array_equal(full, before[0][[2, 2, 2]])
    np.testing.assert_array_equal(windowed, before[1][[0, 0, 2, 3, 0]])
    assert transfer.counters.out_bytes == sum(spec.block_bytes)
    with pytest.raises(InvalidArgumentError, match=r"copies\[1\]: block 2 is in pool 0, block 3 in 1"):
        transfer.run([], [], [(0, 1), (2, 3)])
    for given, words in ((4, "has 1 numbers, must have one for 2 pools"), ((4, 0), "num_blocks is 0")):
        with pytest.raises(InvalidArgumentError, match=words):
            KVCache(spec, given)
    for wrong in (1, 6):
        with pytest.raises(InvalidArgumentError, match=f"layer 1 uses the pages of layer {wrong}|layer 3 uses"):
            KVCacheSpec((layers[0], wrong, layers[2], 1) if wrong == 1 else (*layers[:3], 3), 8, float32)
    with pytest.raises(InvalidArgumentError, match="layer 3 uses the pages of layer 1"):
        KVCacheSpec(layers, 8, float32, own_layers=range(2, 6))


def test_layers_without_pages_and_stages_that_lack_a_form() -> None:
    """As in Nemotron-H: few layers of attention, states, and layers of an MLP alone."""
    kept, attention = LayerCache(KeyValues(1, 32), State()), LayerCache(KeyValues(2, 16))
    spec = KVCacheSpec((kept, None, attention, None, kept, None), 8, float32)
    assert [(group.kind, group.layers) for group in spec.groups] == [(FULL, (2,)), (State(), (0, 4))]
    assert spec.layers_with_pages == [0, 2, 4]
    assert [KVCache(spec, (2, 3)).group_of(layer) for layer in (0, 2, 4)] == [1, 0, 1]
    for own, sizes in ((range(1, 4), [1, 0]), (range(4, 6), [0, 1]), (range(5, 6), [0, 0])):
        stage = replace(spec, own_layers=own)
        assert [group.kind for group in stage.groups] == [FULL, State()]
        assert [size > 0 for size in stage.block_bytes] == [size > 0 for size in sizes]
        assert KVCache(stage, (2, 3)).size_bytes == sum(map(operator.mul, (2, 3), stage.block_bytes))
    with pytest.raises(InvalidArgumentError, match="layer 2 uses the pages of layer 1, which must have pages"):
        KVCacheSpec((kept, None, 1), 8, float32)
