"""A model without weights, and an engine around it.

Its KV cache holds the token ids themselves, and its logits are a fixed function of the tokens that it finds
there by way of the block table. So a wrong slot, block or position gives other tokens, and nothing has to be
trained.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import float32
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.limits import resolve
from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.pooling import PoolingTask
from runtime.tensor.tensor import Tensor

VOCAB_SIZE = 97
EOS = 96
ROTATED = 1000
"""Added to a token for each position by which it is rotated further."""


class FakeModel:
    """`hidden[t]` is a hash of the tokens up to and including `t`; logits are waves in hash and token id.

    `before_forward` sees every batch and may raise; `nan_after` makes the logits NaN wherever that token was
    last. Tokens that are rotated by a `longrope_threshold` count as others.
    """

    def __init__(self, longrope_threshold: int | None = None) -> None:
        self.device = Device.parse("cpu")
        self.longrope_threshold = longrope_threshold
        self.before_forward: Callable[[Batch], None] = lambda batch: None
        self.nan_after: int | None = None
        self.num_computed_tokens = 0

    suppressed_ids: Tensor | None = None
    gives_last_rows = False

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype=float32)

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        offsets = check_batch(batch, kv_cache)
        assert set(offsets.tolist()) <= {0, self.longrope_threshold}
        self.before_forward(batch)
        keys = kv_cache.layer(0)[0].array  # [num_blocks, 1, 1, block_size]
        block_size = kv_cache.spec.block_size
        block, offset = np.divmod(batch.slot_mappings[0].array, block_size)
        keys[block, 0, 0, offset] = batch.token_ids.array + ROTATED * offsets
        self.num_computed_tokens += batch.num_tokens
        hidden = np.empty((batch.num_tokens, 1), np.float32)
        starts, lens = batch.query_start.array, batch.seq_lens.array
        for s in range(batch.num_seqs):
            table = batch.block_tables[0].array[s, : -(-int(lens[s]) // block_size)]
            tokens = keys[table, 0, 0].reshape(-1)[: lens[s]].astype(np.int64)
            hashes = prefix_hashes(tokens)
            hidden[starts[s] : starts[s + 1], 0] = hashes[lens[s] - (starts[s + 1] - starts[s]) :]
            if self.nan_after is not None and tokens[-1] == self.nan_after:
                hidden[starts[s + 1] - 1] = np.nan
        return Tensor.from_numpy(hidden)

    def head(self, task: PoolingTask, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        return pooled

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return Tensor.from_numpy(fake_logits(hidden.array[:, 0]))


def prefix_hashes(tokens: np.ndarray) -> list[int]:
    hashes, value = [], 7
    for token in tokens.tolist():
        value = (value * 31 + token + 1) % 65_521
        hashes.append(value)
    return hashes


def fake_logits(hashes: np.ndarray) -> np.ndarray:
    """`[n]` → `[n, VOCAB_SIZE]` float32; EOS is never likely."""
    angles = hashes.astype(np.float64)[:, None] * (1.0 + np.arange(VOCAB_SIZE) * 0.618)
    logits = (3.0 * np.sin(angles)).astype(np.float32)
    logits[:, EOS] = -9.0
    return np.ascontiguousarray(logits)


def greedy(prompt: list[int], num_tokens: int, longrope_threshold: int | None = None) -> list[int]:
    """What the fake model continues with, computed without an engine."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        known = np.array(tokens)
        if longrope_threshold is not None and len(known) > longrope_threshold:
            known += ROTATED * longrope_threshold
        tokens.append(int(np.argmax(fake_logits(np.array(prefix_hashes(known)[-1:])))))
    return tokens[len(prompt) :]


