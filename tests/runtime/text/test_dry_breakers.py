"""DRY's breakers as ids are what a search of every token finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.engine.dry import DryBreakers
from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import SamplingParams
from runtime.text.dry_breakers import dry_breakers, with_dry_breakers
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_pretrained(Path("models/demo"))


@pytest.mark.parametrize("text", ["\n", ":", "the", "er the", "User: ", "é€", "zzz"])
def test_every_token_is_found(demo: Tokenizer, text: str) -> None:
    data, singles, sequences = text.encode(), [], []
    for token_id in range(demo.vocab_size):
        word = demo.token_bytes(token_id)
        if data in word:
            singles.append(token_id)
            continue
        for count in range(1, len(data)):
            rest = data[count:]
            if word.endswith(data[:count]) and rest[0] & 0xC0 != 0x80:
                sequences.append([token_id, *demo.encode(rest.decode(), add_special_tokens=False)])
    found = dry_breakers((text,), demo)
    assert found.token_ids == singles
    assert sorted(found.sequences) == sorted(sequences)


def test_the_texts_become_ids(demo: Tokenizer) -> None:
    on = {"dry_multiplier": 1.0}
    default = with_dry_breakers(SamplingParams(**on), demo).dry_breakers  # type: ignore[arg-type]
    assert default == dry_breakers(("\n", ":", '"', "*"), demo)
    own = with_dry_breakers(SamplingParams(dry_sequence_breakers=["the"], **on), demo)  # type: ignore[arg-type]
    assert (own.dry_breakers, own.dry_sequence_breakers) == (dry_breakers(("the",), demo), None)
    none = with_dry_breakers(SamplingParams(dry_sequence_breakers=[], **on), demo)  # type: ignore[arg-type]
    assert none.dry_breakers == DryBreakers()
    given = SamplingParams(dry_breakers=DryBreakers(token_ids=[3]), **on)  # type: ignore[arg-type]
    assert with_dry_breakers(given, demo) is given
    assert with_dry_breakers(SamplingParams(dry_sequence_breakers=["a"]), demo).dry_breakers is None
    with pytest.raises(RequestError, match="no tokenizer"):
        with_dry_breakers(SamplingParams(dry_sequence_breakers=["a"], **on), None)  # type: ignore[arg-type]
