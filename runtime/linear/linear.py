"""A linear map as a model calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from runtime import ops
from runtime.batch import AdaptedRows, Batch
from runtime.communicator import Communicator
from runtime.dtype import float32
from runtime.linear.addends import Addend, LateAddend, RidingAddend
from runtime.linear.format import WeightFormat
from runtime.linear.low_rank_slots import LowRank
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import GpuWeight, LinearWeight, logits_share
from runtime.tensor.tensor import Tensor


class Linear:
    """``x [T, K] . weight [N, K]^T + bias + addends(x)``, or this rank's part of it.

    Calls pass the step's batch, or a picture's `AdaptedRows`, which has the adapter of each row; a map without addends
    does not read it.

    Attributes:
        weight: the matrix with its bias, as the device's product reads them.
        communicator: of the ranks whose results are added, where the matrix is split over its inputs; else None.
        norm: of the rows that it multiplies; None if there is none, as where it is split over its inputs.
        whole_width: outputs of all ranks together if this rank has a shard of them and `logits` gathers all; else 0.
        addends: added to the product (`runtime.linear.addends`).
    """

    __slots__ = ("addends", "communicator", "norm", "weight", "whole_width")

    def __init__(
        self, weight: LinearWeight, communicator: Communicator | None = None, norm: RmsNorm | None = None,
        whole_width: int = 0, addends: Sequence[Addend] = (),
    ) -> None:  # fmt: skip
        self.weight = weight
        self.communicator = communicator
        self.norm = norm
        self.whole_width = whole_width
        self.addends = tuple(addends)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape

    @property
    def has_addends(self) -> bool:
        """Whether there are any that are not empty."""
        return any(not (isinstance(each, LateAddend) and each.is_empty) for each in self.addends)

    @property
    def format(self) -> WeightFormat:
        """The matrix's format."""
        return self.weight.format

    def __call__(
        self,
        x: Tensor,
        batch: Batch | AdaptedRows | None = None,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``x [T, K]`` -> ``[T, N]``, plus the residual; see `ops.linear`."""
        if self.communicator is None:
            return self.own_part(x, batch, residual=residual, out=out)
        if self.weight.num_segments:
            partials = self.communicator.all_gather(ops.linear_partial(x, self.weight))
            if self.addends and batch is not None and batch.adapters is not None:  # of all ranks' columns
                share = x.shape[1]
                x = self.communicator.all_gather_columns(x, share, share * self.communicator.num_ranks)
            residual, low_rank = self._with_addends(residual, x, batch, None, None)
            return ops.add_partials(partials, self.weight, residual=residual, out=out, low_rank=low_rank)
        if self.communicator.rank:
            residual = None  # rank 0 adds it
        if out is None:
            out = self.communicator.sum_buffer((x.shape[0], self.weight.shape[0]), self.weight.activations)
        result = self.own_part(x, batch, residual=residual, out=out)
        self.communicator.all_reduce(result)
        result.deferred_norm = None  # were those of this rank's part
        return result

    def own_part(
        self,
        x: Tensor,
        batch: Batch | AdaptedRows | None = None,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The result without that of other ranks."""
        x, norm = self._normalised(x)
        residual, low_rank = self._with_addends(residual, x, batch, norm, "")
        return ops.linear(x, self.weight, residual=residual, out=out, norm=norm, low_rank=low_rank)

    def glu(self, x: Tensor, activation: ops.GluActivation, batch: Batch | AdaptedRows | None = None) -> Tensor:
        """``f(gate) * up`` of the map's halves, gate first: ``[T, K]`` -> ``[T, N / 2]``; see `ops.linear_glu`. An
        exact map with addends on a GPU takes the same kernels whether a row of the batch has an adapter or not."""
        if self.addends and isinstance(self.weight, GpuWeight) and self.weight.exact:
            return ops.glu(self.own_part(x, batch), activation)
        x, norm = self._normalised(x)
        added, low_rank = self._with_addends(None, x, batch, norm, activation)
        if added is not None:
            product = ops.linear(x, self.weight, residual=added, norm=norm, low_rank=low_rank)
            return ops.glu(product, activation)
        return ops.linear_glu(x, self.weight, activation, norm=norm, low_rank=low_rank)

    def _with_addends(
        self,
        residual: Tensor | None,
        x: Tensor,
        batch: Batch | AdaptedRows | None,
        norm: RmsNorm | None,
        activation: str | None,
    ) -> tuple[Tensor | None, LowRank | None]:
        """The residual plus the addends of x, normalised first if there is a norm; and the sums that the product's
        launch adds instead. `ops.takes_low_rank` tells of ``activation``."""
        if not self.addends:
            return residual, None
        assert batch is not None, "a map with addends was called without the batch"
        if batch.adapters is None:
            return residual, None
        left: LowRank | None = None
        normed: Tensor | None = x if norm is None else None
        if activation and len(self.addends) > 1:
            activation = ""  # the gate is a launch of its own, after all of them
        takes = partial(ops.takes_low_rank, x, self.weight, norm, activation)
        for addend in self.addends:
            if isinstance(addend, RidingAddend):
                riding = addend.riding(x, batch, takes) if left is None else None
                if riding is None:
                    residual = addend.add_to(residual, x, batch, norm)
                left = left or riding
                continue
            if norm is not None and normed is None:
                normed = ops.rms_norm(x, norm.weight, norm.eps)
            assert normed is not None
            residual = addend.add_to(residual, normed, batch)
        return residual, left

    def _normalised(self, x: Tensor) -> tuple[Tensor, RmsNorm | None]:
        """The product's arguments: x, and the norm if the product applies it."""
        if self.norm is None or self.weight.takes_norm:
            return x, self.norm
        return ops.rms_norm(x, self.norm.weight, self.norm.eps), None

    def logits(
        self, x: Tensor, *, scale: float = 1.0, softcap: float | None = None, adapters: Tensor | None = None
    ) -> Tensor:
        """``[T, K]`` -> ``[T, N]`` float32; see `ops.logits_linear`. Rows without `adapters [T]` get no addends."""
        added, rows = None, AdaptedRows(adapters)
        for addend in self.addends if adapters is not None else ():
            added = addend.add_to(added, x, rows)
        if added is None:
            logits = ops.logits_linear(x, self.weight, scale=scale, softcap=softcap)
        else:
            added = added if added.dtype is float32 else added.to(float32)
            logits = ops.add_scaled(ops.logits_linear(x, self.weight), added, 1.0)
            logits = ops.scale_logits(logits, scale, softcap)
        if not self.whole_width:
            return logits
        assert self.communicator is not None, "a share is one of several ranks'"
        share = logits_share(self.whole_width, self.communicator.num_ranks)
        return self.communicator.all_gather_columns(logits, share, self.whole_width)
