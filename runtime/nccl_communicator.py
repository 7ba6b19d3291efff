"""Ranks with a GPU each: collectives by NCCL in the GPU's current stream, eager or recorded into a graph.

Small sums, such as a decode step's, lie in a window, memory of NCCL's at the same offsets on all ranks, for which NCCL
has its fastest algorithms. A pass of the model takes the window's slots in turn, always from the first on, so that all
ranks take the same ones, in recordings, too.

With several stages, the ranks of each have their own communicator, and transfers between stages use one of all ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import numpy as np

from runtime.communicator import CommunicatorError, check_columns
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.nccl import NcclComm, NcclError, Window
from runtime.dtype import DType
from runtime.rank_notices import Noticed, Notices, Span
from runtime.tensor.storage import Storage
from runtime.tensor.tensor import Tensor
from runtime.tensor.views import contiguous_strides

WINDOW_SLOT_BYTES = 512 << 10
"""Bytes of the largest sums that lie in the window."""
NUM_SLOTS = 8
"""A sum is valid until so many more have been made."""


class NcclCommunicator(Noticed):
    """See `RankCommunicator`. The first error of any rank ends all."""

    def __init__(
        self, gpu: Gpu, comm: NcclComm | None, notices: Notices, everyone: NcclComm, stage: int = 0, num_stages: int = 1
    ) -> None:
        """Collective, since it registers the window: every rank makes its own at the same time. `comm` is among the
        ranks of a stage, or None for one rank. `everyone` is among all; without stages it is the same."""
        self.rank, self.num_ranks = (0, 1) if comm is None else (comm.rank, comm.num_ranks)
        self.stage, self.num_stages = stage, num_stages
        self._number = self._number_at(stage)
        self._gpu, self._comm, self._everyone, self._notices = gpu, comm, everyone, notices
        self._device: Device = gpu.device
        self._window: Window | None = None if comm is None else comm.new_window(NUM_SLOTS * WINDOW_SLOT_BYTES)
        self._held: list[weakref.ref[Storage] | None] = [None] * NUM_SLOTS
        self._turn = 0

    @property
    def _own(self) -> NcclComm:
        assert self._comm is not None, "the stage has one rank"
        return self._comm

    def all_reduce(self, tensor: Tensor) -> None:
        with self._named("all_reduce"):
            self._own.all_reduce(tensor.address, tensor.address, tensor.size, tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        result = Tensor.empty((self.num_ranks, *tensor.shape), tensor.dtype, self._device)
        with self._named("all_gather"):
            self._own.all_gather(tensor.address, result.address, tensor.size, tensor.dtype)
        return result

    def all_gather_columns(self, tensor: Tensor, share: int, columns: int) -> Tensor:
        rows, width = tensor.shape
        check_columns(self.rank, self.num_ranks, width, share, columns)
        if width < share:  # NCCL gathers as much of each
            padded = Tensor.empty((rows, share), tensor.dtype, self._device)
            self._gpu.fill(padded.address, 0, padded.size_bytes)
            padded[:, :width] = tensor
            tensor = padded
        gathered = self.all_gather(tensor)  # [num_ranks, rows, share]
        if rows == 1:
            shape = (1, columns)
            return Tensor(gathered.storage, tensor.dtype, shape, contiguous_strides(shape), 0)
        result = Tensor.empty((rows, columns), tensor.dtype, self._device)
        for rank in range(self.num_ranks):
            first, end = rank * share, min((rank + 1) * share, columns)
            result[:, first:end] = gathered[rank][:, : end - first]
        return result

    def sum_buffer(self, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
        size = dtype.itemsize * int(np.prod(shape))
        if self._window is None or not 0 < size <= WINDOW_SLOT_BYTES:
            return None
        slot, self._turn = self._turn, (self._turn + 1) % NUM_SLOTS
        held = self._held[slot]
        if held is not None and (storage := held()) is not None and storage.reference_count:
            raise CommunicatorError(f"a sum is used when {NUM_SLOTS} more have been made: its memory is needed")
        storage = Storage(self._device, size, None, self._window, self._window.address + slot * WINDOW_SLOT_BYTES)
        self._held[slot] = weakref.ref(storage)
        return Tensor(storage, dtype, shape, contiguous_strides(shape), 0)

    def begin_pass(self) -> None:
        self._turn = 0

    def agree(self, is_so: bool) -> bool:
        if self._everyone.nccl.is_dry:
            return is_so
        votes = Tensor.from_numpy(np.array([is_so], np.float32)).to(self._device)
        with self._named("agree"):
            self._everyone.all_reduce(votes.address, votes.address, 1, votes.dtype)
        return float(votes.to("cpu").array[0]) == self._everyone.num_ranks

    def send(self, x: Tensor) -> None:
        with self._named("send"):
            self._everyone.send(x.address, x.size, x.dtype, self._number_at(self.stage + 1))

    def receive(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        result = Tensor.empty(shape, dtype, self._device)
        with self._named("receive"):
            self._everyone.receive(result.address, result.size, dtype, self._number_at(self.stage - 1))
        return result

    def _number_at(self, stage: int) -> int:
        """The number, among all ranks, of this one's peer in that stage."""
        return stage % self.num_stages * self.num_ranks + self.rank

    def begin_step(self, number: int) -> None:
        """See `RankCommunicator`. NCCL pairs messages by their order."""

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        """See `RankCommunicator`: no steps. The GPU's times of computing and waiting are not known here."""
        return num_known, []

    def end_step(self, number: int) -> None:
        self._notices.count(0, 0)
        with self._named("end_step"):
            if self._comm is not None:
                self._comm.end_step(number)
            if self._comm is not self._everyone:
                self._everyone.check()

    def abort_for(self, rank: int, reason: str) -> None:
        super().abort_for(rank, reason)
        for comm in (self._comm, self._everyone):
            if comm is not None:
                with contextlib.suppress(NcclError):
                    comm.abort()

    @contextlib.contextmanager
    def _named(self, call: str) -> Iterator[None]:
        """Raises NCCL's errors as CommunicatorError."""
        if self._notices.has_given_up:
            raise CommunicatorError(f"{call}: the ranks have given up: {self.last_words()}")
        try:
            yield
        except NcclError as error:
            raise CommunicatorError(str(error)) from error
