"""The process of a rank: it loads its part of a model and runs the driver's commands in step with the other ranks.

    python -m runtime.engine.ranks.main --fd N [--memory M]

N is a socket to the driver, M the memory that the ranks share. Without M the driver is on another machine; each rank
then has such memory to itself and learns of another's end over the socket. The process ends when the driver closes the
socket or ends, and with its own first error, which it reports to the driver and the other ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from runtime.engine.process.wire import WaitingWriter
from runtime.engine.process.wire_errors import problem_of
from runtime.engine.ranks.inbox import Inbox
from runtime.engine.ranks.messages import (
    Allocate,
    Allocated,
    Drew,
    DropEncoded,
    Encode,
    Failed,
    Load,
    Loaded,
    Logits,
    Masks,
    Note,
    Record,
    RunPass,
    RunStep,
    StartEncoding,
    StartPass,
    frame,
)

if TYPE_CHECKING:
    from runtime.communicator import RankCommunicator
    from runtime.engine.steps.executor import Computation, SidePass
    from runtime.engine.steps.local_executor import LocalExecutor
    from runtime.engine.steps.step_input import StepInput

logger = logging.getLogger("xserv.engine")

LEAD_S = 0.005
"""How long a rank with a running graph waits for a step to queue after it, before it reads the result."""

EXIT_FAILED = 1


class RankProcess:
    """One rank of a model."""

    def __init__(self, connection: socket.socket, memory: int | None) -> None:
        self._writer = WaitingWriter(connection)
        self._inbox = Inbox(connection)
        self._memory = memory
        self._communicator: RankCommunicator | None = None

    def run(self) -> NoReturn:
        """Run the driver's commands until one of the ends that the module lists. To be called on the main thread."""
        try:
            self._obey()
        except BaseException as error:
            from runtime.communicator import CommunicatorError

            if self._communicator is not None and not isinstance(error, CommunicatorError):
                self._communicator.abort(f"failed: {type(error).__name__}: {error}")
            with suppress(OSError):
                self._writer.send(frame(Failed(problem_of(error))))
        os._exit(EXIT_FAILED)

    def _obey(self) -> NoReturn:
        load = self._inbox.get()
        assert isinstance(load, Load), load
        _settle(load)
        executor = self._made(load)
        pooling_pass: SidePass | None = None
        running: Computation | None = None  # a graph, after which the next step's may be queued
        while True:
            if running is None and self._inbox.is_empty:
                executor.finish_queued()
            message = self._inbox.get(wait_s=None if running is None else LEAD_S)
            if running is not None and not (isinstance(message, RunStep) and executor.can_overlap(message.step)):
                running.result()
                running = None
            match message:
                case None:
                    pass
                case RunStep(step, has_masks):
                    started = self._started(executor, step, has_masks)
                    if running is not None:
                        running.result()
                    running = started
                case Note(number, rows, positions, token_ids):
                    executor.note_sampled(number, rows, positions, token_ids)
                case Record():
                    executor.record_together()
                case StartEncoding(slot, patches, grid):
                    executor.start_encoding(slot, patches, grid)
                case Encode(slot, num_rows):
                    executor.encode(slot, num_rows)
                case DropEncoded(slot):
                    executor.drop_encoded(slot)
                case StartPass(lengths):
                    pooling_pass = None  # frees its room for the next
                    pooling_pass = executor.pooling_pass(lengths)
                case RunPass(token_ids, starts, pictures):
                    assert pooling_pass is not None, "a pass was started"
                    pooling_pass.run(token_ids, starts, pictures)
                case Logits(token_ids):
                    executor.logits(token_ids)
                case other:
                    raise AssertionError(f"{type(other).__name__} came when it could not")

    def _made(self, load: Load) -> LocalExecutor:
        from pathlib import Path

        from runtime.device.device import Device
        from runtime.engine.make_engine import executor_over, free_memory_bytes, loaded_model
        from runtime.engine.ranks.joining import Shape, join, new_memory

        device, shape = Device.parse(load.config.device), Shape(load.num_ranks, load.num_stages)
        memory = new_memory(device, shape) if self._memory is None else self._memory
        communicator = join(device, memory, load.unique_ids, load.number, shape)
        self._communicator = communicator
        folder = Path(load.folder)
        model = loaded_model(folder, load.config, communicator=communicator)
        self._writer.send(frame(Loaded(model.weight_bytes, free_memory_bytes(device))))
        allocate = self._inbox.get()
        assert isinstance(allocate, Allocate), allocate
        executor = executor_over(model, folder, load.config, allocate.limits, allocate.vocab_size, communicator)
        self._writer.send(frame(Allocated()))
        return executor

    def _started(self, executor: LocalExecutor, step: StepInput, has_masks: bool) -> Computation | None:
        """The running step if another may be queued after it; else None, and it is over."""
        from runtime.engine.steps.executor import UnsupportedStepError

        try:
            computation = executor.start(step, _SentMasks(self._inbox) if has_masks else None)
        except UnsupportedStepError:  # the driver raises it, too
            return None
        if executor.may_be_led:
            return computation
        if step.num_seqs:
            sampled = computation.result()
            if self._tells_draws:
                self._writer.send(frame(Drew(step.number, sampled)))
        return None

    @property
    def _tells_draws(self) -> bool:
        """Whether this is the first rank of the last of several stages, which reports the sampled tokens."""
        ranks = self._communicator
        assert ranks is not None, "it has joined"
        return ranks.num_stages > 1 and ranks.stage == ranks.num_stages - 1 and ranks.rank == 0


class _SentMasks:
    """See ``DrawMasks``: received from the driver."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def wait(self) -> tuple[NDArray[np.intp], NDArray[np.uint32], list[int]]:
        message = self._inbox.get()
        assert isinstance(message, Masks), message
        return message.batch_slots, message.words, message.failed


def _settle(load: Load) -> None:
    """Settings that must precede any count of processors."""
    if load.dies_with_thread:
        from runtime.engine.process.parent import die_with_parent

        die_with_parent()
    if load.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, load.cores)
    os.environ["NUMBA_NUM_THREADS"] = str(load.threads)
    logging.basicConfig(format=f"rank {load.number}: %(message)s", level=load.log_level)


def main() -> NoReturn:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable()
    parser = argparse.ArgumentParser(description="A rank of a split model; started by an engine.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--memory", type=int, help="the inherited memory")
    given = parser.parse_args()
    for descriptor in (given.fd, given.memory):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    RankProcess(socket.socket(fileno=given.fd), given.memory).run()


if __name__ == "__main__":
    main()
