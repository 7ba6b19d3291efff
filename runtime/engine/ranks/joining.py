"""How a process becomes a rank: by memory that all map, and on GPUs by NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.device.device import Device
from runtime.rank_notices import Notices, notices_bytes, shared_memory

if TYPE_CHECKING:
    from runtime.communicator import RankCommunicator


def device_of_rank(device: Device, rank: int) -> Device:
    """Where a rank computes whose first one is on this device: each on a GPU of its own, the next ones; emulated ones
    are of processes anyway."""
    return Device(f"cuda:{device.index + rank}") if device.kind == "cuda" else device


def new_memory(device: Device, num_ranks: int) -> int:
    """What the ranks share: its descriptor, which they inherit."""
    if device.kind != "cpu":
        return shared_memory(notices_bytes(num_ranks))
    from runtime.shared_communicator import shared_file

    return shared_file(num_ranks)


def new_unique_id(device: Device) -> bytes:
    """Of a new communicator, on GPUs. Raises NoNcclError, NcclError."""
    if device.kind == "cpu":
        return b""
    from runtime.device.gpu import Gpu
    from runtime.device.nccl import open_nccl

    return open_nccl(Gpu.of(device).driver).unique_id()


def join(device: Device, memory: int, unique_id: bytes, rank: int, num_ranks: int) -> RankCommunicator:
    """This rank's communicator, on its own device; on GPUs it waits for the others. Raises NoNcclError, NcclError."""
    if device.kind == "cpu":
        from runtime.shared_communicator import SharedCommunicator

        return SharedCommunicator(memory, rank, num_ranks)
    from runtime.device.gpu import Gpu
    from runtime.device.nccl import NcclComm, open_nccl
    from runtime.nccl_communicator import NcclCommunicator

    gpu = Gpu.of(device)
    comm = NcclComm(gpu, open_nccl(gpu.driver), unique_id, rank, num_ranks)
    return NcclCommunicator(gpu, comm, Notices.open(memory, rank, num_ranks))
