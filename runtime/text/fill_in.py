"""Prompts for a text between two others, with the tokens that each family of models was taught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FillInTokens:
    """
    before, after, middle  stand in front of the text before the gap, of the text after it, and of the answer
    after_comes_first  the text after the gap stands in front of the one before it
    ends               tokens after which something else than the answer follows
    """

    before: str
    after: str
    middle: str = ""
    after_comes_first: bool = False
    ends: tuple[str, ...] = ()


_SEPARATORS, _REPOSITORIES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>"), ("<|repo_name|>", "<repo_name>")
_FILES = ("<|fim_pad|>", *_REPOSITORIES, *_SEPARATORS)

FAMILIES = (
    FillInTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=_FILES),  # Qwen's coders, CodeGemma
    FillInTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=_FILES),  # StarCoder, Granite
    FillInTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInTokens("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", after_comes_first=True),  # Seed-Coder
    FillInTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FillInTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FillInTokens("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    FillInTokens("[PREFIX]", "[SUFFIX]", after_comes_first=True),  # Codestral
)
"""By their tokens, of which a vocabulary must have all."""


def fill_in_tokens(tokenizer: Tokenizer) -> FillInTokens | None:
    """Those of the model's family; None if its vocabulary has none."""
    for family in FAMILIES:
        tokens = filter(None, (family.before, family.after, family.middle))
        if all(tokenizer.token_to_id(token) is not None for token in tokens):
            return family
    return None


def fill_in_prompt(
    tokenizer: Tokenizer,
    family: FillInTokens,
    before: str,
    after: str,
    *,
    add_special_tokens: bool = True,
    files: Sequence[tuple[str | None, str]] = (),
) -> list[int]:
    """The ids of a prompt for the text between these two, in which special tokens' texts are text. `files`: names and
    texts of other files, which come first."""

    def part(token: str, text: str) -> list[int]:
        token_id = tokenizer.token_to_id(token)
        assert token_id is not None, token
        return [token_id, *tokenizer.encode_ordinary(text)]

    first = tokenizer.encode("") if add_special_tokens else []
    if files:
        separator = next((each for each in _SEPARATORS if tokenizer.token_to_id(each) is not None), None)
        if separator is None:
            before = "".join(f"{text}\n\n" for _, text in files) + before
        else:
            repository = next((each for each in _REPOSITORIES if tokenizer.token_to_id(each) is not None), None)
            first = [*first, *([] if repository is None else part(repository, "project\n"))]
            for number, (name, text) in enumerate(files):
                first += part(separator, f"{name or f'file{number + 1}'}\n{text}\n")
            first += part(separator, "current\n")
    parts = [part(family.before, before), part(family.after, after)]
    if family.after_comes_first:
        parts.reverse()
    return [*first, *parts[0], *parts[1], *(part(family.middle, "") if family.middle else ())]


def fill_in_end_ids(tokenizer: Tokenizer, family: FillInTokens) -> tuple[int, ...]:
    """The ids that end an answer beside the model's own."""
    ids = map(tokenizer.token_to_id, family.ends)
    return tuple(token_id for token_id in ids if token_id is not None)
