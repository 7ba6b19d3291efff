"""A folder with a `tokenizer.model` alone, as InternLM 2 is published.

The model is the fixture's in SentencePiece's form; the library of that name gives the expected ids for it, too, except
where a text spells out a control token, which it leaves text.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from models.checkpoints.model_files import open_model
from tests.tokenizer.gguf_metadata import sentencepiece_metadata
from tests.tokenizer.support import FIXTURES
from tokenizer import Tokenizer
from tokenizer.errors import TokenizerFileError

BPE = {3: 2, 35: 1}  # trainer_spec: model_type, byte_fallback
AS_IT_IS: dict[int, int | bytes] = {1: b"identity", 3: 1, 4: 0}  # normalizer_spec: a blank in front, none dropped


def varint(number: int) -> bytes:
    low = number & 127
    return bytes([low]) if number < 128 else bytes([low | 128]) + varint(number >> 7)


def message(fields: dict[int, Any]) -> bytes:
    parts = []
    for number, value in fields.items():
        if isinstance(value, float):
            parts.append(varint(number << 3 | 5) + struct.pack("<f", value))
        elif isinstance(value, int):
            parts.append(varint(number << 3) + varint(value % (1 << 64)))
        else:
            parts.append(varint(number << 3 | 2) + varint(len(value)) + value)
    return b"".join(parts)


def model_file(trainer: dict[int, Any], normalizer: dict[int, Any], folder: Path = FIXTURES / "sentencepiece") -> bytes:
    lists = sentencepiece_metadata(folder)
    columns = (lists[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    pieces = [
        message({1: message({1: token.encode(), 2: float(score), 3: int(kind)})})
        for token, score, kind in zip(*columns, strict=True)
    ]
    return b"".join(pieces) + message({2: message(trainer), 3: message(normalizer)})


def write(folder: Path, content: bytes | None = None, **config: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(model_file(BPE, AS_IT_IS) if content is None else content)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ids_and_texts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(write(tmp_path))
    cases = json.loads((FIXTURES / "sentencepiece" / "expected.json").read_text(encoding="utf-8"))
    assert len(cases) > 50
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert tokenizer.special_tokens_map == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_tokens_of_the_config_take_the_places_of_others(tmp_path: Path) -> None:
    own = {"304": {"content": "<|im_end|>", "special": True}, "305": {"content": "<|im_start|>", "special": True}}
    write(tmp_path, added_tokens_decoder=own, add_bos_token=False, eos_token="<|im_end|>")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("<|im_start|>the<|im_end|>") == [305, *tokenizer.encode("the"), 304]
    assert tokenizer.eos_token_id == 304
    found = open_model(tmp_path).end_tokens()
    assert found is not None
    assert 304 in found.ids


REFUSED = [
    (model_file({3: 3}, AS_IT_IS), "tokenizer.model: is a model of words; read are Unigram, BPE and characters"),
    (model_file(BPE, {**AS_IT_IS, 2: b"map"}), "precompiled_charsmap has 3 bytes, which are no table"),
    (b"IQ== 0\nIg== 1\n", "has tokens and ranks alone"),  # tiktoken's form
    (model_file(BPE, AS_IT_IS)[:1000], "is no SentencePiece model"),
    (b"", "is no SentencePiece model"),
]


@pytest.mark.parametrize(("content", "problem"), REFUSED)
def test_others_are_told_and_leave_a_model_its_ids(
    content: bytes, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, content)
    with pytest.raises(TokenizerFileError, match=problem):
        Tokenizer.from_pretrained(tmp_path)
    assert open_model(tmp_path).tokenizer_files() is None
    assert problem in caplog.text
    assert "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)" in caplog.text
