"""Simulates a trace of requests on one or many replicas: the real scheduler in virtual time.

    python -m tools.simulate TRACE.csv --config qwen3-8b --gpu h200          # or a folder with a config.json
    python -m tools.simulate TRACE.jsonl --step-model fitted.json --num-blocks 20000 --replicas 4

    python -m tools.simulate TRACE.jsonl --config llama-3.1-70b --tensor-parallel-size 4 --pipeline-parallel-size 2
    python -m tools.simulate TRACE.csv --config qwen3-32b --rate 0.2 --tenants 5 --flood 15    # fair shares

A step's time is given by a step-time model: ``--step-model``, fitted to measured steps (`xserv bench simulation` writes
one), or the roofline of GPUs over the shapes of ``--config``: those of each replica exchange sums over ``--link``, and
hidden states over ``--stage-link``. Prints TTFT, TPOT, throughput, preemptions and hit rate; ``--json`` the whole
report.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, get_args

from runtime.bench.load.traces import Trace, read_trace, shared_prefixes
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.ablation import spread
from runtime.bench.scheduling.roofline import (
    GPUS,
    LINKS,
    PRESETS,
    RooflineStepModel,
    find_config,
    link_of,
    pipeline_of,
    rooflines,
)
from runtime.bench.scheduling.simulation import simulate
from runtime.bench.scheduling.tenants import Flood, compare, text_of
from runtime.engine.config import BATCHING, POLICIES, PREEMPTIONS, VICTIMS, EngineConfig, RoutingPolicy
from runtime.engine.limits import EngineLimits, resolve
from runtime.engine.process.thread_client import BURST_PAUSE_S
from runtime.engine.scheduling.step_model import LinearStepModel, Pipeline, StepModel, window_shares
from runtime.errors import XservError
from runtime.kv.groups import cut_layers
from runtime.kv.kinds import kind_of_window

_CONFIG = EngineConfig()
MEMORY_SHARE = 0.9  # of a GPU's memory, for weights and KV cache together


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        report = run(options)
    except XservError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    as_text = _as_text if options.tenants is None else text_of
    print(json.dumps(report) if options.json else as_text(report))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The report for these options."""
    trace = _trace(options)
    if options.spread:
        trace = spread(trace)
    if options.num_requests is not None:
        trace = trace.head(options.num_requests)
    if (options.rate, options.length) != (1.0, 1.0):
        trace = trace.scaled(rate=options.rate, length=options.length)
    if options.copies > 1:
        trace = trace.multiplied(options.copies)
    model, layer_windows, positions = _step_model(options)
    limits = _limits(options, trace, model, layer_windows, positions or trace.longest)
    if options.tenants is not None:
        windows = window_shares(layer_windows)
        flood = Flood(options.tenants, options.flood)
        found = compare(trace, flood, limits, model, policies=("fcfs", "fair"), windows=windows, wake_s=BURST_PAUSE_S)
        return {"trace": trace.name, "requests_of_a_tenant": len(trace.requests), **_of_limits(limits), **found}
    start, start_processor = time.perf_counter(), time.process_time()
    simulation = simulate(
        trace,
        limits,
        model,
        windows=window_shares(layer_windows),
        num_replicas=options.replicas,
        routing_policy=options.routing_policy,
        max_concurrency=options.max_concurrency,
        block_transfer_s=options.block_transfer_ms / 1e3,
        wake_s=BURST_PAUSE_S,
    )
    wall_s, processor_s = time.perf_counter() - start, time.process_time() - start_processor
    return {
        "trace": trace.name,
        "replicas": options.replicas,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "gpus": options.replicas * options.tensor_parallel_size * options.pipeline_parallel_size,
        "routing_policy": options.routing_policy,
        "max_concurrency": options.max_concurrency,
        **_of_limits(limits),
        "batching": options.batching,
        "scheduling_policy": options.scheduling_policy,
        **simulation.report(),
        "wall_s": wall_s,
        "processor_s": processor_s,
    }


def _of_limits(limits: EngineLimits) -> dict[str, int]:
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks")
    return {name: getattr(limits, name) for name in names}


