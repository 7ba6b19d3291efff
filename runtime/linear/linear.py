"""A linear map as a model calls it."""

from __future__ import annotations

from runtime import ops
from runtime.communicator import Communicator
from runtime.linear.format import WeightFormat
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import LinearWeight, logits_share
from runtime.tensor.tensor import Tensor


class Linear:
    """``x [T, K] . weight [N, K]^T + bias``, or this rank's part of it.

    Attributes:
        weight: the matrix with its bias, as the device's product reads them.
        communicator: of the ranks whose results are added, where the matrix is split over its inputs; else None.
        norm: of the rows that it multiplies; None if there is none, as where it is split over its inputs.
        whole_width: outputs of all ranks together if this rank has a shard of them and `logits` gathers all; else 0.
    """

    __slots__ = ("communicator", "norm", "weight", "whole_width")

    def __init__(
        self, weight: LinearWeight, communicator: Communicator | None = None, norm: RmsNorm | None = None,
        whole_width: int = 0,
    ) -> None:  # fmt: skip
        self.weight = weight
        self.communicator = communicator
        self.norm = norm
        self.whole_width = whole_width

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape

    @property
    def format(self) -> WeightFormat:
        """The matrix's format."""
        return self.weight.format

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``x [T, K]`` -> ``[T, N]``, plus the residual; see `ops.linear`."""
        if self.communicator is None:
            x, norm = self._normalised(x)
            return ops.linear(x, self.weight, residual=residual, out=out, norm=norm)
        if self.weight.num_segments:
            partials = self.communicator.all_gather(ops.linear_partial(x, self.weight))
            return ops.add_partials(partials, self.weight, residual=residual, out=out)
        added = residual if self.communicator.rank == 0 else None
        if out is None:
            out = self.communicator.sum_buffer((x.shape[0], self.weight.shape[0]), self.weight.activations)
        result = ops.linear(x, self.weight, residual=added, out=out)
        self.communicator.all_reduce(result)
        result.row_squares = None  # were those of this rank's part
        return result

    def glu(self, x: Tensor, activation: ops.GluActivation) -> Tensor:
        """``f(gate) * up`` of the map's halves, gate first: ``[T, K]`` -> ``[T, N / 2]``; see `ops.linear_glu`."""
        x, norm = self._normalised(x)
        return ops.linear_glu(x, self.weight, activation, norm=norm)

    def _normalised(self, x: Tensor) -> tuple[Tensor, RmsNorm | None]:
        """The product's arguments: x, and the norm if the product applies it."""
        if self.norm is None or self.weight.is_normed or self.weight.rounds_rows:
            return x, self.norm
        return ops.rms_norm(x, self.norm.weight, self.norm.eps), None

    def logits(self, x: Tensor, *, scale: float = 1.0, softcap: float | None = None) -> Tensor:
        """``[T, K]`` -> ``[T, N]`` float32; see `ops.logits_linear`."""
        logits = ops.logits_linear(x, self.weight, scale=scale, softcap=softcap)
        if not self.whole_width:
            return logits
        assert self.communicator is not None, "a share is one of several ranks'"
        share = logits_share(self.whole_width, self.communicator.num_ranks)
        return self.communicator.all_gather_columns(logits, share, self.whole_width)
