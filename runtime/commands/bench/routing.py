"""`xserv bench routing`: several engines under each routing policy."""

from __future__ import annotations

import statistics
from typing import Annotated, Any, get_args

import typer

from runtime.commands.options import EngineOptions
from runtime.commands.report import ReportOptions
from runtime.engine.config import RoutingPolicy


def routing(
    engine: EngineOptions,
    output: ReportOptions,
    num_engines: Annotated[int, typer.Option(help="Engines.", min=2)] = 2,
    cached_prefixes: Annotated[int, typer.Option(help="Beginnings that an engine's cache holds.", min=2)] = 6,
    share: Annotated[float, typer.Option(help="All beginnings, as a share of what all caches hold.", min=0.01)] = 0.8,
    prefix_len: Annotated[int, typer.Option(help="Tokens of a beginning.", min=1)] = 2000,
    own_len: Annotated[int, typer.Option(help="Further tokens of a prompt.", min=1)] = 100,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 16,
    num_requests: Annotated[int, typer.Option(help="Requests of a run.", min=4)] = 160,
    concurrency: Annotated[int, typer.Option(help="Open requests, of all engines.", min=1)] = 8,
    num_rounds: Annotated[int, typer.Option(help="Rounds, in turns; medians are reported.", min=1)] = 3,
    policies: Annotated[
        str, typer.Option(help="To compare; round-robin and prefix-aware among them.")
    ] = ",".join(get_args(RoutingPolicy)),
) -> None:
    """Round-robin, least-load and prefix-aware on shared and skewed prefixes; without --model, on small shapes."""
    from contextlib import ExitStack

    from runtime.bench.scheduling.routing import bench_routing, small_model

    chosen: list[Any] = policies.split(",")
    if not {"round-robin", "prefix-aware"} <= set(chosen) <= set(get_args(RoutingPolicy)):
        raise typer.BadParameter(f"policies must be of {', '.join(get_args(RoutingPolicy))}, got {policies!r}")
    given = engine.arguments()
    usual = EngineOptions().arguments()
    for name in ("data_parallel_size", "routing_policy", "max_num_seqs", "max_model_len", "kv_cache_bytes"):
        if given.pop(name, None) != usual.get(name):
            raise typer.BadParameter(f"--{name.replace('_', '-')} is this benchmark's own business")
    with ExitStack() as stack:
        shapes = {} if engine.model is not None else stack.enter_context(small_model())
        report = bench_routing(
            {**given, **shapes}, num_engines=num_engines, cached_prefixes=cached_prefixes, share=share,
            prefix_len=prefix_len, own_len=own_len, output_len=output_len, num_requests=num_requests,
            concurrency=concurrency, num_rounds=num_rounds, policies=chosen,
        )  # fmt: skip
    lines = []
    for unit, ratios in (("requests_per_s", "ratios"), ("requests_per_processor_s", "processor_ratios")):
        lines.append(f"{unit:<26}" + "".join(f"{policy:>14}" for policy in chosen) + f"{'ratio':>8}   hits")
        for name, rates in report[unit].items():
            cells = "".join(f"{statistics.median(rates[policy]):>14.2f}" for policy in chosen)
            hits = ", ".join(f"{100 * rate:.0f} %" for rate in report["hit_rates"][name].values())
            lines.append(f"{name:<26}{cells}{report[ratios][name]:>8.2f}   {hits}")
    death = report["death"]
    ended = ", ".join(f"{count} {reason}" for reason, count in death["ended"].items())
    lines.append(f"an engine killed in the middle: {ended}; {death['lost']} lost")
    output.deliver(report, "\n".join(lines))


COMMANDS = (routing,)
