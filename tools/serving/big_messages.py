"""Measures the stalls of other clients while one sends a big request, or gets a big answer.

    python tools/serving/big_messages.py --url http://127.0.0.1:8000 [--pid PID] [--cases idle ids ...]
            [--output-json FILE]

While each big request is on its way, a chat is streamed again and again, and `GET /health` begins every 10 ms, each on
a connection of its own. Prints, for each case, the big answer's size and time, the longest silence within a stream, and
the longest wait for `/health`. The stream also waits for the engine, which is busy with the same answer; `/health`
needs only the server. Run it on an idle server; "idle" has the baseline.

On a shared machine, times depend on other load. With the server's process id, on this machine, the CPU time of its
threads is read from Linux: "cpu" is the most during a silence or a wait, which is its length on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HEALTH_EVERY_S = 0.01
IDLE_S = 5.0
ASKED = [{"role": "user", "content": "Count from one to a hundred."}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": ASKED, "ignore_eos": True, **fields}


CASES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "idle": None,
    "logprobs": ("/v1/chat/completions", chat(n=128, max_tokens=400, logprobs=True, top_logprobs=20)),
    "legacy logprobs": (
        "/v1/completions",
        {"prompt": "One", "n": 128, "max_tokens": 400, "logprobs": 20, "ignore_eos": True},
    ),
    "prompt logprobs": ("/v1/completions", {"prompt": [[9] * 2000] * 16, "max_tokens": 1, "prompt_logprobs": 20}),
    "ids": ("/v1/completions", {"prompt": [7] * 1_200_000, "max_tokens": 1}),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello " * 300}] * 4000}),
    "text": ("/v1/completions", {"prompt": "How many words has a text? " * 280_000, "max_tokens": 1}),
    "tokenize": ("/tokenize", {"prompt": "How many words has a text? " * 280_000, "return_token_strs": True}),
    "embeddings": ("/v1/embeddings", {"input": ["How many words has a text?"] * 256}),
}
"""Path and body of each big request; None: nothing is sent for a while."""


@dataclass(slots=True)
class Seen:
    """The other clients' silences within streams, and waits for `/health`, each in seconds of wall time and of the
    server's CPU time."""

    pid: int | None
    gaps: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def now(self) -> tuple[float, float]:
        return time.monotonic(), 0.0 if self.pid is None else run_time_s(self.pid)

    def since(self, start: tuple[float, float]) -> tuple[float, float]:
        now = self.now()
        return now[0] - start[0], now[1] - start[1]


def run_time_s(pid: int) -> float:
    """The CPU time of a process's threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            total += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
    return total / 1e9


def request(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def stream(host: str, port: int, seen: Seen) -> None:
    """Streams one chat after another. The time to a chat's first token is not counted."""
    body = json.dumps(chat(stream=True, max_tokens=1900)).encode()
    while True:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(request("POST", "/v1/chat/completions", body))
            await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"\n\n")  # the role
            await reader.readuntil(b"\n\n")
            last = seen.now()
            while await reader.read(1 << 16):
                seen.gaps.append(seen.since(last))
                last = seen.now()
        finally:
            writer.close()


async def watch_health(host: str, port: int, seen: Seen) -> None:
    """Requests `/health` periodically, independently of earlier answers."""

    async def ask() -> None:
        start = seen.now()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request("GET", "/health"))
        await reader.read()
        writer.close()
        seen.waits.append(seen.since(start))

    tasks: set[asyncio.Task[None]] = set()
    try:
        while True:
            task = asyncio.create_task(ask())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(HEALTH_EVERY_S)
    finally:
        await asyncio.gather(*tasks)


def post(host: str, port: int, path: str, body: bytes) -> tuple[int, int]:
    """Status and bytes of the whole answer. Blocks: it has a thread of its own, and sockets let the others run."""
    import socket

    with socket.create_connection((host, port)) as connection:
        connection.sendall(request("POST", path, body))
        first = connection.recv(1 << 20)
        num_bytes = len(first)
        while data := connection.recv(1 << 20):
            num_bytes += len(data)
    return int(first.split(b" ", 2)[1]), num_bytes


async def measure(host: str, port: int, pid: int | None, case: tuple[str, dict[str, Any]] | None) -> dict[str, Any]:
    seen = Seen(pid)
    found: dict[str, Any] = {}
    body = b"" if case is None else json.dumps(case[1]).encode()
    others = [asyncio.create_task(stream(host, port, seen)), asyncio.create_task(watch_health(host, port, seen))]
    await asyncio.sleep(0.5)
    seen.gaps.clear()
    seen.waits.clear()
    start = time.monotonic()
    if case is None:
        await asyncio.sleep(IDLE_S)
    else:
        status, num_bytes = await asyncio.to_thread(post, host, port, case[0], body)
        found = {"status": status, "sent_bytes": len(body), "answer_bytes": num_bytes}
    found["seconds"] = round(time.monotonic() - start, 2)
    await asyncio.sleep(0.5)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for name, times in (("gap", seen.gaps), ("health", seen.waits)):
        found[f"largest_{name}_ms"] = round(1e3 * max((each for each, _ in times), default=0.0), 1)
        if pid is not None:
            found[f"largest_{name}_cpu_ms"] = round(1e3 * max((each for _, each in times), default=0.0), 1)
    return found


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    options = parser.parse_args()
    address = urlsplit(options.url)
    if address.hostname is None or address.port is None:
        parser.error(f"--url {options.url!r} must have a host and a port")
    if options.pid is not None and not Path(f"/proc/{options.pid}").exists():
        parser.error(f"--pid {options.pid}: there is no such process")
    result = {}
    for name in options.cases:
        result[name] = asyncio.run(measure(address.hostname, address.port, options.pid, CASES[name]))
        print(name, json.dumps(result[name]), flush=True)
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
