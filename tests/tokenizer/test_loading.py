"""What a tokenizer folder may hold, and what is refused by name."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.support import FIXTURES, added_token, bpe_model, build, byte_level_model, content_of
from tokenizer import ChatTemplateError, Tokenizer, TokenizerError, TokenizerFileError


def _folder(path: Path, content: dict[str, Any] | None = None, **files: Any) -> Path:
    """A folder with tokenizer.json and further files; a dot in a name is written as two underscores."""
    if content is not None:
        files["tokenizer__json"] = content
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return path


def _content(**parts: Any) -> dict[str, Any]:
    model = bpe_model(["a", "b", "<s>", "</s>", "<unk>"], ["a b"])
    return content_of(model | parts.pop("model", {}), **parts)


@pytest.mark.parametrize("name", ["bytelevel", "sentencepiece"])
def test_fixtures(name: str) -> None:
    tokenizer = Tokenizer.from_pretrained(FIXTURES / name)
    expected = json.loads((FIXTURES / name / "expected.json").read_text(encoding="utf-8"))
    assert len(expected) > 50
    for case in expected:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]


def test_the_properties_of_a_folder() -> None:
    tokenizer = Tokenizer.from_pretrained(FIXTURES / "bytelevel")
    begin, end, think = (tokenizer.token_to_id(token) for token in ("<|begin|>", "<|end|>", "<think>"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (begin, end)
    assert tokenizer.pad_token_id is None
    assert tokenizer.unk_token_id is None
    assert tokenizer.all_special_ids == {begin, end}
    assert tokenizer.vocab_size == (think or 0) + 1
    assert tokenizer.special_tokens_map == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    assert tokenizer.token_to_id("nothing") is None
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert tokenizer.decode(prompt) == "<|begin|>user\nhello<|end|><|begin|>assistant\n"
    assert tokenizer.decode(prompt, skip_special_tokens=True) == "user\nhelloassistant\n"


def test_special_text_can_stay_text() -> None:
    tokenizer = Tokenizer.from_pretrained(FIXTURES / "bytelevel")
    text = "<|end|><think>hello"
    end, think = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<think>")
    assert tokenizer.encode(text, add_special_tokens=False)[:2] == [end, think]
    split = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert end not in split
    assert think in split
    ordinary = tokenizer.encode_ordinary(text)
    assert end not in ordinary
    assert think not in ordinary
    assert tokenizer.decode(split) == tokenizer.decode(ordinary) == text


def test_token_bytes() -> None:
    tokenizer = Tokenizer.from_pretrained(FIXTURES / "bytelevel")
    for text in ("é€🙂 hello\n", "<|end|>"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, False))) == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    spaced = Tokenizer.from_pretrained(FIXTURES / "sentencepiece")
    assert b"".join(map(spaced.token_bytes, spaced.encode("hello €", False))) == " hello €".encode()
    assert spaced.token_bytes(spaced.token_to_id("<0xE2>") or 0) == b"\xe2"


def test_a_lone_surrogate_is_a_replacement_character() -> None:
    for name in ("bytelevel", "sentencepiece"):
        tokenizer = Tokenizer.from_pretrained(FIXTURES / name)
        assert tokenizer.encode("a\ud83d b") == tokenizer.encode("a\ufffd b")
        assert tokenizer.encode_ordinary("\udc00") == tokenizer.encode_ordinary("\ufffd")


def test_vocab_and_merges(tmp_path: Path) -> None:
    content = content_of(byte_level_model(["Ġ a", "a b"]))
    model = content["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    config = {"eos_token": "<|endoftext|>"}
    merges = "#version: 0.2\n" + "\n".join(model["merges"]) + "\n"
    folder = _folder(tmp_path, vocab__json=vocab, merges__txt=merges, tokenizer_config__json=config)
    tokenizer = Tokenizer.from_pretrained(folder)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    same = build({**content, "pre_tokenizer": byte_level, "decoder": byte_level})
    text = "ab a ab's  中\n"
    assert tokenizer.encode(text) == same.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("ab<|endoftext|>")[-1] == tokenizer.eos_token_id == len(model["vocab"])


def test_qwen2_vocab_and_merges_and_an_unknown_class(tmp_path: Path) -> None:
    model = byte_level_model([])
    folder = _folder(tmp_path, vocab__json=model["vocab"], merges__txt="", tokenizer_config__json={})
    _folder(folder, tokenizer_config__json={"tokenizer_class": "Qwen2Tokenizer"})
    assert Tokenizer.from_pretrained(folder).encode("e\u0301") == Tokenizer.from_pretrained(folder).encode("é")
    _folder(folder, tokenizer_config__json={"tokenizer_class": "LlamaTokenizer"})
    with pytest.raises(TokenizerFileError, match=r"tokenizer_config.json: tokenizer_class: 'LlamaTokenizer'"):
        Tokenizer.from_pretrained(folder)


def test_named_tokens_of_the_vocabulary_are_special(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    tokenizer = Tokenizer.from_pretrained(_folder(tmp_path, _content(), tokenizer_config__json=config))
    assert tokenizer.encode("a<s>b") == [0, 2, 1]
    assert tokenizer.decode([0, 2, 1], skip_special_tokens=True) == "a b"


def test_truncation_and_padding_are_not_the_files_to_say(tmp_path: Path) -> None:
    """As `tokenizer(texts, truncation=True, padding=True)` leaves them for `save_pretrained`; a call starts without."""
    used = {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "a",
        },
    }  # fmt: skip
    tokenizer = Tokenizer.from_pretrained(_folder(tmp_path, {**_content(), **used}))
    assert tokenizer.encode("aabb") == [0, 5, 1]


def test_a_named_token_outside_the_vocabulary_is_a_mere_name(tmp_path: Path) -> None:
    config = {"pad_token": "<pad>", "chat_template": "{{ pad_token }}"}
    folder = _folder(tmp_path, _content(), tokenizer_config__json=config, config__json={"vocab_size": 6})
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id is None
    assert tokenizer.vocab_size == 6
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "<pad>"


def test_tokens_that_only_the_config_lists(tmp_path: Path) -> None:
    listed = {
        "6": {"content": "<tool>", "special": False, "normalized": False},
        "7": {"content": "<x>", "special": True},
    }
    tokenizer = Tokenizer.from_pretrained(
        _folder(tmp_path, _content(), tokenizer_config__json={"added_tokens_decoder": listed})
    )
    assert tokenizer.encode("a<tool>b<x>") == [0, 6, 1, 7]
    assert tokenizer.all_special_ids == {7}


def test_the_older_files(tmp_path: Path) -> None:
    special = {"bos_token": {"content": "<s>"}, "additional_special_tokens": ["</s>"]}
    folder = _folder(tmp_path, _content(), special_tokens_map__json=special, added_tokens__json={"<new>": 6})
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.bos_token_id == 2
    assert tokenizer.all_special_ids == {2, 3}
    assert tokenizer.encode("a<new>") == [0, 6]


def test_chat_template_files(tmp_path: Path) -> None:
    def templates(**files: Any) -> dict[str, str]:
        return dict(Tokenizer.from_pretrained(_folder(tmp_path, _content(), **files)).chat_templates)

    assert templates() == {}
    assert templates(tokenizer_config__json={"chat_template": "one"}) == {"default": "one"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert templates(tokenizer_config__json={"chat_template": named}) == {"default": "d", "tool_use": "t"}
    assert templates(chat_template__json={"chat_template": "j"})["default"] == "j"
    assert templates(chat_template__jinja="file") == {"default": "file"}  # transformers 5.24: nothing of the config's
    assert templates(chat_template__jinja=" \n") == {}
    assert templates(tokenizer_config__json={"chat_template": ""}, chat_template__jinja="file") == {"default": "file"}
    assert templates(processor_config__json={"chat_template": "of the processor"})["default"] == "of the processor"
    assert templates(processor_config__json={"chat_template": None})["default"] == "file"


_UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer_config__json": {"chat_template": 3}}, "chat_template: expected a string, found 3"),
    ({"tokenizer_config__json": {"chat_template": ["x"]}}, r"chat_template[0].template: is missing, expected a string"),
    ({"chat_template__json": "{"}, "chat_template.json: is not valid JSON"),
    ({"chat_template__json": {}}, "chat_template.json: chat_template: is missing"),
    (
        {"tokenizer_config__json": {"chat_template": [{"name": name, "template": name} for name in ("x", "rag")]}},
        "there is no chat template 'default', only rag, x",
    ),
]


@pytest.mark.parametrize(("files", "reason"), _UNREADABLE)
def test_a_template_that_cannot_be_read_is_told_to_whoever_chats(
    files: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_pretrained(_folder(tmp_path, _content(), **files))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ChatTemplateError, match=re.escape(reason)):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


def test_a_template_by_name_and_files_that_are_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = {"default": "d", "tool_use": "t"}
    folder = _folder(tmp_path, _content(), tokenizer_config__json={"chat_template": named})
    assert dict(Tokenizer.from_pretrained(folder).chat_templates) == named
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff\xfe{")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "d"
    assert "the chat template 'rag' cannot be used: rag.jinja: cannot be read: 'utf-8' codec" in caplog.text


def test_an_id_that_is_declared_otherwise_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = _content(added_tokens=[added_token("<odd>", 7)])
    assert Tokenizer.from_pretrained(_folder(tmp_path, content)).encode("a<odd>") == [0, 6]
    assert "'<odd>' is declared with id 7, but has id 6" in caplog.text
    _folder(tmp_path, _content(), tokenizer_config__json={"added_tokens_decoder": {"9": {"content": "<odder>"}}})
    assert Tokenizer.from_pretrained(tmp_path).encode("a<odder>") == [0, 6]
    assert "'<odder>' is declared with id 9, but has id 6" in caplog.text


def test_an_unknown_token_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = _content(model={"unk_token": "<none>"})
    assert Tokenizer.from_pretrained(_folder(tmp_path, content)).encode("ax") == [0]
    assert "unk_token '<none>' is not in the vocabulary" in caplog.text


def test_dropout_is_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = _content(model={"dropout": 1.0})
    assert Tokenizer.from_pretrained(_folder(tmp_path, content)).encode("ab") == [5]
    assert "model.dropout is 1.0, which is of training" in caplog.text


def test_special_tokens_that_a_config_has_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"split_special_tokens": True, "eos_token": "</s>", "chat_template": "{{ messages[0].content }}</s>"}
    tokenizer = Tokenizer.from_pretrained(_folder(tmp_path, _content(), tokenizer_config__json=config))
    assert tokenizer.encode("a</s>b") == [5]  # as in transformers; "<", "/", "s" and ">" are no tokens
    assert tokenizer.encode("a</s>b", split_special_tokens=False) == [0, 3, 1]
    for how in ("parse", "text"):
        messages = [{"role": "user", "content": "a"}]
        assert tokenizer.apply_chat_template(messages, special_tokens_in_content=how) == [0]  # type: ignore[call-overload]
    assert "split_special_tokens is true" in caplog.text


def test_named_tokens_that_no_file_lists(tmp_path: Path) -> None:
    """transformers adds them after all others, in this order; here as far as the model has rows for them."""
    config = {"pad_token": "[PAD]", "bos_token": "[BOS]", "additional_special_tokens": ["<zz>"]}
    folder = _folder(tmp_path, _content(), tokenizer_config__json=config, config__json={"vocab_size": 8})
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.encode("a[BOS]b[PAD]<zz>") == [0, 6, 1, 7]
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (6, 7)
    without_room = _folder(tmp_path, _content(), config__json={"text_config": {"vocab_size": 7}})
    assert Tokenizer.from_pretrained(without_room).pad_token_id is None


_ADDED = added_token("<x>", 6)
_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {**_content(), "model": {"type": "Unigram", "vocab": [["a"]]}},
        r"model.vocab\[0\]: expected a token and its score",
    ),
    (
        {**_content(), "model": {"type": "Unigram", "vocab": [["a", 0]], "unk_id": 1}},
        "model.unk_id: is 1, must be less",
    ),
    ({**_content(), "model": {"type": "SplinterLevel", "vocab": {}}}, "model.type: model 'SplinterLevel'"),
    ({**_content(), "model": {"type": "WordLevel", "vocab": {}, "novel": 1}}, "model.novel: is not supported"),
    ({**_content(), "model": {"type": "WordLevel", "vocab": {"a": "x"}}}, "model.vocab: the id of 'a' must be"),
    (_content(model={"dropout": 1.5}), "model.dropout: must be null or a number from 0 to 1, found 1.5"),
    (_content(model={"dropout": True}), "model.dropout: must be null or a number from 0 to 1, found True"),
    (_content(model={"novel": 1}), r"model.novel: is not supported \(value 1\)"),
    (_content(model={"merges": ["a  b"]}), r"model.merges\[0\]: expected a pair"),
    (_content(model={"merges": ["a c"]}), r"model.merges\[0\]: the token 'ac' is not in the vocabulary"),
    (_content(model={"merges": [["b", "a"]]}), r"model.merges\[0\]: the token 'ba' is not in the vocabulary"),
    (_content(model={"vocab": {"a": -1}}), "model.vocab: the id of 'a' must be an integer"),
    (_content(model={"vocab": {"a": "0"}}), "model.vocab: the id of 'a' must be an integer"),
    (_content(model={"vocab": None}), "model.vocab: expected an object, found None"),
    (_content(model={"fuse_unk": "yes"}), "model.fuse_unk: expected true or false, found 'yes'"),
    ({**_content(), "version": "2.0"}, "version: expected"),
    (
        _content(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "normalizer.precompiled_charsmap: has 3 bytes, which are no table",
    ),
    (_content(normalizer={"type": "SpacyNormalizer"}), "normalizer 'SpacyNormalizer' is not supported"),
    (_content(normalizer={"type": "NFC", "x": 1}), "normalizer.x: is not supported"),
    (_content(normalizer={"type": "Prepend"}), "normalizer.prepend: is missing, expected a string"),
    (
        _content(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Odd"}]}),
        r"normalizer.normalizers\[1\].type: normalizer 'Odd'",
    ),
    (
        _content(normalizer={"type": "Replace", "pattern": {"Regex": "(a"}, "content": ""}),
        "normalizer.pattern.Regex: pattern",
    ),
    (_content(pre_tokenizer={"type": "UnicodeScripts"}), "pre-tokenizer 'UnicodeScripts' is not supported"),
    (
        _content(pre_tokenizer={"type": "Split", "pattern": {"Regex": r"(a)\1"}, "behavior": "Isolated"}),
        "backreferences are not supported",
    ),
    (
        _content(pre_tokenizer={"type": "Split", "pattern": {"String": "a"}, "behavior": "Odd", "invert": False}),
        "pre_tokenizer.behavior: expected one of Removed",
    ),
    (
        _content(pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "last"}),
        "prepend_scheme: expected one of first, never, always",
    ),
    (
        _content(pre_tokenizer={"type": "Metaspace", "replacement": "__"}),
        "replacement: expected one character",
    ),
    (_content(post_processor={"type": "Odd"}), "post_processor.type: post-processor 'Odd' is not supported"),
    (
        _content(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                "special_tokens": {},
            }
        ),
        "'<s>' is not among special_tokens",
    ),
    (_content(decoder={"type": "CTC"}), "decoder.type: decoder 'CTC' is not supported"),
    (_content(decoder={"type": "CTC"}), "decoder 'CTC' is not supported"),
    (
        _content(decoder={"type": "Strip", "content": " ", "start": -1, "stop": 0}),
        "start: expected a non-negative",
    ),
    (
        _content(added_tokens=[{**_ADDED, "lstrip": 1}]),
        r"added_tokens\[0\].lstrip: expected true or false, found 1",
    ),
    (_content(added_tokens={}), "added_tokens: expected a list"),
]


@pytest.mark.parametrize("index", range(len(_REFUSED)))
def test_refused_by_name(index: int, tmp_path: Path) -> None:
    content, problem = _REFUSED[index]
    with pytest.raises(TokenizerFileError, match=problem) as caught:
        Tokenizer.from_pretrained(_folder(tmp_path, content))
    assert str(caught.value).startswith("tokenizer.json: ")
    assert isinstance(caught.value, TokenizerError)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not valid JSON"),
        ("[1]", "expected an object"),
        ("{}", "model: is missing, expected an object"),
        ("[" * 100_000, "is not valid JSON"),
        ("\xff", "is not valid JSON"),
    ],
)
def test_not_a_tokenizer(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TokenizerFileError, match=problem):
        Tokenizer.from_pretrained(tmp_path)


def test_a_file_nested_too_deeply(tmp_path: Path) -> None:
    part = '{"type":"Sequence","normalizers":['
    text = json.dumps(_content()).replace(
        '"added_tokens"', f'"normalizer":{part * 90_000}{"]}" * 90_000},"added_tokens"'
    )
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerFileError, match=r"nested too deeply|not valid JSON"):
        Tokenizer.from_pretrained(tmp_path)


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = Tokenizer.from_pretrained(FIXTURES / "bytelevel")
    texts = [f"hello {i} world{i * 7}" for i in range(300)]
    expected = [tokenizer.encode(text) for text in texts]
    shared_one = Tokenizer.from_pretrained(FIXTURES / "bytelevel")
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: [shared_one.encode(text) for text in texts], range(8)):
            assert found == expected


def test_missing_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerFileError, match="is not a folder"):
        Tokenizer.from_pretrained(tmp_path / "none")
    with pytest.raises(
        TokenizerFileError, match=r"holds no tokenizer: none of tokenizer.json, vocab.json, tekken.json"
    ):
        Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(TokenizerFileError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
