"""`xserv bench ...`: the flags of the benchmarks, and their reports on stdout."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from runtime.commands.group import Command
from runtime.commands.options import EngineOptions, integers, with_options
from runtime.commands.report import ReportOptions, listing

bench = typer.Typer(
    name="bench",
    help="Measure: latency, throughput, serve, streaming, accuracy, peers, exact, overhead, products, pictures, …",
    rich_markup_mode=None,
    add_completion=False,
)


@bench.callback()
def _bench() -> None:
    """Measure what the commands below name. What is timed has been verified first."""


def latency(
    engine: EngineOptions,
    output: ReportOptions,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="New tokens of each.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Prompts in the batch.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(help="Runs before the timed ones.")] = 3,
    num_iters: Annotated[int, typer.Option(help="Timed runs.")] = 10,
) -> None:
    """How long one batch takes."""
    from runtime.bench.scheduling.latency import bench_latency
    from runtime.llm import LLM

    with LLM(**engine.arguments()) as llm:
        report = bench_latency(
            llm,
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            num_iters_warmup=num_iters_warmup,
            num_iters=num_iters,
        )
    lines = {"avg latency (s)": report["avg_latency"]}
    lines.update({f"p{q} latency (s)": value for q, value in report["percentiles"].items()})
    output.deliver(report, listing(report, lines))


def throughput(
    engine: EngineOptions,
    output: ReportOptions,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="New tokens of each.")] = 128,
    num_prompts: Annotated[int, typer.Option(help="How many prompts.")] = 64,
) -> None:
    """How much comes out when all requests are there from the start."""
    from runtime.bench.scheduling.throughput import bench_throughput
    from runtime.llm import LLM

    with LLM(**engine.arguments()) as llm:
        report = bench_throughput(llm, input_len=input_len, output_len=output_len, num_prompts=num_prompts)
    names = (
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
        "output_tokens_per_second",
    )
    output.deliver(report, listing(report, {name.replace("_", " "): report[name] for name in names}))


def streaming(
    engine: EngineOptions,
    output: ReportOptions,
    num_requests: Annotated[int, typer.Option(help="Requests of one burst.")] = 32,
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 8,
    num_warmup_rounds: Annotated[int, typer.Option(help="Bursts before the timed ones.")] = 2,
    num_rounds: Annotated[int, typer.Option(help="Timed bursts; the median one is reported.")] = 5,
) -> None:
    """A burst: many short requests in the same moment."""
    from runtime.bench.load.streaming import bench_streaming
    from runtime.llm import LLM

    with LLM(**engine.arguments()) as llm:
        report = bench_streaming(
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


def exact(
    engine: EngineOptions,
    output: ReportOptions,
    num_requests: Annotated[int, typer.Option(help="How many requests.")] = 300,
    num_schedules: Annotated[int, typer.Option(help="How many ways to serve them; the first serves each alone.")] = 13,
    num_rounds: Annotated[int, typer.Option(help="Timed runs of the exact and of the default mode, in turns.")] = 5,
) -> None:
    """Whether answers are equal to the bit under every schedule, and what that costs. Exit status 1: they are not."""
    from runtime.bench.scheduling.exact import bench_exact, engine_maker

    arguments = engine.arguments()
    make_exact = engine_maker(arguments, exact=True)
    make_default = engine_maker(arguments, exact=False)
    report = bench_exact(
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
    """What a decode step costs the host beside the computation."""
    from runtime.bench.scheduling.overhead import bench_overhead

    sizes, lens = integers("batch_sizes", batch_sizes), integers("context_lens", context_lens)
    report = bench_overhead(batch_sizes=sizes, context_lens=lens, num_steps=num_steps)
    lines = {}
    for result in report["results"]:
        what = f"{result['num_seqs']} x {result['context_len']} tokens"
        lines[f"{what}, host (ms a step)"] = result["host_ms"]
        if "graph_host_ms" in result:
            lines[f"{what}, as a graph"] = result["graph_host_ms"]
    output.deliver(report, listing(report, lines))


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


def pictures(
    output: ReportOptions,
    parts: Annotated[str, typer.Option(help="Of decoding, tower, reuse, gaps, comma-separated.")] = (
        "decoding,tower,reuse,gaps"
    ),
    side: Annotated[int, typer.Option(help="Pixels of a picture's side.")] = 512,
    tower_layers: Annotated[int, typer.Option(help="Layers of the tower, of Qwen3-VL-2B's 24.")] = 6,
    text_layers: Annotated[int, typer.Option(help="Layers of the language model, of its 28.")] = 7,
    num_rounds: Annotated[int, typer.Option(help="Rounds of each.")] = 5,
) -> None:
    """Pictures on the cpu: file to patches, the tower beside its products, known pictures, decodes beside them."""
    from runtime.bench.pictures.bench_pictures import bench_pictures, lines_of

    report = bench_pictures(
        parts.split(","), side=side, tower_layers=tower_layers, text_layers=text_layers, num_rounds=num_rounds,
        report_progress=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    output.deliver(report, listing(report, lines_of(report)))


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


for _command in (latency, throughput, streaming, allocator, exact, overhead, loading, products, pictures, nccl):
    bench.command(cls=Command)(with_options(_command))
