"""Rejection sampling through the engine: other tokens than without, of the same distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import engine_of
from runtime.engine.speculation.draft_model import DraftModelDrafter
from runtime.engine.speculation.speculator import Speculator
from runtime.pooling import PoolingTask
from runtime.tensor.tensor import Tensor
from tests.runtime.engine.fakes import VOCAB_SIZE, FakeModel, make_engine, request, run_to_end

PROMPT = [5, 9, 2, 40]


class Flatter(FakeModel):
    """Has another opinion than the model that it drafts for, though not quite."""

    def head(self, task: PoolingTask, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        return pooled

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        logits.array[:] *= np.float32(0.6)
        logits.array[:, ::3] += np.float32(0.5)
        return logits


def drafting_engine(*, rejects: bool) -> tuple[Engine, Speculator]:
    engine = make_engine()
    drafter = DraftModelDrafter(Flatter(), 1000, None, engine.limits, 200, rejects=rejects)
    speculator = Speculator(drafter, 3, VOCAB_SIZE, fixed=True)
    engine.use(speculator)
    return engine, speculator


def answers(engine: Engine, count: int, **params: Any) -> np.ndarray:
    """`[count, max_tokens]`, each with a seed of its own."""
    for i in range(count):
        engine.add(request(f"r{i}", PROMPT, ignore_eos=True, seed=i, **params))
    results = run_to_end(engine)
    return np.array([results[f"r{i}"].token_ids() for i in range(count)])


@pytest.mark.parametrize(
    ("num_requests", "params"),
    [
        (400, {"temperature": 0.8, "top_k": 3}),
        pytest.param(3000, {"temperature": 0.8, "top_k": 4}, marks=pytest.mark.exhaustive),
        pytest.param(3000, {"temperature": 1.1, "top_k": 3, "frequency_penalty": 0.9}, marks=pytest.mark.exhaustive),
    ],
)
def test_tokens_have_the_distribution_that_they_have_without(num_requests: int, params: dict[str, Any]) -> None:
    """The third and fourth token together, by how often each pair comes without speculation and with."""
    engine, speculator = drafting_engine(rejects=True)
    found = answers(engine, num_requests, max_tokens=4, **params)
    assert speculator.is_on
    counters = speculator.counters
    assert 0.1 < counters.num_accepted_tokens / counters.num_draft_tokens < 0.95
    plain = answers(make_engine(), num_requests, max_tokens=4, **params)
    assert (found != plain).any(), "other answers"
    pairs = [each[:, 1] * VOCAB_SIZE + each[:, 2] for each in (found, plain)]
    size = VOCAB_SIZE * VOCAB_SIZE
    counts = np.stack([np.bincount(each, minlength=size) for each in pairs]).astype(np.float64)
    counts = counts[:, counts.sum(0) >= 12]  # of two samples: half of what came in both is expected of each
    expected = counts.sum(0) / counts.sum() * counts.sum(1, keepdims=True)
    freedom = counts.shape[1] - 1
    value = ((counts - expected) ** 2 / expected).sum()
    assert freedom > 4
    assert abs(value - freedom) / np.sqrt(2 * freedom) < 5
    assert (found[:, 0] == plain[:, 0]).all(), "behind the prompt there are no proposals"


def test_what_is_certain_stays_the_same() -> None:
    """Greedy answers are those without, and the others come again."""
    greedy: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0}
    assert (answers(drafting_engine(rejects=True)[0], 5, **greedy) == answers(make_engine(), 5, **greedy)).all()
    one, two = (answers(drafting_engine(rejects=True)[0], 4, max_tokens=16, temperature=1.0) for _ in range(2))
    assert (one == two).all(), "the same seeds, the same schedule"


def test_more_is_kept_than_by_equal_draws() -> None:
    kept = {}
    for rejects in (True, False):
        engine, speculator = drafting_engine(rejects=rejects)
        answers(engine, 30, max_tokens=12, temperature=1.0)
        kept[rejects] = speculator.counters.num_accepted_tokens / speculator.counters.num_draft_tokens
    assert kept[True] > kept[False] > 0.1


def test_exact_refuses_it() -> None:
    with pytest.raises(RequestError, match="speculation_acceptance is 'rejection', which does not go with exact"):
        EngineConfig(speculation_acceptance="rejection", exact=True)
    with pytest.raises(RequestError, match="does not go with tensor_parallel_size 2"):
        EngineConfig(speculation_acceptance="rejection", tensor_parallel_size=2)
    with pytest.raises(RequestError, match="speculation_acceptance must be one of"):
        EngineConfig(speculation_acceptance="typical")  # type: ignore[arg-type]


def test_the_configuration_asks_for_it() -> None:
    """The bundled model drafts for itself: p equals q, and all is kept."""
    demo = Path("models/demo").resolve()
    config = EngineConfig(
        max_model_len=64, device="cpu", num_blocks=40, max_num_seqs=4, speculation=f"draft:{demo}",
        speculation_acceptance="rejection",
    )  # fmt: skip
    engine = engine_of(demo, config)
    assert engine.speculator is not None
    engine.use(engine.speculator)
    for i in range(4):
        engine.add(request(f"r{i}", [7, 8, 9], max_tokens=40, temperature=1.0, seed=i, ignore_eos=True))
    results = run_to_end(engine)
    assert all(len(results[f"r{i}"].token_ids()) == 40 for i in range(4))
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    engine.close()
