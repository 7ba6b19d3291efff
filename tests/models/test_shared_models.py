"""The two trained models of ../shared/data: transformers' greedy continuations and logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.base import Model
from models.registry import load_model
from runtime import LLM, SamplingParams
from tests.models.driver import greedy, logits_of, relative_error

MODELS = Path(__file__).resolve().parents[3] / "shared" / "data" / "models"

pytestmark = pytest.mark.skipif(not MODELS.is_dir(), reason="needs ../shared/data/models")


def expected() -> dict[str, Any]:
    return json.loads((MODELS / "expected.json").read_text()) if MODELS.is_dir() else {}


RUNS = [(name, index) for name, entry in expected().items() for index in range(len(entry["greedy"]))]
GOLDENS = sorted(MODELS.glob("*/golden_logits_*.npy"))


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: load_model(MODELS / name) for name in expected()}


@pytest.mark.parametrize(("name", "index"), RUNS)
def test_greedy_continuations(models: dict[str, Model], name: str, index: int) -> None:
    run = expected()[name]["greedy"][index]
    chosen, _ = greedy(
        models[name], run["prompt_ids"], len(run["output_ids"]), max_tokens=512, block_size=8, seed=index
    )
    assert chosen == run["output_ids"]


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.parametrize("chunking", ["whole", "by_one", "random"])
def test_golden_logits(models: dict[str, Model], path: Path, chunking: str) -> None:
    name = path.parent.name
    run = expected()[name]["greedy"][int(path.stem.rsplit("_", 1)[1])]
    theirs = np.load(path)
    ids = (run["prompt_ids"] + run["output_ids"])[: theirs.shape[0]]
    sizes = {"whole": [len(ids)], "by_one": [1] * len(ids), "random": [2, 1, len(ids) - 3]}[chunking]
    assert relative_error(logits_of(models[name], ids, sizes, seed=len(ids)), theirs) <= 1e-4


@pytest.mark.parametrize("name", sorted(expected()))
def test_the_same_through_the_llm_class(name: str) -> None:
    runs = expected()[name]["greedy"]
    params = [SamplingParams(temperature=0.0, max_tokens=len(run["output_ids"]), ignore_eos=True) for run in runs]
    with LLM(str(MODELS / name), skip_tokenizer_init=True, max_num_batched_tokens=7, kv_cache_bytes=1 << 22) as llm:
        outputs = llm.generate([run["prompt_ids"] for run in runs], params)
        for run, output in zip(runs, outputs, strict=True):
            assert output.outputs[0].token_ids == run["output_ids"]
        for path in (path for path in GOLDENS if path.parent.name == name):
            theirs = np.load(path)
            run = runs[int(path.stem.rsplit("_", 1)[1])]
            assert relative_error(llm.logits(run["prompt_ids"][: theirs.shape[0]]), theirs) <= 1e-4
