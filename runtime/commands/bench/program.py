"""`xserv bench` with all its commands; imported when one of them is asked for, since most of the program's flags are
theirs."""

from __future__ import annotations

import typer

from runtime.commands.bench.accuracy import COMMANDS as ACCURACY_COMMANDS
from runtime.commands.bench.devices import COMMANDS as DEVICE_COMMANDS
from runtime.commands.bench.engine import COMMANDS as ENGINE_COMMANDS
from runtime.commands.bench.kernels import COMMANDS as KERNEL_COMMANDS
from runtime.commands.bench.parallel import COMMANDS as PARALLEL_COMMANDS
from runtime.commands.bench.peers import COMMANDS as PEER_COMMANDS
from runtime.commands.bench.pictures import COMMANDS as PICTURE_COMMANDS
from runtime.commands.bench.routing import COMMANDS as ROUTING_COMMANDS
from runtime.commands.bench.scheduling import COMMANDS as SCHEDULING_COMMANDS
from runtime.commands.bench.serve import COMMANDS as SERVE_COMMANDS
from runtime.commands.bench.tokenizer import COMMANDS as TOKENIZER_COMMANDS
from runtime.commands.group import Command
from runtime.commands.options import with_options

bench = typer.Typer(
    name="bench",
    help="Measure: latency, throughput, serve, streaming, accuracy, peers, exact, overhead, products, pictures, …",
    rich_markup_mode=None,
    add_completion=False,
)


@bench.callback()
def _bench() -> None:
    """Measure what the commands below name. What is timed has been verified first."""


for _command in (
    *ENGINE_COMMANDS, *DEVICE_COMMANDS, *PICTURE_COMMANDS, *PEER_COMMANDS, *TOKENIZER_COMMANDS, *SERVE_COMMANDS,
    *ACCURACY_COMMANDS, *SCHEDULING_COMMANDS, *ROUTING_COMMANDS, *PARALLEL_COMMANDS, *KERNEL_COMMANDS,
):  # fmt: skip
    bench.command(cls=Command)(with_options(_command))
