"""`xserv bench accuracy`: the quality of a running server's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from runtime.commands import later
from runtime.commands.options import ReportOptions, listing
from runtime.errors import InvalidArgumentError
from runtime.progress import ON_STDERR
from runtime.text_files import read_text_file

_bench_accuracy = later("runtime.bench.accuracy.bench_accuracy")
_gsm8k = later("runtime.bench.accuracy.gsm8k")
_serving = later("runtime.bench.load.serving")


def accuracy(
    output: ReportOptions,
    url: Annotated[str, typer.Option("--url", "--base-url", help="A running OpenAI server, http://host:port.")],
    model: Annotated[str | None, typer.Option(help="The name to ask for; default: the first that it lists.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="Sent as a token.")
    ] = None,
    gsm8k: Annotated[
        Path | None,
        typer.Option(
            help="A .jsonl of question and answer, '#### n' at its end; default: our few.", show_default=False
        ),
    ] = None,
    shots: Annotated[
        Path | None,
        typer.Option(help="The same of worked examples, GSM8K's train.jsonl; default: our few.", show_default=False),
    ] = None,
    num_shots: Annotated[int, typer.Option(help="Worked examples in front of each question.", min=0)] = 5,
    limit: Annotated[int | None, typer.Option(help="Ask the first so many.", min=1)] = None,
    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="What is asked.")] = "completions",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 320,
    perplexity: Annotated[
        Path | None, typer.Option(help="Instead, or with --gsm8k, too: score this text, a file in UTF-8.")
    ] = None,
    context: Annotated[int, typer.Option(help="Characters in front of each scored piece of the text.", min=1)] = 512,
    piece: Annotated[int, typer.Option(help="Characters that are scored at a time.", min=1)] = 512,
    concurrency: Annotated[int, typer.Option(help="Most open requests.", min=1)] = 8,
    timeout_s: Annotated[float, typer.Option(help="Seconds that one answer may take.", min=0.1)] = 600.0,
    records: Annotated[
        Path | None, typer.Option(help="Keep each answer here, a JSON line each; a run that broke off goes on.")
    ] = None,
) -> None:
    """Word problems in GSM8K's format, and perplexity, on any OpenAI server. Exit status 1: the measurement failed."""
    text = ""
    if perplexity is not None:
        text = read_text_file(perplexity)
        if not text.strip():
            raise typer.BadParameter(f"{perplexity} has no text")
    asks = gsm8k is not None or perplexity is None
    worked = _gsm8k.read_problems(shots or _gsm8k.SHOTS, num_shots) if asks and num_shots else []
    if len(worked) < num_shots and asks:
        raise InvalidArgumentError(f"--num-shots is {num_shots}, but {shots or _gsm8k.SHOTS} has {len(worked)}")
    run = _bench_accuracy.AccuracyRun(
        url=url, problems=_gsm8k.read_problems(gsm8k or _gsm8k.SAMPLE, limit) if asks else (), shots=worked,
        endpoint=endpoint, max_tokens=max_tokens, text=text, context=context, scored=piece, concurrency=concurrency,
        timeout_s=timeout_s, model=model, api_key=api_key,
    )  # fmt: skip
    report = _serving.run_bench(_bench_accuracy.measure(run, records, ON_STDERR))
    output.deliver(report, listing(report, _lines(report)))


def _lines(report: dict[str, Any]) -> dict[str, Any]:
    lines: dict[str, Any] = {"model": report["model_id"]}
    if "gsm8k" in report:
        found = report["gsm8k"]
        lines["problems"] = found["num_problems"]
        lines["right, number behind ####"] = found["exact_match_strict"]
        lines["right, last number"] = found["exact_match_flexible"]
    if "perplexity" in report:
        found = report["perplexity"]
        lines["perplexity"] = found["perplexity"]
        lines["nats a character"] = found["nats_per_character"]
        lines["scored tokens"] = found["num_scored_tokens"]
    return lines
