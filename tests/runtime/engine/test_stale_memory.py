"""No answer depends on what memory held before: a debug mode fills it with NaN (0xFF) ahead of each replay and page.

What a recording's arrays leave in the arena between two replays, and pages that a sequence is given, hold numbers of
other steps and sequences. Whoever reads them ahead of writing them gets plausible values, and now and then another
answer; here he gets NaN, or token id -1.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
from numba_kernels.cpu.running.recording import Recording
from runtime import LLM, SamplingParams
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.kv.cache import KVCache

BYTE = 0xFF
MODELS = Path(models.__file__).parent
QUESTIONS = ["Count from 1 to 9", "What is 17 plus 25?", "Reverse the word planet", "What is the capital of France?"]


@contextlib.contextmanager
def filled_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """While it is entered: bytes of arenas, and pages, that were filled (and so were somebody's before)."""
    filled, caches = [0, 0], []
    replay, allocate, make_cache = Recording.replay, BlockPool.allocate, KVCache.__init__

    def fill_and_replay(recording: Recording, *passed: Any) -> None:
        for segment in recording.arena._segments:
            for start, end in segment.gaps:
                stale = segment.memory[start : min(end, segment.used_bytes)]
                stale[:] = BYTE
                filled[0] += stale.nbytes
        replay(recording, *passed)

    def note(cache: KVCache, *arguments: Any) -> None:
        make_cache(cache, *arguments)
        caches.append(cache)

    def fill_and_allocate(blocks: BlockPool, count: int, pool: int = 0, **options: Any) -> list[int]:
        block_ids = allocate(blocks, count, pool, **options)
        for cache in caches:
            rows = np.array(block_ids, np.int64) - sum(cache.pool_sizes[:pool])
            for planes in itertools.compress(cache.storages, (each == pool for each in cache.spec.pool_of_storage)):
                for plane in planes:
                    plane.array.view(np.uint8)[rows] = BYTE
        filled[1] += len(block_ids)
        return block_ids

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "replay", fill_and_replay)
        patch.setattr(KVCache, "__init__", note)
        patch.setattr(BlockPool, "allocate", fill_and_allocate)
        yield filled


def answers(model: Path, **options: Any) -> list[Any]:
    """Tokens and log probabilities, of one question alone and then of many beside each other and again."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    sampled = SamplingParams(temperature=0.9, max_tokens=24, logprobs=2, seed=5, n=2, repetition_penalty=1.1)
    found = []
    with LLM(model, device="cpu", max_model_len=256, **options) as llm:
        chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
        for asked, params in ((chats[:1], greedy), (chats * 4, greedy), (chats, sampled), (chats[:1], greedy)):
            for output in llm.chat(asked, params, use_tqdm=False):
                found += [(choice.token_ids, choice.logprobs) for choice in output.outputs]
    return found


@pytest.mark.exhaustive_cases("^demo-", "^demo_moe-", "^demo_hybrid-(?!{'num_blocks')")
@pytest.mark.parametrize(
    "options",
    [
        {}, {"enable_prefix_caching": False}, {"kv_cache_dtype": "int8"}, {"num_blocks": 28, "max_num_seqs": 8},
        {"max_num_batched_tokens": 32, "max_num_seqs": 8}, {"speculation": "ngram"}, {"exact": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["demo", "demo_moe", "demo_hybrid"])
def test_answers_are_the_same_over_memory_full_of_nan(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(MODELS / name, **options)
    with filled_memory(monkeypatch) as filled:
        found = answers(MODELS / name, **options)
    assert min(filled) > 0, "nothing was filled"
    assert found == expected
