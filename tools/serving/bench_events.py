"""Measures the server process's cost per stream event, and events per second.

    python tools/serving/bench_events.py --streams 200 --tokens 400 [--json FILE]

The engine is a thread that answers every open request with one token a step, and starts a step when the server has
delivered the previous one; so this measures only the server: bridge, text pipeline, JSON, framing, HTTP, the socket. A
second process reads. Cost is the CPU time of the whole server process, engine thread included, over the events.
`loop_ns` is the machine's speed meanwhile: the cost of an empty loop's iteration. Compare runs of the same value, or
ratios."""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import multiprocessing
import multiprocessing.connection
import pstats
import selectors
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TEXT = (
    "The quick brown fox jumps over the lazy dog, and then it sat down by the river to think about what it had seen. "
    "Nobody had told it that dogs can be so lazy in the middle of a working day. "
)


def loop_ns() -> float:
    """CPU nanoseconds per iteration of a plain loop: this core's present speed, under its present load."""
    begin, total = time.thread_time(), 0
    for number in range(2_000_000):
        total += number
    return (time.thread_time() - begin) / 2_000_000 * 1e9


def serve(connection: multiprocessing.connection.Connection, options: dict[str, Any]) -> None:
    """The server process: reports its port, waits for the end, reports its CPU seconds and the times of sending."""
    import asyncio

    import uvicorn

    import models.demo
    from runtime.engine.messages import EngineInfo, EngineOutput, EngineStats, RequestTimes
    from runtime.text.load import load_tokenizer
    from server.app import create_app
    from server.transport.protocol import uvicorn_config

    folder = Path(models.demo.__file__).resolve().parent
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None, "the bundled model has one"
    ids = list(itertools.islice(itertools.cycle(tokenizer.encode(TEXT)), options["tokens"]))

    class Engine:
        """Starts answering when all `streams` requests have arrived."""

        info = EngineInfo(
            model_name="bench", model_path="", architecture="none", device="cpu", dtype="float32", vocab_size=1 << 20,
            eos_token_ids=(), max_model_len=1 << 20, max_num_seqs=4096, max_num_batched_tokens=4096, max_waiting=4096,
            block_size=16, num_blocks=1, kv_cache_bytes=0, weight_bytes=0,
        )  # fmt: skip
        state = "ready"

        def __init__(self) -> None:
            self.open: list[Any] = []
            self.loop: asyncio.AbstractEventLoop | None = None
            self.seconds = self.cpu_seconds = self.loop_ns = 0.0
            self.has_ended = threading.Event()

        def submit(self, request: Any, sink: Any) -> None:
            self.loop = asyncio.get_running_loop()
            self.open.append((request, sink))
            if len(self.open) == options["streams"]:
                threading.Thread(target=self.run, daemon=True).start()

        def run(self) -> None:
            assert self.loop is not None
            time.sleep(0.5)
            before_ns = loop_ns()
            handed_out = threading.Event()
            begin, cpu = time.monotonic(), time.process_time()
            now = time.monotonic()
            times = RequestTimes(arrival_s=now, first_scheduled_s=now, first_token_s=now, last_token_s=now)
            for step, token_id in enumerate(ids):
                is_last = step == len(ids) - 1
                for request, sink in self.open:
                    sink(
                        EngineOutput(
                            request_id=request.request_id,
                            index=0,
                            new_token_ids=[token_id],
                            num_prompt_tokens=len(request.prompt_token_ids),
                            finish_reason="length" if is_last else None,
                            times=times if is_last else None,
                        )
                    )
                handed_out.clear()
                self.loop.call_soon_threadsafe(self.loop.call_soon, handed_out.set)
                handed_out.wait()
            self.seconds = time.monotonic() - begin
            time.sleep(0.2)  # the last writes
            self.cpu_seconds = time.process_time() - cpu
            self.loop_ns = (before_ns + loop_ns()) / 2
            self.has_ended.set()

        def pause(self, request_id: str) -> None:
            """Does nothing: the engine does not wait for slow readers."""

        def resume(self, request_id: str) -> None:
            """Does nothing: it was never paused."""

        def cancel(self, request_id: str, index: int | None = None) -> None:
            pass

        def stats(self) -> EngineStats:
            return EngineStats(
                num_running=0, num_waiting=0, max_waiting=1, num_blocks=1, num_free_blocks=1, kv_cache_usage=0.0,
                num_preemptions=0, num_steps=0, prompt_tokens=0, generation_tokens=0, num_requests=0, num_errors=0,
                last_step_s=0.0,
            )  # fmt: skip

    engine = Engine()
    app = create_app(engine, tokenizer)  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        settings = uvicorn_config(app, app.config)
        if options["http"] != "ours":
            settings.http = options["http"]
            settings.h11_max_incomplete_event_size = app.config.max_header_bytes
        server = uvicorn.Server(settings)
        profile = cProfile.Profile(time.thread_time)

        def run() -> None:
            if options["profile"]:
                profile.runcall(server.run, sockets=[listener])
            else:
                server.run(sockets=[listener])

        thread = threading.Thread(target=run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        connection.send(listener.getsockname()[1])
        connection.recv()
        assert engine.has_ended.wait(10)
        server.should_exit = True
        thread.join()
        if options["profile"]:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    connection.send((engine.seconds, engine.cpu_seconds, engine.loop_ns))


def read(port: int, streams: int, route: str) -> int:
    """Requests the streams and reads them to their ends; returns the number of events."""
    ask: dict[str, Any]
    if route == "chat":
        path, ask = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
    else:
        path, ask = "/v1/completions", {"prompt": "hi"}
    body = json.dumps({"model": "bench", "stream": True, "max_tokens": 100_000, **ask}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ)
    num_events, num_open = 0, streams
    while num_open:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
            num_events += data.count(b"data: {")
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                num_open -= 1
        time.sleep(0.001)
    return num_events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--route", choices=("chat", "completions"), default="chat")
    parser.add_argument("--http", choices=("ours", "h11", "httptools"), default="ours", help="the HTTP protocol")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="print where the event loop's thread spends its time")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results = []
    for _ in range(options.runs):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs, vars(options)))
        process.start()
        num_events = read(ours.recv(), options.streams, options.route)
        ours.send("end")
        seconds, cpu_seconds, turn_ns = ours.recv()
        process.join()
        num_tokens = options.streams * options.tokens
        assert num_events >= num_tokens * 0.9, f"{num_events} events came, of {num_tokens} tokens"
        results.append(
            {
                "streams": options.streams,
                "tokens": options.tokens,
                "route": options.route,
                "http": options.http,
                "events": num_events,
                "cpu_us_per_event": round(cpu_seconds / num_events * 1e6, 2),
                "events_per_s": round(num_events / seconds),
                "loop_ns": round(turn_ns, 1),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
