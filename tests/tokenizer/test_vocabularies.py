"""Vocabularies in the forms that trainers write, without a tokenizer.json: SentencePiece models of each kind,
`tekken.json`, tiktoken's files. Expected ids are their own libraries' (`tools.references.make_vocabularies`)."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoints.model_files import open_model
from tests.tokenizer.support import FIXTURES, added_token, assigned_codes, content_of, library
from tests.tokenizer.test_sentencepiece import AS_IT_IS, BPE, message
from tokenizer import IncrementalDecoder, Tokenizer
from tokenizer.byte_ranks import FAMILIES
from tokenizer.components.normalizers import build_normalizer
from tokenizer.errors import TokenizerFileError
from tokenizer.gguf.vocabulary import GgufVocabulary
from tokenizer.json_fields import Fields
from tokenizer.loading import TokenizerFiles, read_folder
from tokenizer.piece_classes import T5, content_of_class
from tokenizer.sentencepiece import read_pieces
from tokenizer.unigram.charsmap import Charsmap

FOLDER = FIXTURES / "vocabularies"
XLM_ROBERTA_GGUF = Path(__file__).parents[1] / "models" / "gguf" / "encoders" / "xlm_roberta.json"
"""llama.cpp's metadata of the same pieces."""
CASES: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))["cases"]
PIECES = tuple(name for name in CASES if (FOLDER / name / "tokenizer.model").is_file() and name[0].islower())


@pytest.mark.parametrize("name", CASES)
def test_ids_and_texts(name: str) -> None:
    tokenizer = Tokenizer.from_pretrained(FOLDER / name)
    assert len(CASES[name]) > 100
    for case in CASES[name]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case
        if "decoded" in case:
            assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["decoded"]
    assert open_model(FOLDER / name).tokenizer_files() is not None


@pytest.mark.parametrize("name", CASES)
def test_ids_of_streams(name: str) -> None:
    tokenizer = Tokenizer.from_pretrained(FOLDER / name)
    for case in CASES[name][::9]:
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        text = "".join(decoder.push([i]) for i in case["ids"]) + decoder.flush()
        assert text == tokenizer.decode(case["ids"])


@pytest.mark.parametrize("name", CASES)
@given(text=st.text(max_size=40))
def test_any_text_has_ids(name: str, text: str) -> None:
    tokenizer = _cached(name)
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    if name in FAMILIES or name == "tekken":
        assert name == "QWenTokenizer" or tokenizer.decode(tokenizer.encode_ordinary(text)) == text


_TOKENIZERS: dict[str, Tokenizer] = {}


def _cached(name: str) -> Tokenizer:
    if name not in _TOKENIZERS:
        _TOKENIZERS[name] = Tokenizer.from_pretrained(FOLDER / name)
    return _TOKENIZERS[name]


def test_special_tokens_stand_between_texts() -> None:
    tokenizer = _cached("bpe")
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("the cat", "a dog"))
    assert tokenizer.encode("the cat</s>a dog") == [1, *first, 2, *second]
    assert tokenizer.special_tokens_map == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
    }  # fmt: skip


def test_tekken() -> None:
    tokenizer = _cached("tekken")
    assert tokenizer.vocab_size == 640
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1
    assert [tokenizer.token_to_id(token) for token in ("[INST]", "[/INST]", "<SPECIAL_20>", "<SPECIAL_39>")] == [
        3, 4, 20, 39,
    ]  # fmt: skip
    assert tokenizer.decode([3, *tokenizer.encode_ordinary("hé"), 4], skip_special_tokens=True) == "hé"
    assert open_model(FOLDER / "tekken").end_tokens().ids == (2,)  # type: ignore[union-attr]


