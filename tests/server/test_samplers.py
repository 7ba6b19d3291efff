"""Samplers over HTTP with OpenAI's client: the ends of their ranges, all at once, and values that make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.real_server import Real, serving_real, write_tiny_model

ENDS: list[dict[str, Any]] = [
    {"typical_p": 1e-9}, {"typical_p": 1}, {"top_n_sigma": -1}, {"top_n_sigma": 1e-9}, {"top_n_sigma": 10000},
    {"xtc_probability": 1, "xtc_threshold": 0}, {"xtc_probability": 1, "xtc_threshold": 1}, {"xtc_probability": 1e-9},
    {"dynatemp_range": 10000, "dynatemp_exponent": 10000}, {"dynatemp_range": 1, "dynatemp_exponent": 0},
    {"mirostat": 2, "mirostat_tau": 0, "mirostat_eta": 0},
    {"mirostat": 2, "mirostat_tau": 10000, "mirostat_eta": 10000},
    {"dry_multiplier": 10000, "dry_base": 10000, "dry_allowed_length": 0}, {"dry_multiplier": 1e-9, "dry_base": 1},
    {"dry_multiplier": 1, "dry_penalty_last_n": 0}, {"dry_multiplier": 1, "dry_sequence_breakers": []},
    {"samplers": []}, {"samplers": ["temp"], "temperature": 0.0001}, {"temperature_last": True, "temperature": 10000},
    {
        "typical_p": 0.5, "top_n_sigma": 2, "xtc_probability": 0.5, "xtc_threshold": 0.1, "dynatemp_range": 0.5,
        "mirostat": 2, "dry_multiplier": 1, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "min_tokens": 3, "temperature_last": True,
    },
]  # fmt: skip
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"typical_p": 0}, "typical_p"), ({"typical_p": "a"}, "typical_p"), ({"top_n_sigma": -2}, "top_n_sigma"),
    ({"xtc_probability": 1.5}, "xtc_probability"), ({"mirostat": 1}, "mirostat"), ({"mirostat": True}, "mirostat"),
    ({"mirostat_tau": -1}, "mirostat_tau"), ({"dry_base": 0.5}, "dry_base"), ({"dry_range": -5}, "dry_range"),
    ({"samplers": ["magic"]}, "samplers"), ({"samplers": [], "temperature_last": True}, "samplers"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"), ({"dynatemp_range": 1e9}, "dynatemp_range"),
]  # fmt: skip


@pytest.fixture(scope="module", params=["off", "ngram"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    with serving_real(folder, load_format="dummy", num_blocks=400, exact=True, speculation=request.param) as server:
        yield server


def test_ends_of_ranges_answer_alike_alone_and_streamed(real: Real) -> None:
    for fields in ENDS:
        asked: dict[str, Any] = {"model": real.model, "prompt": "abcabcabc", "max_tokens": 8, "seed": 3}
        asked["extra_body"] = {"ignore_eos": True, "return_token_ids": True} | fields
        whole = real.openai.completions.create(n=4, logprobs=2, **asked).choices
        ids: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
        for chunk in real.openai.completions.create(n=4, stream=True, **asked):
            for choice in chunk.choices:
                ids[choice.index] += choice.token_ids  # type: ignore[attr-defined]
        assert [each.token_ids for each in whole] == [ids[each.index] for each in whole], fields  # type: ignore[attr-defined]
        assert all(len(each) == 8 for each in ids.values()), fields
        assert all(each.logprobs is not None and len(each.logprobs.tokens or ()) == 8 for each in whole), fields


def test_nonsense_names_the_field(real: Real) -> None:
    for fields, param in NONSENSE:
        with pytest.raises(openai.BadRequestError) as caught:
            real.openai.completions.create(model=real.model, prompt="a", extra_body=fields)
        body: Any = caught.value.body
        assert body["param"].startswith(param), (fields, body)
        assert param in body["message"], body
        assert "\n" not in body["message"]
