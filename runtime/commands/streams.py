"""A command's stdin, stdout and stderr: closed, in another encoding than UTF-8, or closed meanwhile."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


class ClosedOutput(io.TextIOBase):
    """stdout of a process that was started without one (`>&-`): what is written is lost, which is an error."""

    def write(self, text: str) -> int:
        raise OSError("stdout is closed: nothing can be written")


def prepare() -> None:
    """Text of any language can be read and written. In a locale that knows ASCII alone (`LC_ALL=POSIX`) it is UTF-8, as
    Python itself has it; what another encoding lacks is written as `\\xe9`. The numbers 0 to 2 are never those of
    another file."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if type(stream) is not io.TextIOWrapper or stream.encoding is None:
            continue
        is_ascii = stream.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968", "646")
        errors = "surrogateescape" if stream is sys.stdin else "backslashreplace"
        stream.reconfigure(encoding="utf-8" if is_ascii else None, errors=errors)


def flush() -> None:
    """Raises `OSError` where what was printed cannot be written: nobody reads it any more, the disk is full."""
    sys.stdout.flush()


def give_up_output() -> None:
    """After such an error: what is still to be written is dropped, so that the interpreter's end does not try again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
