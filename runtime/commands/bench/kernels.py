"""`xserv bench kernels|profile`: the kernels' rates, and the profile of a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from runtime.commands.options import EngineOptions
from runtime.commands.report import ReportOptions


def kernels(
    output: ReportOptions,
    device: Annotated[str, typer.Option(help="cuda[:N]; emulated[:ARCH] runs tiny shapes and counts.")] = "cuda",
    parts: Annotated[
        str, typer.Option(help="Which lines, comma-separated.")
    ] = "gemm,linear,prefill,decode,launch,graph,upload",
    num_runs: Annotated[int, typer.Option(help="Timed runs of each, each with a cold cache.")] = 30,
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline to this SVG.")] = None,
) -> None:
    """Each kernel against its goal: verified, then timed. cuBLAS takes turns with ours if installed."""
    from runtime.bench.kernels.bars import roofline_svg
    from runtime.bench.kernels.bench_kernels import as_lines, bench_kernels, parts_named, roofs

    report = bench_kernels(
        device,
        parts=parts_named(parts),
        num_runs=num_runs,
        report_progress=lambda line: print(line, file=sys.stderr),
    )
    if plot is not None:
        plot.write_text(roofline_svg(report, *roofs(report)), encoding="utf-8")
    output.deliver(report, "\n".join(as_lines(report)))


def profile(
    engine: EngineOptions,
    output: ReportOptions,
    batch_size: Annotated[int, typer.Option(help="Sequences.")] = 8,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    num_steps: Annotated[int, typer.Option(help="Decode steps.")] = 8,
    plot: Annotated[Path | None, typer.Option(help="Draw the shares to this SVG.")] = None,
) -> None:
    """Profile a step's time by kernel (events on cuda, counts when emulated, clocks on the cpu) and host part."""
    from runtime.bench.kernels.bars import profile_svg
    from runtime.bench.kernels.step_profile import as_lines, bench_profile
    from runtime.engine.make_engine import build_engine

    arguments = engine.arguments() | {"overlap": "off", "decode_graphs": "off"}
    report = bench_profile(
        build_engine(**arguments), batch=batch_size, prompt_len=input_len, num_steps=num_steps, seed=engine.seed or 0
    )
    if plot is not None:
        plot.write_text(profile_svg(report), encoding="utf-8")
    output.deliver(report, "\n".join(as_lines(report)))
