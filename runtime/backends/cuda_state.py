"""Layers with a recurrent state on a GPU; see `runtime.state_ops`."""

from __future__ import annotations

from runtime.backends.checks import fail
from runtime.batch import Batch
from runtime.errors import InvalidArgumentError
from runtime.linear.recurrent import DeltaRule, Mamba, ShortConv
from runtime.tensor.tensor import Tensor


def _refused(op: str, x: Tensor) -> InvalidArgumentError:
    return fail(op, "x", f"is on {x.device}, but models with recurrent states run on the cpu alone")


def short_conv(
    x: Tensor, weights: ShortConv, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int
) -> Tensor:
    """See `ops.short_conv`."""
    raise _refused("short_conv", x)


def delta_rule(
    x: Tensor, weights: DeltaRule, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int
) -> Tensor:
    """See `ops.delta_rule`."""
    raise _refused("delta_rule", x)


def mamba(x: Tensor, weights: Mamba, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int) -> Tensor:
    """See `ops.mamba`."""
    raise _refused("mamba", x)
