"""Ids of `suppress_tokens` in generation_config.json are never sampled, however a step samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models.demo
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM

PROMPT = "Once upon a time there was"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, which may not say the three ids that it would say most often."""
    folder = tmp_path_factory.mktemp("suppressed") / "model"
    shutil.copytree(models.demo.__path__[0], folder, ignore=shutil.ignore_patterns("drafter", "*.py", "__pycache__"))
    with LLM(max_num_seqs=4, num_blocks=64) as llm:
        said = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    ids, counts = np.unique(said, return_counts=True)
    suppressed = [*ids[np.argsort(counts)[-3:]].tolist(), 1 << 20]  # the last is outside of the vocabulary
    config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    (folder / "generation_config.json").write_text(json.dumps({**config, "suppress_tokens": suppressed}))
    return folder


def suppressed_ids(folder: Path) -> list[int]:
    found: list[int] = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["suppress_tokens"]
    return found[:-1]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"decode_graphs": "off"},
    {"speculation": "ngram"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["recorded", "eager", "speculation"])
def test_they_are_never_sampled(folder: Path, settings: dict[str, Any]) -> None:
    suppressed = suppressed_ids(folder)
    with LLM(str(folder), max_num_seqs=8, num_blocks=256, **settings) as llm:
        logits = llm.logits(llm.tokenizer.encode(PROMPT))[-1]
        greedy = llm.generate(PROMPT, GREEDY)[0].outputs[0]
        drawn = SamplingParams(temperature=1.5, max_tokens=48, seed=1, n=4, ignore_eos=True)
        guided = SamplingParams(
            temperature=1.5, max_tokens=16, seed=2, grammar=Grammar(kind="regex", text="[a-z ]{16,}")
        )
        said = [*llm.generate(PROMPT, drawn)[0].outputs, *llm.generate(PROMPT, guided)[0].outputs, greedy]
    assert np.isfinite(logits).all()
    assert not {token_id for answer in said for token_id in answer.token_ids}.intersection(suppressed)
    logits[suppressed] = -np.inf
    assert greedy.token_ids[0] == int(logits.argmax())
    shown = logits.astype(np.float64) - logits.max()
    expected = shown[greedy.token_ids[0]] - np.log(np.exp(shown).sum())
    assert greedy.logprobs is not None
    first = greedy.logprobs[0]
    assert first[greedy.token_ids[0]].logprob == pytest.approx(expected, abs=1e-4)
    assert not set(first).intersection(suppressed)
