"""Routing against a plain numpy router, and products of experts against each expert's own product with its rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from runtime import ops
from runtime.backends import cpu
from runtime.errors import InvalidArgumentError
from runtime.linear.experts import ExpertsWeight
from runtime.linear.options import LoadOptions
from runtime.routing import Routing, RoutingRule
from runtime.tensor.tensor import Tensor
from tests.models.driver import relative_error
from tests.models.products import experts_by
from tests.numba_kernels.cpu.cases import normal, tensor

RULES = [
    RoutingRule(num_experts=8, top_k=2, normalises=True),
    RoutingRule(num_experts=1, top_k=1),
    RoutingRule(num_experts=5, top_k=5, scale=2.5),
    RoutingRule(num_experts=64, top_k=6, scores="sigmoid", normalises=True, scale=1.8, sum_eps=1e-20),
    RoutingRule(num_experts=24, top_k=4, num_groups=6, top_groups=2, group_score="two", scores="sigmoid"),
    RoutingRule(num_experts=16, top_k=3, num_groups=4, top_groups=1),
]


def routed(logits: np.ndarray, rule: RoutingRule, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of one row, in float64."""
    row = logits.astype(np.float64)
    if rule.scores == "sparsemixer":
        return sparsely_mixed(row, rule)
    powers = np.exp(row - row.max())
    scores = powers / powers.sum() if rule.scores == "softmax" else 1 / (1 + np.exp(-row))
    choice = scores + (0 if bias is None else bias)
    if rule.num_groups > 1:
        groups = choice.reshape(rule.num_groups, -1)
        ranks = np.sort(groups, 1)[:, -2:].sum(1) if rule.group_score == "two" else groups.max(1)
        groups[np.argsort(-ranks)[rule.top_groups :]] = -np.inf
    ids = np.argsort(-choice, kind="stable")[: rule.top_k]
    weights = scores[ids]
    if rule.normalises:
        weights = weights / (weights.sum() + rule.sum_eps)
    return ids, weights * rule.scale


def sparsely_mixed(row: np.ndarray, rule: RoutingRule) -> tuple[np.ndarray, np.ndarray]:
    """As transformers' `sparsemixer` has it."""
    ids, weights, left = [], [], row.copy()
    for _ in range(rule.top_k):
        best, peak = int(left.argmax()), left.max()
        is_near = (peak - row) / np.maximum(np.abs(row), peak) <= rule.threshold
        powers = np.where(is_near, np.exp(left - peak), 0.0)
        ids.append(best)
        weights.append(powers[best] / powers.sum())
        left[best] = -np.inf
    return np.array(ids), np.array(weights) * rule.scale


SPARSE = [
    RoutingRule(num_experts=count, top_k=top_k, scores="sparsemixer", threshold=threshold, scale=scale)
    for count, top_k, threshold, scale in ((16, 2, 0.02, 1.0), (16, 2, 0.8, 1.0), (40, 3, 0.3, 1.5))
]


@pytest.mark.parametrize("rule", SPARSE, ids=lambda rule: f"{rule.num_experts}-{rule.threshold}")
def test_routes_of_sparsemixer(rule):
    logits = normal(np.random.default_rng(3), (700, rule.num_experts)) * 2
    logits[:50] -= 9  # all are negative
    found = ops.route(tensor(logits), rule)
    wanted = [routed(row, rule, None) for row in logits]
    np.testing.assert_array_equal(found.ids.numpy(), [ids for ids, _ in wanted])
    assert relative_error(found.weights.numpy(), np.array([weights for _, weights in wanted])) <= 1e-6
    logits[0, 0] = np.nan
    assert np.isnan(ops.route(tensor(logits[:2]), rule).weights.numpy()).all(1).tolist() == [True, False]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.num_experts}-{rule.top_k}-{rule.scores}")
def test_routes(rule, has_bias):
    rng = np.random.default_rng(rule.num_experts)
    logits = normal(rng, (700, rule.num_experts))
    bias = normal(rng, rule.num_experts) if has_bias else None
    found = ops.route(tensor(logits), rule, None if bias is None else tensor(bias))
    wanted = [routed(row, rule, bias) for row in logits]
    np.testing.assert_array_equal(found.ids.numpy(), [ids for ids, _ in wanted])
    assert relative_error(found.weights.numpy(), np.array([weights for _, weights in wanted])) <= 1e-6


def test_of_equals_the_lower_is_chosen_and_nan_stays_in_its_row():
    rule = RoutingRule(num_experts=6, top_k=3, normalises=True)
    logits = np.zeros((4, 6), np.float32)
    logits[1, 4] = np.nan
    logits[2, 2] = np.inf
    logits[3, 5] = 1.0
    found = ops.route(tensor(logits), rule)
    assert found.ids.numpy().tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [5, 0, 1]]
    assert np.isfinite(found.weights.numpy()).all(1).tolist() == [True, False, False, True]


