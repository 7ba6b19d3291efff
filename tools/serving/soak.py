"""A server under mixed traffic for minutes: is every answer right, and does memory stay flat?

    python tools/serving/soak.py --minutes 10 [--clients 8] [--seed N] [--json FILE]

Starts `xserv serve` with the bundled model on a free port of 127.0.0.1. Clients send chats, completions, several
choices, tool calls, JSON by schema, embeddings, responses, tokens; disconnect in mid-stream or before the answer; read
slowly; send invalid requests. Every answer is checked. Resources of server and engine are sampled during traffic and in
idle pauses: there no block may be in use, and files, threads and processes must be as many as in the first pause.
Memory is flat if no pause after the first third of the time has 16 MiB more than the pause that ends it. Exit status 1
if a check failed."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx

from runtime.bench.environment import describe_machine
from tools.serving.soaking.server_process import Holdings, ServerProcess, growth
from tools.serving.soaking.traffic import TIMEOUT_S, Record, Traffic

MOST_GROWTH = 16 << 20
PAUSE_EVERY_S = 15.0
SAMPLE_EVERY_S = 2.0
KV_CACHE_BYTES = 32 << 20
COUNTED = ("server_fds", "server_threads", "engine_fds", "engine_threads", "num_processes")


async def drive(server: ServerProcess, clients: int, until_s: float, seed: int, record: Record) -> list[Holdings]:
    """Runs traffic until the deadline; returns the resources held meanwhile."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as http:

        async def client(number: int) -> None:
            traffic = Traffic(http, server.port, random.Random(seed * 1000 + number), record)
            while time.monotonic() < until_s:
                await traffic.one()

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        samples = []
        while time.monotonic() < until_s:
            await asyncio.sleep(min(SAMPLE_EVERY_S, max(0.0, until_s - time.monotonic())))
            samples.append(await asyncio.to_thread(server.holdings))
        await asyncio.gather(*tasks)
    return samples


async def warm_up(server: ServerProcess, clients: int, seed: int, record: Record) -> None:
    """Runs as many of every kind at once as there are clients, to create one-time threads and buffers."""
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
        all_traffic = [Traffic(http, server.port, random.Random(seed * 1000 + i), record) for i in range(clients)]
        for kind in all_traffic[0].kinds:
            await asyncio.gather(*(traffic.one(kind.__name__) for traffic in all_traffic))


def soak(minutes: float, clients: int = 8, seed: int = 0, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the soak; the record's `failures` lists failed checks."""
    record = Record()
    failures: list[str] = []
    pauses: list[dict[str, Any]] = []
    busy: list[Holdings] = []
    quiet: list[tuple[float, Holdings]] = []
    arguments = ("--device", "cpu", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--slow-reader-timeout-s", "2")
    # The bundled model's template has no tools; calls can still be forced.
    with ServerProcess(*arguments, "--tool-call-parser", "hermes", "--log-level", "warning") as server:
        asyncio.run(warm_up(server, clients, seed, record))
        begun = time.monotonic()
        end = begun + minutes * 60
        round_number = 0
        while time.monotonic() < end:
            until = min(end, time.monotonic() + PAUSE_EVERY_S)
            busy += asyncio.run(drive(server, clients, until, seed * 1000 + round_number, record))
            round_number += 1
            try:
                held = server.settle(quiet[0][1].server_fds if quiet else None)
            except TimeoutError as error:
                failures.append(str(error))
                break
            second = time.monotonic() - begun
            quiet.append((second, held))
            pauses.append({"second": round(second, 1), "requests": record.counts.total(), **held.as_dict()})
            report(json.dumps(pauses[-1]))
        metrics = server.metrics()
        log = server.log
    duration_s = quiet[-1][0] if quiet else 0.0
    third = [held for second, held in quiet if second >= duration_s / 3]
    base = third[0] if third else None
    for held in third[1:]:
        assert base is not None
        if grown := growth(base, held, COUNTED):
            failures.append(f"more than before: {grown}")
        sizes = growth(base, held, ("server_rss", "engine_rss"))
        failures += [f"{name} grew by {size} bytes" for name, size in sizes.items() if size > MOST_GROWTH]
    if record.num_wrong:
        failures.append(f"{record.num_wrong} answers were wrong")
    if "Traceback" in log:
        failures.append(f"the log has a traceback: {log[log.index('Traceback') :][:1000]}")
    return {
        "tool": "tools/serving/soak.py",
        "minutes": minutes,
        "clients": clients,
        "seed": seed,
        "commit": commit(),
        "environment": describe_machine(),
        "duration_s": round(duration_s, 1),
        "num_requests": record.counts.total(),
        "requests": dict(sorted(record.counts.items())),
        "completion_tokens": record.tokens,
        "engine_generation_tokens": int(metrics["xserv:generation_tokens_total"]),
        "num_wrong": record.num_wrong,
        "wrong": record.wrong,
        "growth_after_first_third": growth(base, third[-1], ("server_rss", "engine_rss")) if base else None,
        "most_while_busy": {
            name: max(getattr(held, name) for held in busy) for name in (Holdings.__slots__ if busy else ())
        },
        "pauses": pauses,
        "failures": failures,
    }


def commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, encoding="utf-8"
    )
    return done.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = soak(options.minutes, options.clients, options.seed)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in record.items() if name != "pauses"}, indent=1))
    sys.exit(1 if record["failures"] else 0)


if __name__ == "__main__":
    main()
