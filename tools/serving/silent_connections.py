"""Opens thousands of silent connections, and then sends requests to a running server.

    python tools/serving/silent_connections.py --url http://127.0.0.1:8000 [--num 3200] [--beginning silent|head|body]
                                       [--seconds 15] [--output-json FILE]

Every 100 ms a chat of one token and `GET /health` begin, each on a connection of its own, while the others stay open.
Prints their times and the number without an answer. Exit status 1 if there was one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

BEGINNINGS = {
    "silent": b"",
    "head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-",
    "body": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 100\r\n\r\n{"messages"',
}
CHAT = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}).encode()
ASKED = {
    "health": b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "chat": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(CHAT)
    + CHAT,
}
EVERY_S, TIMEOUT_S = 0.1, 30.0


async def ask(host: str, port: int, request: bytes) -> float | None:
    """Seconds until the whole answer with status 200, or None without one."""
    start = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            answer = await reader.read()
            writer.close()
    except (OSError, TimeoutError):
        return None
    return time.monotonic() - start if answer.startswith(b"HTTP/1.1 200 ") else None


async def hold(host: str, port: int, beginning: bytes, num: int) -> list[asyncio.StreamWriter]:
    """Opens so many connections at once that have sent this; returns those that the system accepted."""

    async def one() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(host, port)
        writer.write(beginning)
        return writer

    opened = await asyncio.gather(*(one() for _ in range(num)), return_exceptions=True)
    return [each for each in opened if isinstance(each, asyncio.StreamWriter)]


async def measure(host: str, port: int, beginning: bytes, num: int, seconds: float) -> dict[str, dict[str, float]]:
    """By kind of request: the numbers sent and unanswered, and milliseconds."""
    held = await hold(host, port, beginning, num)
    began, tasks = time.monotonic(), []
    while (elapsed := time.monotonic() - began) < seconds:
        tasks += [(kind, asyncio.create_task(ask(host, port, request))) for kind, request in ASKED.items()]
        await asyncio.sleep(max(0.0, (elapsed // EVERY_S + 1) * EVERY_S - (time.monotonic() - began)))
    found: dict[str, dict[str, float]] = {}
    for kind in ASKED:
        took = [await task for name, task in tasks if name == kind]
        times = sorted(1e3 * each for each in took if each is not None)
        found[kind] = {"sent": len(took), "unanswered": took.count(None)}
        if times:
            p99 = times[min(len(times) - 1, round(0.99 * len(times)))]
            found[kind] |= {"p50_ms": round(statistics.median(times), 1), "p99_ms": round(p99, 1)}
            found[kind]["max_ms"] = round(times[-1], 1)
    for writer in held:
        writer.close()
    return found


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--num", type=int, default=3200)
    parser.add_argument("--beginning", choices=BEGINNINGS, default="silent")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    options = parser.parse_args()
    address = urlsplit(options.url)
    if address.hostname is None or address.port is None:
        parser.error(f"--url {options.url!r} must have a host and a port")
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = options.num + 1000
    if needed > limit:
        if needed > hard != resource.RLIM_INFINITY:
            parser.error(f"--num {options.num} needs {needed} open files, and {hard} are allowed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    found = asyncio.run(
        measure(address.hostname, address.port, BEGINNINGS[options.beginning], options.num, options.seconds)
    )
    result = {"connections": options.num, "beginning": options.beginning, **found}
    print(json.dumps(result, indent=2))
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(any(each["unanswered"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
