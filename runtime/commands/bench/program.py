"""`xserv bench` with all its commands; imported only for one of them, since they have most of the program's flags."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from runtime.commands.bench import engine, peers, serve
from runtime.commands.group import Command
from runtime.commands.options import with_options
from runtime.errors import UnsupportedError

GONE = {
    "allocator": "`xserv bench profile` shows where the time of a step goes, the host's parts among it",
    "budget": "`xserv bench stalls --tpot-ratio R` measures the budget, and what prompts beside decodes then cost",
    "chunked": "`xserv bench stalls` and `xserv bench schedule` compare chunks with whole prompts",
    "latency": "`xserv bench streaming --num-requests N --prompt-len M --max-tokens K` times one batch",
    "loading": "`xserv bench peers --workloads load` times how soon the tensors of a file are there",
    "nccl": "NVIDIA's nccl-tests measure the same; `tools/simulate.py --link` takes their MICROSECONDS,GB_PER_S",
    "parallel": "`xserv bench streaming` and `serve` take --tensor-parallel-size, --pipeline-parallel-size and "
    "--data-parallel-size",
    "pictures": "`xserv bench serve` measures a server that is busy; `python -m tools.gpu_check` times a tower",
    "routing": "`xserv bench serve --data-parallel-size N --routing-policy P --num-prefixes M` measures one policy",
    "throughput": "`xserv bench streaming` has the throughput of requests that are submitted at once",
    "tokenizer": "`xserv bench peers --workloads tokenizer --tokenizer FILE` compares encoding",
}
"""Commands of earlier versions, each with what measures the same or the nearest."""


class BenchGroup(TyperGroup):
    """The benchmarks; a removed one names its replacement."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in GONE:
            raise UnsupportedError(f"xserv bench {cmd_name} was removed: {GONE[cmd_name]}")
        return super().get_command(ctx, cmd_name)


bench = typer.Typer(
    name="bench",
    cls=BenchGroup,
    help="Measure: serve, streaming, accuracy, peers, exact, overhead, products, …",
    rich_markup_mode=None,
    add_completion=False,
)


@bench.callback()
def _bench() -> None:
    """Run a benchmark. Everything timed is verified first."""


for _command in (
    engine.streaming, engine.exact, engine.overhead, engine.products, peers.peers, peers.encoders, peers.adapters,
    peers.memory, serve.serve, serve.accuracy, engine.schedule, engine.stalls, engine.simulation, engine.speculation,
    engine.kernels, engine.profile, engine.states, engine.roles,
):  # fmt: skip
    bench.command(cls=Command)(with_options(_command))
