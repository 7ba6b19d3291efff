"""`xserv bench peers` and `bench memory`: comparisons with other engines on one machine, and the memory of serving."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from runtime.commands import later
from runtime.commands.options import ReportOptions

_memory = later("runtime.bench.memory")
_metrics = later("runtime.bench.metrics")
_bench_adapters = later("runtime.bench.peers.bench_adapters")
_bench_encoders = later("runtime.bench.peers.bench_encoders")
_bench_peers = later("runtime.bench.peers.bench_peers")
_encoders = later("runtime.bench.peers.encoders")
_ik_llama = later("runtime.bench.peers.ik_llama")
_report = later("runtime.bench.peers.report")
_sides = later("runtime.bench.peers.rounds")
_workloads = later("runtime.bench.peers.workloads")

CheckFlag = Annotated[bool, typer.Option("--check", help="Status 1 where a goal is missed or cannot be judged.")]
PeersOption = Annotated[str | None, typer.Option(help="transformers,llama.cpp; default: those whose Python is there.")]
PeerPythonOption = Annotated[Path | None, typer.Option(help="A Python with torch and transformers.")]
LlamaPythonOption = Annotated[Path | None, typer.Option(help="A Python with llama-cpp-python and gguf.")]
RoundsOption = Annotated[int, typer.Option(help="Rounds of each workload, in turns.")]
ClockOption = Annotated[
    Literal["wall", "processor"],
    typer.Option(help="processor: each side's processor time, for a busy machine; on one core (`taskset -c 0`)."),
]


def peers(
    output: ReportOptions,
    workloads: Annotated[
        str | None,
        typer.Option(
            help="decode-1,prefill,decode-8,decode-32,burst,qwen3-decode-1,load,pack,tokenizer, which all run by "
            "default, and concurrent-8."
        ),
    ] = None,
    dtypes: Annotated[
        str | None, typer.Option(help="Weights: float32,bfloat16,int8 (beside q8_0); default: all.")
    ] = None,
    gguf: Annotated[
        list[Path] | None,
        typer.Option(help="A GGUF file that llama.cpp reads, too: of the workloads, decode-1 to burst, on it alone."),
    ] = None,
    peers: PeersOption = None,
    peer_python: PeerPythonOption = None,
    llama_python: LlamaPythonOption = None,
    ik_llama: Annotated[
        Path | None,
        typer.Option(help="A folder with ik_llama.cpp's llama-bench and llama-batched-bench, a side of its own."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json of the tokenizer's rows; default: the bundled, not tiktoken's.")
    ] = None,
    num_rounds: RoundsOption = 5,
    clock: ClockOption = "wall",
    kv_cache_bytes: Annotated[
        int, typer.Option(help="Bytes of our KV cache; recurrent states of eight sequences need more than the default.")
    ] = 512 << 20,
    check: CheckFlag = False,
) -> None:
    """Ours, llama.cpp and Hugging Face transformers in turns on GPT-2 124M's shape, and the host's work.

    ik_llama.cpp's own benchmarks take their turns with --ik-llama. A peer that dies is left out, with the reason; one
    without its Python is reported as missing. Status 1 if sides disagree.
    """
    keys = (*(workload.key for workload in _workloads.WORKLOADS), *_workloads.HOST_WORK)
    chosen = _workloads.named("--workloads", workloads, keys, [key for key in keys if key not in _workloads.ON_REQUEST])
    chosen_dtypes = _workloads.named("--dtypes", dtypes, _workloads.DTYPES, _workloads.DTYPES)
    pythons = _pythons(peers, peer_python, llama_python)
    if ik_llama is not None:
        _ik_llama.check_folder(ik_llama)
    groups = _workloads.groups_of(
        [workload for workload in _workloads.WORKLOADS if workload.key in chosen], chosen_dtypes
    )
    host_work = [key for key in _workloads.HOST_WORK if key in chosen]
    if gguf:
        groups, host_work = (
            _workloads.gguf_groups(
                gguf, _workloads.named("--workloads", workloads, _workloads.GGUF_WORKLOADS, _workloads.GGUF_WORKLOADS)
            ),
            [],
        )
    report = _bench_peers.bench_peers(
        pythons,
        groups,
        host_work=host_work,
        tokenizer=tokenizer,
        num_rounds=num_rounds,
        clock=clock,
        ik_llama=ik_llama,
        kv_cache_bytes=kv_cache_bytes,
    )
    output.deliver(report, _report.markdown(report))
    failed = _bench_peers.failures(report)
    for line in failed if check else ():
        print(line, file=sys.stderr)
    if report["refused"] or (check and failed):
        raise typer.Exit(1)


def _pythons(peers: str | None, peer_python: Path | None, llama_python: Path | None) -> dict[str, Path]:
    """The peers' Pythons by their names; a peer that was not asked for may lack one."""
    names = [engine.name for engine in _sides.PEER_ENGINES]
    chosen_peers = _workloads.named("--peers", peers, names, names)
    given = {_sides.TRANSFORMERS.name: peer_python, _sides.LLAMA.name: llama_python}
    pythons = {}
    for engine in _sides.PEER_ENGINES:
        if engine.name not in chosen_peers:
            continue
        try:
            pythons[engine.name] = engine.python(given[engine.name], Path(__file__).resolve().parents[3])
        except _metrics.BenchmarkError as error:
            if peers is not None or given[engine.name] is not None:
                raise
            print(f"missing: {error}", file=sys.stderr)
    return pythons


