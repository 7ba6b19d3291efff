"""Collectives between the ranks of a split model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never, Protocol

from runtime.dtype import DType
from runtime.errors import XservError
from runtime.rank_notices import Span, Tally
from runtime.tensor.tensor import Tensor


class CommunicatorError(XservError):
    """Ranks called different collectives, or one of them has gone; the message names each rank's call.

    The ranks cannot be used afterwards.
    """


class Communicator(Protocol):
    """One rank of several that compute a model together, each on its own device.

    Attributes:
        rank: the number of this rank, from 0.
        num_ranks: the number of ranks.
    """

    rank: int
    num_ranks: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces each rank's tensor by the sum of all; every rank calls it in the same order."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, of the same shape, in rank order: ``[num_ranks, ...]``."""
        ...

    def all_gather_columns(self, tensor: Tensor, share: int, columns: int) -> Tensor:
        """All ranks' matrices ``[T, share]``, the last one's ``[T, rest]``, side by side: ``[T, columns]``."""
        ...

    def sum_buffer(self, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
        """A buffer to write an input of `all_reduce` to, valid until its next few results; None if any memory will do.
        Every rank calls it in the same order."""
        ...


class Pipeline(Protocol):
    """One stage of a pipeline, which holds a consecutive part of a model's layers. If a stage has several ranks, they
    share its layers, and rank r exchanges tensors with rank r of the neighbouring stages.

    Attributes:
        stage: the number of this stage, from 0.
        num_stages: the number of stages.
    """

    stage: int
    num_stages: int

    def send(self, x: Tensor) -> None:
        """Queues a contiguous tensor for the next stage, in the order of calls; the last stage sends to the first."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """The next tensor from the previous stage; both stages must agree on its size."""
        ...


def check_columns(rank: int, num_ranks: int, width: int, share: int, columns: int) -> None:
    """Checks that a rank's ``width`` is its part of ``columns``, of which each rank but the last has ``share``. Raises
    CommunicatorError."""
    expected = min(share, columns - rank * share)
    if width != expected or not 0 < columns - (num_ranks - 1) * share <= share:
        raise CommunicatorError(
            f"all_gather_columns: rank {rank} of {num_ranks} has {width} of {columns} columns, and each but the last"
            f" {share}"
        )


def begins_here(pipeline: Pipeline | None) -> bool:
    """Whether this stage has the model's first layers; True without stages."""
    return pipeline is None or pipeline.stage == 0


def ends_here(pipeline: Pipeline | None) -> bool:
    """Whether this stage has the model's last layers; True without stages."""
    return pipeline is None or pipeline.stage == pipeline.num_stages - 1


class RankCommunicator(Communicator, Pipeline, Protocol):
    """Further calls for the runner of a rank's steps. Ranks are numbered through all stages, stage by stage."""

    def begin_step(self, number: int) -> None:
        """Sends between stages belong to this step from now on."""
        ...

    def begin_pass(self) -> None:
        """A forward pass begins: none of the earlier sums is needed any more."""
        ...

    def agree(self, is_so: bool) -> bool:
        """Whether ``is_so`` holds on all ranks of all stages. Not to be recorded in a graph."""
        ...

    def end_step(self, number: int) -> None:
        """All collectives of a step have been called; finds ranks of this stage that called fewer or more."""
        ...

    def tallies(self) -> list[Tally]:
        """Each rank's progress in each stage, as far as it is known. Thread-safe."""
        ...

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        """The number of steps that a rank has done, and the times of the latest, oldest first, without its first
        `num_known`; as far as they are known. Thread-safe."""
        ...

    def abort(self, reason: str) -> None:
        """Ends all pending collectives of all stages with an error that names the reason. Thread-safe."""
        ...

    def abort_for(self, rank: int, reason: str) -> None:
        """Aborts on behalf of a rank that cannot do so itself."""
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether a rank has aborted."""
        ...

    def last_words(self) -> str:
        """The reason that each rank gave."""
        ...


def _cannot_run(self: object, *arguments: object, **keywords: object) -> Never:
    raise CommunicatorError("a declared model cannot run")


@dataclass(slots=True)
class DeclaredRank:
    """The rank that a model is declared for; it has no peers, so the model cannot run."""

    rank: int
    num_ranks: int
    all_reduce = all_gather = all_gather_columns = sum_buffer = _cannot_run


@dataclass(slots=True)
class DeclaredStage:
    """The stage that a model is declared for; it has no peers, so the model cannot run."""

    stage: int
    num_stages: int
    send = receive = _cannot_run
