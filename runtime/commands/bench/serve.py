"""`xserv bench serve` and `accuracy`: load on a server, measured by its clients, and the quality of its answers."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from runtime.bench.options import Load
from runtime.commands import later
from runtime.commands.options import EngineOptions, ReportOptions, listing
from runtime.errors import InvalidArgumentError
from runtime.own_packages import python_module
from runtime.progress import ON_STDERR
from runtime.text_files import read_text_file

_samples = later("runtime.bench.load.samples")
_serving = later("runtime.bench.load.serving")
_child_process = later("runtime.bench.peers.child_process")
_bench_accuracy = later("runtime.bench.accuracy.bench_accuracy")
_gsm8k = later("runtime.bench.accuracy.gsm8k")


def serve(
    engine: EngineOptions,
    output: ReportOptions,
    load: Load,
    base_url: Annotated[
        str | None, typer.Option(help="A running server, http://host:port; without it, our own is started.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="With --base-url: sent as a token.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="How many requests.", min=1)] = 64,
    input_len: Annotated[
        int, typer.Option("--random-input-len", "--input-len", help="Tokens of each prompt.", min=1)
    ] = 32,
    output_len: Annotated[
        int, typer.Option("--random-output-len", "--output-len", help="New tokens of each answer.", min=1)
    ] = 32,
    range_ratio: Annotated[
        float, typer.Option("--random-range-ratio", "--range-ratio", help="Lengths vary by this share, in [0, 1).")
    ] = 0.0,
    prefix_len: Annotated[
        int, typer.Option("--random-prefix-len", "--prefix-len", help="Tokens before each prompt that others share.")
    ] = 0,
    num_prefixes: Annotated[int, typer.Option(help="How many prefixes take turns.")] = 1,
    random_vocab_size: Annotated[int, typer.Option(help="With --base-url: ids are drawn from [0, this).")] = 256,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Instead: a file of prompts, .txt by the line or .jsonl with prompt and output_tokens."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead: a recorded trace, .csv (Azure) or .jsonl (Mooncake), at its moments.")
    ] = None,
    trace_rate: Annotated[float, typer.Option(help="The trace's arrivals this many times as dense.")] = 1.0,
    trace_length: Annotated[float, typer.Option(help="Its prompts and answers this many times as long.")] = 1.0,
    trace_max_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer; default: our own server's max_model_len.")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="Most ttft, tpot, e2el of a good request; may be repeated."),
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Metrics with percentiles: ttft, tpot, itl, e2el.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, comma-separated.")] = "99",
    num_warmups: Annotated[int, typer.Option(help="Requests before the timed ones.", min=0)] = 1,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="The report has every request's numbers, too.")
    ] = False,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the report to a file.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder that --save-result writes to.")] = Path("."),
    result_filename: Annotated[str | None, typer.Option(help="Its name; default: made of rate and time.")] = None,
) -> None:
    """Load on a server: TTFT, TPOT, ITL, end-to-end latency. Exit status 1: a request failed.

    With --base-url, --model is the model's name in requests (default: the first that the server lists). Without it our
    own server is started with the engine's flags, in a process of its own; the report then has that process's costs.
    """
    percentiles = _percentiles(metric_percentiles)
    targets = _targets(goodput or [])
    if prompts is not None and trace is not None:
        raise typer.BadParameter("--prompts and --trace: one of them")
    _serving.check_load(load)
    seed = engine.seed or 0
    count = num_prompts + num_warmups
    with ExitStack() as stack:
        vocab_size, model, own, used_s = random_vocab_size, engine.model, None, [0.0]
        if base_url is None:
            command = [sys.executable, "-P", *python_module("runtime.bench.load.own_server")]
            server = stack.enter_context(_child_process.ChildProcess(command, "our server"))
            own = server.ask("start", **engine.arguments())
            base_url, vocab_size, model = f"http://127.0.0.1:{own['port']}", own["vocab_size"], own["model"]
            trace_max_len = trace_max_len or own["max_model_len"]
            print(f"our own server, in its own process, at {base_url}", file=sys.stderr)
        if load.endpoint == "chat":
            vocab_size = len(_samples.WORDS)
        if trace is not None:
            dataset: dict[str, Any] = {"rate": trace_rate, "length": trace_length, "max_len": trace_max_len}
            samples = _samples.trace_samples(trace, count, **dataset, vocab_size=vocab_size, seed=seed)
            dataset = {"name": trace.stem, **dataset}
        elif prompts is not None:
            samples = _samples.file_samples(prompts, count, output_len)
            dataset = {"name": prompts.stem}
        else:
            dataset = {
                "input_len": input_len,
                "output_len": output_len,
                "range_ratio": range_ratio,
                "prefix_len": prefix_len,
                "num_prefixes": num_prefixes,
            }
            samples = _samples.random_samples(count, **dataset, vocab_size=vocab_size, seed=seed)
            dataset = {"name": "random", **dataset}
        if load.endpoint == "chat" and prompts is None:
            samples = _samples.as_text(samples)

        async def between() -> None:
            if own is not None:
                used_s[0] = server.ask("cpu")["cpu_s"]

        measure = _serving.bench_serve(
            base_url,
            load,
            samples[:num_prompts],
            samples[num_prompts:],
            model=model,
            api_key=api_key,
            goodput=targets,
            percentile_metrics=tuple(part.strip() for part in percentile_metrics.split(",")),
            metric_percentiles=percentiles,
            save_detailed=save_detailed,
            seed=seed,
            between=between,
        )
        report = {"dataset": dataset, **_serving.run_bench(measure)}
        if own is not None:
            cpu_s = server.ask("cpu")["cpu_s"] - used_s[0]
            report["server_cpu_us_per_event"] = cpu_s / report["total_events"] * 1e6
            report["environment"] = own["environment"]
    if save_result:
        stamp = report["environment"]["date"].replace(":", "")
        name = f"openai-{report['request_rate']}qps-{report['model_id']}-{stamp}.json".replace("/", "-")
        output = replace(output, output_json=result_dir / (result_filename or name))
    output.deliver(report, listing(report, _lines(report)))
    if report["failed"]:
        for message, times in report["error_counts"].items():
            print(f"failed, {times} times: {message}", file=sys.stderr)
        raise typer.Exit(1)


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0.0 <= value <= 100.0 for value in values):
        raise typer.BadParameter(f"--metric-percentiles {text!r}: not numbers from 0 to 100, comma-separated")
    return values


def _targets(texts: list[str]) -> dict[str, float]:
    """Parses "ttft:500 tpot:50", in one value or several."""
    targets = {}
    for pair in re.split(r"[\s,]+", " ".join(texts).strip()) if texts else []:
        name, _, most_ms = pair.partition(":")
        try:
            targets[name] = float(most_ms)
        except ValueError:
            raise typer.BadParameter(f"--goodput {pair!r} is not a name and milliseconds, such as ttft:500") from None
    return targets


def _lines(report: dict[str, Any]) -> dict[str, Any]:
    """The report in vLLM's lines."""
    titles = {
        "completed": "Successful requests",
        "failed": "Failed requests",
        "max_concurrency": "Maximum request concurrency",
        "duration": "Benchmark duration (s)",
        "total_input_tokens": "Total input tokens",
        "total_output_tokens": "Total generated tokens",
        "request_throughput": "Request throughput (req/s)",
        "request_goodput": "Request goodput (req/s)",
        "output_throughput": "Output token throughput (tok/s)",
        "max_output_tokens_per_s": "Peak output token throughput (tok/s)",
        "max_concurrent_requests": "Peak concurrent requests",
        "total_token_throughput": "Total token throughput (tok/s)",
        "server_cpu_us_per_event": "Server CPU per event (us)",
    }
    lines = {title: report[key] for key, title in titles.items() if report.get(key) is not None}
    for key, value in report.items():
        if key.endswith("_ms"):
            kind, name, _ = key.split("_")
            lines[f"{kind.capitalize()} {name.upper()} (ms)"] = value
    return lines


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
    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="Route that is asked.")] = "completions",
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
    output.deliver(report, listing(report, _accuracy_lines(report)))


def _accuracy_lines(report: dict[str, Any]) -> dict[str, Any]:
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
