"""The classes that transformers builds anew. The ids of folders of LlamaTokenizer are what its AutoTokenizer gave on 22
November 2026 (5.23); those of every class, with BOS, EOS and a blank in front or not, `tools.references` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.class_cases import EXPECTED, cases
from tests.tokenizer.class_cases import TEXTS as CLASS_TEXTS
from tests.tokenizer.support import bpe_model, content_of
from tokenizer import Tokenizer, TokenizerFileError

TEXTS = ("a b", " a", "  a", "", " ", "a</s> b", "a</s>b")
PREPEND_AND_REPLACE = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
SPECIAL = ["<unk>", "<s>", "</s>"]
CONTENT = content_of(
    bpe_model([*SPECIAL, "▁", "a", "b"], ["▁ a", "▁ b", "▁ ▁"], unk_token="<unk>", fuse_unk=True, byte_fallback=True),
    normalizer=PREPEND_AND_REPLACE,
    pre_tokenizer=None,
    decoder={"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]},
    added_tokens=[
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(SPECIAL)
    ],
)  # fmt: skip
AS_STORED = [[6, 7], [3, 6], [8, 6], [], [8], [6, 2, 3, 7], [6, 2, 7]]
REBUILT = [[6, 7], [6], [3, 6], [], [3], [6, 2, 7], [6, 2, 5]]
LEGACY = [[6, 7], [6], [3, 6], [], [3], [6, 2, 7], [6, 2, 7]]
NO_PREFIX = [[4, 7], [6], [3, 6], [], [3], [4, 2, 7], [4, 2, 5]]


def folder_of(path: Path, model_type: str | None = "llama", **config: Any) -> Path:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (path / "tokenizer.json").write_text(json.dumps(CONTENT))
    (path / "tokenizer_config.json").write_text(json.dumps({**names, **config}))
    if model_type is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


CASES: list[tuple[dict[str, Any], list[list[int]]]] = [
    ({}, REBUILT),
    ({"legacy": False}, REBUILT),
    ({"legacy": None, "add_prefix_space": None, "model_type": None}, REBUILT),
    ({"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": True}, REBUILT),
    ({"legacy": True}, LEGACY),
    ({"add_prefix_space": False}, NO_PREFIX),
    ({"legacy": True, "add_prefix_space": False}, NO_PREFIX),
    ({"model_type": "mistral"}, AS_STORED),
    ({"tokenizer_class": "PreTrainedTokenizerFast", "legacy": False}, AS_STORED),
    ({"tokenizer_class": None}, AS_STORED),
]


@pytest.mark.parametrize(("config", "expected"), CASES, ids=[str(config) for config, _ in CASES])
def test_ids_are_those_of_the_class(tmp_path: Path, config: dict[str, Any], expected: list[list[int]]) -> None:
    tokenizer = Tokenizer.from_pretrained(folder_of(tmp_path, **config))
    assert [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS] == expected


def test_a_byte_level_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {**CONTENT, "normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_pretrained(folder).encode("ab", add_special_tokens=False) == [4, 5]


def test_a_wrong_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerFileError, match=r"tokenizer_config.json: legacy: expected .*, found 'yes'"):
        Tokenizer.from_pretrained(folder_of(tmp_path, legacy="yes"))


IDS_OF_CLASSES = json.loads(EXPECTED.read_text(encoding="utf-8"))["ids"]


def test_every_case_has_its_ids() -> None:
    assert sorted(name for names in IDS_OF_CLASSES.values() for name in names) == sorted(cases())


@pytest.mark.parametrize("ids", IDS_OF_CLASSES)
def test_what_is_added_is_what_the_class_adds(ids: str, tmp_path: Path) -> None:
    folders, wrong = cases(), []
    for i, name in enumerate(IDS_OF_CLASSES[ids]):
        folder = tmp_path / str(i)
        folder.mkdir()
        for file, text in folders[name].items():
            (folder / file).write_text(text, encoding="utf-8")
        tokenizer = Tokenizer.from_pretrained(folder)
        if [tokenizer.encode(text) for text in CLASS_TEXTS] != json.loads(ids):
            wrong.append(name)
    assert not wrong
