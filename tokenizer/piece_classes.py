"""Classes of transformers 5 that make other ids of a SentencePiece model than SentencePiece itself: fairseq's have
special tokens of their own first, T5 has sentinels after the others; both cut words at white space before Unigram."""

from __future__ import annotations

from typing import Any

from tokenizer.sentencepiece import Pieces
from tokenizer.unigram.model import CONTROL

XLM_ROBERTA, T5 = "XLMRobertaTokenizer", "T5Tokenizer"

_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
_NUM_SENTINELS = 100


def content_of_class(name: str, pieces: Pieces, num_sentinels: int | None = None) -> dict[str, Any] | None:
    """The content of a `tokenizer.json` as the class of this name has it; None for another class."""
    around: tuple[str, ...]
    vocab = list(zip(pieces.tokens, pieces.scores, strict=True))
    if name == XLM_ROBERTA:
        vocab = [*((token, 0.0) for token in _FAIRSEQ), *vocab[3:], ("<mask>", 0.0)]
        special, unknown, around = [*_FAIRSEQ, "<mask>"], 3, ("<s>", "A", "</s>")
    elif name == T5:
        count = _NUM_SENTINELS if num_sentinels is None else num_sentinels
        sentinels = [f"<extra_id_{i}>" for i in range(count - 1, -1, -1)]
        vocab += [(token, 0.0) for token in sentinels]
        special, unknown, around = ["<pad>", "</s>", "<unk>", *pieces.of_type(CONTROL), *sentinels], 2, ("A", "</s>")
    else:
        return None
    ids = {token: i for i, (token, _) in enumerate(vocab)}
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": pieces.charsmap} if pieces.charsmap else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence" if part == "A" else "SpecialToken": {"id": part, "type_id": 0}} for part in around],
            "pair": [],
            "special_tokens": {part: {"id": part, "ids": [ids[part]]} for part in around if part in ids},
        },
        "decoder": spaces,
        "model": {"type": "Unigram", "vocab": vocab, "unk_id": unknown, "byte_fallback": False},
        "added_tokens": [
            {"id": ids[token], "content": token, "special": True, "normalized": False, "lstrip": token == "<mask>"}
            for token in dict.fromkeys(special) if token in ids
        ],
    }  # fmt: skip
