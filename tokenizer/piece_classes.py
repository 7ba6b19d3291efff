"""Classes of transformers 5 that make other ids of a SentencePiece model than SentencePiece itself: fairseq's have
special tokens of their own first, T5 has sentinels after the others; both cut words at white space before Unigram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizer.sentencepiece import Pieces
from tokenizer.unigram.model import CONTROL

XLM_ROBERTA, T5 = "XLMRobertaTokenizer", "T5Tokenizer"

_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
_NUM_SENTINELS = 100


def content_of_class(name: str, pieces: Pieces, num_sentinels: int | None = None) -> dict[str, Any] | None:
    """The content of a `tokenizer.json` as the class of this name has it; None for another class."""
    vocab = list(zip(pieces.tokens, pieces.scores, strict=True))
    if name == XLM_ROBERTA:
        vocab = [*((token, 0.0) for token in _FAIRSEQ), *vocab[3:], ("<mask>", 0.0)]
        content, special = unigram_content(vocab, pieces.charsmap, 3), [*_FAIRSEQ, "<mask>"]
        content["post_processor"] = pair_template("<s>", 0, "</s>", 2, is_roberta=True)
    elif name == T5:
        count = _NUM_SENTINELS if num_sentinels is None else num_sentinels
        sentinels = [f"<extra_id_{i}>" for i in range(count - 1, -1, -1)]
        vocab += [(token, 0.0) for token in sentinels]
        content = unigram_content(vocab, pieces.charsmap, 2)
        special = ["<pad>", "</s>", "<unk>", *pieces.of_type(CONTROL), *sentinels]
        one, other, ends = ("A", 0), ("B", 0), ("</s>", 0)
        ids_of_end = {token: i for i, (token, _) in enumerate(vocab) if token == "</s>"}
        content["post_processor"] = _template((one, ends), (one, ends, other, ends), ids_of_end)
    else:
        return None
    ids = {token: i for i, (token, _) in enumerate(vocab)}
    content["added_tokens"] = [
        {"id": ids[token], "content": token, "special": True, "normalized": False, "lstrip": token == "<mask>"}
        for token in dict.fromkeys(special) if token in ids
    ]  # fmt: skip
    return content


def unigram_content(
    vocab: list[tuple[str, float]], charsmap: bytes, unknown: int | None, *, types: Sequence[int] | None = None,
    has_prefix: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """A `tokenizer.json` without added tokens and templates: Unigram over words between white space. With `types`
    of tokens its sums are as SentencePiece's."""
    spaces = {
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always" if has_prefix else "never", "split": True,
    }  # fmt: skip
    own = {} if types is None else {"types": list(types)}
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap} if charsmap else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "decoder": spaces,
        "model": {"type": "Unigram", "vocab": vocab, "unk_id": unknown, "byte_fallback": False, **own},
    }


def pair_template(first: str, first_id: int, last: str, last_id: int, *, is_roberta: bool) -> dict[str, Any]:
    """The post-processor that puts a token before and after a text. RoBERTa's puts two between texts and gives them one
    type; BERT's puts one, and gives the second text another type."""
    own = 0 if is_roberta else 1
    between = ((last, 0), (last, 0)) if is_roberta else ((last, 0),)
    return _template(
        ((first, 0), ("A", 0), (last, 0)), ((first, 0), ("A", 0), *between, ("B", own), (last, own)),
        {first: first_id, last: last_id},
    )  # fmt: skip


def _template(
    single: tuple[tuple[str, int], ...], pair: tuple[tuple[str, int], ...], special: dict[str, int]
) -> dict[str, Any]:  # fmt: skip
    def parts(named: tuple[tuple[str, int], ...]) -> list[dict[str, Any]]:
        return [
            {"Sequence" if name in ("A", "B") else "SpecialToken": {"id": name, "type_id": own}} for name, own in named
        ]

    return {
        "type": "TemplateProcessing", "single": parts(single), "pair": parts(pair),
        "special_tokens": {name: {"id": name, "ids": [own]} for name, own in special.items()},
    }  # fmt: skip
