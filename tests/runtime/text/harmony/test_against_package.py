"""Harmony beside the package `openai-harmony`, in part and as a whole."""

from __future__ import annotations

import pytest

from tests.runtime.text.harmony.against_package import Comparison, write_vocabulary
from tests.tokenizer.support import shared


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    folder = shared("tokenizers/gpt-oss")
    pytest.importorskip("openai_harmony", reason="needs the package openai-harmony")
    return Comparison(folder)


def test_some_conversations(comparison: Comparison) -> None:
    report = comparison.conversations(60, seed=1)
    assert report.differences == []
    assert report.counts["chats whose analysis the package dropped"] > 5


def test_some_answers(comparison: Comparison) -> None:
    report = comparison.answers(300, seed=1)
    assert report.differences == []
    assert report.counts["agree"] > 80


@pytest.mark.exhaustive
def test_ten_thousand_conversations_and_a_hundred_thousand_answers(comparison: Comparison) -> None:
    assert comparison.conversations(10_000, seed=0).differences == []
    report = comparison.answers(100_000, seed=0)
    assert report.differences == []
    assert report.counts["agree"] > 0.95 * report.counts["read by the package"]


def test_the_vocabulary_is_made_of_no_other_tokenizer(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from tests.runtime.text.tokenizers import byte_level_tokenizer

    with pytest.raises(ValueError, match="not o200k_base"):
        write_vocabulary(byte_level_tokenizer(), tmp_path)
