"""`xserv bench products | nccl`: what a device does, without an engine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from runtime.commands.options import integers
from runtime.commands.report import ReportOptions


def products(
    output: ReportOptions,
    formats: Annotated[str, typer.Option(help="Of weights, comma-separated.")] = (
        "float32,bfloat16,int8,fp8,Q8_0,Q4_0,MXFP4"
    ),
    rows: Annotated[str, typer.Option(help="Rows of x, comma-separated.")] = "1,8,32,512",
    shape: Annotated[str, typer.Option(help="N and K of the matrix.")] = "3072,1024",
    num_rounds: Annotated[int, typer.Option(help="Rounds of each, in turns.")] = 7,
) -> None:
    """Matrix products on the cpu by the format of their weights, beside what the processor reads."""
    from runtime.bench.cpu_products import as_lines, bench_products

    sizes = integers("shape", shape)
    if len(sizes) != 2:
        raise typer.BadParameter(f"{shape!r} must be two numbers, N and K", param_hint="--shape")
    report = bench_products(
        tuple(formats.split(",")), rows=integers("rows", rows), width=sizes[0], depth=sizes[1], num_rounds=num_rounds,
        report_progress=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    output.deliver(report, "\n".join(as_lines(report)))


def nccl(
    output: ReportOptions,
    device: Annotated[str, typer.Option(help="The first rank's: cuda[:N] or emulated[:ARCH].")] = "cuda",
    num_ranks: Annotated[int, typer.Option(help="Ranks: processes, each with a GPU of its own.")] = 2,
    sizes: Annotated[str, typer.Option(help="Bytes, comma-separated; 1 KiB to 256 MiB unless given.")] = "",
    collectives: Annotated[str, typer.Option(help="Which, comma-separated.")] = (
        "all_reduce,all_gather,reduce_scatter,broadcast"
    ),
    num_calls: Annotated[int, typer.Option(help="Calls that are timed together.")] = 20,
    num_rounds: Annotated[int, typer.Option(help="Rounds of each way, in turns.")] = 5,
) -> None:
    """NCCL's collectives by size: called, in a registered window, and as a graph."""
    from runtime.bench.collectives import SIZES, as_lines, bench_collectives

    report = bench_collectives(
        device, num_ranks=num_ranks, sizes=integers("sizes", sizes) if sizes else SIZES,
        collectives=tuple(collectives.split(",")), num_calls=num_calls, num_rounds=num_rounds,
    )  # fmt: skip
    output.deliver(report, "\n".join(as_lines(report)))


COMMANDS = (products, nccl)