def _trace(options: argparse.Namespace) -> Trace:
    """The given trace, or a generated one."""
    if (options.trace is None) == (options.shared_prefixes is None):
        raise BenchmarkError("give a trace, or --shared-prefixes")
    if options.trace is not None:
        return read_trace(options.trace)
    requests, prefixes, prefix_len, own_len, output_len, hot_share = options.shared_prefixes
    return shared_prefixes(
        num_requests=int(requests), num_prefixes=int(prefixes), prefix_len=int(prefix_len), own_len=int(own_len),
        output_len=int(output_len), hot_share=hot_share,
    )  # fmt: skip


def _step_model(options: argparse.Namespace) -> tuple[StepModel | Pipeline, tuple[int | None, ...], int | None]:
    """The step-time model, the window of each layer, and the most positions, if known."""
    num_ranks, num_stages = options.tensor_parallel_size, options.pipeline_parallel_size
    if min(num_ranks, num_stages) < 1:
        raise BenchmarkError(f"{num_ranks} ranks and {num_stages} stages: at least 1 of each is needed")
    if options.step_model is not None:
        if (num_ranks, num_stages) != (1, 1):
            raise BenchmarkError("--step-model knows neither ranks nor stages: give --config for a roofline")
        values = json.loads(options.step_model.read_text(encoding="utf-8"))
        if "step_model" not in values:  # the terms alone
            return LinearStepModel.from_json(values), (None,), None
        return LinearStepModel.from_json(values["step_model"]), _layer_windows(values), None
    if options.config is None:
        raise BenchmarkError("a step-time model is needed: --step-model FILE, or --config NAME for a roofline")
    config = find_config(options.config)
    link = link_of(options.link) if num_ranks > 1 else None
    stages = rooflines(
        config, GPUS[options.gpu], overhead_s=options.overhead_ms / 1e3, num_ranks=num_ranks, num_stages=num_stages,
        link=link,
    )  # fmt: skip
    model: StepModel | Pipeline = stages[0]
    if num_stages > 1:
        model = pipeline_of(config, stages, link_of(options.stage_link or options.link))
    return model, config.layer_windows, config.max_position_embeddings


def _layer_windows(report: dict[str, Any]) -> tuple[int | None, ...]:
    windows = report.get("layer_windows")
    if isinstance(windows, list) and windows and all(each is None or _is_window(each) for each in windows):
        return tuple(windows)
    raise BenchmarkError(f"layer_windows must have each layer's window, null where it has none, not {windows!r:.80}")


def _is_window(value: Any) -> bool:
    return type(value) is int and value > 0


def _limits(
    options: argparse.Namespace,
    trace: Trace,
    model: StepModel | Pipeline,
    layer_windows: tuple[int | None, ...],
    positions: int,
) -> EngineLimits:
    """The limits of each replica; the given number of blocks, else as many as fit beside the weights into the memory of
    the stage with the least room."""
    num_blocks = options.num_blocks
    stages = model.stages if isinstance(model, Pipeline) else (model,)
    if num_blocks is None:
        known = [each for each in stages if isinstance(each, RooflineStepModel)]
        if len(known) < len(stages):
            raise BenchmarkError("--num-blocks is needed with --step-model: nothing says how much memory there is")
        num_blocks = min(each.num_blocks(options.block_size, MEMORY_SHARE) for each in known)
        if num_blocks == 0:
            needed, memory = max(each.weight_bytes for each in known), known[0].rates.memory_bytes
            raise BenchmarkError(
                f"{needed / 1e9:.1f} GB of weights leave no room for a block in {MEMORY_SHARE:.0%} of a GPU's "
                f"{memory / 1e9:.0f} GB: more ranks or stages are needed"
            )
    engine = EngineConfig(
        max_model_len=options.max_model_len or trace.longest,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        num_blocks=num_blocks,
        scheduling_policy=options.scheduling_policy,
        batching=options.batching,
        prefill_chunk=options.prefill_chunk,
        prefill_chunk_stages=options.prefill_chunk_stages,
        enable_prefix_caching=options.enable_prefix_caching,
        preemption=options.preemption,
        victim=options.victim,
        swap_space_bytes=options.swap_blocks,  # a block counts as one byte here
    )
    return resolve(
        engine,
        max_position_embeddings=max(positions, engine.max_model_len or 0),
        bytes_per_block=1,
        available_bytes=num_blocks,
        cache_kinds=tuple(group.kind for group in cut_layers(tuple(map(kind_of_window, layer_windows)))),
    )


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(map(float, text.split(",")))
    if len(values) != 6:
        raise argparse.ArgumentTypeError(f"six numbers are needed, got {len(values)}")
    return values


