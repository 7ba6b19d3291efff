"""`xserv bench parallel`: a model in one piece, on ranks and in stages."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.commands.options import EngineOptions
from runtime.commands.report import ReportOptions


def parallel(
    engine: EngineOptions,
    output: ReportOptions,
    shapes: Annotated[str, typer.Option(help="Stages, or stages x ranks, comma-separated.")] = "1,2",
    num_prompts: Annotated[int, typer.Option(help="Prompts of a run.", min=1)] = 8,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 384,
    num_decodes: Annotated[int, typer.Option(help="Sequences that decode.", min=1)] = 16,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.", min=2)] = 48,
    num_rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 3,
) -> None:
    """Speed of a model in one piece, on ranks and in stages, and how long each rank waits; without --model, of a small
    shape."""
    from contextlib import ExitStack

    from runtime.bench.parallel import Layout, as_lines, bench_parallel, small_model

    given, usual = engine.arguments(), EngineOptions().arguments()
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_num_seqs"):
        if given.pop(name, None) != usual.get(name):
            raise typer.BadParameter(f"--{name.replace('_', '-')} is this benchmark's own business")
    layouts = [layout for text in shapes.split(",") for layout in Layout.parse(text.strip())]
    with ExitStack() as stack:
        model = {} if engine.model is not None else stack.enter_context(small_model())
        report = bench_parallel(
            {**given, **model}, layouts=layouts, num_prompts=num_prompts, input_len=input_len,
            num_decodes=num_decodes, output_len=output_len, num_rounds=num_rounds,
        )  # fmt: skip
    output.deliver(report, "\n".join(as_lines(report)))


COMMANDS = (parallel,)
