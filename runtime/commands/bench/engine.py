"""`xserv bench` on an engine, its steps, its kernels, and the effect of scheduling on latency."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.bench.options import SpeculationOptions, StallsOptions, StreamingOptions
from runtime.commands import later
from runtime.commands.options import EngineOptions, ReportOptions, listing
from runtime.engine.config import integers

_ablation = later("runtime.bench.scheduling.ablation")
_cpu_products = later("runtime.bench.cpu_products")
_cpu_rates = later("runtime.bench.cpu_rates")
_cpu_latent = later("runtime.bench.kernels.cpu_latent")
_cpu_adapters = later("runtime.bench.kernels.cpu_adapters")
_cpu_states = later("runtime.bench.kernels.cpu_states")
_burst = later("runtime.bench.load.burst")
_exact = later("runtime.bench.scheduling.exact")
_overhead = later("runtime.bench.scheduling.overhead")
_llm = later("runtime.llm")
_bench_kernels = later("runtime.bench.kernels.bench_kernels")
_step_profile = later("runtime.bench.kernels.step_profile")
_device = later("runtime.device.device")
_load = later("runtime.text.load")
_make_engine = later("runtime.engine.make_engine")
_traces = later("runtime.bench.load.traces")
_engines = later("runtime.bench.scheduling.engines")
_measured_steps = later("runtime.bench.scheduling.measured_steps")
_prediction = later("runtime.bench.scheduling.prediction")
_roofline = later("runtime.bench.scheduling.roofline")
_schedule = later("runtime.bench.scheduling.schedule")
_speculation = later("runtime.bench.scheduling.speculation")
_state_cache = later("runtime.bench.scheduling.state_cache")
_stalls = later("runtime.bench.scheduling.stalls")


def streaming(engine: EngineOptions, output: ReportOptions, options: StreamingOptions) -> None:
    """Measure a burst of many short requests."""
    with _llm.LLM(**engine.arguments()) as llm:
        report = _burst.bench_streaming(llm, options)
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


def states(
    output: ReportOptions,
    trace: Annotated[
        Path,
        typer.Argument(
            help="A trace with hashes of prompts (Mooncake's .jsonl), or a conversation's messages (.json)."
        ),
    ],
    models: Annotated[str, typer.Option(help="Shapes, comma-separated.")] = "qwen3.5-9b,qwen3.5-27b,qwen3.5-35b-a3b",
    budgets: Annotated[str, typer.Option(help="Shares of the prompts' bytes, comma-separated.")] = "0.05,0.2,1",
    state_share: Annotated[float | None, typer.Option(help="States' share of a budget; default: an engine's.")] = None,
    num_requests: Annotated[int | None, typer.Option(help="Only the first of a trace.")] = None,
    tokenizer: Annotated[str, typer.Option(help="A folder with the tokenizer and template of a conversation.")] = "",
) -> None:
    """The prefix cache of models with states beside that of attention alone, of as many bytes."""
    try:
        shares = [float(budget) for budget in budgets.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--budgets {budgets!r}: not numbers above 0, comma-separated") from None
    settings: dict[str, Any] = {"report_progress": lambda line: print(line, file=sys.stderr)}
    if state_share is not None:
        settings["state_share"] = state_share
    if trace.suffix == ".json":
        if not tokenizer:
            raise typer.BadParameter("a conversation needs one: give a model's folder", param_hint="--tokenizer")
        messages = _messages_of(trace)
        report = _state_cache.bench_conversation(
            messages, _load.read_tokenizer(tokenizer), models.split(","), shares, **settings
        )
    else:
        requests = _traces.read_trace(trace)
        requests = requests if num_requests is None else requests.head(num_requests)
        report = _state_cache.bench_state_cache(requests, models.split(","), shares, **settings)
    lines = {f"{row['budget']:.0%}, {row['model']}": row.get("hits_of_attention", 1.0) for row in report["results"]}
    output.deliver(report, listing(report, lines))


def _messages_of(path: Path) -> list[dict[str, Any]]:
    """A conversation's messages. Raises BadParameter for what is no list of objects with a role."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {getattr(error, 'strerror', None) or error}", param_hint="TRACE") from None
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise typer.BadParameter(f"{path}: must be a list of messages with a role each", param_hint="TRACE")
    return messages


