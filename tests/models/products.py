"""Every product that a model asks for, seen by a test: replaced, or compared with what the tile in force defines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from numba_kernels.blocks import BLOCKS
from runtime import ops
from runtime.backends import cpu
from runtime.backends.cpu import head_linear
from runtime.linear.weight import JoinedWeight
from runtime.ops import LinearWeight, experts, linear
from runtime.tensor.tensor import Tensor
from tests.models.driver import logits_of, relative_error
from tests.oracles import int8
from tests.oracles.tiles import as_multiplied


@contextmanager
def products_by(instead: Callable[..., Tensor]) -> Iterator[None]:
    """Whoever multiplies with a linear map calls `instead(op, x, weight, *more, **rest)`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("linear", "logits_linear", "linear_glu"):
            patch.setattr(ops, name, partial(instead, getattr(ops, name)))
        yield


@contextmanager
def compared_products() -> Iterator[list[float]]:
    """Gives the relative error of each product against float32 weights and rows rounded as the tile rounds them. The
    model goes on with float32 weights and its own rows, so that its logits have no rounding of activations in them.

    Each product is compared by itself, since one number that is rounded to the other side moves all that follows.
    """
    errors: list[float] = []
    twins: dict[int, tuple[LinearWeight, LinearWeight]] = {}  # by a weight's id, which is kept with its twin

    def compared(op: Callable[..., Tensor], x: Tensor, weight: LinearWeight, *more: Any, **rest: Any) -> Tensor:
        if id(weight) not in twins:
            twins[id(weight)] = weight, _in_float32(weight)
        twin = twins[id(weight)][1]
        if isinstance(weight, JoinedWeight):  # each part rounds rows by its own type
            for part in weight.parts:
                compared(linear, x, part)
            parts = [linear(x, part).numpy() for part in weight.parts]
            np.testing.assert_array_equal(linear(x, weight).numpy(), np.concatenate(parts, 1))
            return op(x, twin, *more, **rest)
        if weight.format.name in BLOCKS and weight.format.activation is not None:
            has_powers = BLOCKS[weight.format.name].has_power_scales
            rows = int8.rounded_by_blocks(x.numpy(), has_powers=has_powers).astype(np.float32)
        else:
            rows = as_multiplied(x.numpy(), weight.format.element.numpy)
        rounded = Tensor.from_numpy(rows)
        given = {name: value for name, value in rest.items() if name != "out"}  # that may be the residual
        own, expected = op(x, weight, *more, **given), op(rounded, twin, *more, **given)
        errors.append(relative_error(own.numpy(), expected.numpy()))
        return op(x, twin, *more, **rest)

    def experts_compared(*arguments: Any, **rest: Any) -> Tensor:
        """Experts are the products of each with its rows."""
        alike = experts_by(linear, *arguments, **rest).numpy()
        assert relative_error(experts(*arguments, **rest).numpy(), alike) <= 1e-6
        return experts_by(partial(compared, linear), *arguments, **rest)

    def heads_compared(x: Tensor, weight: Any, out: Tensor, first: int) -> None:
        """So are heads."""
        _, width, depth = weight.shape

        def by(multiply: Callable[[Tensor, LinearWeight], Tensor]) -> Any:
            rows = [np.ascontiguousarray(x.numpy()[:, head, :depth]) for head in range(x.shape[1])]
            given = zip(rows, weight.experts, strict=True)
            return np.stack([multiply(Tensor.from_numpy(own), matrix).numpy() for own, matrix in given], 1)

        head_linear(x, weight, out, first)
        own = out.numpy()[..., first : first + width]
        assert relative_error(own.copy(), by(linear)) <= 1e-6
        own[...] = by(partial(compared, linear))

    with products_by(compared), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "experts", experts_compared)
        patch.setattr(cpu, "head_linear", heads_compared)
        yield errors


def check_products(model: Any, ids: list[int], expected: Any) -> None:
    """Each product of a model with blocks is that of its dequantised twin, x rounded as the product rounds it; with
    products that round nothing its logits are the twin's, ``expected``."""
    with compared_products() as errors:
        logits = logits_of(model, ids)
    assert 0 < max(errors) <= 5e-6
    assert relative_error(logits, expected) <= 1e-5


def experts_by(
    multiply: Callable[[Tensor, LinearWeight], Tensor], x: Tensor, routing: Any, gate_up: Any, down: Any,
    activation: Any, *, shared: Tensor | None = None, shared_gate: Tensor | None = None, residual: Tensor | None = None,
    gather: None = None,
) -> Tensor:  # fmt: skip
    """`ops.experts` of a lone rank, expert by expert."""
    assert gather is None
    ids, weights = routing.ids.numpy(), routing.weights.numpy()
    drawn = np.zeros((*ids.shape, down.shape[1]), np.float32)  # what each draw gives
    for number in range(gate_up.shape[0]):
        rows, draws = np.nonzero(ids == number)
        if rows.size:
            both = multiply(Tensor.from_numpy(x.numpy()[rows]), gate_up.experts[number])
            between = ops.squared_relu(both) if activation == "squared_relu" else ops.glu(both, activation)
            drawn[rows, draws] = multiply(between, down.experts[number]).numpy()
    result = np.zeros(drawn[:, 0].shape, np.float32)
    for draw in range(ids.shape[1]):
        result += weights[:, draw, None] * drawn[:, draw]
    if shared is not None:
        gate = 1.0 if shared_gate is None else 1.0 / (1.0 + np.exp(-shared_gate.numpy()))
        result += gate * shared.numpy()
    return Tensor.from_numpy(result if residual is None else result + residual.numpy())


def _in_float32(weight: Any) -> LinearWeight:
    """The same numbers and bias, in float32."""
    parts = weight.parts if isinstance(weight, JoinedWeight) else (weight,)
    counts = [part.shape[0] for part in parts]
    return ops.prepare_linear(
        [ops.embedding(Tensor.from_numpy(np.arange(n, dtype=np.int32)), part) for n, part in zip(counts, parts)],
        [Tensor.from_numpy(part.bias[:n].copy()) for n, part in zip(counts, parts)],
    )
