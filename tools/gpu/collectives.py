"""The installed NCCL: its calls with one rank, and two ranks, in two processes, on one GPU.

Two ranks on one GPU need `NCCL_MULTI_RANK_GPU_ENABLE`, which older ones lack: they refuse, and the case records the
message.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.kernels.case import Array, Inputs
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph
from runtime.device.nccl import NcclComm, NcclError, candidates, open_nccl
from runtime.dtype import DType, float32
from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import engine_of, lone_rank
from runtime.engine.messages import EngineRequest
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.ranks import group
from runtime.engine.sampling_params import SamplingParams
from runtime.nccl_communicator import NUM_SLOTS, NcclCommunicator
from runtime.rank_notices import Notices, notices_bytes, shared_memory
from runtime.tensor.tensor import Tensor
from tools.gpu.sections import ROOT, Case, Options, Result
from tools.gpu.serving.asking import DEMO, ask, first_difference, ids_of

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}
TWO_RANKS_S = 30.0
"""After which two processes that have not ended are ended."""
QUESTIONS = (
    "What is 17 plus 25?", "Who are you?", "Sort these words: pear, apple, fig", "Count from 3 to 9",
    "What is the capital of France?", "Reverse the word stone",
)  # fmt: skip
KINDS = ("all_reduce", "all_gather", "send and receive")


def cases(options: Options) -> Iterator[Case]:
    gpu = Gpu.of(options.device)

    @functools.cache
    def comm() -> NcclComm:
        nccl = open_nccl(gpu.driver)
        return NcclComm(gpu, nccl, nccl.unique_id(), 0, 1)

    @functools.cache
    def two_ranks() -> tuple[list[dict[str, Any]], str, str]:
        return _two_ranks(options, (1024,) if options.is_quick else (1024, 65536, 1 << 22))

    sizes = (64, 1000) if options.is_quick else (1, 1000, 4096, 1 << 20)
    yield Case("library", lambda: _library(gpu))
    yield Case("one rank joins", lambda: {"rank": comm().rank, "ranks": comm().num_ranks})
    for kind in KINDS:
        yield Case(kind, functools.partial(_check, comm, kind, sizes))
    yield Case("window", lambda: _in_window(comm(), options.is_quick))
    yield Case("graph", lambda: _in_graph(comm()))
    yield Case("communicator of a model", lambda: _communicator(comm()))
    yield Case("destroy", lambda: _destroyed(comm()))
    yield Case("abort", lambda: _aborted(gpu))
    yield Case("two ranks on one GPU", lambda: _collectives(options, two_ranks))
    yield Case("a model on two ranks", lambda: _split_model(options, two_ranks))


def _library(gpu: Gpu) -> Result:
    """The loaded library and its version."""
    nccl = open_nccl(gpu.driver)
    if len(nccl.unique_id()) != 128:
        raise AssertionError("a unique id has other than 128 bytes")
    return {"version": nccl.version(), "is_emulated": nccl.is_emulated, "candidates": list(candidates())}


def _numbers(count: int, dtype: DType, seed: int) -> Array:
    """Small integers: all types hold them and their sums exactly."""
    return (np.random.default_rng(seed).integers(-7, 8, count)).astype(np.float32).astype(dtype.numpy)


def _kinds(comm: NcclComm) -> tuple[str, ...]:
    """The collectives that one rank can do alone."""
    return KINDS[:-1] if comm.nccl.is_emulated else KINDS


def _call(comm: NcclComm, kind: str, source: int, target: int, count: int, dtype: DType) -> None:
    """Any collective with one rank: the target gets the source's content."""
    if kind == "all_reduce":
        comm.all_reduce(source, target, count, dtype)
    elif kind == "all_gather":
        comm.all_gather(source, target, count, dtype)
    else:
        with comm.nccl.group():
            comm.send(source, count, dtype, 0)
            comm.receive(target, count, dtype, 0)


def _check(comm: Callable[[], NcclComm], kind: str, sizes: tuple[int, ...]) -> Result:
    found, gpu = 0, comm().gpu
    if kind not in _kinds(comm()):
        return {"skipped": "the emulated NCCL refuses a rank that sends to itself"}
    for name in ("float32", "bfloat16"):
        dtype = DType.parse(name)
        for number, count in enumerate(sizes):
            inputs, given = Inputs(gpu, number), _numbers(count, dtype, number)
            source, target = inputs.put(given), inputs.empty(given.nbytes)
            gpu.fill(target, 0xFF, given.nbytes)
            _call(comm(), kind, source, target, count, dtype)
            _expect(gpu, target, given, f"{kind} of {count} {name}")
            found += 1
    comm().check()
    return {"checked": found}


