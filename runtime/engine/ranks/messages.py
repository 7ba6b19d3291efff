"""The messages between the driver of a split model and its other ranks, which are processes.

Frames are `runtime.engine.process.wire`'s. Computations are not answered, since the ranks meet in their collectives;
only the last of several stages reports its sampled tokens. A rank's thread that computes reads them itself (`Inbox`).
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Literal, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.config import EngineConfig
from runtime.engine.limits import EngineLimits
from runtime.engine.process import wire
from runtime.engine.process.wire import FrameReader, Problem
from runtime.engine.steps.step_input import BlockAddition, PassPictures, Sampled, StepInput, from_array, to_array
from runtime.engine.weights.commands import SentWeights

# To a rank


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message: load this rank's part of the model in a folder.

    config   of this rank, with its own device
    number   of this rank among those of all stages
    num_ranks, num_stages  ranks of a stage, and stages
    unique_ids  of the communicators, on GPUs (`runtime.device.nccl`); empty on the CPU
    cores    the rank's processors; all if empty
    threads  that compute
    dies_with_thread  whether the thread that started the process lives as long as the driver does
    """

    folder: str
    config: EngineConfig
    number: int
    num_ranks: int
    num_stages: int
    unique_ids: list[bytes]
    cores: list[int]
    threads: int
    dies_with_thread: bool
    log_level: int


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate the pages; steps follow."""

    limits: EngineLimits
    vocab_size: int


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.start``. With ``has_masks``, masks of its draws follow."""

    step: StepInput
    has_masks: bool


class RunNext(msgspec.Struct, frozen=True, tag=True):
    """A step that continues the previous one: see ``StepInput.next``. ``starts``: int64."""

    number: int
    starts: bytes
    additions: list[BlockAddition]
    has_masks: bool


class Masks(msgspec.Struct, frozen=True, tag=True):
    """The result of the driver's ``DrawMasks.wait``."""

    batch_slots: NDArray[np.intp]
    words: NDArray[np.uint32]
    failed: list[int]


class Note(msgspec.Struct, frozen=True, tag=True):
    """See ``LocalExecutor.note_sampled``; to the ranks of the stages before the last."""

    number: int
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int32]


class Record(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.record``."""


class StartEncoding(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.start_encoding``."""

    slot: int
    patches: NDArray[np.uint8]
    grid: tuple[int, int]
    adapter: int


class Encode(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.encode``."""

    slot: int
    num_rows: int


class DropEncoded(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.drop_encoded``."""

    slot: int


class WriteAdapter(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.write_adapter``: for each module the bytes of its pair's float32 arrays, and their shapes."""

    slot: int
    pairs: dict[str, list[tuple[tuple[int, ...], NDArray[np.uint8]]]]


class ReadWeights(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.load_weights``; answered by ``WeightsRead``."""

    source: SentWeights


class ReloadWeights(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.reload_weights``; answered by ``WeightsRead``."""


MemoryChange = Literal["use", "drop", "free_weights", "free_pages", "keep", "forget", "allocate"]


class ChangeMemory(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.use_weights`` and the methods after it."""

    what: MemoryChange


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Copy these blocks of a pool; answered by ``PagesCopied``."""

    pool: int
    block_ids: list[int]


class FillPages(msgspec.Struct, frozen=True, tag=True):
    """Write blocks from ``block_id`` on: ``data`` has this rank's planes, one after another."""

    pool: int
    block_id: int
    num_blocks: int
    data: bytes


class StartPass(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.pooling_pass``; it replaces the previous one."""

    lengths: list[int]


class RunPass(msgspec.Struct, frozen=True, tag=True):
    """See ``SidePass.run``."""

    token_ids: list[NDArray[np.int32]]
    starts: list[int]
    pictures: PassPictures | None = None
    types: list[NDArray[np.int32] | None] = []


class Logits(msgspec.Struct, frozen=True, tag=True):
    """See ``Executor.logits``."""

    token_ids: NDArray[np.int32]


ToRank = (
    Load
    | Allocate
    | RunStep
    | RunNext
    | Masks
    | Note
    | Record
    | StartEncoding
    | Encode
    | DropEncoded
    | WriteAdapter
    | ReadWeights
    | ReloadWeights
    | ChangeMemory
    | CopyPages
    | FillPages
    | StartPass
    | RunPass
    | Logits
)


def step_message(step: StepInput, before: StepInput | None, *, has_masks: bool) -> RunStep | RunNext:
    """The shortest message about a step for ranks that have the previous one, if there was one."""
    if before is not None and step.goes_on(before):
        return RunNext(step.number, step.starts.tobytes(), step.additions, has_masks)
    return RunStep(step, has_masks)


def told_step(message: RunStep | RunNext, before: StepInput | None) -> StepInput:
    """The step of such a message."""
    if isinstance(message, RunStep):
        return message.step
    assert before is not None, "it goes on with another"
    return before.next(message.number, np.frombuffer(message.starts, np.int64), message.additions)


# From a rank


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """This rank's part of the weights is in memory; ``free_bytes`` of its device are free."""

    weight_bytes: int
    free_bytes: int


class Allocated(msgspec.Struct, frozen=True, tag=True):
    """The pages are allocated; by pool, the bytes of each of this rank's planes."""

    page_bytes: list[list[int]]


class Drew(msgspec.Struct, frozen=True, tag=True):
    """The tokens that the last stage has sampled in a step; sent by its first rank."""

    number: int
    sampled: Sampled


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    """This rank has read its part of the weights, or why not."""

    problem: Problem | None = None


class PagesCopied(msgspec.Struct, frozen=True, tag=True):
    """This rank's planes of the wanted blocks, one after another."""

    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a rank that has failed."""

    problem: Problem


FromRank = Loaded | Allocated | Drew | WeightsRead | PagesCopied | Failed

_ENCODER = msgspec.msgpack.Encoder(enc_hook=from_array)
DECODER: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=to_array)
ANSWERS: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def frame(message: ToRank | FromRank) -> bytearray:
    """A message, ready to be sent. Raises ``WireError`` if it is too long."""
    return wire.frame(message, _ENCODER)


EXIT_DRIVER_GONE = 72


class Inbox:
    """The messages of a connection to the driver. The process ends with the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader(connection)
        self._pending: deque[ToRank] = deque()
        self._step: StepInput | None = None  # the latest
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        threading.Thread(target=self._watch, name="xserv-rank-watch", daemon=True).start()

    @property
    def is_empty(self) -> bool:
        """Whether no command is pending."""
        return not (self._pending or self._poll.poll(0))

    def get(self, wait_s: float | None = None) -> ToRank | None:
        """The next message; None if it did not come in time. Raises the errors of malformed messages."""
        if not self._pending and wait_s is not None and not self._poll.poll(1000.0 * wait_s):
            return None
        while not self._pending:
            frames: list[memoryview] = []
            with suppress(OSError):
                frames = self._reader.read()
            if not frames:
                os._exit(EXIT_DRIVER_GONE)
            self._pending.extend(self._message(data) for data in frames)
        return self._pending.popleft()

    def _message(self, data: memoryview) -> ToRank:
        message = DECODER.decode(data)
        if isinstance(message, RunStep | RunNext):
            self._step = told_step(message, self._step)
            return RunStep(self._step, message.has_masks)
        return message

    def _watch(self) -> NoReturn:
        """Ends the process with the connection, even while its thread computes or waits for other ranks."""
        poll = select.poll()
        poll.register(self._connection, getattr(select, "POLLRDHUP", 0))  # and anything else that ends it
        poll.poll()
        os._exit(EXIT_DRIVER_GONE)
