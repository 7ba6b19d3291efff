"""The other ranks of a split model, for their driver, which is rank 0. It starts their processes, or connects to those
with GPUs on other machines. A process becomes a rank (`join`) through memory that all map, and on GPUs through NCCL."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from numba_kernels.cpu.running import pool
from runtime.communicator import CommunicatorError, RankCommunicator
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.nccl import NcclComm, open_nccl
from runtime.engine.config import EngineConfig
from runtime.engine.limits import EngineLimits
from runtime.engine.process.handshake import join as meet
from runtime.engine.process.handshake import watch_connection
from runtime.engine.process.spawning import connected_process
from runtime.engine.process.wire import FrameReader, RemoteRank, WaitingWriter, error_of
from runtime.engine.ranks.messages import (
    ANSWERS,
    Allocate,
    Allocated,
    Drew,
    Failed,
    FromRank,
    Load,
    Loaded,
    PagesCopied,
    ToRank,
    WeightsRead,
    frame,
)
from runtime.engine.steps.step_input import Sampled
from runtime.nccl_communicator import NcclCommunicator
from runtime.own_packages import python_module
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


logger = logging.getLogger("xserv.engine")

COMMAND = python_module("runtime.engine.ranks.main")
"""The command line of the processes, for Python."""

END_S = 2.0
"""How long processes may take to end on command, before they are killed."""

UNREAD_BYTES = 1 << 16
"""Bytes of messages that a connection always buffers before they are read."""

LOOK_S = 0.1
"""Seconds between checks for aborted ranks while waiting for one."""

Answer = TypeVar("Answer", Loaded, Allocated, Drew, WeightsRead, PagesCopied)


class RankGroup:
    """The processes of all ranks but 0. Belongs to the engine's thread.

    The processors are divided among the ranks; this process keeps to its number of threads.

    communicator  rank 0's
    page_bytes    by rank from 1 on, and by pool: the bytes of each plane's page
    """

    def __init__(self, folder: Path, config: EngineConfig, remote: Sequence[RemoteRank] = ()) -> None:
        """Starts the processes, or connects to those that were started elsewhere, and waits until all have joined.
        Raises CommunicatorError, HandshakeError, OSError, and a rank's error."""
        self.shape = Shape(config.tensor_parallel_size, config.pipeline_parallel_size)
        num_ranks = self.shape.count
        device = Device.parse(config.device)
        has_cores = device.kind != "cuda" and hasattr(os, "sched_getaffinity")
        cores = sorted(os.sched_getaffinity(0)) if has_cores else []
        threads = max(1, pool.NUM_THREADS // num_ranks)
        unique_ids = new_unique_ids(device, self.shape)
        memory = new_memory(device, self.shape)
        self._joining = device, unique_ids
        self._ranks: list[_Rank] = []
        self.page_bytes: list[list[list[int]]] = []
        try:
            pool.limit_threads(threads)
            for rank in range(1, num_ranks):
                mine = cores[rank * threads : (rank + 1) * threads] if len(cores) >= num_ranks * threads else []
                own = device_of_rank(device, rank).type
                if remote:
                    own, mine = remote[rank - 1].device, []
                    self._ranks.append(_Rank(rank, _connected(remote[rank - 1])))
                else:
                    self._ranks.append(_Rank(rank, *connected_process([*COMMAND, "--memory", str(memory)], memory)))
                self._ranks[-1].send(
                    frame(
                        Load(
                            folder=str(folder), config=replace(config.for_processes(), device=own),
                            number=rank, num_ranks=self.shape.num_ranks, num_stages=self.shape.num_stages,
                            unique_ids=unique_ids, cores=mine, threads=threads,
                            log_level=logger.getEffectiveLevel(),
                            dies_with_thread=threading.current_thread() is threading.main_thread(),
                        )
                    )
                )  # fmt: skip
            self.communicator = self._joined(device, memory, unique_ids)
            for each in self._ranks:
                each.tell_its_end_to(self.communicator)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def _joined(self, device: Device, memory: int, unique_ids: list[bytes]) -> RankCommunicator:
        """Rank 0's communicator, once all have joined; on a thread, since NCCL would wait for a rank that has ended."""
        found: list[RankCommunicator | BaseException] = []

        def work() -> None:
            try:
                found.append(join(device, memory, unique_ids, 0, self.shape))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=work, name="xserv-join", daemon=True)
        thread.start()
        while not found:
            thread.join(0.05)
            for rank in self._ranks:
                rank.raise_if_ended()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def wait_loaded(self) -> list[Loaded]:
        """Waits until all have their weights. Raises a rank's error, and CommunicatorError."""
        loaded = [rank.wait_for(Loaded) for rank in self._ranks]
        forget_unique_ids(*self._joining)
        return loaded

    def allocate(self, limits: EngineLimits, vocab_size: int) -> None:
        """Has all allocate their pages, and waits. Raises as `wait_loaded`."""
        self.send(Allocate(limits, vocab_size))
        self.page_bytes = [rank.wait_for(Allocated).page_bytes for rank in self._ranks]

    def wait_read(self) -> list[WeightsRead]:
        """Waits until all have read weights, or failed to. Raises CommunicatorError."""
        return [rank.wait_for(WeightsRead) for rank in self._ranks]

    def wait_copied(self) -> list[bytes]:
        """Waits until all have copied pages. Raises CommunicatorError."""
        return [rank.wait_for(PagesCopied).data for rank in self._ranks]

    def send_each(self, frames: Sequence[bytearray]) -> None:
        """Sends each its own frame, as `send_frame` does."""
        for rank, data in zip(self._ranks, frames, strict=True):
            rank.send(data)

    def send(self, message: ToRank) -> None:
        """Sends a message to all. One for a rank that has ended is dropped: the next collective fails."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytearray) -> None:
        """Sends a frame to all. Ranks read a command after they have done the previous one; beyond `UNREAD_BYTES` the
        sender waits."""
        for rank in self._ranks:
            rank.send(data)

    def send_to_last_stage(self, message: ToRank) -> None:
        """To the ranks that sample; with several stages."""
        data = frame(message)
        for rank in self._ranks[-self.shape.num_ranks :]:
            rank.send(data)

    def send_to_earlier_stages(self, message: ToRank) -> None:
        """To the ranks that do not sample; with several stages."""
        data = frame(message)
        for rank in self._ranks[: -self.shape.num_ranks]:
            rank.send(data)

    def wait_sampled(self, number: int) -> Sampled:
        """The tokens that the last stage has sampled in this step, in order of the sampling steps. Raises
        CommunicatorError, with each rank's reason if one has aborted."""
        drew = self._ranks[-self.shape.num_ranks].wait_for(Drew)
        assert drew.number == number, f"step {drew.number} came instead of step {number}"
        return drew.sampled

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that this one has started, in the order of ranks from 1 on."""
        return [rank.process.pid for rank in self._ranks if rank.process is not None]

    def expect_end(self) -> None:
        """From now on the end of a rank is not an error."""
        for rank in self._ranks:
            rank.expect_end()

    def close(self) -> None:
        """Ends the processes unconditionally."""
        for rank in self._ranks:
            rank.close()
        until = time.monotonic() + END_S
        for rank in self._ranks:
            rank.end(until)
        pool.limit_threads(pool.NUM_THREADS)


def _connected(remote: RemoteRank) -> socket.socket:
    """Connects to a rank that waits for it. Raises HandshakeError, OSError."""
    connection = meet(remote.host, remote.port, remote.secret)
    watch_connection(connection)
    return connection


class _Rank:
    """A rank, and the thread that detects its end. ``process`` is None if it was started elsewhere."""

    def __init__(self, rank: int, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._rank, self._connection, self.process = rank, connection, process
        self._communicator: RankCommunicator | None = None
        self._reader, self._writer = FrameReader(self._connection), WaitingWriter(self._connection)
        self._condition = threading.Condition()
        self._answers: list[FromRank] = []
        self._has_ended = self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name=f"xserv-rank-{rank}", daemon=True)
        self._thread.start()

    def send(self, data: bytearray) -> None:
        try:  # noqa: SIM105  on the path of every step
            self._writer.send(data)
        except OSError:
            pass

    def tell_its_end_to(self, communicator: RankCommunicator) -> None:
        """From now on, or at once if it has ended."""
        with self._condition:
            self._communicator = communicator
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raises the error of a rank that has failed before it was ready, and CommunicatorError."""
        with self._condition:
            if not self._has_ended:
                return
        self.wait_for(Loaded)

    def wait_for(self, kind: type[Answer]) -> Answer:
        is_running = kind in (Drew, PagesCopied)
        with self._condition:
            while (place := self._place_of(kind)) is None and not self._has_ended:
                self._condition.wait(LOOK_S)
                communicator = self._communicator
                if self._place_of(kind) is None and is_running and communicator is not None and communicator.is_aborted:
                    raise CommunicatorError(f"the ranks have given up: {communicator.last_words()}")
            if place is None:
                raise CommunicatorError(f"rank {self._rank} ended{'' if is_running else ' before it was ready'}")
            answer = self._answers.pop(place)
        if isinstance(answer, Failed):
            raise error_of(answer.problem)
        assert isinstance(answer, kind), answer
        return answer

    def _place_of(self, kind: type[Answer]) -> int | None:
        """The place of the next answer. Draws of open steps, which come between, are skipped unless they are wanted.
        The condition is held."""
        passes = (each for each, answer in enumerate(self._answers) if kind is Drew or not isinstance(answer, Drew))
        return next(passes, None)

    def expect_end(self) -> None:
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def end(self, until: float) -> None:
        if self.process is not None:
            try:
                self.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
        """Listens until the rank ends, and aborts all others then."""
        reason = "ended"
        with suppress(OSError):
            while frames := self._reader.read():
                for data in frames:
                    answer = ANSWERS.decode(data)
                    if isinstance(answer, Failed):
                        reason = f"failed: {answer.problem.message}"
                        if not self._is_closed:
                            logger.error("rank %d %s", self._rank, reason)
                    with self._condition:
                        self._answers.append(answer)
                        self._condition.notify_all()
        if not self._is_closed and reason == "ended":
            logger.error("rank %d has ended", self._rank)
        with self._condition:
            self._has_ended = True
            communicator = self._communicator
            self._condition.notify_all()
        if not self._is_closed and communicator is not None:
            communicator.abort_for(self._rank, reason)
