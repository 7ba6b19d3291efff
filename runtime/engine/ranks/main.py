"""The process of a rank: it loads its part of a model and runs the driver's commands in step with the other ranks.

    python -m runtime.engine.ranks.main --fd N [--memory M]

N is a socket to the driver, M the memory that the ranks share. Without M the driver is on another machine; each rank
then has such memory to itself and learns of another's end over the socket. The process ends when the driver closes the
socket or ends, and with its own first error, which it reports to the driver and the other ranks.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from typing import NoReturn

from runtime.engine.process.spawning import begin, die_with_parent
from runtime.engine.process.wire import WaitingWriter, problem_of
from runtime.engine.ranks.messages import Failed, Inbox, Load, frame
from runtime.later import later

_rank_process = later("runtime.engine.ranks.rank_process")

EXIT_FAILED = 1


def _settle(load: Load) -> None:
    """Settings that must precede any count of processors."""
    if load.dies_with_thread:
        die_with_parent()
    if load.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, load.cores)
    os.environ["NUMBA_NUM_THREADS"] = str(load.threads)
    logging.basicConfig(format=f"rank {load.number}: %(message)s", level=load.log_level)


def main() -> NoReturn:
    given = begin("A rank of a split model; started by an engine.", "memory")
    connection = socket.socket(fileno=given.fd)
    inbox, writer = Inbox(connection), WaitingWriter(connection)
    try:
        load = inbox.get()
        assert isinstance(load, Load), load
        _settle(load)
        _rank_process.RankProcess(inbox, writer, load, given.memory).run()
    except BaseException as error:
        with suppress(OSError):
            writer.send(frame(Failed(problem_of(error))))
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
