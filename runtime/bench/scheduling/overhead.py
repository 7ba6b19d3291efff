"""`bench overhead`: a step's host overhead beside the computation: schedule, prepare (lay out its arrays), commit.

A hollow model computes nothing, so that every step is a decode of all sequences; the times are the medians of
`Engine.timeline`'s records. If they do not grow with the context's length, no work is repeated for tokens of earlier
steps.

With decode graphs the loop only does these parts and a few driver calls. So on a dummy GPU (`DryDriver`) a step's wall
time is all host time.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch
from runtime.bench.environment import finished
from runtime.bench.metrics import BenchmarkError
from runtime.device.device import Device
from runtime.device.driver import Driver, cuda_bindings
from runtime.device.gpu import Gpu
from runtime.device.kernel_cache import KernelList
from runtime.dtype import float32
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.limits import resolve
from runtime.engine.make_engine import free_memory_bytes
from runtime.engine.messages import EngineInfo, EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.later import later
from runtime.pooling import PoolingTask
from runtime.tensor.tensor import Tensor

BLOCK_SIZE = 16
STEP_TOKENS = 1 << 16
VOCAB_SIZE = 64
PARTS = ("schedule", "prepare", "commit")
DRY_ARCH = "sm_90a"
_emulated_driver = later("runtime.emulator.driver.emulated_driver")  # needs the GPU libraries


class HollowModel:
    """Computes next to nothing: a zero for each token, from which a product of depth 1 makes logits of zero, except for
    token 1. On a GPU it launches nothing."""

    suppressed_ids = None
    gives_last_rows = False

    def __init__(self, device: Device) -> None:
        self.device = device
        if device.kind == "cpu":
            favoured = np.zeros(VOCAB_SIZE, np.float32)
            favoured[1] = 1.0
            self._table = Tensor.from_numpy(np.zeros((VOCAB_SIZE, 1), np.float32))
            self._head = ops.prepare_linear(self._table, Tensor.from_numpy(favoured))

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """One number a token."""
        return KVCacheSpec.uniform(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype=float32, device=self.device
        )

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """``[num_tokens, 1]`` zeros."""
        if self.device.kind == "cpu":
            return ops.embedding(batch.token_ids, self._table)
        return Tensor.empty((batch.num_tokens, 1), device=self.device)

    def head(self, task: PoolingTask, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        return pooled

    def compute_logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """``[n, VOCAB_SIZE]``."""
        if self.device.kind == "cpu":
            return ops.logits_linear(hidden, self._head)
        return Tensor.empty((hidden.shape[0], VOCAB_SIZE), device=self.device)


def hollow_engine(num_seqs: int, max_model_len: int, device: str = "cpu") -> Engine:
    """An engine around a hollow model with room for `num_seqs` whole contexts: with the plain loop on the cpu, with the
    overlapped loop and decode graphs on a GPU."""
    model = HollowModel(Device.parse(device))
    spec = model.kv_cache_spec(BLOCK_SIZE)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(num_seqs, STEP_TOKENS),
        block_size=BLOCK_SIZE,
        num_blocks=num_seqs * (-(-max_model_len // BLOCK_SIZE) + 1),
        overlap="off" if device == "cpu" else "on",
    )
    limits = resolve(
        config,
        max_position_embeddings=max_model_len,
        bytes_per_block=spec.block_bytes[0],
        available_bytes=free_memory_bytes(model.device),
    )
    kv_cache = KVCache(spec, limits.num_blocks)
    info = EngineInfo(
        model_name="hollow",
        model_path="",
        architecture="Hollow",
        device=str(model.device),
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_waiting=limits.max_waiting,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        kv_cache_bytes=kv_cache.size_bytes,
        weight_bytes=0,
    )
    return Engine(LocalExecutor(model, kv_cache, limits, VOCAB_SIZE), limits, info, seed=0)


def loaded_engine(num_seqs: int, context_len: int, num_steps: int, seed: int, device: str) -> Engine:
    """A hollow engine with as many requests, which decode together for more than `num_steps` steps."""
    longest = context_len + BLOCK_SIZE
    output_len = num_steps + 2 + -(-num_seqs * longest // STEP_TOKENS)  # some decode while others prefill
    engine = hollow_engine(num_seqs, longest + output_len, device)
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    for index in range(num_seqs):
        prompt = rng.choices(range(VOCAB_SIZE), k=context_len + index % BLOCK_SIZE)
        engine.add(EngineRequest(request_id=f"overhead-{index}", prompt_token_ids=prompt, params=params))
    return engine


def measure_overhead(num_seqs: int, context_len: int, num_steps: int, seed: int = 0) -> dict[str, float]:
    """Medians over `num_steps` steps that decode `num_seqs` sequences of `context_len` tokens and more: milliseconds
    `schedule_ms`, `prepare_ms`, `commit_ms`, of their sum `host_ms` and `host_p90_ms`. The lengths are spread over a
    block, so that in each step the same share of sequences fills its last one."""
    engine = loaded_engine(num_seqs, context_len, num_steps, seed, "cpu")
    while engine.has_work:
        engine.step()
    records = [record for record in engine.timeline if record.num_tokens == num_seqs == len(record.chunks)]
    records = [record for record in records if all(chunk.kind == "decode" for chunk in record.chunks)][-num_steps:]
    if len(records) < num_steps:
        raise BenchmarkError(f"{len(records)} of {num_steps} steps decoded all {num_seqs} sequences")
    result = {f"{part}_ms": 1e3 * statistics.median(getattr(r, f"{part}_s") for r in records) for part in PARTS}
    host = sorted(1e3 * record.host_s for record in records)
    return {**result, "host_ms": statistics.median(host), "host_p90_ms": host[len(host) * 9 // 10]}


def measure_graphs(num_seqs: int, context_len: int, num_steps: int, seed: int = 0) -> dict[str, float]:
    """The same decodes as graphs of a dummy GPU: the medians `graph_host_ms` and `graph_host_p90_ms` of a
    step's wall time. The process's device of that architecture is a dummy from then on."""
    device = _dry_device()
    engine = loaded_engine(num_seqs, context_len, num_steps + 8, seed, device)
    walls = []
    while engine.has_work:
        before, start = engine.stats().num_graph_steps, time.perf_counter()
        engine.step()
        wall = time.perf_counter() - start
        if engine.stats().num_graph_steps == before + 1 and len(engine.scheduler.running) == num_seqs:
            walls.append(1e3 * wall)
    engine.close()
    walls = sorted(walls[4:][-num_steps:])  # without those that start while graphs are recorded
    if len(walls) < num_steps:
        raise BenchmarkError(f"{len(walls)} of {num_steps} steps were graphs of all {num_seqs} sequences")
    return {"graph_host_ms": statistics.median(walls), "graph_host_p90_ms": walls[len(walls) * 9 // 10]}


def _dry_device() -> str:
    """A dummy GPU."""
    driver = Driver(_emulated_driver.DryDriver(DRY_ARCH), cuda_bindings("a dummy GPU"), arch=DRY_ARCH)
    driver.call("cuInit", 0)
    device = Device(f"emulated:{DRY_ARCH}")
    Gpu(device, driver, kernel_cache=KernelList()).install()
    return device.type


def bench_overhead(
    *, batch_sizes: Sequence[int] = (32, 256), context_lens: Sequence[int] = (64, 4096), num_steps: int = 200
) -> dict[str, Any]:
    """`measure_overhead` of every batch size and context length, and `measure_graphs` if the GPU libraries are
    installed, as `results`."""
    if num_steps < 1 or min(batch_sizes, default=0) < 1 or min(context_lens, default=0) < 1:
        raise BenchmarkError("--batch-sizes, --context-lens and --num-steps must be positive")
    has_gpu_libraries = all(importlib.util.find_spec(name) is not None for name in ("cuda", "numba_cuda"))
    results = []
    for num_seqs in batch_sizes:
        for context_len in context_lens:
            result = measure_overhead(num_seqs, context_len, num_steps)
            if has_gpu_libraries:
                result |= measure_graphs(num_seqs, context_len, num_steps)
            results.append({"num_seqs": num_seqs, "context_len": context_len, **result})
    return finished({"num_steps": num_steps, "block_size": BLOCK_SIZE, "results": results})