def test_tiktoken_special_tokens(tmp_path: Path) -> None:
    qwen = _cached("QWenTokenizer")
    assert qwen.encode("<|im_start|>") == [621]
    assert qwen.token_to_id("<|extra_204|>") == 620 + 207
    shutil.copy(FOLDER / "TikTokenTokenizer" / "tiktoken.model", tmp_path)
    listed = {"621": {"content": "[EOS]", "special": True}, "625": {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed, "eos_token": "[EOS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    kimi = Tokenizer.from_pretrained(tmp_path)
    assert kimi.encode("<|im_end|><|reserved_token_622|>") == [625, 622]
    assert (kimi.eos_token_id, kimi.vocab_size) == (621, 620 + 258)


def test_the_class_decides_how_words_are_cut(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "QWenTokenizer" / "qwen.tiktoken", tmp_path / "own.tiktoken")
    for config in ({"tokenizer_class": "OwnTokenizer"}, {}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(TokenizerFileError, match=r"Python code of .*, which is not run; known are QWenTokenizer"):
            read_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen"}))
    assert Tokenizer.from_pretrained(tmp_path).encode("1234") == _cached("QWenTokenizer").encode("1234")


def _lines(*ranked: tuple[bytes, object]) -> bytes:
    letters = [(bytes([byte]), byte) for byte in range(256)]
    return b"".join(base64.b64encode(token) + f" {rank}\r\n".encode() for token, rank in (*letters, *ranked))


TIKTOKEN_FAULTS = [
    (_lines((b"ab", -1)), r"line 257: 'YWI= -1\\r': expected a token in base 64 and its rank"),
    (_lines((b"ab", 256), (b"ab", 257)), r"the token b'ab' of rank 257 is there twice"),
    (_lines((b"ab", 256), (b"cd", 256)), r"the token b'cd' of rank 256 has a rank of another token"),
    (_lines((b"ab", 1 << 40)), "has too high a rank"),
    (_lines((b"", 256)), "expected a token in base 64"),
    (_lines() + b"YW%I= 256\n", "line 257"),
    (_lines()[:500], "rank of another token|no token for the byte|line"),
    (b"", "has no tokens"),
]


@pytest.mark.parametrize(("content", "problem"), TIKTOKEN_FAULTS)
def test_faults_of_tiktoken_files(
    content: bytes, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "QWenTokenizer"}')
    with pytest.raises(TokenizerFileError, match=problem):
        read_folder(tmp_path)
    assert open_model(tmp_path).tokenizer_files() is None
    assert "the model serves ids alone" in caplog.text


def _tekken(**changes: Any) -> str:
    content = json.loads((FOLDER / "tekken" / "tekken.json").read_text(encoding="utf-8"))
    config = {**content["config"], **changes.pop("config", {})}
    return json.dumps({**content, **changes, "config": config})


def _entry(rank: object, token: object) -> dict[str, object]:
    return {"rank": rank, "token_bytes": token}


TEKKEN_FAULTS = [
    (
        _tekken(config={"default_vocab_size": 700}),
        "default_vocab_size: is 700, of which 40 are special; must leave 1 to",
    ),
    (_tekken(config={"default_vocab_size": 40}), "default_vocab_size: is 40"),
    (_tekken(config={"default_num_special_tokens": -1}), "default_num_special_tokens: expected a non-negative"),
    (_tekken(config={"pattern": "(a"}), "pattern"),
    (_tekken(vocab=[_entry(0, "AA==")] * 600), "is there twice"),
    (_tekken(vocab=[_entry(-1, "AA==")] * 600), r"vocab\[0\]: .* must be an integer from 0 on"),
    (_tekken(vocab=[_entry(0, 7)] * 600), r"vocab\[0\]"),
    (_tekken(vocab={}), "vocab: expected a list"),
    (_tekken(special_tokens=[{"rank": 40, "token_str": "<x>"}]), "has rank 40, must be less than 40"),
    (_tekken(special_tokens=[{"rank": i, "token_str": "<x>"} for i in (1, 2)]), "names a token or a rank twice"),
    ("", "is not valid JSON"),
]


@pytest.mark.parametrize(("content", "problem"), TEKKEN_FAULTS)
def test_faults_of_tekken_files(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerFileError, match=problem):
        Tokenizer.from_pretrained(tmp_path)


PIECE = message({1: message({1: b"a", 2: -1.0})})
PIECE_FAULTS = [
    (PIECE + message({1: message({1: b"\xff\xfe"})}), r"pieces\[1\] is .*not UTF-8"),
    (PIECE + PIECE, r"pieces\[0\] and pieces\[1\] are both 'a'"),
    (PIECE + message({1: message({1: b"b", 2: float("nan")})}), r"score of pieces\[1\], 'b', is nan"),
    (PIECE + message({1: message({1: b"", 2: 1.0})}), r"pieces\[1\] is empty"),
    (PIECE + b"\x0a\xff\xff\xff\xff\x07", "is cut off"),  # a length of 2 GiB
    (PIECE + b"\x0a" + b"\xff" * 20, "is cut off"),
    (PIECE + message({2: message({3: 3})}), "is a model of words"),
    (PIECE + message({5: message({2: b"map"})}), "denormalizer_spec"),
]


@pytest.mark.parametrize(("content", "problem"), PIECE_FAULTS)
def test_faults_of_sentencepiece_models(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerFileError, match=problem):
        read_pieces(tmp_path / "tokenizer.model")


@given(size=st.integers(0, 20_000), place=st.integers(0, 20_000), byte=st.integers(0, 255))
def test_a_damaged_model_is_read_or_refused(
    size: int, place: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray((FOLDER / "unigram_odd" / "tokenizer.model").read_bytes()[: size or None])
    if content:
        content[place % len(content)] = byte
    (folder / "tokenizer.model").write_bytes(content)
    try:
        tokenizer = Tokenizer.from_pretrained(folder)
    except TokenizerFileError:
        return
    tokenizer.decode(tokenizer.encode("the cat <sep> ab ▁é"))


@given(content=st.binary(max_size=2000), text=st.text(max_size=20))
def test_any_table_of_characters_is_read_or_refused(content: bytes, text: str) -> None:
    units = content[: len(content) // 4 * 4]
    for blob in (content, len(units).to_bytes(4, "little") + units + b"a\0"):
        try:
            charsmap = Charsmap(blob)
        except ValueError:
            continue
        charsmap.replace(text)
        charsmap.replace_as_library(text)


def _unigram(tokens: list[tuple[str, float]], **more: Any) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], *map(list, tokens)],
        "byte_fallback": False,
        **more,
    }


@given(
    words=st.dictionaries(st.text("ab▁é漢", min_size=1, max_size=4), st.integers(-40, 0), min_size=1, max_size=12),
    text=st.text("ab é漢🙂", max_size=14), has_bytes=st.booleans(),
)  # fmt: skip
def test_unigram_beside_the_library(words: dict[str, int], text: str, has_bytes: bool) -> None:
    """Scores are powers of two apart, so that no two sums differ by rounding alone."""
    tokens = [(word, float(score)) for word, score in words.items()]
    tokens += [(f"<0x{byte:02X}>", -50.0) for byte in range(256)] if has_bytes else []
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    content = content_of(
        _unigram(tokens, byte_fallback=has_bytes), pre_tokenizer=spaces, decoder=spaces,
        added_tokens=[added_token("<unk>", 0, special=True)],
    )  # fmt: skip
    ours, theirs = Tokenizer(TokenizerFiles(Fields(content, "tokenizer.json"))), library(content)
    ids = theirs.encode(text).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", [name for name in PIECES if read_pieces(FOLDER / name / "tokenizer.model").charsmap])
def test_the_table_of_characters_beside_the_library(name: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers library")
    blob = read_pieces(FOLDER / name / "tokenizer.model").charsmap
    theirs = tokenizers.normalizers.Precompiled(blob)
    part = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}
    ours = build_normalizer(Fields(part, "tokenizer.json"))
    assert ours is not None
    for text in [case["text"] for case in CASES[name]] + ["A\u030a ﬃ ㍿ \u1100\u1161 ①", "ｶﾞ", "\u0f71\u0f72", "Å"]:
        assert ours(text, True)[0] == theirs.normalize_str(text), text


def test_fairseq_and_t5_have_ids_of_their_own(tmp_path: Path) -> None:
    source = FOLDER / "unigram" / "tokenizer.model"
    pieces = read_pieces(source)
    plain = _cached("unigram").encode("the cat", add_special_tokens=False)
    for kind, file, ids in (
        ("XLMRobertaTokenizer", "sentencepiece.bpe.model", [0, *(i + 1 for i in plain), 2]),
        ("T5Tokenizer", "spiece.model", [*plain, pieces.tokens.index("</s>")]),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        shutil.copy(source, folder / file)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        tokenizer = Tokenizer.from_pretrained(folder)
        assert tokenizer.encode("the cat") == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    assert Tokenizer.from_pretrained(tmp_path / "T5Tokenizer").encode("<extra_id_0>")[0] == len(pieces.tokens) + 99


def test_t5_without_an_end_is_refused_by_name() -> None:
    pieces = read_pieces(FOLDER / "unigram" / "tokenizer.model")
    tokens = ["<end>" if token == "</s>" else token for token in pieces.tokens]
    content = content_of_class(T5, replace(pieces, tokens=tokens))
    assert content is not None
    with pytest.raises(TokenizerFileError, match="'</s>' is not among special_tokens"):
        Tokenizer.from_files(TokenizerFiles(Fields({"version": "1.0", **content}, "spiece.model")))


def xlm_roberta_of_the_library(source: Path) -> Any:
    """As transformers' XLMRobertaTokenizer makes it of a SentencePiece model."""
    pieces = read_pieces(source)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    own = list(zip(pieces.tokens, pieces.scores, strict=True))[3:]
    vocab = [*((token, 0.0) for token in special), *own, ("<mask>", 0.0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=3, byte_fallback=False))
    made.normalizer = tokenizers.normalizers.Precompiled(pieces.charsmap)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.WhitespaceSplit(),
        tokenizers.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
    ])  # fmt: skip
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    made.add_special_tokens([*special, tokenizers.AddedToken("<mask>", lstrip=True, normalized=False, special=True)])
    return made


def test_xlm_roberta_beside_the_library(tmp_path: Path) -> None:
    """Out of its SentencePiece model and out of GGUF's metadata of it: texts of all scripts, and pairs."""
    source = FOLDER / "unigram" / "tokenizer.model"
    theirs = xlm_roberta_of_the_library(source)
    shutil.copy(source, tmp_path / "sentencepiece.bpe.model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    metadata: dict[str, Any] = {
        key: np.array(value) if key.endswith(("scores", "token_type")) else value
        for key, (_, value) in json.loads(XLM_ROBERTA_GGUF.read_text(encoding="utf-8"))["metadata"].items()
    }  # fmt: skip
    metadata["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(read_pieces(source).charsmap, np.uint8)
    metadata["general.architecture"] = "bert"
    of_gguf = Tokenizer.from_files(GgufVocabulary(metadata, "m.gguf").files())
    codes = assigned_codes()
    texts = [
        *(case["text"] for case in CASES["unigram"]), "a <mask> b", "", " ", "<s> a", "\u00a0x\u3000y\u2028z",
        *("".join(map(chr, codes[at : at + 50])) for at in range(0, len(codes), 50)),
        *(f"a{chr(code)}b" for code in codes[::7]),
    ]  # fmt: skip
    for ours in (Tokenizer.from_pretrained(tmp_path), of_gguf):
        for text in texts:
            assert ours.encode(text) == theirs.encode(text).ids, ascii(text)
        for text in texts[:150]:
            assert ours.encode_pair("the cat", text) == (theirs.encode("the cat", text).ids, None), ascii(text)


def test_tokenizer_json_wins(tmp_path: Path) -> None:
    for name in ("bytelevel/tokenizer.json", "vocabularies/tekken/tekken.json", "vocabularies/bpe/tokenizer.model"):
        shutil.copy(FIXTURES / name, tmp_path)
    own = Tokenizer.from_file(FIXTURES / "bytelevel" / "tokenizer.json")
    assert Tokenizer.from_pretrained(tmp_path).encode("hello") == own.encode("hello")
    (tmp_path / "tokenizer.json").unlink()
    assert Tokenizer.from_pretrained(tmp_path).encode("hello") == _cached("tekken").encode("hello")


def test_equal_scores_merge_from_the_left(tmp_path: Path) -> None:
    """As SentencePiece and llama.cpp: (a, aa) and (aa, a) are one merge."""
    tokens = [(b"<unk>", 0.0, 2), (b"a", -3.0, 1), (b"aa", -1.0, 1), (b"aaa", -2.0, 1)]
    made = b"".join(message({1: message({1: token, 2: score, 3: kind})}) for token, score, kind in tokens)
    (tmp_path / "tokenizer.model").write_bytes(
        made + message({2: message({**BPE, 35: 0}), 3: message({**AS_IT_IS, 3: 0})})
    )
    assert Tokenizer.from_pretrained(tmp_path).encode("aaaaa") == [2, 3]
