"""Sends a server thousands of valid, invalid and corrupted requests, and checks its answers.

    python tools/serving/fuzz_api.py [--cases 20000] [--seed N] [--clients 4] [--json FILE]

Starts `xserv serve` with the bundled model on a free port of 127.0.0.1. Requests come from schemathesis, by the
server's own /openapi.json: allowed and forbidden ones. Each one with a body is repeated twice, corrupted: NUL bytes and
control characters in its strings and keys, invalid UTF-8, truncation, other numbers; raw bytes also go into request
lines and headers. An answer is right if it is in time, not a 5xx, and as described: status, media type, JSON, each
event of a stream. At the end the server must be alive and hold no requests."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import re
import socket
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema_rs
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.serving.soaking.server_process import ServerProcess

PACKAGES = ("schemathesis", "hypothesis", "uvicorn", "starlette", "msgspec")

TIMEOUT_S = 60.0
"""An answer that takes longer counts as a hang."""

MAX_FAILURES = 50
MAX_SLOWEST = 20
WATCHED_BYTES = 2000
"""The most that is read of a stream that has no end."""

NUM_SPOILT = 2
RAW_SHARE = 0.03
"""The share of cases with request lines and headers that no HTTP client would send."""

BODY_WEIGHT = 12
"""How much oftener an operation with a body is asked than one without."""

CONTROL = [chr(code) for code in (0, 1, 7, 8, 9, 10, 13, 27, 31, 127, 0x85, 0x2028, 0xFEFF, 0xFFFE)]


@dataclass
class Record:
    """The sent requests and their answers."""

    seed: int
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest: list[tuple[float, str, int]] = field(default_factory=list)
    num_cases: int = 0
    num_failures: int = 0

    def add(
        self, route: str, kind: str, status: int | str, seconds: float, num_bytes: int, problem: str | None
    ) -> None:
        self.num_cases += 1
        if self.num_cases % 500 == 0:
            print(f"seed {self.seed}: {self.num_cases} cases, {self.num_failures} wrong", file=sys.stderr, flush=True)
        self.statuses.setdefault(f"{route} ({kind})", Counter())[str(status)] += 1
        self.slowest = sorted([*self.slowest, (round(seconds, 3), f"{route} ({kind})", num_bytes)], reverse=True)
        del self.slowest[MAX_SLOWEST:]
        if problem is not None:
            self.num_failures += 1

    def fail(self, route: str, problem: str, sent: object) -> None:
        if len(self.failures) < MAX_FAILURES:
            self.failures.append({"route": route, "problem": problem[:500], "sent": repr(sent)[:2000]})

    def merge(self, other: Record) -> None:
        """Adds another client's record of the same server."""
        for route, counts in other.statuses.items():
            self.statuses.setdefault(route, Counter()).update(counts)
        self.failures = [*self.failures, *other.failures][:MAX_FAILURES]
        self.slowest = sorted([*self.slowest, *other.slowest], reverse=True)[:MAX_SLOWEST]
        self.num_cases += other.num_cases
        self.num_failures += other.num_failures

    def summary(self) -> dict[str, Any]:
        by_status: Counter[str] = Counter()
        for counts in self.statuses.values():
            by_status.update(counts)
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {platform.system()}",
            "versions": {name: version(name) for name in PACKAGES},
            "seed": self.seed,
            "num_cases": self.num_cases,
            "num_failures": self.num_failures,
            "by_status": dict(sorted(by_status.items())),
            "by_route": {route: dict(sorted(counts.items())) for route, counts in sorted(self.statuses.items())},
            "slowest": [{"seconds": s, "route": route, "body_bytes": size} for s, route, size in self.slowest],
            "failures": self.failures,
        }


