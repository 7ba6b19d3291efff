"""The commands to a rank, in order, read by the thread that runs them, without a hand-over. The driver's end is
detected even while the rank computes."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import NoReturn

from runtime.engine.process.wire import FrameReader
from runtime.engine.ranks.messages import DECODER, RunNext, RunStep, ToRank, told_step
from runtime.engine.steps.step_input import StepInput

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