def products(
    output: ReportOptions,
    formats: Annotated[str, typer.Option(help="Formats of weights, comma-separated.")] = (
        "float32,bfloat16,int8,fp8,Q8_0,Q4_0,MXFP4"
    ),
    rows: Annotated[str, typer.Option(help="Rows of x, comma-separated.")] = "1,8,32,512",
    shape: Annotated[str, typer.Option(help="N and K of the matrix.")] = "3072,1024",
    num_rounds: Annotated[int, typer.Option(help="Rounds of each, in turns.")] = 7,
    rates: Annotated[bool, typer.Option("--rates", help="Only this processor's rates: a row for docs/cpu.md.")] = False,
) -> None:
    """Matrix products on the cpu by the format of their weights, compared with the read bandwidth."""
    if rates:
        found = _cpu_rates.bench_rates(num_rounds)
        output.deliver(found, _cpu_rates.as_row(found))
        return
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
    device: Annotated[
        str,
        typer.Option(help="cuda[:N]; emulated[:ARCH] runs tiny shapes and counts; cpu has adapters, latent, states."),
    ] = "cuda",
    parts: Annotated[
        str | None, typer.Option(help="Lines to run, comma-separated; default: all but state.", show_default=False)
    ] = None,
    num_runs: Annotated[int, typer.Option(help="Timed runs of each, each with a cold cache.")] = 30,
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline to this SVG.")] = None,
) -> None:
    """Each kernel against its goal: verified, then timed. cuBLAS takes turns with ours if installed."""
    if device == "cpu":
        if parts not in (None, "adapters", "latent", "states"):
            raise typer.BadParameter(
                f"{parts!r}: on the cpu there are adapters, latent and states", param_hint="--parts"
            )
        if plot is not None:
            raise typer.BadParameter("there is no roofline of the cpu", param_hint="--plot")
        measure, lines = _cpu_latent.bench_latent, _cpu_latent.as_lines
        if parts == "states":
            measure, lines = _cpu_states.bench_states, _cpu_states.as_lines
        elif parts == "adapters":
            measure, lines = _cpu_adapters.bench_adapters, _cpu_adapters.as_lines
        found = measure(num_runs=num_runs, report_progress=lambda line: print(line, file=sys.stderr))
        output.deliver(found, "\n".join(lines(found)))
        return
    usual = tuple(part for part in _bench_kernels.PARTS if part != "state")
    report = _bench_kernels.bench_kernels(
        device,
        parts=usual if parts is None else _bench_kernels.parts_named(parts),
        num_runs=num_runs,
        report_progress=lambda line: print(line, file=sys.stderr),
    )
    if plot is not None:
        plot.write_text(_bench_kernels.roofline_svg(report, *_bench_kernels.roofs(report)), encoding="utf-8")
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
    arguments = engine.arguments() | {"overlap": "off"}
    if _device.Device.parse(arguments.get("device", "auto")).kind != "cpu":
        arguments["decode_graphs"] = "off"
    report = _step_profile.bench_profile(
        _make_engine.build_engine(**arguments),
        batch=batch_size,
        prompt_len=input_len,
        num_steps=num_steps,
        seed=engine.seed or 0,
    )
    if plot is not None:
        plot.write_text(_step_profile.profile_svg(report), encoding="utf-8")
    output.deliver(report, "\n".join(_step_profile.as_lines(report)))


TraceFile = Annotated[
    Path | None, typer.Option("--replay", help="A recorded trace: .csv (Azure) or .jsonl (Mooncake).")
]


def schedule(
    engine: EngineOptions,
    output: ReportOptions,
    replay: TraceFile = None,
    num_requests: Annotated[int, typer.Option(help="With --replay: only the first.")] = 32,
    rate: Annotated[float, typer.Option(help="With --replay: arrivals this many times as dense.")] = 1.0,
    length: Annotated[float, typer.Option(help="With --replay: prompts and answers this many times as long.")] = 1.0,
    num_decodes: Annotated[int, typer.Option(help="Without --replay: answers under way from the start.")] = 8,
    decode_len: Annotated[int, typer.Option(help="Their tokens.")] = 128,
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt that comes beside them.")] = 1024,
    num_prompts: Annotated[int, typer.Option(help="How many of those.")] = 4,
    first_s: Annotated[float, typer.Option(help="When the first comes, in seconds.")] = 0.2,
    gap_s: Annotated[float, typer.Option(help="Seconds between two.")] = 0.2,
    styles: Annotated[str, typer.Option(help="Ways of batching.")] = "stall-free,staged,prefill-first,orca,static",
    num_rounds: Annotated[int, typer.Option(help="Rounds, in turns; medians are reported.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw the styles side by side to this SVG.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline for Perfetto; NAME.STYLE.json with several styles.")
    ] = None,
) -> None:
    """One trace under each way of batching: TTFT, TPOT, worst stall, throughput."""
    if replay is not None:
        requests = (
            _traces.read_trace(replay).head(num_requests).scaled(rate=rate, length=length, max_len=engine.max_model_len)
        )
    else:
        requests = _traces.beside_decodes(
            num_decodes=num_decodes,
            decode_len=decode_len,
            context_len=16,
            prompt_len=prompt_len,
            num_prompts=num_prompts,
            first_s=first_s,
            gap_s=gap_s,
        )
    longest_prompt = max(request.input_len for request in requests.requests)
    built = _make_engine.build_engine(**engine.arguments())
    chosen = _schedule.styles_named(styles, budget=built.limits.max_num_batched_tokens, longest_prompt=longest_prompt)
    report, timelines = _schedule.bench_schedule(built, requests, chosen, num_rounds=num_rounds, seed=engine.seed or 0)
    if plot is not None:
        plot.write_text(_schedule.svg(report), encoding="utf-8")
    if trace is not None:
        for name, events in timelines.items():
            path = trace if len(timelines) == 1 else trace.with_name(f"{trace.stem}.{name}{trace.suffix}")
            path.write_text(json.dumps(events) + "\n", encoding="utf-8")
    columns = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "worst_stall_ms", "output_throughput")
    titles = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "worst stall", "tokens/s")
    lines = [f"{'':<15}" + "".join(f"{title:>13}" for title in titles)]
    for result in report["results"]:
        lines.append(f"{result['style']:<15}" + "".join(f"{result[name]:>13,.2f}" for name in columns))
    lines.append(
        f"milliseconds; medians of {num_rounds} rounds of {report['num_requests']} requests ({report['trace']})"
    )
    output.deliver(report, "\n".join(lines))


