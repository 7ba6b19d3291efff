"""The engine's process with faults planted in its sampler, and a server that uses it and starts it again soon.

    python -m tests.server.planted_engine serve --port 0 ...    # the server
    python -m tests.server.planted_engine --fd N                # its engine

A request whose seed is LOADING cannot be set up; one whose seed is SAMPLING fails when its third token is to be
drawn."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from runtime.engine.process.child import Supervision
from runtime.engine.process.main import ProcessServer, main
from runtime.engine.steps.assemble import Assembler
from runtime.engine.steps.sampler import SamplingRows
from runtime.own_packages import python_module

LOADING, SAMPLING = 666, 667


class PlantedAssembler(Assembler):
    def load_of(self, sequence: Any) -> Any:
        if sequence.request.params.seed == LOADING:
            raise RuntimeError("planted: no parameters of this request")
        return super().load_of(sequence)


class PlantedRows(SamplingRows):
    def gather(self, rows: Any, positions: Any) -> Any:
        if ((self._seeds[rows] == SAMPLING) & (positions == 2)).any():
            raise RuntimeError("planted: no token for this request")
        return super().gather(rows, positions)


class PlantedProcess(ProcessServer):
    def make_engine(self, start: Any) -> Any:
        import runtime.engine.engine as engine
        import runtime.engine.steps.persistent_batch as rows

        engine.Assembler = PlantedAssembler  # type: ignore[misc]
        rows.SamplingRows = PlantedRows  # type: ignore[misc]
        return super().make_engine(start)


def serve() -> None:
    import runtime.engine.make_client as start
    from runtime.cli import main as run

    command = python_module("tests.server.planted_engine")
    start.Supervision = partial(Supervision, command=command, first_delay_s=0.2, healthy_s=0.0)  # type: ignore
    sys.argv += ["--hang-timeout", "600"]
    run()


if __name__ == "__main__":
    if "--fd" in sys.argv:
        main(PlantedProcess)
    else:
        serve()
