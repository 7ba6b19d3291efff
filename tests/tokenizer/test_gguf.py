"""Tokenizers out of GGUF's metadata: the same ids as the tokenizer.json that the metadata was made of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tokenizer.gguf_metadata import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    gemma4_metadata,
    sentencepiece_metadata,
    tiny_metadata,
)
from tests.tokenizer.support import FIXTURES, added_token, build, content_of, library, random_text, shared
from tokenizer import Tokenizer
from tokenizer.components.added_tokens import AddedToken
from tokenizer.errors import ChatTemplateError, TokenizerFileError
from tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS
from tokenizer.gguf.vocabulary import GgufVocabulary


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_files(GgufVocabulary(metadata, "m.gguf").files())


BYTE_LEVEL = {"gpt2": "gpt-2", "qwen3": "qwen2", "gpt-oss": "gpt-4o"}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_vectors(name: str) -> None:
    folder = shared(f"tokenizers/{name}")
    ours, theirs = tokenizer_of(byte_level_metadata(folder, BYTE_LEVEL[name])), Tokenizer.from_pretrained(folder)
    for line in (folder / "vectors.jsonl").read_text(encoding="utf-8").splitlines():
        vector = json.loads(line)
        assert ours.encode(vector["text"], add_special_tokens=False) == theirs.encode(vector["text"], False)
        if not vector["add_special_tokens"]:
            assert ours.encode(vector["text"], add_special_tokens=False) == vector["ids"]
    rng = random.Random(1)
    specials = [token.content for token in theirs._id_to_added.values()]
    for _ in range(200):
        text = random_text(rng) + rng.choice(specials) + random_text(rng)
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)


def test_sentencepiece_beside_tokenizer_json() -> None:
    folder = shared("models/stories260K")
    ours, theirs = tokenizer_of(sentencepiece_metadata(folder)), Tokenizer.from_file(folder / "tokenizer.json")
    rng = random.Random(2)
    texts = ["Once upon a time, there was a little girl named Lily.", " two  blanks", "\n\n", "été 🦙", "<s> a", ""]
    for text in texts + [random_text(rng) for _ in range(300)]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids)


def test_sentencepiece_whose_scores_the_converter_did_not_know() -> None:
    """Made of a tokenizer.json alone: every score is -1000, and only ids tell which merge comes first."""
    folder = shared("models/stories260K")
    metadata = sentencepiece_metadata(folder)
    metadata["tokenizer.ggml.scores"] = np.full(len(metadata["tokenizer.ggml.tokens"]), -1000, np.float32)
    ours, theirs = tokenizer_of(metadata), Tokenizer.from_file(folder / "tokenizer.json")
    vectors = (shared("tokenizers/qwen3") / "vectors.jsonl").read_text(encoding="utf-8").splitlines()
    rng = random.Random(5)
    for text in ["You should've done this", *(json.loads(line)["text"] for line in vectors)]:
        assert ours.encode(text) == theirs.encode(text), text
    for _ in range(300):
        text = random_text(rng)
        assert ours.encode(text) == theirs.encode(text), text


def small_sentencepiece(**more: Any) -> dict[str, Any]:
    """Every type of token; merges of one score, and a user-defined token of blanks."""
    pieces: list[tuple[str, float, int]] = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
    pieces += [("▁a", -1, NORMAL), ("ab", -2, NORMAL), ("▁ab", -3, NORMAL), ("bc", -2, NORMAL), ("abc", -4, NORMAL)]
    pieces += [("  ", -1000, USER_DEFINED), ("<|end|>", -1000, CONTROL), ("[PAD1]", -10000, UNUSED)]
    pieces += [(letter, -10 - i, NORMAL) for i, letter in enumerate("▁abc<|end>s")]
    values = {
        "model": "llama", "tokens": [piece for piece, _, _ in pieces],
        "scores": np.array([score for _, score, _ in pieces], np.float32),
        "token_type": np.array([kind for _, _, kind in pieces], np.int32), **more,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def with_merges(model: dict[str, Any]) -> dict[str, Any]:
    """A model with merges instead of ranks, as the library takes it."""
    ranks = {token: rank for token, rank in zip(model["vocab"], model["ranks"], strict=True) if rank >= 0}
    splits = [
        (rank, token[:cut], token[cut:]) for token, rank in ranks.items() for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]  # fmt: skip
    rest = {name: value for name, value in model.items() if name != "ranks"}
    return {**rest, "merges": [list(parts) for _, *parts in sorted(splits)]}


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_beside_the_tokenizers_library(has_prefix: bool) -> None:
    vocabulary = GgufVocabulary(small_sentencepiece(add_space_prefix=has_prefix), "m.gguf")
    files = vocabulary.files()
    content = dict(files.tokenizer.values)
    ours, theirs = Tokenizer.from_files(files), library({**content, "model": with_merges(content["model"])})
    rng = random.Random(3)
    for _ in range(500):
        parts = ["a", "b", "c", " ", "  ", "é", "<|end|>", "<s>", "▁", "[PAD1]"]
        text = "".join(rng.choices(parts, k=rng.randrange(12)))
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def test_sentencepiece_ids() -> None:
    """What llama.cpp gives: the highest score first, a prefix behind each special token, bytes for the rest."""
    tokenizer = tokenizer_of(small_sentencepiece())
    ids = dict(tokenizer._model.vocab)
    named = [ids[token] for token in ("<s>", "▁a", "bc")]
    assert tokenizer.encode("abc") == named
    assert tokenizer.encode("a  b<|end|>é", add_special_tokens=False) == [
        *(ids[token] for token in ("▁a", "  ", "▁", "b", "<|end|>", "▁", "<0xC3>", "<0xA9>")),
    ]
    assert tokenizer.decode(tokenizer.encode("abc"), skip_special_tokens=True) == "abc"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer_of(small_sentencepiece(add_bos_token=False, add_eos_token=True)).encode("a") == [ids["▁a"], 2]


def test_special_tokens_of_phi_3_swallow_blanks() -> None:
    metadata = {**small_sentencepiece(), "general.architecture": "phi3"}
    text, ids = "<|end|>\n a", tokenizer_of(metadata).encode("<|end|> a", add_special_tokens=False)
    assert tokenizer_of(metadata).encode(text, add_special_tokens=False) == ids
    assert tokenizer_of(small_sentencepiece()).encode(text, add_special_tokens=False) != ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_beside_the_tokenizers_library(pre: str) -> None:
    files = GgufVocabulary(tiny_metadata(pre=pre), "m.gguf").files()
    ours, theirs = Tokenizer.from_files(files), library(dict(files.tokenizer.values))
    rng = random.Random(pre)
    for _ in range(60):
        between = rng.choice(["", "<|im_end|>", " 1234567", "  x", "I'LL'll", "\r\n\n a"])
        text = random_text(rng) + between + random_text(rng)
        assert ours.encode(text) == theirs.encode(text).ids, text


def test_what_stands_around_a_text() -> None:
    tokenizer = tokenizer_of(tiny_metadata(bos_token_id=10, add_bos_token=True, padding_token_id=11))
    assert tokenizer.encode("ab")[:2] == [10, 256]
    assert tokenizer.encode("ab", add_special_tokens=False) == [256]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (10, 258, 11)
    assert tokenizer_of(tiny_metadata(bos_token_id=10, pre="llama-bpe")).encode("ab") == [10, 256]
    assert tokenizer_of(tiny_metadata(bos_token_id=10)).encode("ab") == [256]
    assert tokenizer.all_special_ids == {10, 11, 258}
    assert GgufVocabulary(tiny_metadata(), "m.gguf").files().named_tokens["eos_token"] == AddedToken(
        "<|im_end|>", is_special=True
    )


def test_what_ends_an_answer() -> None:
    assert GgufVocabulary(tiny_metadata(eos_token_id=...), "m").end_ids() == (258,)
    assert GgufVocabulary(tiny_metadata(eos_token_id=5, eot_token_id=258, eom_token_id=7), "m").end_ids() == (5, 258, 7)
    harmony = ["<|return|>", "<|call|>", "<|end|>", "a"]
    metadata = tiny_metadata(tokens=harmony, token_type=np.full(4, CONTROL, np.int32), eos_token_id=0)
    assert GgufVocabulary(metadata, "m").end_ids() == (0, 1)


def test_templates() -> None:
    metadata = tiny_metadata() | {
        "tokenizer.chat_template": "{{ messages[0].content }}", "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }  # fmt: skip
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.chat_templates == {"default": "{{ messages[0].content }}", "tool_use": "tools"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == [256]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": "rwkv"}, "model: 'rwkv' is not supported; supported are gpt2"),
    ({"model": 3}, "model: must be a str, found 3"),
    ({"pre": "whitespace"}, "pre: 'whitespace' is not supported; supported are chatglm-bpe, "),
    ({"pre": ...}, "pre: is missing, and words cannot be cut without it; supported are"),
    ({"tokens": ...}, "tokens: is missing"),
    ({"tokens": []}, "tokens: must be a list of strings"),
    ({"tokens": np.arange(3)}, "tokens: must be a list of strings"),
    ({"tokens": ["a", "b", "a"]}, "tokens: 'a' has the ids 0 and 2"),
    ({"token_type": np.ones(3, np.int32)}, "token_type: must have a number for each of 260 tokens, found 3 of them"),
    ({"token_type": 1}, "token_type: must have a number for each of 260 tokens, found 1"),
    ({"merges": ...}, "merges: is missing"),
    ({"eos_token_id": 260}, "eos_token_id: = 260 is not one of 260 tokens"),
    ({"add_bos_token": "yes"}, "add_bos_token: must be a bool, found 'yes'"),
    ({"model": "llama"}, "scores: must have a number for each of 260 tokens, found None"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_wrong_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerFileError, match="m.gguf: .*" + message):
        tokenizer_of(tiny_metadata(**changes))


def test_a_chat_template_that_is_no_text_is_told_to_whoever_chats() -> None:
    tokenizer = tokenizer_of(tiny_metadata() | {"tokenizer.chat_template": 3})
    with pytest.raises(ChatTemplateError, match=r"tokenizer.chat_template: expected a template, found 3"):
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])


def test_merges_of_tokens_that_are_not_there_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp loads such a vocabulary: a result that is missing, a part that is, both, and no pair at all."""
    metadata = tiny_metadata()
    merges = metadata["tokenizer.ggml.merges"]
    odd = ["b a", "ab zz", "ab", "qq rr"]
    some = tokenizer_of(metadata | {"tokenizer.ggml.merges": [odd[0], *merges, *odd[1:]]})
    assert some.encode("ab ba abab") == tokenizer_of(metadata).encode("ab ba abab")
    count = len(merges) + len(odd)
    assert f"{len(odd)} of {count} merges name a token that is not in the vocabulary, such as 'b a'" in caplog.text