def stalls(engine: EngineOptions, output: ReportOptions, options: StallsOptions) -> None:
    """Measure how long decodes wait while a long prompt is computed beside them, with a budget and prefill-first.

    Without --model, on Qwen3-0.6B's shapes.
    """
    with _engines.model_arguments(engine.arguments()) as arguments:
        arguments.setdefault("max_model_len", options.prompt_len + 1024)
        report = _stalls.bench_stalls(_make_engine.build_engine(**arguments), options, engine.seed or 0)
    lines: dict[str, Any] = {"budget (tokens a step)": report["budget"]}
    for name, result in report["results"].items():
        lines[f"{name}: usual TPOT (ms)"] = result["usual_tpot_ms"]
        lines[f"{name}: p99 gap (ms)"] = result["p99_gap_ms"]
        lines[f"{name}: p99 gap / usual"] = result["p99_ratio"]
        lines[f"{name}: TTFT of the prompt (s)"] = result["ttft_s"]
    output.deliver(report, listing(report, lines))


def simulation(
    engine: EngineOptions,
    output: ReportOptions,
    replay: TraceFile = None,
    length: Annotated[float, typer.Option(help="With --replay: prompts and answers this many times as long.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option(help="Arrivals this many times as dense; default: for a busy engine.")
    ] = None,
    prompt_len: Annotated[int, typer.Option(help="Without --replay: median tokens of a prompt.")] = 256,
    output_len: Annotated[int, typer.Option(help="Without --replay: median tokens of an answer.")] = 64,
    num_requests: Annotated[int, typer.Option(help="Requests of each run.")] = 48,
    num_pairs: Annotated[int, typer.Option(help="Runs and their predictions.")] = 5,
    most_error: Annotated[float, typer.Option(help="Exit status 1 when a median error is larger.")] = 0.15,
) -> None:
    """The simulator against the engine: predicted and measured TTFT and throughput of the same trace."""
    built = _make_engine.build_engine(**engine.arguments())
    max_len = built.limits.max_model_len
    count = num_requests * (num_pairs + 1)
    if replay is not None:
        requests = _traces.read_trace(replay).head(count).scaled(length=length, max_len=max_len)
    else:
        requests = _prediction.poisson_trace(
            count, prompt_len=prompt_len, output_len=output_len, max_len=max_len, seed=engine.seed or 0
        )
    report = _prediction.bench_simulation(
        built, requests, rate=rate, num_requests=num_requests, num_pairs=num_pairs, seed=engine.seed or 0
    )
    lines: dict[str, Any] = {"requests a run": num_requests, "arrivals, times as dense": report["rate"]}
    for index, pair in enumerate(report["pairs"]):
        for name, title in (("median_ttft_s", "median TTFT (s)"), ("output_throughput", "tokens/s")):
            values = f"{pair['predicted'][name]:.4g} / {pair['measured'][name]:.4g}"
            lines[f"pair {index}: {title}, predicted / run"] = values
    lines["median error of median TTFT"] = report["median_ttft_s_error"]
    lines["median error of throughput"] = report["output_throughput_error"]
    output.deliver(report, listing(report, lines))
    if not max(report["median_ttft_s_error"], report["output_throughput_error"]) <= most_error:
        print(f"the prediction is off by more than {most_error:.0%}", file=sys.stderr)
        raise typer.Exit(1)


def speculation(engine: EngineOptions, output: ReportOptions, options: SpeculationOptions) -> None:
    """Measure speculation by scripted acceptance rates; without --model, on Qwen3-0.6B's shapes."""
    with _engines.model_arguments(engine.arguments()) as arguments:
        arguments.setdefault("max_model_len", options.output_len + 64)
        report = _speculation.bench_speculation(_make_engine.build_engine(**arguments), options, engine.seed or 0)
    modes = [mode for mode in report["rows"][0]["tokens_per_s"] if mode != "off again"]
    titles = "".join(f"{mode:>10}" for mode in modes)
    lines = [
        f"{'sequences':>9}{'rate':>6}{titles}{'speed-up':>10}{'off/off':>9}{'from start':>12}{'of best':>9}"
        f"{'allowed':>9}{'of curve':>10}"
    ]
    for row in report["rows"]:
        speeds = "".join(f"{row['tokens_per_s'][mode]:>10,.1f}" for mode in modes)
        lines.append(
            f"{row['num_sequences']:>9}{row['rate']:>6.2f}{speeds}{row['speedup']:>10.2f}{row['off_of_itself']:>9.2f}"
            f"{row['from_start']:>12.2f}{row['of_best_fixed']:>9.2f}{row['allowed']:>9.2f}{row['of_curve']:>10.2f}"
        )
    for row in report["rows"]:
        times = ", ".join(f"{most}: {each:.2f}" for most, each in row["step_times"].items())
        step = f"steps of {row['num_sequences']} at {row['rate']:g}, as multiples of {1e3 * row['plain_step_s']:.4g} ms"
        lines.append(f"{step}, by proposals of each: {times}")
    lines.append(f"tokens per second of all sequences; medians of {options.num_rounds} rounds")
    output.deliver(report, "\n".join(lines))


def roles(
    output: ReportOptions,
    trace: Annotated[Path, typer.Argument(help="A trace: .csv (Azure) or .jsonl (Mooncake).")],
    steps: Annotated[
        Path, typer.Option(help="Measured steps of models (docs/measurements/2026-11-30-step-times.json).")
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="One of them.")] = "qwen3-8b",
    engines: Annotated[str, typer.Option(help="Sizes of fleets, comma-separated.")] = "2,4",
    targets: Annotated[
        str, typer.Option(help="TTFT/TPOT in seconds that 90 % of the requests keep, comma-separated.")
    ] = "0.25/0.0075,0.5/0.015,1/0.05",
    budgets: Annotated[str, typer.Option(help="max_num_batched_tokens of chunked prefill, comma-separated.")] = (
        "256,512,1024,2048,4096,8192"
    ),
    links: Annotated[
        str, typer.Option(help="Between engines: infiniband400, nvlink4 or MICROSECONDS:GB_PER_S, comma-separated.")
    ] = "infiniband400,nvlink4,30:11",
    requests_per_engine: Annotated[int, typer.Option(help="Length of each run.")] = 500,
    windows: Annotated[
        int, typer.Option(help="Most parts of the trace in which each cell is searched: 1, 2, 4, 8 … as fit.")
    ] = 1,
    before: Annotated[
        Path | None,
        typer.Option(
            help="A report of this command with the same arguments: auto alone is searched, beside its others."
        ),
    ] = None,
    eager_ms: Annotated[
        float | None,
        typer.Option(help="Least milliseconds of a step with prompts, if its launches are not recorded.", min=0.0),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the cells into this SVG.")] = None,
) -> None:
    """Prompts and answers on engines of their own against chunked prefill: goodput of simulated fleets."""
    models = _measured_steps.read_models(steps)
    if model not in models:
        raise typer.BadParameter(f"{model!r} is none of {', '.join(models)}", param_hint="--model")
    served, errors = models[model]
    if eager_ms is not None:
        served = replace(served, eager_s=eager_ms / 1e3)

    def tell(cell: dict[str, Any]) -> None:
        print(_ablation.line_of(cell), file=sys.stderr)

    report = _ablation.bench_roles(
        _traces.read_trace(trace),
        served,
        engines=integers("engines", engines),
        targets=_ablation.read_targets(targets),
        budgets=integers("budgets", budgets),
        links={name: _roofline.link_of(name.replace(":", ",")) for name in links.split(",")},
        requests_per_engine=requests_per_engine,
        windows=windows,
        before=json.loads(before.read_text(encoding="utf-8")) if before is not None else None,
        report_cell=tell,
    )
    report["step_times"], report["eager_ms"] = errors, 1e3 * served.eager_s
    if plot is not None:
        plot.write_text(_ablation.plot([report]), encoding="utf-8")
    output.deliver(report, "\n".join(map(_ablation.line_of, report["cells"])))
