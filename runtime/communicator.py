"""What the ranks of a split model say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never, Protocol

from runtime.errors import XservError
from runtime.tensor.tensor import Tensor


class CommunicatorError(XservError):
    """Ranks called different collectives, or one of them cannot come any more; the message names each rank's call.

    The ranks are of no use from then on.
    """


class Communicator(Protocol):
    """One rank of several that compute a model together, each on a device of its own.

    Attributes:
        rank: this one's number, from 0.
        num_ranks: how many there are.
    """

    rank: int
    num_ranks: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Puts the sum of all ranks' tensors into each; every rank calls it in the same order."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, each of this one's shape, in the order of ranks: ``[num_ranks, ...]``."""
        ...

    def all_gather_columns(self, tensor: Tensor, share: int, columns: int) -> Tensor:
        """All ranks' matrices ``[T, share]``, the last one's ``[T, rest]``, beside each other: ``[T, columns]``."""
        ...


@dataclass(slots=True)
class DeclaredRank:
    """Says which rank a model is declared for; there is nobody to talk to, so that it cannot run."""

    rank: int
    num_ranks: int

    def all_reduce(self, tensor: Tensor) -> Never:
        raise CommunicatorError("a declared model cannot run")

    def all_gather(self, tensor: Tensor) -> Never:
        raise CommunicatorError("a declared model cannot run")

    def all_gather_columns(self, tensor: Tensor, share: int, columns: int) -> Never:
        raise CommunicatorError("a declared model cannot run")
