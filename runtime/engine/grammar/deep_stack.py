"""Runs a call on a deep stack, for code that recurses as deeply as its input and could overflow the usual one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 512 << 20
"""Bytes of address space; only touched pages take memory."""

_starting = threading.Lock()


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # no thread of the child could release it


os.register_at_fork(after_in_child=_after_fork)


def on_deep_stack(function: Callable[[], T]) -> T:
    """Return or raise as ``function`` does, run in a thread with ``STACK_BYTES`` of stack."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="xserv-deep-stack", daemon=True)
    with _starting:  # the stack size applies to every thread that the process starts
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
