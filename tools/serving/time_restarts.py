"""Times the first token of a long chat's next turn: warm, and after a restart with a folder of prefixes.

    python -m tools.serving.time_restarts models/demo models/demo_hybrid --rounds 6 > times.json

Each round starts `xserv serve`, asks three short questions, rests, and asks the long chat's, which is answered from the
folder, and three more, which are warm. Questions have many lengths, so that no turn finds its step's shape recorded by
another alone. With `--idle 0` the engine has no time to read prefixes back before it is asked. The processor's time
is that of the server and its engine until the first text of the answer has come.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from runtime.bench.environment import describe_machine
from runtime.bench.memory import descendants
from runtime.text.load import load_tokenizer
from tokenizer import Tokenizer
from tools.serving.served import Served, above_the_server, threads_s, wake_before_the_engine

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


def _questions(tokenizer: Tokenizer, rng: random.Random, count: int) -> list[dict[str, str]]:
    """Questions whose lengths differ, by few tokens."""
    least = rng.randint(*_NEW_TOKENS)
    lengths = rng.sample(range(least, least + count), count)
    return [{"role": "user", "content": _text(tokenizer, each, rng)} for each in lengths]


def _ask(served: Served, pids: list[int], name: str, messages: list[dict[str, str]]) -> _Time:
    """The time until the first text of the answer has come."""
    body = json.dumps({
        "model": name, "messages": messages, "max_tokens": 6, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    time.sleep(0.3)  # what was written or recorded after the last answer is over
    processor, wall, taken = threads_s(pids), time.perf_counter(), (0.0, 0.0)
    usage: dict[str, Any] = {}
    with above_the_server(2):
        served.connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = served.connection.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if not any(taken) and event["choices"] and event["choices"][0]["delta"].get("content"):
                    taken = time.perf_counter() - wall, threads_s(pids) - processor
                usage = event.get("usage") or usage
    return _Time(*taken, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def measure(model: Path, num_tokens: int, rounds: int, idle_s: float) -> dict[str, Any]:
    tokenizer, rng = load_tokenizer(model), random.Random(0)
    assert tokenizer is not None, f"{model} has no tokenizer"
    system = {"role": "system", "content": _text(tokenizer, num_tokens, rng)}
    found: dict[str, list[_Time]] = {"cold": [], "restored": [], "warm": []}
    overrides = json.dumps({"max_position_embeddings": num_tokens + 4096})
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            with Served(model, "--hf-overrides", overrides, "--prefix-cache-dir", folder) as served:
                name = json.loads(served.ask("GET", "/v1/models"))["data"][0]["id"]
                served.ask("GET", "/health")
                pids = descendants(served.process.pid)
                wake_before_the_engine(served.process.pid)
                for question in _questions(tokenizer, rng, _WARM_TURNS):
                    _ask(served, pids, name, [question])
                time.sleep(idle_s)
                for turn, question in enumerate(_questions(tokenizer, rng, 1 + _WARM_TURNS)):
                    kind = "warm" if turn else "restored" if number else "cold"
                    found[kind].append(_ask(served, pids, name, [system, question]))
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
    parser.add_argument("--idle", type=float, default=2.0, help="seconds between the short questions and the long chat")
    asked = parser.parse_args()
    results = [measure(model, asked.tokens, asked.rounds, asked.idle) for model in asked.models]
    print(json.dumps({"results": results, "environment": describe_machine()}, indent=1))


if __name__ == "__main__":
    main()