def gemma4_content() -> dict[str, Any]:
    """A tokenizer.json in the form of Gemma 4's."""
    content = json.loads((FIXTURES / "sentencepiece" / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [*content["model"]["merges"], "\n \n", "\n\n \n", "\n \n\n", "\n\n \n\n"]
    vocab = dict(content["model"]["vocab"])
    for token in ("\n", "\n\n", "\n\n\n", "\n\n\n\n", "▁▁", "<turn|>", "<|tool_call>", '<|"|>'):
        vocab[token] = len(vocab)
    special = [added_token(token, vocab[token], special=True) for token in ("<unk>", "<s>", "</s>", "<turn|>")]
    return content_of(
        content["model"] | {"vocab": vocab, "merges": ["▁ ▁", *merges]},
        added_tokens=[*special, *(added_token(token, vocab[token]) for token in ("<|tool_call>", '<|"|>'))],
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        decoder=content["decoder"] | {"decoders": content["decoder"]["decoders"][:-1]},
    )


def test_gemma4_beside_the_tokenizers_library(tmp_path: Path) -> None:
    content = gemma4_content()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    gguf = gemma4_metadata(tmp_path)
    ours, theirs, of_gguf = build(content), library(content), tokenizer_of(gguf)
    rng = random.Random(4)
    for i in range(300):
        parts = [
            "hello world",
            " the",
            "\n",
            "\n\n",
            "  ",
            "é",
            "🦙",
            "<turn|>",
            '<|tool_call>call:x{a:<|"|>',
            "\t",
            "▁",
        ]
        text = "".join(rng.choices(parts, k=rng.randrange(12))) if i % 2 else random_text(rng)
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert of_gguf.encode(text) == [1, *ids], text
        assert of_gguf.decode(ids) == ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    vocab = content["model"]["vocab"]
    assert GgufVocabulary(gguf, "m.gguf").end_ids() == (2, vocab["<turn|>"])
    shown = [vocab[token] for token in ("<|tool_call>", '<|"|>')]
    assert of_gguf.decode(shown, skip_special_tokens=True) == '<|tool_call><|"|>'


def test_gemma4_with_a_token_twice(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(gemma4_content()))
    gguf = gemma4_metadata(tmp_path)
    tokens = gguf["tokenizer.ggml.tokens"]
    tokens[-1] = "z"
    assert tokenizer_of(gguf).encode("z", add_special_tokens=False) == [len(tokens) - 1]
