"""Times the first token of a long chat's next turn: warm, and after a restart with a folder of prefixes.

    python -m tools.serving.time_restarts models/demo models/demo_hybrid --rounds 6 > times.json

The server and its engine run in this process, and are made anew for each restart, on which a small request comes first;
three warm turns follow. Questions have many lengths, so that no turn finds its step's shape recorded by another alone.
The processor's time is that of the whole process, the client included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from runtime import collector
from runtime.bench.environment import describe_machine
from runtime.engine.make_engine import build_engine
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.text.load import load_tokenizer
from server.app import create_app
from tests.server.running import running
from tokenizer import Tokenizer

_NEW_TOKENS = (60, 140)
_WARM_TURNS = 3


class _Time(NamedTuple):
    wall_s: float
    processor_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


def _text(tokenizer: Tokenizer, num_tokens: int, rng: random.Random) -> str:
    words = Path(__file__).read_text(encoding="utf-8").split()
    text = ""
    while len(ids := tokenizer.encode(text)) < num_tokens:
        text += " ".join(rng.choices(words, k=200)) + "\n"
    return tokenizer.decode(ids[:num_tokens])


def _question(tokenizer: Tokenizer, rng: random.Random) -> dict[str, str]:
    return {"role": "user", "content": _text(tokenizer, rng.randint(*_NEW_TOKENS), rng)}


def _ask(http: httpx.Client, model: str, messages: list[dict[str, str]]) -> _Time:
    """The time until the first text of the answer has come."""
    body = {
        "model": model, "messages": messages, "max_tokens": 6, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    wall, processor, taken = time.perf_counter(), time.process_time(), (0.0, 0.0)
    usage: dict[str, Any] = {}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if not any(taken) and event["choices"] and event["choices"][0]["delta"].get("content"):
                    taken = time.perf_counter() - wall, time.process_time() - processor
                usage = event.get("usage") or usage
    return _Time(*taken, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def measure(model: Path, num_tokens: int, rounds: int) -> dict[str, Any]:
    tokenizer, rng = load_tokenizer(model), random.Random(0)
    assert tokenizer is not None, f"{model} has no tokenizer"
    system = {"role": "system", "content": _text(tokenizer, num_tokens, rng)}
    found: dict[str, list[_Time]] = {"cold": [], "restored": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            options = {"hf_overrides": {"max_position_embeddings": num_tokens + 4096}, "prefix_cache_dir": folder}
            client = ThreadEngineClient(build_engine(model, seed=0, **options))
            name = client.info.model_name
            with running(create_app(client, tokenizer)) as url, httpx.Client(base_url=url, timeout=600) as http:
                _ask(http, name, [_question(tokenizer, rng)])
                collector.resume(collects=True)  # as a server does once it has started
                for thread in threading.enumerate():
                    if thread.name == "xserv-allocate":  # it ends within a moment of a quiet machine's start
                        thread.join()
                time.sleep(0.3)
                for turn in range(1 + _WARM_TURNS):
                    kind = "warm" if turn else "restored" if number else "cold"
                    found[kind].append(_ask(http, name, [system, _question(tokenizer, rng)]))
            client.close()
    medians = {
        kind: {each: round(statistics.median(getattr(time, each) for time in times), 4) for each in _Time._fields}
        for kind, times in found.items()
    }
    ratios = {each: round(medians["restored"][each] / medians["warm"][each], 3) for each in ("wall_s", "processor_s")}
    return {"model": model.name, "medians": medians, "restored_over_warm": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    results = [measure(model, asked.tokens, asked.rounds) for model in asked.models]
    print(json.dumps({"results": results, "environment": describe_machine()}, indent=1))


if __name__ == "__main__":
    main()
