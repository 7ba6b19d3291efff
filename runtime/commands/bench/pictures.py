"""`xserv bench pictures`: from files to embeddings, and decodes beside them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from runtime.commands.report import ReportOptions, listing


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


COMMANDS = (pictures,)
