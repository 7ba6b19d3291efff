"""What a model's routers choose, seen by a test: rounding may turn a choice between two experts that are as good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from runtime import ops
from runtime.backends import cuda
from runtime.routing import Routing
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]


@contextmanager
def recorded_routes() -> Iterator[list[tuple[Array, Array]]]:
    """Gives the logits ``[T, E]`` and the experts ``[T, k]`` of each router, in the order of calls."""
    found: list[tuple[Array, Array]] = []
    route = ops.route

    def recorded(logits: Tensor, *more: Any, **named: Any) -> Routing:
        routing = route(logits, *more, **named)
        found.append((logits.to("cpu").numpy().copy(), np.sort(routing.ids.to("cpu").numpy(), 1)))
        return routing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "route", recorded)
        patch.setattr(cuda, "normed_route", lambda *_: None)  # whose logits nobody sees
        yield found


def rows_routed_alike(
    ours: list[tuple[Array, Array]], theirs: list[tuple[Array, Array]], num_rows: int, *, tolerance: float
) -> Array:
    """Whether each row's experts are the same in all layers, once per row.

    Where a row's first other choice is, the logits of the experts that it lost and won must lie closer together than
    `tolerance` times the largest logit.
    """
    alike = np.ones(num_rows, bool)
    for (_, ids), (logits, wanted) in zip(ours, theirs, strict=True):
        for row in np.flatnonzero((ids != wanted).any(1) & alike):
            lost, won = np.setdiff1d(wanted[row], ids[row]), np.setdiff1d(ids[row], wanted[row])
            assert logits[row, lost].max() - logits[row, won].min() <= tolerance * np.abs(logits).max()
            alike[row] = False
    return alike
