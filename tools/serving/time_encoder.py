"""Times an encoder's start, its memory beside the weights, and what a text costs over HTTP beyond `LLM.embed`.

    python -m tools.serving.time_encoder [--rounds 7] [--requests 300] [--folder FOLDER] > times.json

The model has all-MiniLM-L6-v2's shape, seeded weights and a WordPiece vocabulary of its size. In turns:

server   from the start of the process `xserv serve` to the answer of the first `/v1/embeddings`, which follows a
         `/health` of 200; the best and the median of the rounds, and the processor time of all its processes until then
python   from the start of Python to the first vector of `LLM(FOLDER).embed`
memory   of server and engine after some texts: the sum of their proportional set sizes less the weights
requests one text of 20 tokens over one connection, in turns with `LLM.embed` in this process, each after one of its own
         kind; text in, base64 out: "wire" from the first byte sent to the last received, "http" with the time that
         Python's `http.client` and `json` take for it. `more` has the difference of the medians, and so on
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.environment import finished
from runtime.bench.memory import descendants, resident_bytes
from runtime.bench.peers.encoders import SHAPES
from runtime.llm.llm import LLM
from tools.serving.served import Served, above_the_server, processor_s, threads_s

SHAPE = SHAPES["minilm-l6"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
REST_S = 0.003
"""Before each request, so that no thread spins that worked at the one before."""
IN_PYTHON = """
import sys
from xserv import LLM
assert LLM(sys.argv[1]).embed([sys.argv[2]])[0].outputs.embedding
print(1, flush=True)
"""


def write_model(folder: Path) -> list[str]:
    """A folder with weights, tokenizer and sentence-transformers' files; returns the words of its vocabulary."""
    SHAPE.write(folder, 0, "float32")
    letters = "abcdefghijklmnopqrstuvwxyz"
    number_of_words = SHAPE.config["vocab_size"] - len(SPECIAL) - 2 * len(letters)
    draw, words = random.Random(0), dict[str, None]()
    while len(words) < number_of_words:
        words["".join(draw.choices(letters, k=draw.randint(2, 8)))] = None
    tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words]
    special = [
        {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for number, name in enumerate(SPECIAL)
    ]  # fmt: skip
    ends = {name: [SPECIAL.index(name), name] for name in ("[SEP]", "[CLS]")}
    written: dict[str, Any] = {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
            "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                           "strip_accents": None, "lowercase": True},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {"type": "BertProcessing", "sep": ends["[SEP]"][::-1], "cls": ends["[CLS]"][::-1]},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": {token: i for i, token in enumerate(tokens)}},
        },
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": SHAPE.config["hidden_size"],
                                  "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
    }  # fmt: skip
    for name, content in written.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
    return list(words)


def embed(served: Served, body: str) -> bytes:
    """The vector's bytes."""
    return base64.b64decode(json.loads(served.ask("POST", "/v1/embeddings", body))["data"][0]["embedding"])


def start_of_server(folder: Path, body: str) -> tuple[float, float, float]:
    """Seconds until `/health` answered, until the first vector, and of the processor."""
    with Served(folder) as served:
        served.ask("GET", "/health")
        healthy_s = time.perf_counter() - served.begun_s
        embed(served, body)
        return healthy_s, time.perf_counter() - served.begun_s, sum(processor_s(descendants(served.process.pid)))


def start_in_python(folder: Path, text: str) -> tuple[float, float]:
    """Seconds from the start of a Python until its first vector, and of the processor until its end."""
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", IN_PYTHON, folder, text], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n", "the child failed"
    seconds = time.perf_counter() - begun_s
    process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def timed_requests(folder: Path, text: str, body: str, number: int) -> dict[str, Any]:
    """Milliseconds of a text over HTTP and in this process, in turns, of the clock and of the processor; and the
    server's memory."""
    llm = LLM(folder)
    with Served(folder) as served:
        pids = descendants(served.process.pid)
        host, port = served.connection.host, served.connection.port
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        assert embed(served, body) == np.asarray(llm.embed([text])[0].outputs.embedding, np.float32).tobytes(), (
            "the vectors differ"
        )

        sides: dict[str, tuple[Callable[[], object], Callable[[], float]]] = {
            "wire": (lambda: served.exchange(request), lambda: threads_s(pids)),
            "http": (lambda: embed(served, body), lambda: threads_s(pids)),
            "direct": (lambda: llm.embed([text]), time.process_time),
        }
        clock: dict[str, list[float]] = {name: [] for name in sides}
        used: dict[str, float] = {}
        with above_the_server():
            for _ in range(number):
                for name, (ask, _) in sides.items():
                    time.sleep(REST_S)
                    ask()
                    time.sleep(REST_S)
                    start = time.perf_counter()
                    ask()
                    clock[name].append(1e3 * (time.perf_counter() - start))
        for name, (ask, used_s) in sides.items():
            before = used_s()
            for _ in range(number):
                time.sleep(REST_S)
                ask()
            used[name] = 1e3 * (used_s() - before) / number
        memory = [resident_bytes(pid) for pid in pids]
    found: dict[str, Any] = {
        name: {
            "median_ms": statistics.median(times), "best_ms": min(times), "quartile_ms": statistics.quantiles(times)[0],
            "processor_ms": used[name],
        }
        for name, times in clock.items()
    }  # fmt: skip
    found["more"] = {
        side: {
            **{name: found[side][name] - found["direct"][name] for name in found[side]},
            "median_of_differences_ms": statistics.median(map(float.__sub__, clock[side], clock["direct"])),
        }
        for side in ("wire", "http")
    }
    weights = llm.client.info.weight_bytes
    beside = sum(each["total"] for each in memory) - weights
    return {**found, "processes": memory, "weight_bytes": weights, "beside_weights_bytes": beside}


def summary(times: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, Any]:
    return {
        name: {"best": min(each), "median": statistics.median(each), "all": each}
        for name, each in zip(names, zip(*times, strict=True), strict=True)
    }


def measure(folder: Path, rounds: int, number: int) -> dict[str, Any]:
    words = write_model(folder)
    text = " ".join(random.Random(1).sample(words, 18))  # 20 tokens with [CLS] and [SEP]
    body = json.dumps({"model": folder.name, "input": text, "encoding_format": "base64"})
    start_of_server(folder, body)  # it compiles what is missing
    start_in_python(folder, text)
    servers, pythons, loads = [], [], [os.getloadavg()[0]]
    for _ in range(rounds):
        servers.append(start_of_server(folder, body))
        pythons.append(start_in_python(folder, text))
    requests = timed_requests(folder, text, body, number)
    return {
        "server": summary(servers, ("health_s", "first_vector_s", "processor_s")),
        "python": summary(pythons, ("first_vector_s", "processor_s")),
        "requests": requests,
        "load": [*loads, os.getloadavg()[0]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where the model is written; default: a temporary folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name) / "minilm-l6"
        print(json.dumps(finished(measure(folder, asked.rounds, asked.requests)), indent=1))


if __name__ == "__main__":
    main()
