"""Every family on ranks, in stages, and both, in processes: in exact mode with one device's bits, else with its greedy
tokens. `tests/models/test_ranks.py` has ranks alone, on threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.engine.make_engine import build_engine
from runtime.engine.sampling_params import SamplingParams
from tests.models.folders import load_golden, write_model
from tests.models.shared_families import FAMILIES, WITHOUT_EXACT_RANKS, WITHOUT_STAGES, write_shared
from tests.runtime.engine.ranks.test_tensor_parallel import request_of, run

pytestmark = pytest.mark.exhaustive

PROMPTS = [[5, 9, 2, 44, 17], [8] * 30, [3, 1, 4, 1, 5, 9, 2, 6]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True)
SHAPES = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)]
"""Stages and ranks of each."""


def answers(folder: Path, num_stages: int, num_ranks: int, *, exact: bool) -> list[Any]:
    """Tokens of each prompt's answer, and, in exact mode, their log probabilities."""
    found: dict[str, list[Any]] = {str(number): [] for number in range(len(PROMPTS))}
    engine = build_engine(
        folder, device="cpu", tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages, exact=exact,
        load_format="dummy", dtype="float32", max_model_len=64, num_blocks=48, seed=0,
    )  # fmt: skip
    try:
        for number, ids in enumerate(PROMPTS):
            engine.add(request_of(str(number), ids, GREEDY))
        for output in run(engine):
            found[output.request_id].append((output.new_token_ids, repr(output.logprobs) if exact else ""))
    finally:
        engine.close()
    assert all(sum(len(ids) for ids, _ in each) == GREEDY.max_tokens for each in found.values())
    return list(found.values())


def test_gemma_4s_inputs_in_stages(tmp_path: Path) -> None:
    """The last five of six layers share pages. Prompts skip rows in the last stage, which gets all of them."""
    folder = write_model(tmp_path, load_golden("gemma4_inputs_odd"))
    for exact in (True, False):
        alone = answers(folder, 1, 1, exact=exact)
        assert answers(folder, 2, 1, exact=exact) == alone, exact


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    folder = write_shared(tmp_path, family)
    for exact in (True, False):
        shapes = SHAPES if exact else [(1, 2), (2, 2)]
        if exact and family in WITHOUT_EXACT_RANKS:
            shapes = [shape for shape in SHAPES if shape[1] == 1]
        if family in WITHOUT_STAGES:
            shapes = [shape for shape in shapes if shape[0] == 1]
        alone = answers(folder, 1, 1, exact=exact)
        for num_stages, num_ranks in shapes:
            assert answers(folder, num_stages, num_ranks, exact=exact) == alone, (exact, num_stages, num_ranks)
