"""What the ranks of a split model say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never, Protocol

from runtime.dtype import DType
from runtime.errors import XservError
from runtime.rank_notices import Span, Tally
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


class Pipeline(Protocol):
    """One stage of several that have a model's layers one after another. The ranks of a stage, if there are several,
    share its layers; the r-th of them speaks with the r-th ones of its neighbours.

    Attributes:
        stage: this one's number, from 0.
        num_stages: how many there are.
    """

    stage: int
    num_stages: int

    def send(self, x: Tensor) -> None:
        """Hands a contiguous tensor to the next stage, behind what was handed over before; the last one's goes to the
        first."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """What the stage before hands over next; both say the same of its size."""
        ...


def check_columns(rank: int, num_ranks: int, width: int, share: int, columns: int) -> None:
    """That a rank's ``width`` is its part of ``columns``, of which each rank but the last has ``share``. Raises
    CommunicatorError."""
    expected = min(share, columns - rank * share)
    if width != expected or not 0 < columns - (num_ranks - 1) * share <= share:
        raise CommunicatorError(
            f"all_gather_columns: rank {rank} of {num_ranks} has {width} of {columns} columns, and each but the last"
            f" {share}"
        )


def begins_here(pipeline: Pipeline | None) -> bool:
    """Whether a model begins here; without stages it does."""
    return pipeline is None or pipeline.stage == 0


def ends_here(pipeline: Pipeline | None) -> bool:
    """Whether a model ends here; without stages it does."""
    return pipeline is None or pipeline.stage == pipeline.num_stages - 1


class RankCommunicator(Communicator, Pipeline, Protocol):
    """What whoever runs a rank's steps needs beside that. Ranks and stages together are numbered stage by stage."""

    def begin_step(self, number: int) -> None:
        """What is handed from stage to stage from now on belongs to this step."""
        ...

    def begin_pass(self) -> None:
        """The model is run from its beginning: none of its earlier sums is needed any more."""
        ...

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on all ranks of all stages. Not to be recorded."""
        ...

    def end_step(self, number: int) -> None:
        """All collectives of a step have been called; ranks of this stage that had fewer or more are found."""
        ...

    def tallies(self) -> list[Tally]:
        """What each rank of each stage has done so far, as far as that is known. On any thread."""
        ...

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        """How many steps one of all ranks has done, and when the latest of them were, the oldest first, without its
        `num_known` first ones; as far as that is known. On any thread."""
        ...

    def abort(self, reason: str) -> None:
        """Ends all that ranks of any stage call, which name the reason. On any thread."""
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


@dataclass(slots=True)
class DeclaredStage:
    """The same of a stage."""

    stage: int
    num_stages: int

    def send(self, x: Tensor) -> Never:
        raise CommunicatorError("a declared model cannot run")

    def receive(self, shape: tuple[int, ...], dtype: DType) -> Never:
        raise CommunicatorError("a declared model cannot run")
