"""Addends of a linear map: functions of its rows that are added to the product, such as adapters.

    y = x . weight^T + bias + residual + addends(x)

A product adds bias and residual to its float32 sums before it rounds. The map's addends are added to the residual
first, so every kernel that takes a residual takes them, and results are rounded once. By the form of the product:

- plain: an addend gets x; the launch adds the residual. A `RidingAddend` is added by the launch itself where it can
  (`ops.takes_low_rank`), in every form.
- deferred RMSNorm, where the norm is in the matrix or in the launch that rounds rows: an addend gets x normalised, by
  one more launch unless it is a `RidingAddend`. The residual is added after the norm has scaled the sums.
- gated (`Linear.glu`): the addend is added before the gate, so the product and the gate are two launches.
- split over inputs: an addend gets the rank's columns of x, and each rank adds its part to its result; in exact mode it
  gets all columns, and the whole addend is added to the sum of all ranks (`DeclaredMap.is_segmented`).
- experts: a source that is an `ExpertsSource` (`runtime.linear.experts`) is asked for the addend of all of a layer's
  experts, which is a pair of low rank for each; `ops.adapted_experts` adds it.
- the token table, the output head and routers: those of a `TableSource` (`runtime.linear.table_adapters`).

Convolutions take none: a source is not asked for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from runtime.batch import AdaptedRows, Batch
from runtime.linear.low_rank_slots import LowRank
from runtime.linear.norm import RmsNorm
from runtime.tensor.tensor import Tensor


class Addend(Protocol):
    """One addend of one map."""

    def add_to(self, residual: Tensor | None, x: Tensor, batch: Any) -> Tensor | None:
        """``residual [T, N]`` plus this addend of ``x [T, K]``, in the residual's type and in memory of its own; None
        stands for zeros. Rows belong to the batch's tokens, whose adapters are ``batch.adapters [T]``. A row's bits
        must not depend on other rows; -1 adds nothing. A batch without adapters does not come here. Rows that are no
        tokens of a batch, such as those of the head, come as `AdaptedRows`."""


@runtime_checkable
class RidingAddend(Addend, Protocol):
    """An addend that normalises rows itself, or that a product's launch may add."""

    def riding(self, x: Tensor, batch: Batch | AdaptedRows, takes: Callable[[Any], bool]) -> LowRank | None:
        """The sums that the product adds, for its own rows; None if `add_to` has to add them. ``takes`` says whether
        the product's launch can add those of some slots."""

    def add_to(self, residual: Tensor | None, x: Tensor, batch: Any, norm: RmsNorm | None = None) -> Tensor | None:
        """As in `Addend`, of x normalised if there is a norm."""


@runtime_checkable
class LateAddend(Addend, Protocol):
    """An addend that may not be of any adapter yet."""

    @property
    def is_empty(self) -> bool:
        """Whether it adds nothing to any row."""


class DeclaredMap(Protocol):
    """The map that an addend is asked for, as its maker declares it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its tensors, without `.weight`; several are joined over the outputs."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of this rank's part."""

    @property
    def parts(self) -> Iterator[tuple[str, slice, slice]]:
        """For each of the outputs its tensor's name, and this rank's rows and columns of that tensor."""

    @property
    def whole_maps(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Each tensor's name, and (N, K) of all ranks' map."""

    @property
    def is_transposed(self) -> bool:
        """Whether checkpoints store it inputs first."""

    @property
    def adds_unsplit(self) -> bool:
        """Whether this rank adds what ranks add once, such as a bias."""

    @property
    def is_segmented(self) -> bool:
        """Whether ranks add the whole addend of all columns, instead of their parts."""

    @property
    def rounds_x(self) -> bool:
        """Whether its product rounds x to bytes."""


class AddendSource(Protocol):
    """The addends of a model, asked once for each map that takes them."""

    def addends_of(self, declared: DeclaredMap) -> Sequence[Addend]:
        """Empty for a map without one."""
