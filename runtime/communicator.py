"""What the ranks of a split model say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never, Protocol

from runtime.dtype import DType
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

    def sum_buffer(self, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
        """Where numbers should lie that `all_reduce` will add, until the next few of its results are made; None:
        anywhere. Every rank calls it in the same order."""
        ...


class RankCommunicator(Communicator, Protocol):
    """What whoever runs a rank's steps needs beside that."""

    def begin_pass(self) -> None:
        """The model is run from its beginning: none of its earlier sums is needed any more."""
        ...

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on all ranks. Not to be recorded."""
        ...

    def end_step(self, number: int) -> None:
        """All collectives of a step have been called; ranks that had fewer or more are found."""
        ...

    def abort(self, reason: str) -> None:
        """Ends all collectives of all ranks, which name the reason. On any thread."""
        ...

    def abort_for(self, rank: int, reason: str) -> None:
        """The same for a rank that cannot say so itself."""
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether a rank has given up."""
        ...

    def last_words(self) -> str:
        """What each rank has said of it."""
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

    def sum_buffer(self, shape: tuple[int, ...], dtype: DType) -> Never:
        raise CommunicatorError("a declared model cannot run")
