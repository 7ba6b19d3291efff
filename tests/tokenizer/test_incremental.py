"""The incremental decoder: any way of cutting the ids gives the text of the whole."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tokenizer.support import (
    REAL_TOKENIZERS,
    added_token,
    bpe_model,
    build,
    byte_level_model,
    content_of,
    random_text,
    real_tokenizer,
)
from tokenizer import IncrementalDecoder, TokenIdError, Tokenizer, TokenizerError

_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_FALLBACK = {"type": "ByteFallback"}
_FUSE = {"type": "Fuse"}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
_CHAINS: dict[str, list[dict[str, Any]] | None] = {
    "none": None,
    "byte-level": [_BYTE_LEVEL],
    "byte-level-strip": [_BYTE_LEVEL, {**_STRIP, "stop": 2}],
    "llama": [_REPLACE, _FALLBACK, _FUSE, _STRIP],
    "gemma": [_REPLACE, _FALLBACK, _FUSE],
    "metaspace": [_FALLBACK, _METASPACE],
    "bpe": [{"type": "BPEDecoder", "suffix": "c"}],
    "strip-each": [{"type": "Strip", "content": "a", "start": 1, "stop": 0}],
    "not-streaming": [_FUSE, {"type": "Replace", "pattern": {"Regex": "a+ ?|b$"}, "content": "-"}],
}
_BYTES = [f"<0x{byte:02X}>" for byte in (0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0x41, 0xFF)]


def _tokenizer(chain: str) -> Tokenizer:
    decoders = _CHAINS[chain]
    if chain.startswith("byte-level"):
        model = byte_level_model(["Ġ a", "a b", "Ã ©", "â Ĥ", "Ċ Ċ"])
    else:
        model = bpe_model(["▁", "a", "b", "c", " ", "é", "▁a", "▁▁", "abc", *_BYTES], ["a b"])
    size = len(model["vocab"])
    tokens = [added_token("<end>", size, special=True), added_token("<｜think▁on｜>", size + 1)]
    decoder = {"type": "Sequence", "decoders": decoders} if decoders else None
    pre_tokenizer = {**_BYTE_LEVEL, "add_prefix_space": False} if chain.startswith("byte-level") else None
    return build(content_of(model, decoder=decoder, added_tokens=tokens, pre_tokenizer=pre_tokenizer))


_TOKENIZERS = {chain: _tokenizer(chain) for chain in _CHAINS}


def _cut(source: random.Random, ids: list[int]) -> list[list[int]]:
    pieces = []
    while ids:
        length = source.choice((0, 1, 1, 1, 2, 3, 7))
        pieces.append(ids[:length])
        ids = ids[length:]
    return pieces


def _decode(decoder: IncrementalDecoder, pieces: list[list[int]]) -> str:
    return "".join([decoder.push(piece) for piece in pieces]) + decoder.flush()


@pytest.mark.parametrize("chain", _CHAINS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 30), skips=st.booleans())
def test_any_cut_gives_the_whole(chain: str, seed: int, length: int, skips: bool) -> None:
    tokenizer = _TOKENIZERS[chain]
    source = random.Random(seed)
    ids = [source.randrange(tokenizer.vocab_size + 2) for _ in range(length)]
    whole = tokenizer.decode(ids, skip_special_tokens=skips)
    assert _decode(IncrementalDecoder(tokenizer, skips), _cut(source, ids)) == whole


@pytest.mark.parametrize("chain", _CHAINS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 20), skips=st.booleans())
@example(seed=1907, length=1, skips=False)  # two spaces after a prompt that is one byte token
def test_behind_a_prompt(chain: str, seed: int, length: int, skips: bool) -> None:
    """Behind whole characters, the continuation is what it adds to the decoded prompt, however it is cut."""
    tokenizer = _TOKENIZERS[chain]
    source = random.Random(seed)
    ids = [source.randrange(tokenizer.vocab_size + 2) for _ in range(length)]
    prompt = [source.randrange(tokenizer.vocab_size) for _ in range(source.randrange(4))]
    one_push = _decode(IncrementalDecoder(tokenizer, skips, prompt), [ids])
    assert _decode(IncrementalDecoder(tokenizer, skips, iter(prompt)), _cut(source, ids)) == one_push
    prompt_text = tokenizer.decode(prompt, skips)
    whole = tokenizer.decode(prompt + ids, skips)
    is_whole = "\ufffd" not in whole and whole.startswith(prompt_text)
    if is_whole and chain not in ("byte-level-strip", "bpe"):
        assert one_push == whole[len(prompt_text) :]


@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_real_tokenizers(name: str) -> None:
    tokenizer = real_tokenizer(name)
    source = random.Random(3)
    for round_number in range(150):
        ids = tokenizer.encode(random_text(source))
        if round_number % 3 == 0:
            ids += [source.randrange(tokenizer.vocab_size) for _ in range(5)]
        for skips in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skips)
            assert _decode(IncrementalDecoder(tokenizer, skips), _cut(source, ids)) == whole


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = _TOKENIZERS["byte-level"]
    ids = tokenizer.encode_ordinary("é€x")
    assert len(ids) == 4  # € is two tokens
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push([i]) for i in ids] == ["é", "", "€", "x"]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = _TOKENIZERS["llama"]
    euro = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC)]
    bad, letter = tokenizer.token_to_id("<0xFF>"), tokenizer.token_to_id("a")
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push([i]) for i in [*euro, letter]] == ["", "", "", "€a"]  # type: ignore[list-item]
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push([*euro, bad, letter]) == "\ufffd\ufffd\ufffd\ufffda"  # type: ignore[list-item]


def test_the_leading_space_belongs_to_the_beginning_of_the_text() -> None:
    tokenizer = _TOKENIZERS["llama"]
    word = tokenizer.token_to_id("▁a")
    assert word is not None
    assert IncrementalDecoder(tokenizer).push([word, word]) == "a a"
    assert IncrementalDecoder(tokenizer, prompt_ids=[word]).push([word]) == " a"
    end = tokenizer.token_to_id("<end>")
    assert end is not None
    assert IncrementalDecoder(tokenizer, prompt_ids=[end]).push([word]) == "a"  # the prompt had no text


def test_a_character_across_the_prompts_end_comes_whole() -> None:
    for chain in ("byte-level", "llama"):
        tokenizer = _TOKENIZERS[chain]
        names = ["â", "Ĥ", "¬", "a"] if chain == "byte-level" else ["<0xE2>", "<0x82>", "<0xAC>", "a"]
        ids = [tokenizer.token_to_id(name) for name in names]
        assert IncrementalDecoder(tokenizer, prompt_ids=ids[:2]).push(ids[2:]) == "€a"  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    for tokenizer in _TOKENIZERS.values():
        decoder = IncrementalDecoder(tokenizer)
        assert decoder.push([tokenizer.vocab_size, 10**6, 2**32 - 1]) + decoder.flush() == ""
        for bad in (-1, 2**32):
            with pytest.raises(TokenIdError, match=str(bad)):
                _decode(IncrementalDecoder(tokenizer), [[bad]])
            with pytest.raises(TokenIdError, match=str(bad)):
                tokenizer.decode([bad])


def test_after_flush() -> None:
    decoder = IncrementalDecoder(_TOKENIZERS["byte-level"])
    decoder.flush()
    assert decoder.flush() == ""
    with pytest.raises(TokenizerError, match="flushed"):
        decoder.push([1])


@pytest.mark.parametrize("chain", ["byte-level", "llama", "gemma"])
def test_the_cost_of_an_id_does_not_grow(chain: str) -> None:
    """Forty times as many: 40 times the processor's time; were it quadratic, 1,600 times."""
    tokenizer = _TOKENIZERS[chain]
    source = random.Random(0)
    ids = [source.randrange(tokenizer.vocab_size) for _ in range(20_000)]

    def seconds(count: int) -> float:
        started = time.thread_time()
        decoder = IncrementalDecoder(tokenizer)
        for i in ids[:count]:
            decoder.push([i])
        return time.thread_time() - started

    assert seconds(20_000) < 400 * min(seconds(500) for _ in range(3))