def layer_of(rng, count, hidden, inner, kind):
    """gate_up and down of so many experts, with biases, in a format."""
    options = LoadOptions.parse(quantization="int8" if kind == "int8" else "none")
    dtype = np.dtype("bfloat16" if kind == "int8" else kind)

    def expert(width, depth):
        return ops.prepare_linear(tensor(normal(rng, (width, depth), dtype)), tensor(normal(rng, width)), options)

    return (
        ExpertsWeight([expert(2 * inner, hidden) for _ in range(count)]),
        ExpertsWeight([expert(hidden, inner) for _ in range(count)]),
    )


def routing_of(rng, how, tokens, rule):
    """Chosen at random, or all by the first experts."""
    ids = np.array([rng.permutation(rule.num_experts)[: rule.top_k] for _ in range(tokens)], np.int32)
    if how == "first":
        ids[:] = np.arange(rule.top_k)
    weights = rng.random((tokens, rule.top_k), np.float32)
    return Routing(tensor(ids.reshape(tokens, rule.top_k)), tensor(weights), rule)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "inner", "how"),
    [
        (1, 7, 3, 130, 45, "random"), (1, 1, 1, 33, 1, "random"), (9, 4, 4, 64, 70, "random"),
        (37, 11, 2, 45, 64, "random"), (300, 6, 2, 65, 33, "first"), (150, 40, 5, 128, 17, "random"),
        (0, 3, 1, 20, 20, "random"),
    ],
)  # fmt: skip
def test_experts_are_each_experts_own_products(kind, tokens, count, top_k, hidden, inner, how):
    rng = np.random.default_rng([tokens, count, hidden])
    gate_up, down = layer_of(rng, count, hidden, inner, kind)
    routing = routing_of(rng, how, tokens, RoutingRule(num_experts=count, top_k=top_k))
    x, shared, residual = (tensor(normal(rng, (tokens, hidden))) for _ in range(3))
    gate = tensor(normal(rng, (tokens, 1)))
    for added in ({}, {"residual": residual}, {"shared": shared}, {"shared": shared, "shared_gate": gate}):
        found = ops.experts(x, routing, gate_up, down, "silu", **added).numpy()
        wanted = experts_by(ops.linear, x, routing, gate_up, down, "silu", **added).numpy()
        assert found.shape == (tokens, hidden)
        if tokens:
            assert relative_error(found, wanted) <= 1e-6


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_bits_depend_on_nobody_else(monkeypatch, kind):
    """Alone, in any company, in several passes, and on one thread."""
    rng = np.random.default_rng(5)
    gate_up, down = layer_of(rng, 9, 200, 70, kind)
    rule = RoutingRule(num_experts=9, top_k=3)
    routing, x = routing_of(rng, "random", 80, rule), normal(rng, (80, 200))

    def some(rows):
        chosen = Routing(tensor(routing.ids.numpy()[rows]), tensor(routing.weights.numpy()[rows]), rule)
        return ops.experts(tensor(x[rows]), chosen, gate_up, down, "silu").numpy()

    whole = some(slice(0, 80))
    for rows in ([3], [79, 3, 11], list(range(7, 40))):
        np.testing.assert_array_equal(some(rows), whole[rows])
    monkeypatch.setattr(cpu, "_MOST_EXPERT_ROWS", 50)
    np.testing.assert_array_equal(some(slice(0, 80)), whole)
    workers = cpu.num_workers()
    try:
        cpu.set_num_workers(1)
        np.testing.assert_array_equal(some(slice(0, 80)), whole)
    finally:
        cpu.set_num_workers(workers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 0}, "top_k is 0, must be 1 to num_experts = 8"), ({"top_k": 9}, "top_k is 9"),
        ({"num_groups": 3}, "num_groups is 3, must divide num_experts = 8"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups is 5, must be 1 to num_groups = 4"),
        ({"num_groups": 8, "top_k": 2}, "top_k is 2, limit 1, the experts of 1 groups"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit(changes, words):
    with pytest.raises(InvalidArgumentError, match=words):
        dataclasses.replace(RoutingRule(num_experts=8, top_k=2), **changes)


def test_what_does_not_fit_is_refused_by_name():
    rng = np.random.default_rng(0)
    gate_up, down = layer_of(rng, 3, 20, 8, "float32")
    routing = routing_of(rng, "random", 4, RoutingRule(num_experts=3, top_k=2))
    x = tensor(normal(rng, (4, 20)))
    others, _ = layer_of(rng, 4, 20, 8, "float32")
    for arguments, words in (
        ((x[:3], routing, gate_up, down, "silu"), "routing.ids"), ((x, routing, others, down, "silu"), "4 experts"),
        ((x, routing, gate_up, gate_up, "silu"), "down has 20 inputs, must have 8"),
        ((x, routing, gate_up, down, "relu"), "activation is 'relu'"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=words):
            ops.experts(*arguments)
    with pytest.raises(InvalidArgumentError, match="logits"):
        ops.route(tensor(normal(rng, (4, 5))), routing.rule)
    with pytest.raises(InvalidArgumentError, match="expert 1 is float32"):
        ExpertsWeight([gate_up.experts[0], down.experts[0]])
    with pytest.raises(InvalidArgumentError, match="experts is empty"):
        ExpertsWeight([])
    assert isinstance(ops.experts(x, routing, gate_up, down, "silu"), Tensor)
