"""A rank's process with a fault: `runtime.engine.ranks.main`, once `XSERV_TEST_FAULT` has been planted in it."""

from __future__ import annotations

import os
import time
from typing import Any

from models.errors import ModelLoadError
from runtime.engine.ranks import main as rank
from runtime.engine.ranks.messages import Load
from runtime.errors import OutOfMemoryError

CALLS_BEFORE = 9
"""Of attention: a few steps."""


def _plant(fault: str) -> None:
    from models.decoder import Attention  # once the number of threads is settled

    whole, seen = Attention.__call__, [0]

    def call(self: Attention, *arguments: Any, **keywords: Any) -> Any:
        seen[0] += 1
        if seen[0] > CALLS_BEFORE:
            if fault == "raises":
                raise ArithmeticError("no more paper")
            if fault == "memory":
                raise OutOfMemoryError("no memory for 77 bytes")
            if fault == "exits":
                os._exit(3)
            if fault == "slow":
                time.sleep(0.2)
        return whole(self, *arguments, **keywords)

    if fault == "late":
        time.sleep(3)
    elif fault == "unloadable":
        os._exit(5)
    elif fault == "misread":
        raise ModelLoadError("tensor 'model.norm.weight' is spoilt")
    else:
        Attention.__call__ = call  # type: ignore[method-assign]


_settle = rank._settle


def _settle_and_plant(load: Load) -> None:
    _settle(load)
    _plant(os.environ["XSERV_TEST_FAULT"])


if __name__ == "__main__":
    rank._settle = _settle_and_plant
    rank.main()
