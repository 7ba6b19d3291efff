"""Sends randomly corrupted pictures to a running server: each must be answered by 200 or 400.

    python tools/serving/fuzz_pictures.py --url http://127.0.0.1:8000 --cases 5000 --clients 4 --pid PID

Files of every supported format, with bytes changed, cut, doubled or concatenated, are sent as data: URIs. With the
server's process id, its memory and its children's is printed before and after.
"""

from __future__ import annotations

import argparse
import base64
import collections
import io
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from PIL import Image


def seeds() -> list[bytes]:
    """Valid files of small pictures."""
    chance = random.Random(0)
    image = Image.frombytes("RGB", (48, 32), chance.randbytes(48 * 32 * 3))
    modes = [image, *(image.convert(mode) for mode in ("L", "LA", "P", "RGBA", "1", "CMYK"))]
    found = []
    for mode in modes:
        for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
            file = io.BytesIO()
            try:
                mode.save(file, name)
            except (OSError, ValueError):
                continue  # a format that has no such mode
            found.append(file.getvalue())
    return found


def bent(data: bytes, chance: random.Random) -> bytes:
    """A file with some of its bytes changed."""
    changed = bytearray(data)
    for _ in range(chance.choice((0, 1, 1, 3, 10, 100))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    match chance.randrange(6):
        case 0:
            del changed[chance.randrange(1, len(changed)) :]
        case 1:
            at = chance.randrange(len(changed))
            changed[at:at] = chance.randbytes(chance.randrange(1, 64))
        case 2:
            changed += bytes(changed)
    return bytes(changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pid", type=int, help="the server's process")
    options = parser.parse_args()
    files = seeds()
    answers: collections.Counter[str] = collections.Counter()

    def send(client: httpx.Client, number: int) -> None:
        chance = random.Random(options.seed * 1_000_003 + number)
        data = bent(chance.choice(files), chance)
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "stream": chance.random() < 0.3}
        answer = client.post("/v1/chat/completions", json=body)
        kind = str(answer.status_code)
        if answer.status_code == 400:
            kind += f" {answer.json()['error']['code']}"
        answers[kind] += 1

    before = memory(options.pid)
    with httpx.Client(base_url=options.url, timeout=600) as client, ThreadPoolExecutor(options.clients) as threads:
        for sent in [threads.submit(send, client, number) for number in range(options.cases)]:
            sent.result()
    for kind, count in sorted(answers.items()):
        print(f"{count:7,} {kind}")
    if options.pid is not None:
        print(f"memory of the server and its children: {before:.0f} MiB before, {memory(options.pid):.0f} MiB after")
    if set(answers) - {"200", "400 invalid_image"}:
        sys.exit("other answers than 200 and 400 invalid_image")


def memory(pid: int | None) -> float:
    """Private MiB of a process and its children."""
    if pid is None:
        return 0.0
    process = psutil.Process(pid)
    return float(sum(each.memory_full_info().uss for each in (process, *process.children(recursive=True)))) / 2**20


if __name__ == "__main__":
    main()