def _expect(gpu: Gpu, address: int, expected: Array, what: str) -> None:
    found = np.empty_like(expected)
    gpu.read(address, found)
    if found.tobytes() != expected.tobytes():
        wrong = int((found.astype(np.float32) != expected.astype(np.float32)).sum())
        raise AssertionError(f"{what}: {wrong} of {expected.size} elements are wrong")


def _in_window(comm: NcclComm, is_quick: bool) -> Result:
    """Sums in place in memory allocated and registered by NCCL."""
    gpu, size = comm.gpu, 1 << (16 if is_quick else 22)
    window = comm.new_window(size)
    for number, count in enumerate((8, 1000, size // 4)):
        given = _numbers(count, float32, number)
        gpu.write(window.address, given)
        comm.all_reduce(window.address, window.address, count, float32)
        _expect(gpu, window.address, given, f"a sum of {count} in a window")
    comm.check()
    return {"window_bytes": window.size_bytes}


def _in_graph(comm: NcclComm) -> Result:
    """All kinds one after the other, in and out of a window, replayed with other numbers."""
    gpu, count = comm.gpu, 2048
    inputs, window, kinds = Inputs(gpu, 0), comm.new_window(4 * count), _kinds(comm)
    places = [inputs.empty(4 * count) for _ in range(len(kinds) + 1)]

    for place in places:
        gpu.fill(place, 0, 4 * count)

    def work() -> None:
        for number, kind in enumerate(kinds):
            _call(comm, kind, places[number], places[number + 1], count, float32)
        gpu.copy(window.address, places[-1], 4 * count)
        comm.all_reduce(window.address, window.address, count, float32)

    graph = Graph.capture(gpu, work)
    for seed in range(3):
        given = _numbers(count, float32, seed)
        for place in (*places[1:], window.address):
            gpu.fill(place, 0xFF, 4 * count)
        gpu.write(places[0], given)
        graph.replay()
        _expect(gpu, window.address, given, f"replay {seed}")
    nodes = graph.num_nodes
    graph.release()
    return {"replays": 3, "nodes": nodes}


def _communicator(comm: NcclComm) -> Result:
    """The communicator's calls that models use."""
    memory = shared_memory(notices_bytes(1))
    try:
        ours = NcclCommunicator(comm.gpu, comm, Notices.open(memory, 0, 1), comm)
    finally:
        os.close(memory)
    given = np.arange(512, dtype=np.float32).reshape(2, 256)
    for _ in range(2 * NUM_SLOTS):
        buffer = ours.sum_buffer((2, 256), float32)
        if buffer is None:
            raise AssertionError("a sum of 2 KiB gets no place in the window")
        comm.gpu.write(buffer.address, given)
        ours.all_reduce(buffer)
        _expect(comm.gpu, buffer.address, given, "a sum in a slot")
        del buffer
    gathered = ours.all_gather(Tensor.from_numpy(given).to(comm.gpu.device))
    _expect(comm.gpu, gathered.address, given[None], "all_gather")
    if not ours.agree(True) or (ours.agree(False) and not comm.nccl.is_dry):
        raise AssertionError("one rank does not agree with itself")
    ours.end_step(1)
    return {"slots": NUM_SLOTS}


def _destroyed(comm: NcclComm) -> Result:
    comm.destroy()
    comm.destroy()
    _refuses(comm)
    return {}


def _aborted(gpu: Gpu) -> Result:
    """A communicator that is aborted at once; the GPU keeps working."""
    nccl = open_nccl(gpu.driver)
    comm = NcclComm(gpu, nccl, nccl.unique_id(), 0, 1)
    inputs, given = Inputs(gpu, 0), _numbers(1000, float32, 0)
    source, target = inputs.put(given), inputs.empty(given.nbytes)
    comm.all_reduce(source, target, 1000, float32)
    gpu.synchronize()
    start = time.perf_counter()
    comm.abort()
    seconds = time.perf_counter() - start
    comm.abort()
    _refuses(comm)
    _expect(gpu, target, given, "a sum before the abort")
    return {"abort_s": round(seconds, 3)}


def _refuses(comm: NcclComm) -> None:
    try:
        comm.all_reduce(0, 0, 0, float32)
    except NcclError:
        return
    raise AssertionError("a communicator that was left takes work")


def _two_ranks(options: Options, sizes: tuple[int, ...]) -> tuple[list[dict[str, Any]], str, str]:
    """Rows of `collective_rank` by two processes on the same device, each verified; or NCCL's
    refusal, or another error."""
    nccl = open_nccl(Gpu.of(options.device).driver)
    task = {
        "num_ranks": 2, "sizes": sizes, "num_calls": 2 if options.is_quick else 10, "device": options.device,
        "unique_id": nccl.unique_id().hex(), "collectives": ["all_reduce", "all_gather"],
    }  # fmt: skip
    environment = {**os.environ, **SHARED_GPU}
    limit_s = TWO_RANKS_S * (1 if options.is_real else 12)
    command = [sys.executable, "-m", "tools.gpu.collective_rank"]
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [(Path(folder) / f"{rank}").open("w+", encoding="utf-8") for rank in range(2)]
        try:
            for rank in range(2):
                processes.append(
                    subprocess.Popen(
                        [*command, json.dumps(task | {"rank": rank})], cwd=ROOT, env=environment, text=True,
                        stdout=logs[rank], stderr=subprocess.STDOUT, encoding="utf-8",
                    )
                )  # fmt: skip
            why = _ended(processes, time.monotonic() + limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = []
        for log in logs:
            log.seek(0)
            said.append(log.read().strip())
            log.close()
    if why is None:
        found: list[dict[str, Any]] = json.loads(said[0].splitlines()[-1])
        return found, "", ""
    print("\n".join(said)[-6000:])
    lines = dict.fromkeys(line.strip() for text in said for line in text.splitlines())
    words = " | ".join(line for line in lines if "NCCL WARN" in line or "Error" in line)[-1500:]
    if why == "late":
        return [], "", f"two ranks were not done after {limit_s:.0f} s: {words or list(lines)[-4:]}"
    is_refused = "uplicate GPU" in words or "ncclInvalidUsage" in words
    return [], *((words, "") if is_refused else ("", words or "a rank ended without a word"))


def _ended(processes: list[subprocess.Popen[str]], until: float) -> str | None:
    """None if both succeeded, "failed" if one did not, "late" if they still run."""
    while time.monotonic() < until:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            return "failed"
        if None not in statuses:
            return None
        time.sleep(0.05)
    return "late"


def _collectives(options: Options, two_ranks: Callable[[], tuple[list[dict[str, Any]], str, str]]) -> Result:
    if options.is_dry:
        return {"skipped": "nothing runs"}
    rows, refusal, failure = two_ranks()
    if failure:
        raise AssertionError(failure)
    if refusal:
        return {"skipped": refusal}
    return {
        "nccl": open_nccl(Gpu.of(options.device).driver).version(),
        "us": {f"{row['collective']} {row['bytes']}": round(row["us"], 1) for row in rows},
    }


def _split_model(options: Options, two_ranks: Callable[[], tuple[list[dict[str, Any]], str, str]]) -> Result:
    """The bundled model's answers by two ranks on one GPU, in exact mode: equal to one rank's, to the bit."""
    prompts = [ids_of(DEMO, f"<|user|>{question}<|assistant|>") for question in QUESTIONS]
    prompts, length = (prompts[:1], 3) if options.is_quick else (prompts, 32)
    with contextlib.ExitStack() as stack:
        if options.is_dry:
            split = _answers(options, prompts, length, 2)
        else:
            _, refusal, failure = two_ranks()
            if refusal or failure:
                return {"skipped": "two ranks cannot share the GPU"}
            stack.enter_context(_ranks_on_one_gpu())
            split = _answers(options, prompts, length, 2)
    whole = _answers(options, prompts, length, 1)
    if (difference := first_difference(split, whole)) is not None:
        raise AssertionError(f"two ranks: {difference}")
    return {"prompts": len(prompts), "tokens": sum(map(len, whole))}


def _answers(options: Options, prompts: list[list[int]], length: int, num_ranks: int) -> list[list[int]]:
    """Greedy answers."""
    config = EngineConfig(
        device=options.device, tensor_parallel_size=num_ranks, exact=True, num_blocks=64, max_model_len=128,
        max_num_seqs=8, seed=0,
    )  # fmt: skip
    engine = lone_rank(DEMO, config) if options.is_dry and num_ranks > 1 else engine_of(DEMO, config)
    client = ThreadEngineClient(engine)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    try:
        return ask(client, [
            EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params)
            for number, prompt in enumerate(prompts)
        ])  # fmt: skip
    finally:
        client.close()


@contextlib.contextmanager
def _ranks_on_one_gpu() -> Iterator[None]:
    """Gives all ranks of an engine the first one's device, and allows NCCL to share it."""
    before, environment = group.device_of_rank, {name: os.environ.get(name) for name in SHARED_GPU}
    vars(group)["device_of_rank"] = lambda device, rank: device
    os.environ.update(SHARED_GPU)
    try:
        yield
    finally:
        vars(group)["device_of_rank"] = before
        for name, value in environment.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
