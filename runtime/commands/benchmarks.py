"""`xserv bench` with all its commands; a module of its own, since most of the program's flags are theirs."""

from __future__ import annotations

from runtime.commands.bench import bench
from runtime.commands.bench_accuracy import COMMANDS as ACCURACY_COMMANDS
from runtime.commands.bench_kernels import COMMANDS as KERNEL_COMMANDS
from runtime.commands.bench_parallel import COMMANDS as PARALLEL_COMMANDS
from runtime.commands.bench_peers import COMMANDS as PEER_COMMANDS
from runtime.commands.bench_routing import COMMANDS as ROUTING_COMMANDS
from runtime.commands.bench_scheduling import COMMANDS as SCHEDULING_COMMANDS
from runtime.commands.bench_serve import COMMANDS as SERVE_COMMANDS
from runtime.commands.bench_tokenizer import COMMANDS as TOKENIZER_COMMANDS
from runtime.commands.group import Command
from runtime.commands.options import with_options

__all__ = ["bench"]

for _command in (
    *PEER_COMMANDS, *TOKENIZER_COMMANDS, *SERVE_COMMANDS, *ACCURACY_COMMANDS, *SCHEDULING_COMMANDS, *ROUTING_COMMANDS,
    *PARALLEL_COMMANDS, *KERNEL_COMMANDS,
):  # fmt: skip
    bench.command(cls=Command)(with_options(_command))