def _stages(text: str) -> tuple[int, int, int, int]:
    high, low, stages, over_tokens = map(int, text.split(","))
    return high, low, stages, over_tokens


def _as_text(report: dict[str, Any]) -> str:
    rows = ["", f"{'':<16}{'mean':>12}{'p50':>12}{'p90':>12}{'p99':>12}{'max':>12}"]
    for name, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("worst_gap_s", "worst gap"), ("latency_s", "latency")):
        cells = "".join(f"{1e3 * report[name][kind]:>12,.2f}" for kind in ("mean", "p50", "p90", "p99", "max"))
        rows.append(f"{title + ' (ms)':<16}{cells}")
    rows.append("")
    for name, value in report.items():
        if isinstance(value, float):
            rows.append(f"{name:<28}{value:>14,.3f}")
        elif not isinstance(value, dict):
            rows.append(f"{name:<28}{value!s:>14}")
    return "\n".join(rows[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simulate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, help="a trace: .csv (Azure) or .jsonl (Mooncake)")
    parser.add_argument(
        "--shared-prefixes",
        type=_numbers,
        metavar="REQUESTS,PREFIXES,PREFIX,OWN,OUTPUT,HOT",
        help="instead of a trace: requests at once, each with one of the beginnings; a share HOT of them has the first",
    )
    parser.add_argument("--num-requests", type=int, help="only the first")
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals this many times as dense")
    parser.add_argument("--spread", action="store_true", help="arrivals of the same time evenly up to the next")
    parser.add_argument("--copies", type=int, default=1, help="the users so often, with other prompts")
    parser.add_argument("--length", type=float, default=1.0, help="prompts and answers this many times as long")
    parser.add_argument("--step-model", type=Path, help="JSON of a fitted step-time model")
    parser.add_argument("--config", help=f"shapes for a roofline: {', '.join(PRESETS)}, or a folder with a config.json")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200", help="of the roofline")
    parser.add_argument("--overhead-ms", type=float, default=0.5, help="of each step beside the roofline's time")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of each stage, with --config")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="stages of each replica, with --config")
    link = f"{', '.join(LINKS)} or MICROSECONDS,GB_PER_S"
    parser.add_argument("--link", default="nvlink4", help=f"between the ranks of a stage: {link}")
    parser.add_argument("--stage-link", help="between stages; default: that of ranks")
    parser.add_argument("--routing-policy", choices=get_args(RoutingPolicy), default=_CONFIG.routing_policy)
    parser.add_argument("--max-concurrency", type=int, help="open requests; the next comes when one has ended")
    parser.add_argument("--max-model-len", type=int, help="default: the trace's longest request")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, help="KV blocks of each replica; default: what the GPU holds")
    parser.add_argument("--scheduling-policy", choices=POLICIES, default=_CONFIG.scheduling_policy)
    parser.add_argument("--batching", choices=BATCHING, default=_CONFIG.batching)
    parser.add_argument("--prefill-chunk", type=int, help="most tokens of one prompt in a step")
    parser.add_argument(
        "--prefill-chunk-stages", type=_stages, metavar="HIGH,LOW,STAGES,TOKENS", help="chunks that shrink in stages"
    )
    parser.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    parser.add_argument("--preemption", choices=PREEMPTIONS, default=_CONFIG.preemption)
    parser.add_argument("--victim", choices=VICTIMS, default=_CONFIG.victim)
    parser.add_argument("--swap-blocks", type=int, default=0, help="KV blocks that each replica's host memory holds")
    parser.add_argument("--block-transfer-ms", type=float, default=0.0, help="of one block between device and host")
    parser.add_argument("--tenants", type=int, help="each sends the trace: what one's flood does under fcfs and fair")
    parser.add_argument("--flood", type=int, default=10, help="traces that the first tenant sends at once")
    parser.add_argument("--json", action="store_true", help="the whole report as one JSON object")
    parser.add_argument("--output-json", type=Path, help="write the report to this file, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
