"""The tokenizers that `bench tokenizer` compares: ours, Hugging Face's `tokenizers`, OpenAI's `tiktoken`.

All three are made of one `tokenizer.json`: tiktoken takes ids for ranks, so that its ids are right only where the order
of the vocabulary is that of the merges, which is checked before anything is timed. A library that is not installed is
left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizer import Tokenizer
from tokenizer.byte_level import from_byte_level
from tokenizer.components.pre_tokenizers import GPT2_PATTERN

NAMES = ("ours", "tokenizers", "tiktoken")


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation, loaded.

    encode   a text in which no special token is sought → ids
    prompt   a text in which special tokens are sought, to which none is added → ids
    decode   ids → text
    """

    name: str
    encode: Callable[[str], Sequence[int]]
    prompt: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def load_ours(file: Path) -> Side:
    """This project's."""
    tokenizer = Tokenizer.from_file(file)
    prompt = partial(tokenizer.encode, add_special_tokens=False)
    return Side("ours", tokenizer.encode_ordinary, prompt, tokenizer.decode)


def load_tokenizers(file: Path) -> Side:
    """Hugging Face's."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return Side("tokenizers", encode, encode, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))


def load_tiktoken(file: Path) -> Side | None:
    """OpenAI's; None for a tokenizer that it cannot express: more than one pattern, or no byte-level words."""
    import tiktoken

    content = json.loads(file.read_bytes())
    pattern = _one_pattern(content["pre_tokenizer"])
    if pattern is None:
        return None
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = content["model"]["vocab"]
    ranks = {from_byte_level(token): token_id for token, token_id in vocab.items() if token not in added}
    encoding = tiktoken.Encoding(file.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=added)
    return Side(
        "tiktoken",
        encoding.encode_ordinary,
        lambda text: encoding.encode(text, allowed_special="all"),
        lambda ids: encoding.decode(list(ids)),
    )


LOADERS: dict[str, Callable[[Path], Side | None]] = {
    "ours": load_ours,
    "tokenizers": load_tokenizers,
    "tiktoken": load_tiktoken,
}


def installed() -> list[str]:
    """The names of the sides that can be loaded here."""
    return [name for name in NAMES if name == "ours" or find_spec(name) is not None]


def _one_pattern(fields: Any) -> str | None:
    """The pattern whose matches are the words, in the syntax that tokenizer.json and tiktoken share."""
    steps = fields["pretokenizers"] if fields and fields["type"] == "Sequence" else [fields]
    if steps[0] and steps[0]["type"] == "ByteLevel" and len(steps) == 1:
        is_plain = steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"]
        return GPT2_PATTERN if is_plain else None
    if len(steps) == 2 and steps[0]["type"] == "Split" and steps[1]["type"] == "ByteLevel":
        regex = steps[0]["pattern"].get("Regex")
        return str(regex) if regex and not steps[1].get("use_regex", True) else None
    return None
