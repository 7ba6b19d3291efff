"""What a rank's process reads, and that it ends with the driver whatever it does."""

from __future__ import annotations

import socket
import subprocess
import sys

from runtime.engine.ranks.messages import EXIT_DRIVER_GONE, DropEncoded, Record, frame
from runtime.own_packages import ROOT

RANK = """
import socket, sys, time
from runtime.engine.ranks.messages import Inbox
from runtime.engine.ranks.messages import DropEncoded, Record
inbox = Inbox(socket.socket(fileno=int(sys.argv[1])))
assert inbox.get() == Record()
assert inbox.get() == DropEncoded(7)
assert inbox.is_empty and inbox.get(0.0) is None
print("waits", flush=True)
assert inbox.get(60.0) == DropEncoded(8)
print("computes", flush=True)
time.sleep(60)
"""


def test_messages_come_in_order_and_the_process_ends_with_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE,
            cwd=ROOT,
        )  # fmt: skip
    try:
        with ours:
            ours.sendall(frame(Record()) + frame(DropEncoded(7)))
            assert process.stdout is not None
            assert process.stdout.readline() == b"waits\n"
            ours.sendall(frame(DropEncoded(8)))
            assert process.stdout.readline() == b"computes\n"
        assert process.wait(30) == EXIT_DRIVER_GONE
    finally:
        process.kill()
        process.communicate()
