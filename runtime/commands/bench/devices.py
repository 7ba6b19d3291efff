"""`xserv bench allocator | loading | products | nccl`: what a device does, without an engine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from runtime.commands.options import integers
from runtime.commands.report import ReportOptions, listing


def allocator(
    output: ReportOptions,
    device: Annotated[str, typer.Option(help="cuda[:N] or emulated[:ARCH].")] = "cuda",
    num_operations: Annotated[int, typer.Option(help="Allocations and frees of a round.")] = 200_000,
    num_driver_operations: Annotated[int, typer.Option(help="Of them, those that the driver gets.")] = 2_000,
    max_bytes: Annotated[int, typer.Option(help="Most bytes in use at once.")] = 256 << 20,
    num_rounds: Annotated[int, typer.Option(help="Rounds of each, in turns.")] = 5,
) -> None:
    """The caching allocator against the driver's own, on random sizes."""
    from runtime.bench.kernels.allocator import bench_allocator

    report = bench_allocator(
        device,
        num_operations=num_operations,
        num_driver_operations=num_driver_operations,
        max_bytes=max_bytes,
        num_rounds=num_rounds,
    )
    names = {
        "allocator_us": "caching allocator (us an operation)",
        "driver_us": "cuMemAlloc and cuMemFree (us)",
        "ratio": "times faster",
        "driver_calls_in_timed_rounds": "driver calls in the timed rounds",
        "peak_allocated_bytes": "most bytes in use",
        "reserved_bytes": "bytes reserved",
        "reserved_per_allocated": "reserved per byte in use",
    }
    output.deliver(report, listing(report, {title: report[name] for name, title in names.items()}))


def loading(
    output: ReportOptions,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="PATH|HUB_ID", help="Whose files; the bundled model's.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda[:N] or emulated[:ARCH].")] = "cuda",
    num_readers: Annotated[str, typer.Option(help="Threads that read, comma-separated.")] = "1,2,4,8",
    num_rounds: Annotated[int, typer.Option(help="Rounds of each, in turns.")] = 3,
) -> None:
    """How fast weights come from their files to a GPU, out of the disk and out of the page cache."""
    from runtime.bench.loading import bench_loading

    counts = integers("num_readers", num_readers)
    report = bench_loading(model, device, num_readers=counts, num_rounds=num_rounds)
    lines = {f"{row['source']}: {row['way']} (GB/s)": row["gb_per_s"] for row in report["results"]}
    output.deliver(report, listing(report, lines))


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


COMMANDS = (allocator, loading, products, nccl)
