"""`xserv bench` on an engine, its steps and kernels: streaming, exact, products, profile and others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.commands import later
from runtime.commands.options import EngineOptions, ReportOptions, listing
from runtime.engine.config import integers

_cpu_products = later("runtime.bench.cpu_products")
_burst = later("runtime.bench.load.burst")
_exact = later("runtime.bench.scheduling.exact")
_overhead = later("runtime.bench.scheduling.overhead")
_llm = later("runtime.llm")
_bars = later("runtime.bench.kernels.bars")
_bench_kernels = later("runtime.bench.kernels.bench_kernels")
_step_profile = later("runtime.bench.kernels.step_profile")
_make_engine = later("runtime.engine.make_engine")


def streaming(
    engine: EngineOptions,
    output: ReportOptions,
    num_requests: Annotated[int, typer.Option(help="Requests of one burst.")] = 32,
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 8,
    num_warmup_rounds: Annotated[int, typer.Option(help="Bursts before the timed ones.")] = 2,
    num_rounds: Annotated[int, typer.Option(help="Timed bursts; the median one is reported.")] = 5,
) -> None:
    """Measure a burst of many short requests."""
    with _llm.LLM(**engine.arguments()) as llm:
        report = _burst.bench_streaming(
            llm,
            num_requests=num_requests,
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            num_warmup_rounds=num_warmup_rounds,
            num_rounds=num_rounds,
        )
    lines = {"burst (s)": report["duration"], "submit wall (ms)": report["submit_wall_ms"]}
    for name, title in (("add_request", "add request"), ("ttft", "TTFT"), ("e2el", "latency")):
        for kind in ("mean", "p50", "p99"):
            lines[f"{kind} {title} (ms)"] = report[f"{kind}_{name}_ms"]
    if report["ttft_ratio"] is not None:
        lines["p50 TTFT / one request of as many tokens"] = report["ttft_ratio"]
    lines["completion throughput (tokens/s)"] = report["completion_throughput"]
    output.deliver(report, listing(report, lines))


def exact(
    engine: EngineOptions,
    output: ReportOptions,
    num_requests: Annotated[int, typer.Option(help="How many requests.")] = 300,
    num_schedules: Annotated[int, typer.Option(help="How many ways to serve them; the first serves each alone.")] = 13,
    num_rounds: Annotated[int, typer.Option(help="Timed runs of the exact and of the default mode, in turns.")] = 5,
) -> None:
    """Check that answers are equal to the bit under every schedule, and time that mode. Exit status 1: they differ."""
    arguments = engine.arguments()
    make_exact = _exact.engine_maker(arguments, exact=True)
    make_default = _exact.engine_maker(arguments, exact=False)
    report = _exact.bench_exact(
        make_exact,
        make_default,
        num_requests=num_requests,
        num_schedules=num_schedules,
        num_rounds=num_rounds,
        max_model_len=engine.max_model_len or 96,
        seed=engine.seed or 0,
        report_progress=lambda line: print(line, file=sys.stderr),
    )
    lines: dict[str, Any] = {row["name"]: f"{row['num_different']} differ" for row in report["schedules"]}
    lines["choices"] = report["num_choices"]
    lines["cost (exact time / default time)"] = report["cost"]
    output.deliver(report, listing(report, lines))
    if not report["is_exact"]:
        raise typer.Exit(1)


def overhead(
    output: ReportOptions,
    batch_sizes: Annotated[str, typer.Option(help="Sequences in a step, comma-separated.")] = "32,256",
    context_lens: Annotated[str, typer.Option(help="Tokens of each, comma-separated.")] = "64,4096",
    num_steps: Annotated[int, typer.Option(help="Timed steps of each.")] = 200,
) -> None:
    """Measure a decode step's host overhead beside the computation."""
    sizes, lens = integers("batch_sizes", batch_sizes), integers("context_lens", context_lens)
    report = _overhead.bench_overhead(batch_sizes=sizes, context_lens=lens, num_steps=num_steps)
    lines = {}
    for result in report["results"]:
        what = f"{result['num_seqs']} x {result['context_len']} tokens"
        lines[f"{what}, host (ms a step)"] = result["host_ms"]
        if "graph_host_ms" in result:
            lines[f"{what}, as a graph"] = result["graph_host_ms"]
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
    """Matrix products on the cpu by the format of their weights, compared with the read bandwidth."""
    sizes = integers("shape", shape)
    if len(sizes) != 2:
        raise typer.BadParameter(f"{shape!r} must be two numbers, N and K", param_hint="--shape")
    report = _cpu_products.bench_products(
        tuple(formats.split(",")), rows=integers("rows", rows), width=sizes[0], depth=sizes[1], num_rounds=num_rounds,
        report_progress=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    output.deliver(report, "\n".join(_cpu_products.as_lines(report)))


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
    report = _bench_kernels.bench_kernels(
        device,
        parts=_bench_kernels.parts_named(parts),
        num_runs=num_runs,
        report_progress=lambda line: print(line, file=sys.stderr),
    )
    if plot is not None:
        plot.write_text(_bars.roofline_svg(report, *_bench_kernels.roofs(report)), encoding="utf-8")
    output.deliver(report, "\n".join(_bench_kernels.as_lines(report)))


def profile(
    engine: EngineOptions,
    output: ReportOptions,
    batch_size: Annotated[int, typer.Option(help="Sequences.")] = 8,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    num_steps: Annotated[int, typer.Option(help="Decode steps.")] = 8,
    plot: Annotated[Path | None, typer.Option(help="Draw the shares to this SVG.")] = None,
) -> None:
    """Profile a step's time by kernel (events on cuda, counts when emulated, clocks on the cpu) and host part."""
    arguments = engine.arguments() | {"overlap": "off", "decode_graphs": "off"}
    report = _step_profile.bench_profile(
        _make_engine.build_engine(**arguments),
        batch=batch_size,
        prompt_len=input_len,
        num_steps=num_steps,
        seed=engine.seed or 0,
    )
    if plot is not None:
        plot.write_text(_bars.profile_svg(report), encoding="utf-8")
    output.deliver(report, "\n".join(_step_profile.as_lines(report)))
