"""The time of a swap of models, and whether those beside it notice.

    python -m tools.serving.time_swaps --embed FOLDER [--seconds 20] [--rounds 3] [--json FILE]

Starts `xserv serve` with a chat model, a model that reads pictures and an encoder, which answer clients all the time,
and two more chat models of which one fits beside them. In every other phase these take turns: each request of theirs
puts the one to sleep and wakes the other. Prints the time of such a request beside that of one for a model that is
awake, and the p50 and p99 of the others with and without swaps. Exit status 1 if an answer was lost."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from runtime.bench.environment import describe_machine

ROOT = Path(__file__).resolve().parents[2]
VISION = ROOT / "models" / "demo_vision"
KV_CACHE_BYTES = 64 << 20
ONE = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 1}


def config_of(encoder: str) -> dict[str, Any]:
    chat = {"model": str(ROOT / "models" / "demo"), "kv-cache-bytes": KV_CACHE_BYTES, "max-model-len": 512}
    return {
        "models": {
            "chat": {**chat, "priority": 1},
            "vision": {**chat, "model": str(VISION), "priority": 1},
            "embed": {"model": encoder, "priority": 1},
            "one": chat,
            "other": chat,
        }
    }


def requests_of() -> dict[str, tuple[str, dict[str, Any]]]:
    chart = base64.b64encode((VISION / "chart.png").read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{chart}"}}
    asked = [picture, {"type": "text", "text": "Which bar is the largest?"}]
    return {
        "chat": ("/v1/chat/completions", {**ONE, "max_tokens": 16}),
        "vision": ("/v1/chat/completions", {"messages": [{"role": "user", "content": asked}], "temperature": 0}),
        "embed": ("/v1/embeddings", {"input": ["a short text", "another"]}),
    }


async def ask(http: httpx.AsyncClient, model: str, path: str, body: dict[str, Any], lost: list[str]) -> float:
    """Seconds until the answer is there; one that is none is listed."""
    begun_s = time.perf_counter()
    answer = await http.post(path, json={"model": model, **body})
    if answer.status_code != 200:
        lost.append(f"{model}: {answer.status_code} {answer.text[:200]}")
    return time.perf_counter() - begun_s


async def measure(url: str, seconds: float, rounds: int) -> dict[str, Any]:
    lost: list[str] = []
    asked, phase = requests_of(), "quiet"
    times: dict[str, dict[str, list[float]]] = {name: {"quiet": [], "swapping": []} for name in asked}
    swaps: list[float] = []
    awake: list[float] = []
    is_over = asyncio.Event()

    async with httpx.AsyncClient(base_url=url, timeout=300) as http:

        async def drive(name: str) -> None:
            while not is_over.is_set():
                began = phase
                took_s = await ask(http, name, *asked[name], lost)
                if began == phase:
                    times[name][phase].append(took_s)

        drivers = [asyncio.create_task(drive(name)) for name in asked for _ in range(2)]
        for number in range(2 * rounds):
            phase = ("quiet", "swapping")[number % 2]
            end_s, turn = time.perf_counter() + seconds, 0
            while time.perf_counter() < end_s:
                if phase == "swapping":
                    name, turn = ("one", "other")[turn % 2], turn + 1
                    swaps.append(await ask(http, name, "/v1/chat/completions", ONE, lost))
                    awake.append(await ask(http, name, "/v1/chat/completions", ONE, lost))
                await asyncio.sleep(0.5)
        is_over.set()
        await asyncio.gather(*drivers)
        states = (await http.get("/server_info")).json()["models"]
    return {
        "swap_s": summary(swaps[2:]),  # the first ones load the models
        "awake_s": summary(awake[2:]),
        "beside": {name: {kind: summary(found) for kind, found in of.items()} for name, of in times.items()},
        "p99_ratio": {name: round(p99(of["swapping"]) / p99(of["quiet"]), 3) for name, of in times.items()},
        "lost": lost,
        "status": {each["names"][0]: each["status"] for each in states},
    }


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def summary(values: list[float]) -> dict[str, float]:
    return {"count": len(values), "p50": round(statistics.median(values), 4), "p99": round(p99(values), 4),
            "least": round(min(values), 4), "most": round(max(values), 4)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embed", required=True, help="An encoder's folder.")
    parser.add_argument("--seconds", type=float, default=20.0, help="Seconds of a phase.")
    parser.add_argument("--rounds", type=int, default=3, help="Phases with swaps, and without.")
    parser.add_argument("--json", type=Path, help="File for the report.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "models.json"
        config.write_text(json.dumps(config_of(given.embed)), encoding="utf-8")
        serve = [sys.executable, "-m", "runtime.cli", "serve", "--models-config", str(config), "--models-max", "4",
                   "--port", "0", "--device", "cpu"]  # fmt: skip
        with subprocess.Popen(
            serve, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
        ) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split(" at ")[1].strip().removesuffix("/v1")
                report = asyncio.run(measure(url, given.seconds, given.rounds))
            finally:
                server.terminate()
    command = f"python -m tools.serving.time_swaps --embed FOLDER --seconds {given.seconds:g} --rounds {given.rounds}"
    report = {"command": command, **report, "environment": describe_machine()}
    text = json.dumps(report, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if report["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
