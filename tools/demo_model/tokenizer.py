"""The demo models' tokenizers: byte-level BPE with single digits.

The first model's merges are only prefixes of the phrasings' words; the others' are trained on their texts.

Sorting and reversing need letters, so the words that a question is about must stay close to letters, while
the phrasing around them should be short. Ordinary BPE training merges inside words ("us" for the sake of
" plus", then also in "bus"). Here each frequent word of the phrasings adds a chain of its prefixes (" p",
" pl", " plu", " plus"), and only words that begin with a space, a capital or punctuation do. So a merge can
only happen at the beginning of a word; the rest of it, and any word without a space before it, stays letters.
Digits are single.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.text.harmony.message import SPECIAL_TOKENS as HARMONY_TOKENS
from tools.demo_model import data, tasks

# Qwen2's pattern, which is GPT-4's with single digits.
PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
END, USER, ASSISTANT, SYSTEM, PAD = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, SYSTEM, PAD)
HARMONY_PAD = "<|endoftext|>"


def render(messages: list[tasks.Message]) -> str:
    """The text of `models/demo/chat_template.jinja`, without Jinja, for training."""
    return "".join(
        f"<|{message['role']}|>{message['content']}{END if message['role'] == 'assistant' else ''}"
        for message in messages
    )


SPLITTER = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def _finished(model: models.BPE, special: Sequence[str]) -> Tokenizer:
    """A tokenizer of the model; the special tokens get the last ids."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITTER, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _phrasing_words() -> dict[str, float]:
    """Frequencies of the pre-tokens of the phrasings and the fixed answers, in ByteLevel's spelling.

    The fields are left empty, so no number, word or country of a question is among them.
    """
    arithmetic = {"sum": data.SUM_PHRASINGS, "difference": data.DIFFERENCE_PHRASINGS}
    texts_of_task = {
        **{f"{name}_{digits}": texts for name, texts in arithmetic.items() for digits in (1, 2, 3)},
        "sort": data.SORT_PHRASINGS,
        "reverse": data.REVERSE_PHRASINGS,
        "letters": data.LETTERS_PHRASINGS,
        "count": data.COUNT_UP_PHRASINGS + data.COUNT_DOWN_PHRASINGS,
        "capital": data.CAPITAL_PHRASINGS,
        "greeting": tuple(data.GREETINGS) + sum(data.GREETINGS.values(), ()),
        "identity": tuple(data.IDENTITIES) + sum(data.IDENTITIES.values(), ()),
        "refusal": (data.REFUSAL,) * len(data.REFUSED_PHRASINGS) + data.REFUSED_PHRASINGS,
    }
    counts: defaultdict[str, float] = defaultdict(float)
    for task, texts in texts_of_task.items():
        for text in texts:
            for piece, _ in SPLITTER.pre_tokenize_str(re.sub(r"\{\w+\}", "0", text)):
                counts[piece] += tasks.TASKS[task][1] / len(texts)
    return counts


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids: 256 bytes, prefix merges, then the special tokens."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    num_merged = vocab_size - len(SPECIAL_TOKENS)
    for word, _ in sorted(_phrasing_words().items(), key=lambda item: (-item[1], item[0])):
        if word[0].islower() or word[0].isdigit():
            continue
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab and len(vocab) < num_merged:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    assert len(vocab) == num_merged, f"the phrasings give {len(vocab)} tokens, not {num_merged}"
    return _finished(models.BPE(vocab, merges), SPECIAL_TOKENS)


def trained_tokenizer(
    kept: Path, texts: Callable[[], list[str]], vocab_size: int, special: Sequence[str] = (HARMONY_PAD, *HARMONY_TOKENS)
) -> Tokenizer:
    """The tokenizer beside a checkpoint, or one trained on the texts, which is saved there: 256 bytes, merges, then the
    special tokens, exactly `vocab_size` ids."""
    if not kept.exists():
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = SPLITTER
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(special), show_progress=False, min_frequency=2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )  # fmt: skip
        model.train_from_iterator(texts(), trainer)
        found = model.get_vocab_size()
        assert found == vocab_size - len(special), f"the texts give {found} tokens, not {vocab_size - len(special)}"
        _finished(model.model, special).save(str(kept))
    return Tokenizer.from_file(str(kept))
