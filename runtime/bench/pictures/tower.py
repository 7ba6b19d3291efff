"""A tower on the cpu: how long a picture takes, and how long its products alone take, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from models.registry import load_model
from models.towers.qwen3_vl import Tower
from runtime.bench.metrics import BenchmarkError
from runtime.dtype import DType
from runtime.linear.linear import Linear
from runtime.tensor.tensor import Tensor


def bench_tower(folder: str, side: int, num_rounds: int) -> dict[str, Any]:
    """A square picture of `side` patches a side. Both parts are timed in every round, one behind the other."""
    model: Any = load_model(folder, load_format="dummy", device="cpu")
    tower: Tower = model.tower
    patches = np.random.default_rng(0).uniform(-1, 1, (side * side, _patch_bytes(tower))).astype(np.float32)
    made = tower(patches, (side, side))
    if not all(np.isfinite(each.numpy()).all() for each in made):
        raise BenchmarkError("the tower's embeddings are not finite")
    products = _Products(tower, side * side)
    whole, alone, ratios = [], [], []
    for _ in range(num_rounds):
        whole.append(seconds(lambda: tower(patches, (side, side))))
        alone.append(seconds(products.run))
        ratios.append(alone[-1] / whole[-1])
    return {
        "num_layers": tower.config.num_layers,
        "num_patches": side * side,
        "num_tokens": side * side // tower.config.merge_size**2,
        "gflop_of_products": round(products.num_flops / 1e9, 1),
        "tower_s": round(median(whole), 4),
        "products_s": round(median(alone), 4),
        "products_gflop_per_s": round(products.num_flops / median(alone) / 1e9, 1),
        "share": round(median(ratios), 3),
        "shares": [round(each, 3) for each in ratios],
    }


def _patch_bytes(tower: Tower) -> int:
    return 3 * tower.config.num_frames * tower.config.patch_size**2


def products_of(tower: Tower, num_patches: int) -> list[tuple[Linear, int]]:
    """Every matrix of a tower, with the rows that it has for a picture of so many patches."""
    num_tokens = num_patches // tower.config.merge_size**2
    linears: list[tuple[Linear, int]] = []
    for layer in tower.layers:
        linears += [(each, num_patches) for each in (layer.qkv, layer.proj, layer.up, layer.down)]
    for merger in (tower.merger, *tower.deepstack):
        linears += [(merger.up, num_tokens), (merger.down, num_tokens)]
    return linears


def flops_of(products: list[tuple[Linear, int]]) -> int:
    return sum(2 * rows * linear.weight.shape[0] * linear.weight.shape[1] for linear, rows in products)


class _Products:
    """Those matrices, and nothing between them."""

    def __init__(self, tower: Tower, num_patches: int) -> None:
        dtype, products = tower.layers[0].norms[0][0].dtype, products_of(tower, num_patches)
        self._calls = [(linear, _random(rows, linear.weight.shape[1], dtype)) for linear, rows in products]
        self.num_flops = flops_of(products)

    def run(self) -> None:
        for linear, x in self._calls:
            linear(x)


def _random(rows: int, columns: int, dtype: DType) -> Tensor:
    values = np.random.default_rng(1).uniform(-1, 1, (rows, columns)).astype(np.float32)
    return Tensor.from_numpy(values).to(dtype)


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
