"""`xserv perplexity`: the perplexity of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from runtime.commands.options import EngineOptions
from runtime.text_files import read_text_file


def perplexity(
    engine: EngineOptions,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A file in UTF-8.")],
    window: Annotated[
        int | None, typer.Option(help="Tokens at a time; default: 1024, or one less than the model's positions.", min=2)
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next; default: half a window.", min=1)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Leave out the text behind so many tokens.", min=2)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON object.")] = False,
) -> None:
    """Measure a model on a text: the perplexity over windows that overlap, every token but the first scored once."""
    content = read_text_file(text)
    from runtime.bench.environment import describe_engine
    from runtime.bench.perplexity import measure
    from runtime.llm import LLM

    with LLM(**{**engine.arguments(), "enable_prefix_caching": False}) as llm:
        report = {**measure(llm, content, window, stride, max_tokens), **describe_engine(llm.client.info)}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print(f"perplexity {report['perplexity']:.4f} over {report['num_scored_tokens']:,} tokens")
