"""One rank of a split model, which runs the driver's commands in step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from runtime.communicator import CommunicatorError, RankCommunicator
from runtime.device.device import Device
from runtime.engine.make_engine import executor_over, free_memory_bytes, loaded_model
from runtime.engine.process.wire import Problem, WaitingWriter, problem_of
from runtime.engine.ranks.group import Shape, join, new_memory
from runtime.engine.ranks.messages import (
    Allocate,
    Allocated,
    ChangeMemory,
    CopyPages,
    Drew,
    DropEncoded,
    Encode,
    FillPages,
    Inbox,
    Load,
    Loaded,
    Logits,
    Masks,
    MemoryChange,
    Note,
    PagesCopied,
    ReadWeights,
    Record,
    ReloadWeights,
    RunPass,
    RunStep,
    StartEncoding,
    StartPass,
    WeightsRead,
    WriteAdapter,
    frame,
)
from runtime.engine.ranks.pages import write_told
from runtime.engine.steps.executor import Computation, SidePass, UnsupportedStepError
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.engine.steps.step_input import StepInput
from runtime.errors import XservError
from runtime.kv.page_bytes import PageBytes
from runtime.linear.adapter_pairs import Change, Pair, Rows

LEAD_S = 0.005
"""How long a rank with a running graph waits for a step to queue after it, before it reads the result."""


class RankProcess:
    """One rank of a model, over a connection to the driver; ``load`` was its first message, ``memory`` the ranks'."""

    def __init__(self, inbox: Inbox, writer: WaitingWriter, load: Load, memory: int | None) -> None:
        self._writer, self._inbox, self._load, self._memory = writer, inbox, load, memory
        self._communicator: RankCommunicator | None = None

    def run(self) -> NoReturn:
        """Run the driver's commands. Raises the first error, which the other ranks then know."""
        try:
            self._obey()
        except BaseException as error:
            if self._communicator is not None and not isinstance(error, CommunicatorError):
                self._communicator.abort(f"failed: {type(error).__name__}: {error}")
            raise

    def _obey(self) -> NoReturn:
        executor = self._made()
        pages = PageBytes(executor.kv_cache)
        self._writer.send(frame(Allocated(pages.page_bytes)))
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
                case StartEncoding(slot, patches, grid, adapter):
                    executor.start_encoding(slot, patches, grid, adapter)
                case Encode(slot, num_rows):
                    executor.encode(slot, num_rows)
                case DropEncoded(slot):
                    executor.drop_encoded(slot)
                case WriteAdapter(slot, parts):
                    executor.write_adapter(slot, {module: _adapter_change(arrays) for module, arrays in parts.items()})
                case ReadWeights(source):
                    self._read(partial(executor.load_weights, source))
                case ReloadWeights():
                    pooling_pass = None
                    self._read(executor.reload_weights)
                case ChangeMemory(what):
                    pooling_pass = None  # it has the old model
                    _change(executor, what)
                case CopyPages(pool, block_ids):
                    planes = pages.copy_out(pool, block_ids)
                    self._writer.send(frame(PagesCopied(b"".join(plane.tobytes() for plane in planes))))
                case FillPages():
                    write_told(pages, message)
                case StartPass(lengths):
                    pooling_pass = None  # frees its room for the next
                    pooling_pass = executor.pooling_pass(lengths)
                case RunPass(token_ids, starts, pictures, types):
                    assert pooling_pass is not None, "a pass was started"
                    pooling_pass.run(token_ids, starts, pictures, types)
                case Logits(token_ids):
                    executor.logits(token_ids)
                case other:
                    raise AssertionError(f"{type(other).__name__} came when it could not")

    def _read(self, read: Callable[[], None]) -> None:
        """Read weights and report; an error leaves everything as it was."""
        problem: Problem | None = None
        try:
            read()
        except XservError as error:
            problem = problem_of(error)
        self._writer.send(frame(WeightsRead(problem)))

    def _made(self) -> LocalExecutor:
        load = self._load
        device, shape = Device.parse(load.config.device), Shape(load.num_ranks, load.num_stages)
        memory = new_memory(device, shape) if self._memory is None else self._memory
        communicator = join(device, memory, load.unique_ids, load.number, shape)
        self._communicator = communicator
        folder = Path(load.folder)
        model = loaded_model(folder, load.config, communicator=communicator)
        self._writer.send(frame(Loaded(model.weight_bytes, free_memory_bytes(device))))
        allocate = self._inbox.get()
        assert isinstance(allocate, Allocate), allocate
        return executor_over(model, folder, load.config, allocate.limits, allocate.vocab_size, communicator)

    def _started(self, executor: LocalExecutor, step: StepInput, has_masks: bool) -> Computation | None:
        """The running step if another may be queued after it; else None, and it is over."""
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


def _change(executor: LocalExecutor, what: MemoryChange) -> None:
    match what:
        case "use":
            executor.use_weights()
        case "drop":
            executor.drop_loaded()
        case "free_weights":
            executor.free_memory(weights=True)
        case "free_pages":
            executor.free_memory(weights=False)
        case "keep":
            executor.keep_weights()
        case "forget":
            executor.forget_kept_weights()
        case "allocate":
            executor.allocate_pages()


class _SentMasks:
    """See ``DrawMasks``: received from the driver."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def wait(self) -> tuple[NDArray[np.intp], NDArray[np.uint32], list[int]]:
        message = self._inbox.get()
        assert isinstance(message, Masks), message
        return message.batch_slots, message.words, message.failed


def _adapter_change(arrays: list[tuple[tuple[int, ...], NDArray[np.uint8]]]) -> Change:
    """A module's part of an adapter, as `WriteAdapter` has it: rows begin with a vector, of their numbers."""
    if len(arrays[0][0]) == 1:
        (shape, ids), (whole, values) = arrays
        return Rows(ids.view(np.int32).reshape(shape), values.view(np.float32).reshape(whole))
    return Pair(*(data.view(np.float32).reshape(shape) for shape, data in arrays))
