"""The time to the second token of a fleet that hands each prompt over, beside that of one engine.

    python -m tools.serving.time_second_token [--turns 15] [--json FILE]

Starts one engine of one thread, and a fleet of an engine for prompts and one for answers, of one thread each on
processors of their own. In turns they get the same new prompt, while the others rest: `seconds` are medians from the
submission to the second token, `ratio` is the fleet's by the other's; `first_seconds` are those to the first token,
`gap_seconds` the longest between two of the 32. The shapes are `models/demo` and a quarter of a Qwen3-0.6B's layers.
Exit status 1 if an answer differs or pages did not come."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from runtime.bench.environment import finished
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.process.child import Membership
from runtime.engine.process.client import EngineClient
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.parallel.handing_fleet import HandingFleet
from tools.measure_decisions import DEMO, write_model

LENGTHS = [64, 512, 2000]
MOST_TOKENS = 2048
WARM_UP = 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
KV_CACHE_BYTES = 64 << 20
"""Room for two of the longest prompts, so that all of it was used before: new memory is slow at first."""
REST_S = 0.02
"""Before each request, so that nothing is done any more for the one before."""


class Answer:
    """A sink that notes when each token came."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.at_s: list[float] = []
        self.done = threading.Event()

    def __call__(self, output: EngineOutput) -> None:
        self.at_s += [time.perf_counter()] * len(output.new_token_ids)
        self.ids += output.new_token_ids
        if output.finish_reason is not None:
            self.done.set()


def ask(client: EngineClient, name: str, ids: list[int]) -> tuple[list[int], list[float]]:
    """The answer, and when each of its tokens came after the submission."""
    answer = Answer()
    time.sleep(REST_S)
    begun_s = time.perf_counter()
    client.submit(EngineRequest(request_id=name, prompt_token_ids=ids, params=PARAMS), answer)
    assert answer.done.wait(120.0), "no answer came"
    assert len(answer.ids) == PARAMS.max_tokens, f"the answer has {len(answer.ids)} tokens"
    return answer.ids, [each - begun_s for each in answer.at_s]


def measure(model: Path, turns: int, lengths: Sequence[int], **settings: Any) -> list[dict[str, Any]]:
    settings = {"device": "cpu", "max_model_len": MOST_TOKENS, "kv_cache_bytes": KV_CACHE_BYTES, **settings}
    core = sorted(os.sched_getaffinity(0))[0]
    generator, rows = random.Random(1), []
    with (
        closing(ProcessEngineClient(model, membership=Membership(cores=(core,)), **settings)) as one,
        closing(HandingFleet(model, prefill_engines=1, decode_engines=1, **settings)) as fleet,
    ):
        for number in range(6):  # uses the whole cache
            for each in (one, fleet):
                ask(each, f"first {number}", [generator.randrange(3, 600) for _ in range(max(lengths))])
        for length in lengths:
            times: dict[str, list[list[float]]] = {"one": [], "fleet": []}
            num_differing = 0
            for turn in range(-WARM_UP, turns):
                ids = [generator.randrange(3, 600) for _ in range(length)]
                pair = [("one", one), ("fleet", fleet)][:: 1 if turn % 2 else -1]
                said = []
                for name, client in pair:
                    answer, at_s = ask(client, f"{length} {turn}", ids)
                    said.append(answer)
                    if turn >= 0:
                        times[name].append(at_s)
                num_differing += said[0] != said[1]
            median = {
                (name, n): statistics.median(each[n] for each in found) for name, found in times.items() for n in (0, 1)
            }
            gaps = {name: [max(b - a for a, b in pairwise(each)) for each in found] for name, found in times.items()}
            rows.append({
                "prompt_tokens": length,
                "seconds": {name: round(median[name, 1], 5) for name in times},
                "ratio": round(median["fleet", 1] / median["one", 1], 3),
                "first_seconds": {name: round(median[name, 0], 5) for name in times},
                "gap_seconds": {name: round(statistics.median(each), 5) for name, each in gaps.items()},
                "num_differing": num_differing,
            })  # fmt: skip
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        num_asked = 6 + len(lengths) * (turns + WARM_UP)
        rows[-1]["num_lost"] = num_asked - fleet.stats().num_arrived
    return rows


def priority() -> str:
    """This process's priority, which its engines have, too."""
    policies = {getattr(os, name): name for name in ("SCHED_OTHER", "SCHED_FIFO", "SCHED_RR") if hasattr(os, name)}
    policy = os.sched_getscheduler(0)
    level = os.sched_getparam(0).sched_priority
    return f"{policies.get(policy, policy)}, {f'priority {level}' if level else f'nice {os.nice(0)}'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="Prompts of a length.")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="Tokens of a prompt.")
    parser.add_argument("--models", nargs="+", default=["demo", "quarter"], choices=["demo", "quarter"], help="Shapes.")
    parser.add_argument("--layers", type=int, default=7, help="Layers that the second shape has.")
    parser.add_argument("--note", default="", help="About the machine, kept in the file.")
    parser.add_argument("--json", type=Path, help="File for the report.")
    given = parser.parse_args()
    models = {}
    if "demo" in given.models:
        models["demo"] = measure(DEMO, given.turns, given.lengths)
    with tempfile.TemporaryDirectory() as folder:
        if "quarter" in given.models:
            write_model(Path(folder), 1024, given.layers, MOST_TOKENS)
            models["quarter of 0.6B"] = measure(Path(folder), given.turns, given.lengths, load_format="dummy")
    rows = [row for each in models.values() for row in each]
    report = finished({
        "command": f"python -m tools.serving.time_second_token {' '.join(sys.argv[1:])}",
        "priority": priority(),
        "note": given.note,
        "models": models,
        "worst_ratio": max(row["ratio"] for row in rows),
    })  # fmt: skip
    text = json.dumps(report, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if any(row["num_differing"] or row.get("num_lost") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
