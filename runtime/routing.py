"""Expert routing: the rule as data, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """The rule that turns a router's logits into experts and their weights.

    Attributes:
        num_experts, top_k: experts, and how many of them a token goes to.
        scores: the function of all logits. With "sparsemixer" each expert's weight is that of a softmax over those
            that are not chosen before it and not further below it than ``threshold`` times the larger of their
            magnitude and its logit (SparseMixer, arXiv 2310.00811).
        normalises: weights are divided by their sum (and ``sum_eps``).
        scale: a factor of the weights.
        num_groups, top_groups: equal groups of experts, and how many of the best groups experts are chosen from.
        group_score: a group's score is that of its "best" expert, or the sum of its best "two".

    Raises InvalidArgumentError for counts that do not fit each other.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    threshold: float = 0.0
    normalises: bool = False
    scale: float = 1.0
    sum_eps: float = 0.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two"] = "best"

    @property
    def epsilon(self) -> float:
        """The constant for kernels: the threshold, or the addend of the sum."""
        return self.threshold if self.scores == "sparsemixer" else self.sum_eps

    def __post_init__(self) -> None:
        if self.scores == "sparsemixer" and (self.normalises or self.num_groups > 1):
            raise InvalidArgumentError(
                "RoutingRule: with scores 'sparsemixer' normalises must be False and num_groups 1",
                param="scores",
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise InvalidArgumentError(
                f"RoutingRule: top_k is {self.top_k}, must be 1 to num_experts = {self.num_experts}", param="top_k"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise InvalidArgumentError(
                f"RoutingRule: num_groups is {self.num_groups}, must divide num_experts = {self.num_experts}",
                param="num_groups",
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise InvalidArgumentError(
                f"RoutingRule: top_groups is {self.top_groups}, must be 1 to num_groups = {self.num_groups}",
                param="top_groups",
            )
        if (most := self.num_experts // self.num_groups * self.top_groups) < self.top_k:
            raise InvalidArgumentError(
                f"RoutingRule: top_k is {self.top_k}, limit {most}, the experts of {self.top_groups} groups",
                param="top_k",
            )


@dataclass(frozen=True, slots=True)
class Routing:
    """The result of `ops.route`: experts ``ids [T, k]`` int32, and their ``weights [T, k]`` float32.

    `ops.low_rank` takes ids of adapters, -1 for none, without weights."""

    ids: Tensor
    weights: Tensor | None
    rule: RoutingRule

    def passes(self, most_rows: int) -> Iterator[tuple[slice, Routing]]:
        """Parts of at most so many rows, each token with all of its experts, or of one token; and its tokens."""
        at_once = max(1, most_rows // self.rule.top_k)
        for first in range(0, self.ids.shape[0], at_once):
            some = slice(first, first + at_once)
            weights = None if self.weights is None else self.weights[some]
            yield some, Routing(self.ids[some], weights, self.rule)
