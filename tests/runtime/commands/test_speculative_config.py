"""vLLM's `--speculative-config` as ours."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from runtime.commands.options import EngineOptions, options_of
from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 5}', {"speculation": "ngram", "num_speculative_tokens": 5}),
        ('{"method": "suffix"}', {"speculation": "suffix"}),
        ('{"model": "x", "num_speculative_tokens": 4}', {"speculation": "draft:x", "num_speculative_tokens": 4}),
        (
            '{"model": "x", "draft_sample_method": "probabilistic"}',
            {"speculation": "draft:x", "speculation_acceptance": "rejection"},
        ),
        (
            '{"model": "x", "rejection_sample_method": "standard"}',
            {"speculation": "draft:x", "speculation_acceptance": "rejection"},
        ),
        ('{"model": "x", "draft_sample_method": "greedy"}', {"speculation": "draft:x"}),
        ('{"method": "eagle3", "model": "x"}', {"speculation": "eagle3:x"}),
        ('{"method": "dflash", "model": "x"}', {"speculation": "dflash:x"}),
        ('{"method": "dspark", "model": "x"}', {"speculation": "dflash:x"}),
        ('{"method": "mtp", "num_speculative_tokens": 1}', {"speculation": "mtp", "num_speculative_tokens": 1}),
        ('{"method": "deepseek_mtp"}', {"speculation": "mtp"}),
        ('{"model": "[ngram]", "num_speculative_tokens": 3}', {"speculation": "ngram", "num_speculative_tokens": 3}),
    ],
)
def test_what_it_stands_for(text: str, options: dict[str, Any]) -> None:
    assert options_of(text) == options
    arguments = EngineOptions(speculative_config=text).arguments()
    assert {name: arguments[name] for name in options} == options
    EngineConfig(**{name: arguments[name] for name in ("speculation", "num_speculative_tokens")})


def test_keys_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xserv"):
        assert options_of('{"method": "ngram", "prompt_lookup_max": 4}') == {"speculation": "ngram"}
    assert [record.getMessage() for record in caplog.records if record.name == "xserv.commands"] == [
        "--speculative-config: prompt_lookup_max has no effect: the longest agreement is looked for"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no JSON"),
        ("[1]", "JSON object"),
        ("{}", "method must be one of draft_model, eagle3, dflash, dspark, ngram, suffix, mtp, got None"),
        ('{"method": 3}', "got 3"),
        ('{"method": "magic"}', "got 'magic'"),
        ('{"method": "eagle", "model": "x"}', "'eagle' is not built"),
        ('{"method": "eagle3"}', "model must be an EAGLE-3 drafter, got None"),
        ('{"method": "dflash"}', "model must be a DFlash drafter, got None"),
        ('{"method": "draft_model"}', "model must be a draft model, got None"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', "got '5'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "got 0"),
        ('{"method": "ngram", "ngram_size": 3}', "no key 'ngram_size'"),
        ('{"model": "x", "rejection_sample_method": "block"}', "must be one of standard, got 'block'"),
        ('{"model": "x", "draft_sample_method": 1}', "greedy, probabilistic, got 1"),
    ],
)
def test_others_are_refused(text: str, problem: str) -> None:
    with pytest.raises(RequestError, match="--speculative-config") as caught:
        EngineOptions(speculative_config=text).arguments()
    assert problem in str(caught.value)


def test_two_that_differ_are_refused() -> None:
    with pytest.raises(RequestError, match="--speculation suffix and --speculative-config say different things"):
        EngineOptions(speculation="suffix", speculative_config='{"method": "ngram"}').arguments()
