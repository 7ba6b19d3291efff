"""Measures the cost of a client that requests much and reads nothing.

    python tools/serving/stalled_reader.py --url http://127.0.0.1:8000 --pid PID [--n 128] [--seconds 20]
            [--output-json FILE]

Requests a stream of many choices with log probabilities from a running server of process id PID, reads nothing for so
many seconds, and samples the server's memory; then it reads everything and counts the tokens. The server needs a longer
`--slow-reader-timeout-s`.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

EVENT = re.compile(rb'"choices":\[\{"index":(\d+),"delta":\{"content":')


def resident_bytes(pid: int) -> int:
    """The process's resident memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found.group(1))


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--n", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    options = parser.parse_args()
    address = urlsplit(options.url)
    asked = {
        "messages": [{"role": "user", "content": "Count from one to a hundred."}], "stream": True, "ignore_eos": True,
        "n": options.n, "max_tokens": options.max_tokens, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = resident_bytes(options.pid)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        most, end = before, time.monotonic() + options.seconds
        while time.monotonic() < end:
            most = max(most, resident_bytes(options.pid))
            time.sleep(0.1)
        received = bytearray()
        while data := connection.recv(1 << 20):
            received += data
    counts = Counter(EVENT.findall(received))
    result = {
        "n": options.n,
        "max_tokens": options.max_tokens,
        "seconds_without_reading": options.seconds,
        "resident_mib_before": round(before / 2**20, 1),
        "most_resident_mib": round(most / 2**20, 1),
        "answer_mib": round(len(received) / 2**20, 1),
        "is_whole": received.endswith(b"data: [DONE]\n\n") and len(counts) == options.n,
    }
    print(json.dumps(result, indent=2))
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(not result["is_whole"])


if __name__ == "__main__":
    sys.exit(main())
