"""WordPiece and WordLevel with BERT's normalizer, and templates of pairs, against the `tokenizers` library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tokenizer.support import assigned_codes
from tokenizer import Tokenizer
from tokenizer.errors import TokenizerFileError

TEXTS = [
    "The quick brown fox jumps over the lazy dog's back, doesn't it?",
    "Ça coûte 12 €, naïve façade — Ångström",
    "東京 2020 大会へ ようこそ",
    "ΌΣΟΣ Σίσυφος",
    "а́ ё ѐ здравствуйте\tмир\n",
    "🙂🙃 emoji\u200d\ufe0f and \x00 control \x7f\x85\u2028 characters \ufffd",
    "x" * 120 + " y",
    "e\u0301 \u1100\u1161\u11a8 ﬀ ﬁ Ⅷ ½",
    "",
]
PAIRS = {
    "template": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    ),
    "bert": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
}


@pytest.fixture(scope="module", params=[(True, None), (False, None), (False, True)], ids=["lower", "cased", "accents"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    lowers, strips = request.param
    theirs = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=strips)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    theirs.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    theirs.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    theirs.post_processor = PAIRS["template"]
    path: Path = tmp_path_factory.mktemp("word_piece") / "tokenizer.json"
    theirs.save(str(path))
    return theirs, Tokenizer.from_file(path)


@pytest.mark.parametrize("unknown", ["[UNK]", "[NONE]"])
def test_word_level(tmp_path: Path, unknown: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whole words; where the unknown token is none of the vocabulary, the library ends at a word that it lacks, and we
    leave it out and say so."""
    theirs = tokenizers.Tokenizer(models.WordLevel(unk_token=unknown))
    theirs.normalizer = normalizers.BertNormalizer()
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    theirs.train_from_iterator(TEXTS[:3], trainers.WordLevelTrainer(special_tokens=["[UNK]", "[CLS]"]))
    theirs.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json")
    is_known = unknown == "[UNK]"
    assert ("words without a token are left out" in caplog.text) == (not is_known)
    for text in (*TEXTS[: None if is_known else 3], ""):
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.encode("the zebra fox") == [*ours.encode("the"), *([0] if is_known else []), *ours.encode("fox")[1:]]


def types_of(ids: list[int], second_from: int | None) -> list[int]:
    return [int(second_from is not None and place >= second_from) for place in range(len(ids))]


def check(both: tuple[Any, Tokenizer], text: str, pair: str) -> None:
    theirs, ours = both
    encoded = theirs.encode(text)
    assert ours.encode(text) == encoded.ids
    assert ours.decode(encoded.ids) == theirs.decode(encoded.ids, skip_special_tokens=False)
    assert ours.decode(encoded.ids, skip_special_tokens=True) == theirs.decode(encoded.ids)
    encoded = theirs.encode(text, pair)
    ids, second_from = ours.encode_pair(text, pair)
    assert (ids, types_of(ids, second_from)) == (encoded.ids, encoded.type_ids)


def test_texts(both: tuple[Any, Tokenizer]) -> None:
    for text in TEXTS:
        check(both, text, TEXTS[1])
    every = [*map(chr, assigned_codes())][:: 1 if both[1].encode("A") == both[1].encode("a") else 7]
    random.Random(1).shuffle(every)
    for start in range(0, len(every), 64):
        text = "a".join(every[start : start + 64])
        assert both[1].encode(text) == both[0].encode(text).ids


ASSIGNED = st.deferred(lambda: st.sampled_from(assigned_codes())).map(chr)


@given(st.text(ASSIGNED, max_size=60), st.text(max_size=20, alphabet="abc é中."))
@settings(max_examples=200)
def test_any_text(both: tuple[Any, Tokenizer], text: str, pair: str) -> None:
    check(both, text, pair)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(both: tuple[Any, Tokenizer], tmp_path: Path, name: str) -> None:
    theirs = tokenizers.Tokenizer.from_str(both[0].to_str())
    theirs.post_processor = PAIRS[name]
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json")
    for text in TEXTS:
        check((theirs, ours), text, "the dog")
    whole, _ = ours.encode_pair(TEXTS[0], TEXTS[1])
    num_special = theirs.num_special_tokens_to_add(True)
    for pair in (TEXTS[:2], TEXTS[1::-1], (TEXTS[0], TEXTS[0]), (TEXTS[0], "")):
        for most in range(num_special, len(whole) + 2):
            theirs.enable_truncation(most)
            encoded = theirs.encode(*pair)
            ids, second_from = ours.encode_pair(*pair, most)
            assert (ids, types_of(ids, second_from)) == (encoded.ids, encoded.type_ids), (pair, most)
    first = ours.encode_first(TEXTS[0], 6)
    assert first == [*ours.encode(TEXTS[0])[:5], whole[-1]]


def test_texts_without_a_template_follow_one_another(both: tuple[Any, Tokenizer], tmp_path: Path) -> None:
    content = json.loads(both[0].to_str())
    content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert ours.encode_pair("the fox", "a dog") == (ours.encode("the fox") + ours.encode("a dog"), None)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"unk_token": "[NONE]"}, "unk_token"),
        ({"max_input_chars_per_word": -1}, "max_input_chars_per_word"),
        ({"vocab": {"a": "x"}}, "vocab"),
        ({"continuing_suffix": "x"}, "continuing_suffix"),
    ],
)
def test_a_wrong_model_is_refused_by_name(
    both: tuple[Any, Tokenizer], tmp_path: Path, changed: dict[str, Any], field: str
) -> None:
    content = json.loads(both[0].to_str())
    content["model"].update(changed)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerFileError, match=field):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_small_letters_by_sentence_transformers_file(both: tuple[Any, Tokenizer], tmp_path: Path) -> None:
    """`do_lower_case` puts a normalizer before the others, if they have none; special tokens stay."""
    theirs = tokenizers.Tokenizer.from_str(both[0].to_str())
    theirs.normalizer = normalizers.NFC()
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    theirs.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()])
    ours = Tokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "THE FOX [SEP] İstanbul"):
        assert ours.encode(text) == theirs.encode(text).ids
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for wrong in ({"type": "Sequence"}, {"type": "Sequence", "normalizers": ["NFC"]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "normalizer": wrong}), encoding="utf-8")
        with pytest.raises(TokenizerFileError, match="normalizer"):
            Tokenizer.from_pretrained(tmp_path)
