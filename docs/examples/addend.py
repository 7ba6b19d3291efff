"""Adapters of rank 1: adapter i adds b[:, i] (a[i] . x) to its rows."""

from collections.abc import Sequence

import numpy as np

from runtime import ops
from runtime.batch import Batch
from runtime.linear.addends import Addend, DeclaredMap
from runtime.tensor.tensor import Tensor


class RankOne:
    def __init__(self, a: np.ndarray, b: np.ndarray) -> None:  # [num_adapters, K], [N, num_adapters]
        self.down, self.up = (ops.prepare_linear(Tensor.from_numpy(each)) for each in (a, b))
        self.numbers = Tensor.from_numpy(np.arange(len(a), dtype=np.int32))

    def add_to(self, residual: Tensor | None, x: Tensor, batch: Batch) -> Tensor | None:
        if batch.adapters is None:
            return residual
        is_own = ops.equal(batch.adapters.view(-1, 1), self.numbers)  # [num_tokens, num_adapters]
        return ops.linear(ops.where(is_own, ops.linear(x, self.down), 0.0), self.up, residual=residual)


class RankOneAdapters:
    """Adapters by the names of their maps' first tensors."""

    def __init__(self, weights: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        self.weights = weights

    def addends_of(self, declared: DeclaredMap) -> Sequence[Addend]:
        found = self.weights.get(declared.names[0])
        return () if found is None else (RankOne(*found),)
