"""`LLM.beam_search` beside transformers' (tools/references/generate_reference.py beam_search), and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import LLM, BeamSearchParams
from runtime.engine.errors import ContextLengthExceededError, RequestError, UnknownOptionError
from tests.models.folders import GOLDENS, load_golden, write_model

GOLDEN: dict[str, Any] = json.loads((GOLDENS / "beam_search.json").read_text())
END_IDS = sorted({tuple(search["eos_token_ids"]) for search in GOLDEN["searches"]})


@pytest.fixture(scope="module", params=END_IDS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, list[Any]]]:
    """The model whose answers end with these ids, and its searches."""
    folder = write_model(tmp_path_factory.mktemp("model"), load_golden(GOLDEN["model"]))
    end_ids = list(request.param)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids} if end_ids else {}))
    with LLM(folder, device="cpu", skip_tokenizer_init=True, kv_cache_bytes=1 << 22) as llm:
        yield llm, [search for search in GOLDEN["searches"] if search["eos_token_ids"] == end_ids]


def test_beams_are_those_of_transformers(loaded: tuple[LLM, list[Any]]) -> None:
    llm, searches = loaded
    assert llm.client.info.eos_token_ids == tuple(searches[0]["eos_token_ids"])
    for asked in searches:
        params = BeamSearchParams(
            beam_width=asked["beam_width"], max_tokens=asked["max_tokens"], length_penalty=asked["length_penalty"]
        )
        (found,) = llm.beam_search([asked["prompt"]], params)
        new = [beam.tokens[len(asked["prompt"]) :] for beam in found.sequences]
        assert new == asked["beams"]
        for beam, ids in zip(found.sequences, new, strict=True):
            total = sum(entry[token_id].logprob for entry, token_id in zip(beam.logprobs, ids, strict=True))
            assert beam.cum_logprob == pytest.approx(total)
            assert beam.finish_reason == ("stop" if ids[-1] in asked["eos_token_ids"] else "length")
        if asked["scores"] is not None:
            scores = [beam.cum_logprob / len(ids) ** params.length_penalty for beam, ids in zip(found.sequences, new)]
            assert scores == pytest.approx(asked["scores"], rel=1e-4)


def test_several_prompts_at_once_are_the_same_as_one_by_one(loaded: tuple[LLM, list[Any]]) -> None:
    llm, searches = loaded
    prompts = [search["prompt"] for search in searches][:3]
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    together = [[beam.tokens for beam in output.sequences] for output in llm.beam_search(prompts, params)]
    alone = [[beam.tokens for beam in llm.beam_search(prompt, params)[0].sequences] for prompt in prompts]
    by_two = llm.beam_search(prompts, params, concurrency_limit=2)
    limited = [[beam.tokens for beam in output.sequences] for output in by_two]
    assert together == alone == limited


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_model(tmp_path_factory.mktemp("model"), load_golden(GOLDEN["model"]))
    with LLM(folder, device="cpu", skip_tokenizer_init=True, kv_cache_bytes=1 << 20, max_model_len=32) as llm:
        yield llm


def test_ignored_ends_and_the_context(plain: LLM) -> None:
    (found,) = plain.beam_search([1] * 28, BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
    assert [len(beam.tokens) for beam in found.sequences] == [32, 32]  # the context ends
    with pytest.raises(ContextLengthExceededError):
        plain.beam_search([1] * 32, BeamSearchParams(beam_width=2, max_tokens=1))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"temperature": 0.5}, "temperature"),
    ],
)
def test_bad_params_are_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **options})
    assert caught.value.param == param


def test_too_many_beams_are_refused(plain: LLM) -> None:
    with pytest.raises(RequestError, match="beam_width must be at most 10"):
        plain.beam_search([1], BeamSearchParams(beam_width=11, max_tokens=1))
    with pytest.raises(RequestError, match="concurrency_limit"):
        plain.beam_search([1], BeamSearchParams(beam_width=1, max_tokens=1), concurrency_limit=0)
    with pytest.raises(UnknownOptionError, match="'beam_with'; did you mean 'beam_width'"):
        BeamSearchParams(beam_with=2, max_tokens=4)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="BeamSearchParams"):
        plain.beam_search([1], {"beam_width": 2})  # type: ignore[arg-type]


def test_the_golden_has_beams_that_end_early() -> None:
    lengths = {len(beam) for search in GOLDEN["searches"] for beam in search["beams"]}
    assert {1, 2} <= lengths
    assert Path(GOLDENS / GOLDEN["model"]).is_dir()
