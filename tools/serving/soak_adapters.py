"""Requests over fifty adapters whose content changes: whether an answer is stale, and whether memory grows.

    python -m tools.serving.soak_adapters [--requests 10000] [--json FILE]               # a server, by HTTP
    python -m tools.serving.soak_adapters --device emulated:sm_90a [--requests 2000]     # an engine in this process
    python -m tools.serving.soak_adapters --device dry:sm_90a [--requests 10000]         # on a GPU without kernels

Names are loaded, unloaded, loaded again and, in place, with other content; each request asks for one of them. Every
answer is compared with that of the content alone, but on a "dry" GPU, which runs no kernel. Memory is read after the
first tenth, and 18 times from then on: of a server, the resident bytes of both processes; of an engine, this
process's, the number of Python objects, what the device's allocator has given out, reserved and pinned, the bytes of
adapters' slots, the writes to them, and the free blocks of pages. Each sample is printed, then the counts and, by least
squares over the second half of the samples, the growth for 1,000 requests. The exit status is 1 if an answer was
stale."""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from models.checkpoints.safetensors_file import write_tensors
from runtime.bench.environment import describe_machine
from runtime.device.device import Device
from runtime.device.driver import Driver, cuda_bindings
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelList
from runtime.emulator.driver.emulated_driver import DryDriver
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.make_engine import engine_of
from runtime.engine.messages import AdapterRef, EngineRequest
from runtime.engine.sampling_params import SamplingParams
from tools.serving.soaking.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "demo"
NAMES, CONTENTS, RANK, AT_ONCE = 50, 24, 8, 4
PROMPTS = tuple([7 * at % 600 for at in range(9 + 8 * which)] for which in range(3))
"""Each begins with the one before, so that prefixes are found."""
Key = tuple[int, int]
"""A content's number, and a prompt's."""


def write_adapters(root: Path) -> list[Path]:
    """A folder for each content."""
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    hidden, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    folders = []
    for content in range(CONTENTS):
        rng, made = np.random.default_rng(content), dict[str, np.ndarray[Any, Any]]()
        for layer in range(config["num_hidden_layers"]):
            for name, outputs, inputs in (("q_proj", width, hidden), ("o_proj", hidden, width)):
                module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                made[f"{module}.lora_A.weight"] = rng.standard_normal((RANK, inputs)).astype(np.float32) / 16
                made[f"{module}.lora_B.weight"] = rng.standard_normal((outputs, RANK)).astype(np.float32) / 4
        folder = root / f"content {content}"
        folder.mkdir()
        fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj", "o_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
        plan = [(name, each.dtype, each.shape) for name, each in made.items()]
        write_tensors(folder / "adapter_model.safetensors", plan, made.values())
        folders.append(folder)
    return folders


@dataclass
class OfServer:
    """A server that is asked by HTTP, by some clients at a time."""

    server: ServerProcess
    http: httpx.Client
    clients: ThreadPoolExecutor
    ids: dict[int, str] = field(default_factory=dict)

    def load(self, name: int, folder: Path, *, is_known: bool) -> None:
        """Gives a name this content."""
        body = {"lora_name": f"adapter-{name}", "lora_path": folder.name, "load_inplace": is_known}
        self.http.post("/v1/load_lora_adapter", json=body).raise_for_status()

    def unload(self, name: int) -> None:
        """Forgets a name."""
        self.http.post("/v1/unload_lora_adapter", json={"lora_name": f"adapter-{name}"}).raise_for_status()

    def answers(self, asked: list[tuple[int, int]]) -> list[Any]:
        """The answers to prompts with adapters, by their names."""
        return list(self.clients.map(self._answer, asked))

    def _answer(self, asked: tuple[int, int]) -> Any:
        name, prompt = asked
        body = {"model": f"adapter-{name}", "prompt": PROMPTS[prompt], "max_tokens": 4, "temperature": 0, "logprobs": 0}
        answer = self.http.post("/v1/completions", json={**body, "ignore_eos": True})
        answer.raise_for_status()
        found = answer.json()["choices"][0]["logprobs"]
        return found["tokens"], found["token_logprobs"]

    def memory(self) -> dict[str, int]:
        """The bytes that each process holds."""
        found = self.server.holdings()
        return {"server_rss": found.server_rss, "engine_rss": found.engine_rss}


@dataclass
class OfEngine:
    """An engine in this process."""

    engine: Engine
    device: Device
    refs: dict[int, AdapterRef] = field(default_factory=dict)
    count: int = 0

    def load(self, name: int, folder: Path, *, is_known: bool) -> None:
        """Gives a name this content."""
        loaded = self.engine.load_adapter(str(name), str(folder)).result(60)
        self.refs[name] = AdapterRef.of(str(name), str(folder), loaded)

    def unload(self, name: int) -> None:
        """Forgets a name."""
        del self.refs[name]

    def answers(self, asked: list[tuple[int, int]]) -> list[Any]:
        """The answers to prompts with adapters, by their names."""
        params, found = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0), dict[str, Any]()
        for name, prompt in asked:
            self.count += 1
            found[str(self.count)] = []
            self.engine.add(
                EngineRequest(
                    request_id=str(self.count), prompt_token_ids=list(PROMPTS[prompt]), params=params,
                    adapter=self.refs[name],
                )
            )  # fmt: skip
        while self.engine.has_work:
            for output in self.engine.step():
                if output.finish_reason == "error":
                    raise RuntimeError(output.error)
                found[output.request_id] += [(each.token_id, each.logprob) for each in output.logprobs or []]
        return list(found.values())

    def memory(self) -> dict[str, int]:
        """The bytes and objects that this process holds."""
        gc.collect()
        held = {"rss": psutil.Process().memory_info().rss, "objects": len(gc.get_objects())}
        if self.device.kind != "cpu":
            gpu = Gpu.of(self.device)
            stats = gpu.allocator.statistics
            held |= {"device_allocated": stats.allocated_bytes, "device_reserved": stats.reserved_bytes}
            held |= {"device_segments": stats.num_segments, "pinned": gpu.pinned.reserved_bytes}
            adapters = self.engine.adapters
            assert adapters is not None, "it serves adapters"
            held |= {"adapter_bytes": adapters.maps.size_bytes, "slot_writes": adapters.num_writes}
            held["free_blocks"] = self.engine.stats().num_free_blocks
        return held


