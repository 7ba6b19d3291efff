"""The process that runs a section's cases: `python -m tools.gpu.checking.worker SECTION --results FILE ...`.

Results go to FILE at once, a line of JSON each:

    {"begin": case}
    {"end": case, "seconds": 1.2, "result": {...}}     or "error": "AssertionError: ..." in place of the result;
                                                       timed cases on a GPU have "clocks" beside it
    {"over": true}                                     no case is left

A case that loses the device, such as by a kernel's fault, is the process's last: it ends with status LOST.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from runtime.device.gpu import Gpu
from runtime.errors import DeviceError
from tools.gpu.checking.clocks import clocks
from tools.gpu.sections import Case, Options, Section, find

LOST = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.checking.worker")
    parser.add_argument("section")
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--known", type=Path, help="JSON: names of cases that are not to be run again")
    asked = parser.parse_args(arguments)
    known = json.loads(asked.known.read_text(encoding="utf-8")) if asked.known is not None else []
    return run(find(asked.section), Options(asked.device, asked.quick), asked.results, known)


class Lines:
    """The file of results; each line is flushed at once."""

    def __init__(self, path: Path, options: Options) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._options = options

    def write(self, **line: Any) -> None:
        """Ends the process after an error that lost the device."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if "error" in line and is_lost(self._options):
            sys.stdout.flush()
            os._exit(LOST)

    def close(self) -> None:
        self._file.close()


def run(section: Section, options: Options, path: Path, known: Collection[str] = ()) -> int:
    """Runs the cases that are not in `known`. Returns the exit status."""
    lines = Lines(path, options)
    if section.is_session:
        section.start(options, known, lines.write)
    else:
        for case in section.start(options):
            if case.name not in known:
                lines.write(begin=case.name)
                start = time.monotonic()
                if section.is_timed and options.is_real:
                    with clocks(options.device) as sampled:
                        found = outcome(case)
                    found["clocks"] = sampled
                else:
                    found = outcome(case)
                lines.write(end=case.name, seconds=round(time.monotonic() - start, 2), **found)
                gc.collect()
    lines.write(over=True)
    lines.close()
    return 0


def outcome(case: Case) -> dict[str, Any]:
    """{"result": ...} or {"error": ...}; an error's traceback is printed."""
    try:
        return {"result": case.run()}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:4000]}


def is_lost(options: Options) -> bool:
    """Whether the device no longer responds."""
    try:
        Gpu.of(options.device).synchronize()
    except DeviceError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