def check_batch(batch: Batch, kv_cache: KVCache) -> np.ndarray:
    """What every model may rely on. Returns how much further each token is rotated than its place says."""
    starts, lens = batch.query_start.array, batch.seq_lens.array
    assert starts[0] == 0
    assert starts[-1] == batch.num_tokens
    counts = np.diff(starts)
    assert counts.min() >= 1
    assert (counts.max(), lens.max()) == (batch.max_query_len, batch.max_seq_len)
    slots = batch.slot_mappings[0].array
    assert len(np.unique(slots)) == len(slots), "two tokens share a slot"
    assert slots.min() >= 0
    assert slots.max() < kv_cache.num_blocks * kv_cache.spec.block_size
    offsets: np.ndarray = batch.positions.array - np.concatenate([np.arange(n - c, n) for n, c in zip(lens, counts)])
    expected = {
        "token_ids": np.int32,
        "positions": np.int32,
        "query_start": np.int32,
        "seq_lens": np.int32,
        "logits_indices": np.int32,
    }
    for name, dtype in expected.items():
        array = getattr(batch, name).array
        assert array.dtype == dtype, name
        assert array.flags.c_contiguous, name
    assert slots.dtype == np.int64
    assert batch.block_tables[0].array.dtype == np.int32
    assert batch.block_tables[0].array.flags.c_contiguous
    return offsets


@pytest.fixture(params=["plain loop", "overlapped loop"])
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Engines that `make_engine` makes have this loop unless they name one; whether it is the overlapped one."""
    overlaps = request.param == "overlapped loop"
    monkeypatch.setitem(DEFAULTS, "overlap", "on" if overlaps else "off")
    return overlaps


DEFAULTS: dict[str, Any] = {
    "num_blocks": 64,
    "block_size": 8,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "decode_graphs": "off",  # the fake model is numpy, which cannot be recorded
}


def make_engine(model: FakeModel | None = None, seed: int | None = 0, **settings: Any) -> Engine:
    model = model or FakeModel()
    config = EngineConfig(**{**DEFAULTS, **settings})
    block_size = config.block_size
    spec = model.kv_cache_spec(block_size)
    limits = resolve(
        config,
        max_position_embeddings=4096,
        bytes_per_block=spec.block_bytes[0],
        available_bytes=1 << 30,
        longrope_threshold=model.longrope_threshold,
    )
    kv_cache = KVCache(spec, limits.num_blocks)
    info = EngineInfo(
        model_name="fake",
        model_path="fake",
        architecture="Fake",
        device="cpu",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_waiting=limits.max_waiting,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        kv_cache_bytes=kv_cache.size_bytes,
        weight_bytes=0,
    )
    return Engine(LocalExecutor(model, kv_cache, limits, VOCAB_SIZE), limits, info, seed)


def request(
    request_id: str,
    prompt: Iterable[int],
    *,
    eos: tuple[int, ...] = (EOS,),
    priority: int = 0,
    **params: object,
) -> EngineRequest:
    """Greedy unless a temperature is given."""
    params = {"temperature": 0.0, **params}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_ids=eos,
        priority=priority,
    )


class Collected:
    """Outputs of one request, put together by choice."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []

    def of(self, index: int = 0) -> list[EngineOutput]:
        return [output for output in self.outputs if output.index == index]

    def token_ids(self, index: int = 0) -> list[int]:
        return [i for output in self.of(index) for i in output.new_token_ids]

    def finish_reason(self, index: int = 0) -> str | None:
        last = self.of(index)[-1]
        assert all(output.finish_reason is None for output in self.of(index)[:-1])
        return last.finish_reason


def collect(outputs: Iterable[EngineOutput], into: dict[str, Collected]) -> None:
    for output in outputs:
        into.setdefault(output.request_id, Collected()).outputs.append(output)


def run_to_end(
    engine: Engine, into: dict[str, Collected] | None = None, *, max_steps: int = 20_000
) -> dict[str, Collected]:
    """Step until there is no work, checking all invariants after each step."""
    collected: dict[str, Collected] = {} if into is None else into
    for _ in range(max_steps):
        if not engine.has_work:
            assert engine.pool.num_free == engine.pool.num_blocks, "blocks leaked"
            assert not engine.requests
            return collected
        collect(engine.step(), collected)
        engine.check_invariants()
    raise AssertionError(f"still work after {max_steps} steps")


def one(engine: Engine, prompt: list[int], **params: object) -> Collected:
    engine.add(request("one", prompt, **params))
    return run_to_end(engine)["one"]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE - 1) for _ in range(length)]


def said_by_engine(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The engine's warnings. Other loggers may log in any test, when garbage is collected, and an earlier test may have
    lowered the level of the engine's logger."""
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in warned if record.name == "xserv.engine"]
