"""Makes a process a rank: through memory that all map, and on GPUs through NCCL."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.communicator import RankCommunicator
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.nccl import NcclComm, open_nccl
from runtime.nccl_communicator import NcclCommunicator
from runtime.rank_notices import Notices, notices_bytes, shared_memory
from runtime.shared_communicator import SharedCommunicator, shared_file


def device_of_rank(device: Device, rank: int) -> Device:
    """The device of a rank, if rank 0 computes on this one: consecutive GPUs; emulated devices are per process."""
    return Device(f"cuda:{device.index + rank}") if device.kind == "cuda" else device


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's split: stages, each with the same number of ranks, numbered stage by stage."""

    num_ranks: int
    num_stages: int = 1

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.num_ranks * self.num_stages

    def stage_and_rank(self, number: int) -> tuple[int, int]:
        """The stage of a process, and its rank in that stage."""
        return divmod(number, self.num_ranks)


def new_memory(device: Device, shape: Shape) -> int:
    """Makes the memory that the ranks share; returns its descriptor, which they inherit."""
    if device.kind != "cpu":
        return shared_memory(notices_bytes(shape.count))
    return shared_file(shape.num_ranks, shape.num_stages)


def new_unique_ids(device: Device, shape: Shape) -> list[bytes]:
    """The ids of new communicators, on GPUs: of all ranks, and, if stages have several ranks, of each stage. Raises
    NoNcclError, NcclError."""
    if device.kind == "cpu":
        return []
    nccl = open_nccl(Gpu.of(device).driver)
    has_both = shape.num_stages > 1 and shape.num_ranks > 1
    return [nccl.unique_id() for _ in range(1 + shape.num_stages * has_both)]


def forget_unique_ids(device: Device, unique_ids: list[bytes]) -> None:
    """Forgets the ids after all ranks have joined."""
    if unique_ids:
        open_nccl(Gpu.of(device).driver).forget(unique_ids)


def join(device: Device, memory: int, unique_ids: list[bytes], number: int, shape: Shape) -> RankCommunicator:
    """The communicator of one process, on its own device; on GPUs it waits for the others. Raises NoNcclError,
    NcclError."""
    stage, rank = shape.stage_and_rank(number)
    if device.kind == "cpu":
        return SharedCommunicator(memory, rank, shape.num_ranks, stage, shape.num_stages)

    gpu = Gpu.of(device)
    nccl = open_nccl(gpu.driver)
    everyone = NcclComm(gpu, nccl, unique_ids[0], number, shape.count)
    own: NcclComm | None = everyone if shape.num_stages == 1 else None
    if shape.num_stages > 1 and shape.num_ranks > 1:
        own = NcclComm(gpu, nccl, unique_ids[1 + stage], rank, shape.num_ranks)
    notices = Notices.open(memory, number, shape.count)
    return NcclCommunicator(gpu, own, notices, everyone, stage, shape.num_stages)
