"""`xserv serve` on a file of random weights: from the process's start to the first token, with the file in the page
cache and not, and a load of requests."""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from tools.gpu.sections import ROOT, Case, Options, Result
from tools.gpu.serving.models import config_of
from tools.serving.served import Served

STARTS = 3
BLOCK_BYTES = 64 << 20
"""The size of the block of random numbers that is written again and again."""
POLL_S = 0.02
CLIENTS, REQUESTS, PROMPT, OUTPUT = 32, 128, 256, 64
QUICK = 2, 4, 6, 3
"""The same numbers of a quick check."""


def cases(options: Options, name: str) -> Iterator[Case]:
    """A Qwen3 by its name: its file, starts, a load."""
    if options.is_dry:
        return  # its kernels are those of the model's own section
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        yield Case("write the weights", functools.partial(write, place, config_of(options, name)))
        for number in range(1 if options.is_quick else STARTS):
            for how in ("not cached", "cached"):
                start = functools.partial(_start, options, place, is_cached=how == "cached")
                yield Case(f"start {number + 1}, {how}", start)
        yield Case("load", functools.partial(_load, options, place))


def write(folder: Path, config: dict[str, Any]) -> Result:
    """The folder of a Qwen3 in bfloat16, as one file of safetensors, with the bundled model's tokenizer."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = config["vocab_size"], hidden
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_norm": (heads,),
            "self_attn.k_norm": (heads,), "self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden), "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }.items()}  # fmt: skip
    header, end = {}, 0
    for tensor, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = np.random.default_rng(0).standard_normal(min(end, BLOCK_BYTES) // 2, np.float32) * np.float32(0.02)
    block = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    begun = time.perf_counter()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, end, len(block)):
            file.write(block[: end - first])
        file.flush()
        os.fsync(file.fileno())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "models" / "demo" / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    return {"bytes": end, "seconds": round(time.perf_counter() - begun, 1)}


def _served(options: Options, folder: Path) -> Served:
    arguments = ["--device", options.device, "--max-model-len", "4096"]
    arguments += ["--kv-cache-bytes", str(1 << 22), "--max-num-seqs", "4"] if options.is_quick else []
    return Served(folder, *arguments)


def _ask(connection: HTTPConnection, body: str) -> dict[str, Any]:
    """The answer to a completion, which the server refuses until it has loaded the model. Raises AssertionError for
    another refusal."""
    while True:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        if answer.status == 200:
            return content  # type: ignore[no-any-return]
        assert content["error"]["code"] == "starting", content
        time.sleep(POLL_S)


def _body(length: int, output: int, seed: int = 0) -> str:
    ids = np.random.default_rng(seed).integers(0, 256, length).tolist()
    return json.dumps({"prompt": ids, "max_tokens": output, "temperature": 0, "ignore_eos": True})


def _start(options: Options, folder: Path, *, is_cached: bool) -> Result:
    file = folder / "model.safetensors"
    with file.open("rb", buffering=0) as opened:
        if is_cached:
            while opened.read(BLOCK_BYTES):
                pass
        else:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with _served(options, folder) as server:
        listens_s = time.perf_counter() - server.begun_s
        _ask(server.connection, _body(8, 1))
        first_s = time.perf_counter() - server.begun_s
    return {"listens_s": round(listens_s, 2), "first_token_s": round(first_s, 2), "bytes": file.stat().st_size}


def _load(options: Options, folder: Path) -> Result:
    """Clients that ask one request after another. Raises AssertionError for an error or a short answer."""
    num_clients, count, prompt, output = QUICK if options.is_quick else (CLIENTS, REQUESTS, PROMPT, OUTPUT)
    with _served(options, folder) as server, ThreadPoolExecutor(num_clients) as pool:
        host, port = server.connection.host, server.connection.port

        def ask(number: int) -> float:
            begun = time.perf_counter()
            connection = HTTPConnection(host, port)
            found = _ask(connection, _body(prompt, output, number))
            connection.close()
            assert found["usage"]["completion_tokens"] == output, found
            return time.perf_counter() - begun

        list(pool.map(ask, range(num_clients)))  # graphs are recorded
        begun = time.perf_counter()
        latencies = sorted(pool.map(ask, range(count)))
        seconds = time.perf_counter() - begun
    return {
        "clients": num_clients, "requests": count, "prompt_len": prompt, "output_len": output,
        "output_tokens_per_s": round(count * output / seconds, 1), "latency_s": {
            "median": round(statistics.median(latencies), 3), "largest": round(latencies[-1], 3),
        },
    }  # fmt: skip