def encoders(
    output: ReportOptions,
    models: Annotated[str | None, typer.Option(help="minilm-l6,bge-m3; default: both.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="Weights: float32,bfloat16,int8; default: all.")] = None,
    texts: Annotated[
        str | None,
        typer.Option(help="one-20,equal-64,mixed-64, which all run by default, and mixed-16,equal-8,mixed-4."),
    ] = None,
    peers: PeersOption = None,
    peer_python: PeerPythonOption = None,
    llama_python: LlamaPythonOption = None,
    num_rounds: RoundsOption = 5,
    clock: ClockOption = "wall",
    serve: Annotated[bool, typer.Option(help="Start our server, too: its start, memory and HTTP.")] = True,
    check: CheckFlag = False,
) -> None:
    """Vectors of ours, llama.cpp and Hugging Face transformers in turns, on the shapes of MiniLM-L6 and bge-m3."""
    keys = [each.key for each in _encoders.TEXTS]
    chosen = _workloads.named("--texts", texts, keys, [key for key in keys if key not in _encoders.ON_REQUEST])
    report = _bench_encoders.bench_encoders(
        _pythons(peers, peer_python, llama_python),
        _workloads.named("--models", models, list(_encoders.SHAPES), list(_encoders.SHAPES)),
        _workloads.named("--dtypes", dtypes, _encoders.DTYPES, _encoders.DTYPES),
        [each for each in _encoders.TEXTS if each.key in chosen],
        num_rounds=num_rounds,
        clock=clock,
        serves=serve,
    )
    output.deliver(report, _encoders.markdown(report))
    if check and not all(row["is_met"] for row in report["results"]):
        raise typer.Exit(1)


def adapters(
    output: ReportOptions,
    dtypes: Annotated[
        str | None,
        typer.Option(help="Weights: bfloat16,q4_0 (a file of llama.cpp's),int4,fp8; default: all that can run."),
    ] = None,
    peers: PeersOption = None,
    peer_python: Annotated[Path | None, typer.Option(help="A Python with torch, transformers and peft.")] = None,
    llama_python: LlamaPythonOption = None,
    sequences: Annotated[str | None, typer.Option(help="Sequences at once: 1,32; default: both.")] = None,
    num_rounds: Annotated[int, typer.Option(help="Rounds of all sides and cases, in turns.")] = 9,
    clock: ClockOption = "wall",
    check: CheckFlag = False,
) -> None:
    """Time decodes with LoRA adapters of rank 16: ours, llama.cpp and peft in turns, on Qwen3-0.6B's shape."""
    counts = _workloads.named("--sequences", sequences, ("1", "32"), ("1", "32"))
    pythons = _pythons(peers, peer_python, llama_python)
    known = _bench_adapters.DTYPES
    can_run = [each for each in known if each != _bench_adapters.FILE or _sides.LLAMA.name in pythons]
    report = _bench_adapters.bench_adapters(
        pythons,
        _workloads.named("--dtypes", dtypes, known, can_run),
        num_rounds=num_rounds,
        clock=clock,
        cases=[each for each in _bench_adapters.CASES if str(each.sequences) in counts],
    )
    output.deliver(report, _bench_adapters.markdown(report))
    if check and not all(row.get("is_met", True) for row in report["results"]):
        raise typer.Exit(1)


def memory(
    output: ReportOptions,
    dtypes: Annotated[str | None, typer.Option(help="Weights: float32,bfloat16,int8; default: all.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests of the load.", min=1)] = 32,
    cold: Annotated[bool, typer.Option("--cold", help="With an empty cache of compiled code.")] = False,
    check: CheckFlag = False,
) -> None:
    """Measure the peak memory of serving GPT-2 124M's shape over all processes, against weights + KV cache + 400 MB."""
    report = _memory.bench_memory(
        _workloads.named("--dtypes", dtypes, _workloads.DTYPES, _workloads.DTYPES),
        num_prompts=num_prompts,
        is_cold=cold,
    )
    rows = []
    for result in report["results"]:
        words = [f"{result[key] / 1e6:,.0f}" for key in ("weight_bytes", "kv_cache_bytes", "peak_bytes", "above_bytes")]
        words.append(" + ".join(f"{each['total'] / 1e6:,.0f}" for each in result["processes"]))
        words += [f"{result['limit_bytes'] / 1e6:,.0f}", "met" if result["is_within"] else "missed"]
        rows.append([result["dtype"], *words])
    head = ("weights", "MB of weights", "KV cache", "peak", "beside both", "of it by process", "limit", "")
    output.deliver(report, _metrics.markdown_table(head, rows))
    if check and not all(result["is_within"] for result in report["results"]):
        raise typer.Exit(1)
