"""Every family on ranks, in stages, and both: in exact mode with one device's bits, else with its greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.families import known_architectures
from runtime.engine.make_engine import build_engine
from runtime.engine.sampling_params import SamplingParams
from tests.models.folders import load_golden
from tests.runtime.engine.ranks.families import FAMILIES, write_shared
from tests.runtime.engine.ranks.test_tensor_parallel import request_of, run

exhaustive = pytest.mark.exhaustive
PROMPTS = [[5, 9, 2, 44, 17], [8] * 30, [3, 1, 4, 1, 5, 9, 2, 6]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True)
SHAPES = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)]
"""Stages and ranks of each."""


def answers(folder: Path, num_stages: int, num_ranks: int, *, exact: bool, device: str) -> list[Any]:
    """Tokens of each prompt's answer, and, in exact mode, their log probabilities."""
    found: dict[str, list[Any]] = {str(number): [] for number in range(len(PROMPTS))}
    engine = build_engine(
        folder, device=device, tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages, exact=exact,
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


@pytest.mark.parametrize("family", [each if each == "deepseek_v2" else pytest.param(each, marks=exhaustive) for each in FAMILIES])
def test_every_family(family: str, tmp_path: Path) -> None:
    folder = write_shared(tmp_path, family)
    for exact in (True, False):
        alone = answers(folder, 1, 1, exact=exact, device="cpu")
        for num_stages, num_ranks in SHAPES if exact else ((1, 2), (2, 2)):
            found = answers(folder, num_stages, num_ranks, exact=exact, device="cpu")
            assert found == alone, (exact, num_stages, num_ranks)


def test_no_family_is_left_out() -> None:
    """But those that read pictures, whose tests are their own."""
    import json

    have = {json.loads((load_golden(case).folder / "config.json").read_text())["architectures"][0] for case in FAMILIES.values()}
    left_out = set(known_architectures()) - have
    assert all("Conditional" in name or "VL" in name or "Llava" in name for name in left_out), left_out
