"""An engine's process whose ranks have a fault, once: `runtime.engine.process.main`, with `faulty_rank` for its ranks.

The fault is what the file named by `XSERV_TEST_FAULT_FILE` says; it is removed, so that the next engine is whole.
"""

from __future__ import annotations

import os
from pathlib import Path

from runtime.engine.process.main import main
from runtime.engine.ranks import group
from runtime.own_packages import python_module

if __name__ == "__main__":
    file = Path(os.environ["XSERV_TEST_FAULT_FILE"])
    os.environ["XSERV_TEST_FAULT"] = file.read_text(encoding="utf-8") if file.exists() else ""
    file.unlink(missing_ok=True)
    group.COMMAND = python_module("tests.runtime.engine.ranks.faulty_rank")
    main()
