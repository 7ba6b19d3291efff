"""`bench overhead`: what a step costs the host beside the computation: schedule, prepare (lay out its arrays), commit.

A hollow model computes nothing, so that every step is a decode of all sequences; the times are the medians of
`Engine.timeline`'s records. Flat in the context's length means that nothing is done again for tokens of earlier steps.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.bench.environment import describe_machine
from runtime.bench.metrics import BenchmarkError, check_finite

if TYPE_CHECKING:
    from runtime.batch import Batch
    from runtime.device.device import Device
    from runtime.engine.engine import Engine
    from runtime.kv_cache import KVCache, KVCacheSpec
    from runtime.tensor import Tensor

BLOCK_SIZE = 16
STEP_TOKENS = 1 << 16
VOCAB_SIZE = 64
PARTS = ("schedule", "prepare", "commit")


class HollowModel:
    """Computes nothing: every logit is zero but that of token 1."""

    def __init__(self) -> None:
        from runtime.device.device import CPU

        self.device: Device = CPU

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """One number a token."""
        from runtime.dtype import float32
        from runtime.kv_cache import KVCacheSpec

        return KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype=float32)

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """``[num_tokens, 1]`` zeros."""
        from runtime.tensor import Tensor

        return Tensor.from_numpy(np.zeros((batch.num_tokens, 1), np.float32))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[n, VOCAB_SIZE]``."""
        from runtime.tensor import Tensor

        logits = np.zeros((hidden.shape[0], VOCAB_SIZE), np.float32)
        logits[:, 1] = 1.0
        return Tensor.from_numpy(logits)


def hollow_engine(num_seqs: int, max_model_len: int) -> Engine:
    """An engine with the plain loop around a hollow model, with room for `num_seqs` whole contexts."""
    from runtime.engine.config import EngineConfig, resolve
    from runtime.engine.engine import Engine
    from runtime.engine.messages import EngineInfo
    from runtime.kv_cache import KVCache

    model = HollowModel()
    spec = model.kv_cache_spec(BLOCK_SIZE)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(num_seqs, STEP_TOKENS),
        block_size=BLOCK_SIZE,
        num_blocks=num_seqs * (-(-max_model_len // BLOCK_SIZE) + 1),
        overlap="off",
    )
    limits = resolve(
        config,
        max_position_embeddings=max_model_len,
        bytes_per_block=spec.bytes_per_block,
        available_bytes=0,
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
    return Engine(model, kv_cache, limits, info, seed=0)


def measure_overhead(num_seqs: int, context_len: int, num_steps: int, seed: int = 0) -> dict[str, float]:
    """Medians over `num_steps` steps that decode `num_seqs` sequences of `context_len` tokens and more: milliseconds
    `schedule_ms`, `prepare_ms`, `commit_ms`, of their sum `host_ms` and `host_p90_ms`. The lengths are spread over a
    block, so that in each step the same share of sequences fills its last one."""
    from runtime.engine.messages import EngineRequest
    from runtime.engine.sampling_params import SamplingParams

    longest = context_len + BLOCK_SIZE
    output_len = num_steps + 2 + -(-num_seqs * longest // STEP_TOKENS)  # some decode while others prefill
    engine = hollow_engine(num_seqs, longest + output_len)
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    for index in range(num_seqs):
        prompt = rng.choices(range(VOCAB_SIZE), k=context_len + index % BLOCK_SIZE)
        engine.add(EngineRequest(request_id=f"overhead-{index}", prompt_token_ids=prompt, params=params))
    while engine.has_work:
        engine.step()
    records = [record for record in engine.timeline if record.num_tokens == num_seqs == len(record.chunks)]
    records = [record for record in records if all(chunk.kind == "decode" for chunk in record.chunks)][-num_steps:]
    if len(records) < num_steps:
        raise BenchmarkError(f"{len(records)} of {num_steps} steps decoded all {num_seqs} sequences")
    result = {f"{part}_ms": 1e3 * statistics.median(getattr(r, f"{part}_s") for r in records) for part in PARTS}
    host = sorted(1e3 * record.host_s for record in records)
    return {**result, "host_ms": statistics.median(host), "host_p90_ms": host[len(host) * 9 // 10]}


def bench_overhead(
    *, batch_sizes: Sequence[int] = (32, 256), context_lens: Sequence[int] = (64, 4096), num_steps: int = 200
) -> dict[str, Any]:
    """`measure_overhead` of every batch size and context length, as `results`."""
    if num_steps < 1 or min(batch_sizes, default=0) < 1 or min(context_lens, default=0) < 1:
        raise BenchmarkError("--batch-sizes, --context-lens and --num-steps must be positive")
    results = [
        {"num_seqs": num_seqs, "context_len": context_len, **measure_overhead(num_seqs, context_len, num_steps)}
        for num_seqs in batch_sizes
        for context_len in context_lens
    ]
    for result in results:
        check_finite(result)
    return {
        "num_steps": num_steps,
        "block_size": BLOCK_SIZE,
        "results": results,
        "environment": describe_machine(),
    }
