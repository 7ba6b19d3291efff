"""`xserv bench parallel`: a model in one piece, on ranks, in stages, and by several engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from runtime.commands.options import EngineOptions
from runtime.commands.report import ReportOptions
from runtime.engine.config import RoutingPolicy


def parallel(
    engine: EngineOptions,
    output: ReportOptions,
    shapes: Annotated[str, typer.Option(help="Stages, or stages x ranks, comma-separated.")] = "1,2",
    num_prompts: Annotated[int, typer.Option(help="Prompts of a run.", min=1)] = 8,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 384,
    num_decodes: Annotated[int, typer.Option(help="Sequences that decode.", min=1)] = 16,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.", min=2)] = 48,
    num_rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 3,
    replay: Annotated[
        Path | None, typer.Option(help="Instead: a recorded trace, .csv (Azure) or .jsonl (Mooncake), at its times.")
    ] = None,
    num_requests: Annotated[int, typer.Option(help="With --replay: only the first.", min=1)] = 32,
    rate: Annotated[float, typer.Option(help="With --replay: arrivals this many times as dense.")] = 1.0,
    length: Annotated[float, typer.Option(help="With --replay: prompts and answers this many times as long.")] = 1.0,
    num_engines: Annotated[int, typer.Option(help="With --replay: engines behind a router.", min=2)] = 2,
    policies: Annotated[
        str, typer.Option(help="With --replay: how these are routed to, comma-separated; empty: no engines.")
    ] = ",".join(get_args(RoutingPolicy)),
) -> None:
    """Speed of a model in one piece, on ranks and in stages, and how long each rank waits; with --replay also of
    several engines. Without --model, of a small shape."""
    from contextlib import ExitStack

    from runtime.bench.parallel import Layout, as_lines, bench_parallel, small_model

    given, usual = engine.arguments(), EngineOptions().arguments()
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_num_seqs"):
        if given.pop(name, None) != usual.get(name):
            raise typer.BadParameter(f"--{name.replace('_', '-')} is this benchmark's own business")
    layouts = [layout for text in shapes.split(",") for layout in Layout.parse(text.strip())]
    with ExitStack() as stack:
        model = {} if engine.model is not None else stack.enter_context(small_model())
        if replay is not None:
            from runtime.bench.load.traces import read_trace
            from runtime.bench.parallel_replay import as_lines as replay_lines
            from runtime.bench.parallel_replay import bench_replay

            chosen: list[Any] = [name for name in policies.split(",") if name]
            if not set(chosen) <= set(get_args(RoutingPolicy)):
                raise typer.BadParameter(f"policies must be of {', '.join(get_args(RoutingPolicy))}, got {policies!r}")
            trace = read_trace(replay).head(num_requests)
            report = bench_replay(
                {**given, **model}, trace.scaled(rate=rate, length=length, max_len=engine.max_model_len),
                layouts=layouts, num_engines=num_engines, policies=chosen, num_rounds=num_rounds,
            )  # fmt: skip
            output.deliver(report, "\n".join(replay_lines(report)))
            return
        report = bench_parallel(
            {**given, **model}, layouts=layouts, num_prompts=num_prompts, input_len=input_len,
            num_decodes=num_decodes, output_len=output_len, num_rounds=num_rounds,
        )  # fmt: skip
    output.deliver(report, "\n".join(as_lines(report)))


COMMANDS = (parallel,)
