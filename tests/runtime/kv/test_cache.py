"""What the pages and the room for them in host memory look like, and what they refuse."""

from __future__ import annotations

import os

import numpy as np
import pytest

from runtime.dtype import bfloat16, float32, uint8
from runtime.errors import InvalidArgumentError, OutOfMemoryError
from runtime.kv import cache as module
from runtime.kv.cache import HostPages, KVCache, KVCacheSpec

SIZES = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 20, "block_size": 8}


def test_sizes_are_those_of_the_arrays() -> None:
    spec = KVCacheSpec(**SIZES, dtype=bfloat16)
    cache = KVCache(spec, 5)
    tensors = [tensor for index in range(2) for tensor in cache.layer(index)]
    assert [tensor.shape for tensor in tensors] == [(5, 3, 20, 8), (5, 3, 8, 32)] * 2
    assert not any(tensor.array.any() for tensor in tensors)
    assert cache.size_bytes == sum(tensor.array.nbytes for tensor in tensors)
    assert [plane.size_bytes for plane in spec.planes[0]] == [3 * 20 * 8 * 2, 3 * 8 * 32 * 2]
    assert spec.bytes_per_token * 8 == spec.bytes_per_block
    host = HostPages(spec, 7)
    assert [plane.shape for plane in host.planes] == [(7, 960), (7, 1536)] * 2
    assert all(plane.dtype == np.uint8 for plane in host.planes)
    assert host.size_bytes == sum(plane.nbytes for plane in host.planes) == 7 * spec.bytes_per_block


@pytest.mark.parametrize("name", [*SIZES, "dtype", "num_blocks", "num_slots"])
def test_sizes_must_be_positive_and_fit(name: str) -> None:
    wrong = {**SIZES, "dtype": float32, "num_blocks": 1, "num_slots": 1, name: uint8 if name == "dtype" else 0}
    num_blocks, num_slots = wrong.pop("num_blocks"), wrong.pop("num_slots")

    def build() -> None:
        spec = KVCacheSpec(**wrong)
        KVCache(spec, num_blocks)
        HostPages(spec, num_slots)

    with pytest.raises(InvalidArgumentError, match=f"{name} is") as caught:
        build()
    assert caught.value.param == name


def test_more_host_pages_than_memory_are_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KVCacheSpec(**SIZES, dtype=float32)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_slots = memory // spec.bytes_per_block + 1
    sizes = f"{num_slots} slots of {spec.bytes_per_block} bytes are {num_slots * spec.bytes_per_block} bytes"
    with pytest.raises(OutOfMemoryError, match=f"{sizes}, the machine has {memory}"):
        HostPages(spec, num_slots)

    def refuse(*arguments: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(module.np, "empty", refuse)
    with pytest.raises(OutOfMemoryError, match=r"3 slots of \d+ bytes are \d+ bytes, which were refused: none left"):
        HostPages(spec, 3)
