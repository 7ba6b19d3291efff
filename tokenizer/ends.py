"""Tokens that end an answer, by a tokenizer's files: the one that they name, and special ones known to end a turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizer.components.added_tokens import AddedToken
from tokenizer.loading import TokenizerFiles

# Ends of a turn by their text: files name at most one of them.
_TURN_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>",
    "<|eot|>", "<|eom|>", "<|end_of_turn|>", "<|endofturn|>", "[|endofturn|]", "<|END_OF_TURN_TOKEN|>", "<turn|>",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Ids that end an answer, and all that are special."""

    ids: tuple[int, ...]
    special: frozenset[int]


def known_ends(named: Mapping[int, str], special: Mapping[int, str]) -> tuple[int, ...]:
    """The ids that end an answer: those that the files name, then special ones known to. Both are mappings from id to
    the token's text."""
    ids = {**named, **{i: text for i, text in special.items() if text in _TURN_ENDS}}
    if {"<|return|>", "<|call|>", "<|end|>"} <= set(ids.values()):  # harmony's, where the last ends only a message
        ids = {i: text for i, text in ids.items() if text != "<|end|>"}
    return tuple(ids)


def end_tokens(files: TokenizerFiles) -> EndTokens:
    """The end tokens of a folder's files. Raises `TokenizerFileError`."""
    model = files.tokenizer.optional_object("model")
    is_listed = model is None or isinstance(model.get("vocab"), list)  # Unigram's pieces with scores
    vocab = None if model is None or is_listed else model.optional_object("vocab")
    special: dict[int, str] = {}
    ids: dict[str, int] = {}

    def add(i: int, token: AddedToken) -> None:
        ids[token.content] = i
        if token.is_special:
            special[i] = token.content

    listed = files.tokenizer.objects("added_tokens") if files.tokenizer.get("added_tokens") is not None else []
    for entry in listed:
        add(entry.count("id"), AddedToken.read(entry))
    for i, token in files.config_tokens:
        add(i, token)
    for token in [*files.named_tokens.values(), *files.extra_special_tokens]:
        place = ids.get(token.content, None if vocab is None else vocab.get(token.content))
        if isinstance(place, int):
            add(place, token)
    eos = files.named_tokens.get("eos_token")
    named = {} if eos is None or eos.content not in ids else {ids[eos.content]: eos.content}
    return EndTokens(known_ends(named, special), frozenset(special))
