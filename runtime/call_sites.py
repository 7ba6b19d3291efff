"""The line of a model's code that called a collective, for messages about what ranks did."""

from __future__ import annotations

import os
import sys

from runtime.own_packages import ROOT

_OWN_FOLDERS = tuple(f"{ROOT / name}{os.sep}" for name in ("runtime", "numba_kernels"))


def calling_line() -> tuple[str, int]:
    """File and line of the caller outside the folders that pass calls on; the innermost frame if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def line_name(file: str, line: int) -> str:
    """`families/llama.py:61`."""
    return f"{os.path.join(*file.split(os.sep)[-2:])}:{line}"
