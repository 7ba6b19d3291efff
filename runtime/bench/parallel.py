"""`bench parallel`: a model in one piece, on ranks and in stages, and how long each rank computes and waits.

Every shape runs the same requests, all there from the start: prompts alone (one token each), then decodes. The tokens
of all shapes have to be the same, in float32, before anything is reported. A rank's idle share is the part of the run
in which it computes nothing: it waits for the stage before it, or has no step. Of stages two schedules run: one step at
a time, and as many as there are stages.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.stages import by_times
from runtime.bench.environment import describe_engine
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import BenchmarkError, check_finite
from runtime.bench.scheduling.engines import Stepper
from runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.engine.engine import Engine
    from runtime.rank_notices import Tally

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "attention_bias": False, "head_dim": 64, "vocab_size": 4096, "hidden_size": 512,
    "max_position_embeddings": 8192, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
"""Of random weights, unless a model is named."""

LATE_S = 5.0
"""How much later than the others a rank may end its last step."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is split. `open_steps`: steps that may be open; None: as many as there are stages."""

    num_stages: int
    num_ranks: int
    open_steps: int | None = None

    @staticmethod
    def parse(text: str) -> list[Layout]:
        """`1`, `2` stages or `2x2` stages and ranks: of several stages both schedules."""
        parts = text.lower().split("x")
        if not 1 <= len(parts) <= 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise InvalidArgumentError(f"a shape is {text!r}, must be stages, or stages x ranks: 2, 2x2, 1x2")
        num_stages, num_ranks = int(parts[0]), int(parts[-1]) if len(parts) == 2 else 1
        if num_stages == 1:
            return [Layout(1, num_ranks)]
        return [Layout(num_stages, num_ranks, 1), Layout(num_stages, num_ranks)]

    @property
    def name(self) -> str:
        """In tables."""
        split = f"{self.num_stages} x {self.num_ranks}"
        return split if self.num_stages == 1 else f"{split}, {self.open_steps or self.num_stages} open"


