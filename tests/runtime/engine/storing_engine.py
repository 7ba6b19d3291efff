"""An engine that serves the same requests again and again over a folder of prefixes, until it is killed.

python -m tests.runtime.engine.storing_engine MODEL DIR BYTES
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from tests.runtime.engine.fakes import run_to_end
from tests.runtime.engine.test_fuzz import templates

LENGTH, VOCAB_SIZE = 96, 97
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "load_format": "dummy", "max_model_len": LENGTH, "max_num_seqs": 4,
    "block_size": 8, "seed": 0, "speculation": "off",
}  # fmt: skip


def make_requests(seed: int, count: int, vocab_size: int = VOCAB_SIZE) -> list[EngineRequest]:
    """Many kinds, whose prompts share beginnings; each wants log probabilities."""
    made = templates(random.Random(seed), count, vocab_size, LENGTH)
    return [msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, logprobs=2)) for each in made]


def answers(engine: Engine, requests: list[EngineRequest]) -> dict[tuple[str, int], Any]:
    """By request and choice: ids, and the bits of their log probabilities."""
    for each in requests:
        engine.add(each)
    results = run_to_end(engine)
    engine.rest()
    engine.check_invariants()
    return {
        (each.request_id, index): [
            (token, logprob)
            for output in results[each.request_id].of(index)
            for token, logprob in zip(output.new_token_ids, output.logprobs or ())
        ]
        for each in requests
        for index in range(each.params.n)
    }


def serve(model: Path, folder: Path, num_bytes: int) -> None:
    options = {**SETTINGS, "num_blocks": 60, "prefix_cache_dir": str(folder), "prefix_cache_disk_bytes": num_bytes}
    engine = build_engine(model, **options)
    print("ready", flush=True)
    while True:
        for seed in range(4):
            answers(engine, make_requests(seed, 10))
            engine.reset_prefix_cache()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
