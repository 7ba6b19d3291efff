"""Handles a command's stdin, stdout and stderr that are closed, not UTF-8, or closed during the run."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


class ClosedOutput(io.TextIOBase):
    """The stdout of a process started without one (`>&-`): writing to it is an error."""

    def write(self, text: str) -> int:
        raise OSError("stdout is closed: nothing can be written")


def prepare() -> None:
    """Prepares the streams for any language. In an ASCII locale (`LC_ALL=POSIX`) they are UTF-8, as in Python itself;
    characters that another encoding lacks are written as `\\xe9`. File descriptors 0 to 2 never belong to another
    file."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
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
    """Flushes stdout. Raises `OSError` if it cannot be written: a closed pipe, or a full disk."""
    sys.stdout.flush()


def give_up_output() -> None:
    """Drops pending output after such an error, so that the interpreter's exit does not retry."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