@contextmanager
def small_model() -> Iterator[dict[str, Any]]:
    """The arguments of an engine over random weights."""
    with tempfile.TemporaryDirectory(prefix="parallel-shapes-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
        yield {"model": folder, "load_format": "dummy", "dtype": "float32"}


def bench_parallel(
    arguments: Mapping[str, Any], *, layouts: Sequence[Layout], num_prompts: int = 8, input_len: int = 384,
    num_decodes: int = 16, output_len: int = 48, num_rounds: int = 3,
) -> dict[str, Any]:  # fmt: skip
    """Tokens a second of each layout, in turns, and the idle share of each rank; medians are the caller's to take.

    `driver_ms`: processor time of the thread that plans and starts steps, a step; on the cpu it computes its own part
    of the model, too. Raises BenchmarkError where layouts give other tokens.
    """
    results: list[dict[str, Any]] = []
    stages: list[dict[str, Any]] = []
    expected: list[list[int]] | None = None
    environment: dict[str, Any] = {}
    for layout in layouts:
        own = {"max_num_seqs": max(16, num_decodes), "enable_prefix_caching": False, "seed": 0}
        engine = engine_in(layout, {**arguments, **own})
        try:
            vocab_size = engine.info.vocab_size
            prompts = random_prompts(num_prompts, input_len, vocab_size, seed=1)
            starts = random_prompts(num_decodes, 8, vocab_size, seed=2)
            environment = environment or describe_engine(engine.info)
            for number in range(1 + num_rounds):  # the first one compiles and records
                rounds = [
                    ("prompts", _run(engine, prompts, 1)), ("decodes", _run(engine, starts, output_len)),
                ]  # fmt: skip
                tokens = [ids for _, run in rounds for ids in run.pop("tokens")]
                if expected is None:
                    expected = tokens
                if tokens != expected:
                    raise BenchmarkError(f"{layout.name}: other tokens than {layouts[0].name}")
                for work, run in rounds if number else ():
                    results.append({"layout": layout.name, "work": work, **run})
            stages += _stages(engine, layout, results)
        finally:
            engine.close()
    report = {"results": results, "stages": stages, "environment": environment}
    for each in results:
        check_finite(each)
    return report


def engine_in(layout: Layout, arguments: Mapping[str, Any]) -> Engine:
    """An engine over a model that is split so."""
    from runtime.engine.config import EngineConfig
    from runtime.engine.make_engine import engine_of

    settings = dict(arguments)
    model = settings.pop("model", None)
    layers = settings.pop("pipeline_layers", "")
    if layers.count(",") + 1 == layout.num_stages > 1:  # those of other layouts are balanced
        settings["pipeline_layers"] = layers
    config = EngineConfig(
        **settings, pipeline_parallel_size=layout.num_stages, tensor_parallel_size=layout.num_ranks
    )
    return engine_of(model, config, most_open_steps=layout.open_steps)


def _run(engine: Engine, prompts: Sequence[list[int]], output_len: int) -> dict[str, Any]:
    stepper, before, found = Stepper(engine), _tallies(engine), dict[str, list[int]]()
    names = [stepper.add(prompt, output_len) for prompt in prompts]
    started, processor, num_steps = time.perf_counter(), time.thread_time(), 0
    while engine.has_work:
        _, outputs = stepper.step()
        num_steps += 1
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    seconds = time.perf_counter() - started
    tokens = [found[name] for name in names]
    if any(len(each) != output_len for each in tokens):
        raise BenchmarkError(f"answers of {sorted(map(len, tokens))} tokens, not of {output_len}")
    computed = [
        (now.step_ns - then.step_ns - now.waited_ns + then.waited_ns) / 1e9
        for then, now in zip(before, _tallies(engine), strict=True)
    ]
    idle = [1.0 - each / seconds for each in computed]
    count = sum(map(len, prompts)) if output_len == 1 else len(prompts) * output_len
    return {
        "tokens": tokens, "seconds": seconds, "tokens_per_s": count / seconds, "num_steps": num_steps,
        "idle": idle, "computed_s": computed, "driver_ms": 1e3 * (time.thread_time() - processor) / num_steps,
    }  # fmt: skip


def _tallies(engine: Engine) -> list[Tally]:
    """Of all ranks, when they have counted the steps that this one has done."""
    until = time.monotonic() + LATE_S
    while len({each.num_steps for each in engine.executor.tallies()}) > 1:
        if time.monotonic() > until:
            raise BenchmarkError(f"ranks have done {engine.executor.tallies()}")
        time.sleep(0.001)
    return engine.executor.tallies()


def _stages(engine: Engine, layout: Layout, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each stage of the layout took in each work, and the layers by which all would take as long as each other;
    nothing of a layout without stages."""
    if layout.num_stages == 1:
        return []
    ranks = engine.info.ranks[:: layout.num_ranks]
    counts = [rank.end_layer - rank.first_layer for rank in ranks]
    found = []
    for work in ("prompts", "decodes"):
        runs = [each["computed_s"] for each in results if (each["layout"], each["work"]) == (layout.name, work)]
        by_rank = [statistics.median(each) for each in zip(*runs, strict=True)]
        seconds = [
            max(by_rank[first : first + layout.num_ranks]) for first in range(0, len(by_rank), layout.num_ranks)
        ]
        better = by_times(counts, [round(1e9 * each) for each in seconds])
        found.append(
            {"layout": layout.name, "work": work, "layers": counts, "seconds": seconds, "by_time": list(better)}
        )
    return found


def as_lines(report: Mapping[str, Any]) -> list[str]:
    """A row for each layout and work: medians, and the mean idle share of each rank."""
    fmean, median = statistics.fmean, statistics.median
    lines = [f"{'stages x ranks':<18}{'work':<10}{'tokens/s':>10}{'steps':>7}{'driver ms':>11}   idle, by rank"]
    rows = list(dict.fromkeys((each["layout"], each["work"]) for each in report["results"]))
    for layout, work in rows:
        runs = [each for each in report["results"] if (each["layout"], each["work"]) == (layout, work)]
        shares = zip(*(each["idle"] for each in runs), strict=True)
        idle = ", ".join(f"{100 * fmean(each):.0f} %" for each in shares)
        speed, steps, driver = (
            median(each[name] for each in runs) for name in ("tokens_per_s", "num_steps", "driver_ms")
        )
        lines.append(f"{layout:<18}{work:<10}{speed:>10.1f}{steps:>7.0f}{driver:>11.2f}   {idle or '-'}")
    for each in report["stages"]:
        layers, better = (",".join(map(str, each[name])) for name in ("layers", "by_time"))
        seconds = ", ".join(f"{1e3 * second:.0f} ms" for second in each["seconds"])
        advice = "as they should be" if layers == better else f"--pipeline-layers {better} would be more alike"
        lines.append(f"{each['layout']:<18}{each['work']:<10}stages of {layers} layers took {seconds}: {advice}")
    return lines