class Fuzzer:
    """Sends cases to the server at `url` and checks its answers against its own description."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.record = Record(seed)
        self.random = random.Random(seed)
        self.session = requests.Session()
        self.session.trust_env = False
        self.description = self.session.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
        self._validators: dict[str, Any] = {}

    def run(self, num_cases: int) -> None:
        """Runs the requested number of cases, or a few more."""
        results: list[Any] = list(schemathesis.openapi.from_dict(self.description).get_all_operations())
        operations = [result.ok() for result in results]
        num_raw = round(num_cases * RAW_SHARE)
        for _ in range(num_raw):
            self._send_raw()
        jobs = [(each, mode) for each in operations for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]
        end, is_first = self.record.num_cases + num_cases - num_raw, True
        while jobs and self.record.num_cases < end:  # finite operations' shares go to others
            left = end - self.record.num_cases
            weights = [BODY_WEIGHT if operation.body else 1 for operation, _ in jobs]
            shares = [-(-left * weight // sum(weights)) for weight in weights]
            jobs = [
                (operation, mode)
                for (operation, mode), share in zip(jobs, shares, strict=True)
                if self._run_operation(operation, mode, share, is_first) and operation.body
            ]
            is_first = False

    def _run_operation(self, operation: Any, mode: GenerationMode, num_cases: int, is_first: bool) -> bool:
        """Runs about so many cases, corrupted ones included. Returns whether there are more."""
        before = self.record.num_cases
        seed = self.record.seed if is_first else self.random.getrandbits(32)

        @seeded(seed)
        @settings(
            max_examples=-(-num_cases // (1 + NUM_SPOILT)) if operation.body else num_cases,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            self._send(case, mode.value)

        try:
            send()
        except Unsatisfiable:  # this route has no forbidden requests
            return False
        return self.record.num_cases - before > num_cases // 2

    def _send(self, case: Any, kind: str) -> None:
        arguments = case.as_transport_kwargs(base_url=self.url)
        body = arguments.get("data")
        if "json" in arguments:
            body = json.dumps(_with_integers(arguments.pop("json"))).encode("utf-8", "surrogatepass")
        headers = {key: value for key, value in (arguments.get("headers") or {}).items() if "\n" not in str(value)}
        if case.operation.body and "content-type" not in {key.lower() for key in headers}:
            headers["Content-Type"] = "application/json"
        self._ask(case.operation, kind, arguments["url"], headers, body)
        for _ in range(NUM_SPOILT if case.operation.body else 0):
            self._ask(case.operation, "spoilt", arguments["url"], headers, self._spoilt(body))

    def _ask(self, operation: Any, kind: str, url: str, headers: dict[str, str], body: Any) -> None:
        route = f"{operation.method.upper()} {operation.path}"
        described = self.description["paths"][operation.path][operation.method]["responses"]
        started = time.monotonic()
        status: int | str = "hang"
        try:
            with self.session.request(
                operation.method, url, data=body, headers=headers, timeout=TIMEOUT_S, stream=True
            ) as answer:
                status = answer.status_code
                problem = self._problem(answer, described, started)
        except requests.RequestException as error:
            problem = f"{type(error).__name__}: {error}"
            status = "hang" if isinstance(error, requests.Timeout) else "broken"
        seconds = time.monotonic() - started
        size = len(body) if isinstance(body, bytes) else 0
        self.record.add(route, kind, status, seconds, size, problem)
        if problem is not None:
            self.record.fail(route, problem, (url, body))

    def _problem(self, answer: requests.Response, described: dict[str, Any], started: float) -> str | None:
        """The problem of an answer, or None."""
        media_type = answer.headers.get("content-type", "").partition(";")[0]
        content = b""
        for chunk in answer.iter_content(None):
            content += chunk
            if time.monotonic() - started > TIMEOUT_S:
                raise requests.Timeout("the answer has no end")
            if len(content) > WATCHED_BYTES and answer.url.endswith("/live"):
                break
        if answer.status_code >= 500:
            return f"status {answer.status_code}: {content[:300]!r}"
        if str(answer.status_code) not in described:
            return f"status {answer.status_code} is not described: {content[:300]!r}"
        contents = described[str(answer.status_code)]["content"]
        if media_type not in contents and "*/*" not in contents:
            return f"media type {media_type!r} is not described for {answer.status_code}"
        if media_type == "application/json":
            return self._mismatch(contents[media_type]["schema"], content)
        if media_type in ("text/event-stream", "application/x-ndjson") and not answer.url.endswith("/live"):
            lines = content.split(b"\n")
            if media_type == "text/event-stream":
                lines = [line[6:] for line in lines if line.startswith(b"data: ") and line != b"data: [DONE]"]
            for line in filter(None, lines):
                problem = self._mismatch(contents[media_type]["x-event-data"], line)
                if problem is not None:
                    return problem
        return None

    def _mismatch(self, schema: dict[str, Any], content: bytes) -> str | None:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._validators:
            whole = {**schema, "components": self.description["components"]}
            self._validators[key] = jsonschema_rs.validator_for(whole)
        try:
            value = json.loads(content)
        except ValueError as error:
            return f"no JSON ({error}): {content[:300]!r}"
        wrong = next(self._validators[key].iter_errors(value), None)
        return None if wrong is None else f"{wrong.message} at {list(wrong.instance_path)}: {content[:300]!r}"

    def _spoilt(self, body: Any) -> bytes:
        data = body if isinstance(body, bytes) else str(body or "").encode("utf-8", "surrogatepass")
        way = self.random.randrange(6)
        if way == 0:  # within strings and keys, escaped as JSON wants it
            control = self.random.choice(CONTROL)
            text = data.decode("utf-8", "replace")
            places = [match.end() for match in re.finditer(r'"', text)] or [0]
            place = self.random.choice(places)
            escaped = json.dumps(control)[1:-1]
            return (text[:place] + escaped * self.random.choice((1, 3, 300)) + text[place:]).encode()
        place = self.random.randint(0, len(data))
        if way == 1:  # raw, where JSON forbids them
            wrong = self.random.choice((b"\0", b"\x01", b"\x7f", b"\xff", b"\xc3", b"\xed\xa0\x80"))
            return data[:place] + wrong + data[place:]
        if way == 2:
            return data[:place]
        if way == 3:
            return b"[" * self.random.choice((10, 1000, 100_000))
        if way == 4:
            return bytes(self.random.randrange(256) for _ in range(self.random.randrange(200)))
        return re.sub(rb"\d+", lambda match: match.group() * self.random.choice((1, 40)), data)

    def _send_raw(self) -> None:
        """Sends a request line or a header with invalid bytes: any answer below 500, or none, is right."""
        paths = list(self.description["paths"])
        path = self.random.choice(paths).encode()
        nasty = bytes(self.random.choices((0, 1, 9, 11, 27, 37, 127, 128, 255), k=self.random.randint(1, 9)))
        place = self.random.randrange(5)
        line = b"GET " + path + (nasty if place == 0 else b"") + b"?a=" + (nasty if place == 1 else b"") + b" HTTP/1.1"
        if place == 2:
            line = nasty + line
        header = b"X-Request-Id: " + (nasty if place == 3 else b"x")
        name = b"X-" + (nasty if place == 4 else b"a") + b": b"
        request = b"\r\n".join((line, b"Host: 127.0.0.1", header, name, b"Connection: close", b"", b""))
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        started, content, problem = time.monotonic(), b"", None
        try:
            with closing(socket.create_connection((parts.hostname, parts.port or 80), timeout=TIMEOUT_S)) as connection:
                connection.sendall(request)
                while (chunk := connection.recv(65536)) and len(content) < WATCHED_BYTES:
                    content += chunk
        except TimeoutError:
            problem = "hang"
        except ConnectionError:
            pass
        found = re.match(rb"HTTP/1\.1 (\d{3}) ", content)
        status: int | str = "hang" if problem else int(found.group(1)) if found else "closed"
        if isinstance(status, int) and status >= 500:
            problem = f"status {status}: {content[:300]!r}"
        self.record.add("raw bytes", "raw", status, time.monotonic() - started, len(request), problem)
        if problem is not None:
            self.record.fail("raw bytes", problem, request)

    def check_rest(self) -> None:
        """Checks that the server lives, and that nothing runs or waits any more."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            health = self.session.get(f"{self.url}/health", timeout=TIMEOUT_S)
            metrics = self.session.get(f"{self.url}/metrics", timeout=TIMEOUT_S).text
            found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", metrics, re.MULTILINE)
            if health.status_code == 200 and found and not any(map(float, found)):
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"the server is not at rest: health {health.status_code}, requests {found}")
            time.sleep(0.2)