@contextmanager
def opened(device: str, root: Path) -> Iterator[OfServer | OfEngine]:
    """The subject on a device; "" is a server on the cpu, "dry:ARCH" a GPU that computes nothing."""
    kind, _, arch = device.partition(":")
    if kind == "dry":
        device = f"emulated:{arch}"
        driver = Driver(DryDriver(arch), cuda_bindings("the kernels' compiler"), arch=arch)
        driver.call("cuInit", 0)
        Gpu(Device(device), driver, kernel_cache=KernelList()).install()
    if device:
        settings = EngineConfig(
            device=device, dtype="float32", max_model_len=64, max_num_seqs=4, block_size=8, num_blocks=80, seed=0,
            enable_lora=True, max_loras=3, max_cpu_loras=5, max_lora_rank=RANK, exact=device != "cpu",
        )  # fmt: skip
        engine = engine_of(str(MODEL), settings)
        yield OfEngine(engine, Device.parse(device))
        engine.check_invariants()
        engine.close()
        return
    arguments = ["--enable-lora", "--max-loras", "3", "--max-cpu-loras", "5", "--max-lora-rank", str(RANK)]
    arguments += ["--lora-root", str(root), "--max-model-len", "64", "--kv-cache-bytes", str(8 << 20)]
    with (
        ServerProcess("--model", str(MODEL), "--dtype", "float32", *arguments) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        ThreadPoolExecutor(AT_ONCE) as clients,
    ):
        yield OfServer(server, http, clients)


def soak(
    subject: OfServer | OfEngine, folders: list[Path], count: int, tell: Callable[[str], None], *,
    is_compared: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Runs so many requests; returns the counts, the samples of memory and their slopes."""
    rng, begun_s = random.Random(0), time.perf_counter()
    expected: dict[Key, Any] = {}
    for content, folder in enumerate(folders):
        subject.load(0, folder, is_known=content > 0)
        for prompt in range(len(PROMPTS)):
            expected[content, prompt] = subject.answers([(0, prompt)])[0]
    if is_compared:
        assert len({str(each) for each in expected.values()}) > CONTENTS, "adapters change nothing"
    known: dict[int, int] = {0: len(folders) - 1}
    num = {"loads": 0, "reloads": 0, "unloads": 0}
    samples: list[dict[str, int]] = []
    stale, done, step = 0, 0, max(1, count // 20)
    while done < count:
        keys: list[Key] = []
        asked: list[tuple[int, int]] = []
        for _ in range(AT_ONCE):
            name = rng.randrange(NAMES)
            if any(name == each for each, _ in asked):
                continue
            if name in known and rng.random() < 0.05:
                subject.unload(name)
                del known[name]
                num["unloads"] += 1
            if name not in known or rng.random() < 0.1:
                content = rng.randrange(len(folders))
                subject.load(name, folders[content], is_known=name in known)
                num["reloads" if name in known else "loads"] += 1
                known[name] = content
            prompt = rng.randrange(len(PROMPTS))
            asked.append((name, prompt))
            keys.append((known[name], prompt))
        before = done // step
        done += len(asked)
        stale += sum(found != expected[key] for key, found in zip(keys, subject.answers(asked), strict=True))
        if done // step > before and done >= count // 10:
            samples.append({"requests": done, **subject.memory()})
            tell(json.dumps(samples[-1]))
    half = samples[len(samples) // 2 :]
    slopes = {
        name: float(np.polyfit([each["requests"] / 1000 for each in half], [each[name] for each in half], 1)[0])
        for name in samples[0]
        if name != "requests"
    }
    took_s = round(time.perf_counter() - begun_s, 1)
    return {
        "requests": done,
        **num,
        "stale": stale if is_compared else None,
        "took_s": took_s,
        "per_1000_requests": slopes,
        "samples": samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--device", default="", help="an engine's in this process; default: a server on the cpu")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folders = write_adapters(Path(folder))
        with opened(options.device, Path(folder)) as subject:
            is_compared = not options.device.startswith("dry:")
            found = soak(
                subject, folders, options.requests, lambda line: print(line, flush=True), is_compared=is_compared
            )
    result = {
        "command": " ".join(sys.argv),
        "device": options.device or "server",
        "machine": describe_machine(),
        **found,
    }
    print(json.dumps({name: each for name, each in result.items() if name != "samples"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if found["stale"] else 0


if __name__ == "__main__":
    sys.exit(main())