def _with_integers(value: Any) -> Any:
    """1.0 as 1: the same number in JSON Schema, but not for a server that is strict about fractions."""
    if isinstance(value, dict):
        return {key: _with_integers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def ask(url: str, seed: int, num_cases: int) -> Record:
    """One client's share."""
    fuzzer = Fuzzer(url, seed)
    fuzzer.run(num_cases)
    return fuzzer.record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--clients", type=int, default=4, help="ask at the same time, each with a seed of its own")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    started = time.monotonic()
    with ServerProcess("--max-model-len", "128", "--log-level", "error") as server:  # a short context: short answers
        url, fuzzer = server.url, Fuzzer(server.url, options.seed)
        shares = [(url, options.seed + i, -(-options.cases // options.clients)) for i in range(options.clients)]
        with multiprocessing.get_context("spawn").Pool(options.clients) as pool:
            for record in pool.starmap(ask, shares):
                fuzzer.record.merge(record)
        fuzzer.check_rest()
        if server.child.poll() is not None:
            raise AssertionError("the server has ended")
    seconds = round(time.monotonic() - started, 1)
    text = json.dumps({**fuzzer.record.summary(), "clients": options.clients, "seconds": seconds}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    if fuzzer.record.num_failures:
        sys.exit(f"{fuzzer.record.num_failures} of {fuzzer.record.num_cases} answers were wrong")


if __name__ == "__main__":
    main()
