"""Vocabularies of bytes by rank: Mistral's `tekken.json`, and tiktoken's files (`tiktoken.model`, `*.tiktoken`), in the
form of `tokenizer.json`.

Any two tokens whose bytes are a third's merge into it, the one of the lowest rank first; a word that is a token is not
cut. tiktoken's files have tokens and ranks alone. How words are cut and which special tokens there are, each family
says in Python code, which is never run: `FAMILIES` has it for those that are known.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tokenizer.byte_level import BYTE_TO_CHAR
from tokenizer.errors import TokenizerFileError
from tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS, byte_level
from tokenizer.json_fields import Fields, shown

TEKKEN_FILE = "tekken.json"

_LETTERS = dict(enumerate(BYTE_TO_CHAR))
_MOST_TOKENS = 1 << 24
_TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of files of version 7 and before that list none."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family's rules for its tiktoken file, which its code says.

    Attributes:
        pre: words are cut as GGUF's pre-tokenizer of this name cuts them.
        special: special tokens that follow the ranks; those of tokenizer_config.json have their own ids.
        reserved: so many ids after the ranks, or those before them, have names made of the id if none is listed.
        begins: special tokens in front of a text.
        named: special tokens by role.
    """

    pre: str
    special: tuple[str, ...] = ()
    reserved: int = 0
    begins: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()


_LLAMA_3 = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)  # fmt: skip
_KIMI = Family("kimi-k2", reserved=258)
_QWEN = Family(
    "qwen2", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    named=(("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")),
)  # fmt: skip
_GLM = Family("glm4", begins=("[gMASK]", "<sop>"))
_LLAMA = Family(
    "llama3", _LLAMA_3, begins=("<|begin_of_text|>",),
    named=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|end_of_text|>")),
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "QWenTokenizer": _QWEN, "qwen": _QWEN,
    "TikTokenTokenizer": _KIMI, "kimi_k2": _KIMI, "kimi_k25": _KIMI, "kimi_vl": _KIMI, "kimi_linear": _KIMI,
    "ChatGLM4Tokenizer": _GLM, "chatglm": _GLM,
    "PreTrainedTokenizerFast": _LLAMA, "PreTrainedTokenizer": _LLAMA, "LlamaTokenizer": _LLAMA, "llama": _LLAMA,
}  # fmt: skip
"""By the class of tokenizer_config.json, or the model's type."""


def read_tekken(file: Path) -> Fields:
    """The content of a `tekken.json`. Raises `TokenizerFileError`."""
    fields = Fields.read(file)
    config = fields.object("config")
    num_special, size = config.count("default_num_special_tokens"), config.count("default_vocab_size")
    listed = fields.items("vocab")
    num_tokens = size - num_special
    if not 0 < num_tokens <= len(listed):
        problem = f"is {size}, of which {num_special} are special; must leave 1 to {len(listed)}, the length of vocab"
        config.fail("default_vocab_size", problem)
    ranked: list[tuple[int, bytes]] = []
    for i, entry in enumerate(listed[:num_tokens]):
        try:
            rank, token = entry["rank"], base64.b64decode(entry["token_bytes"], validate=True)
            if type(rank) is not int or rank < 0:
                raise ValueError(f"the rank is {shown(rank)}, must be an integer from 0 on")
            ranked.append((rank, token))
        except (KeyError, TypeError, ValueError) as error:
            fields.fail(f"vocab[{i}]", f"expected a rank and token_bytes in base 64, found {shown(entry)}: {error}")
    tokens = dict(_tekken_special(fields, num_special))
    content = _content(ranked, num_special, fields, "vocab")
    content["pre_tokenizer"] = _cut_by(config.string("pattern"))
    content["added_tokens"] = _added(tokens)
    content["config"] = {"version": config.get("version")}
    return Fields(content, file.name)


def _tekken_special(fields: Fields, count: int) -> Iterator[tuple[int, str]]:
    """The special tokens by id: those listed, or the usual ones, and names for the others."""
    listed = fields.objects("special_tokens") if fields.get("special_tokens") is not None else None
    if listed is None:
        names = {i: name for i, name in enumerate(_TEKKEN_SPECIAL) if i < count}
    else:
        names = {entry.count("rank"): entry.string("token_str") for entry in listed}
    for i, name in names.items():
        if i >= count:
            fields.fail("special_tokens", f"{shown(name)} has rank {i}, must be less than {count}")
    if len(set(names.values())) != len(listed if listed is not None else names):
        fields.fail("special_tokens", "names a token or a rank twice")
    for i in range(count):
        yield i, names.get(i, f"<SPECIAL_{i}>")


def is_tiktoken(file: Path) -> bool:
    """Whether a file begins as tiktoken's do: a token in base 64 and its rank."""
    try:
        with file.open("rb") as opened:
            line = opened.readline(4096).split()
        return len(line) == 2 and line[1].isdigit() and bool(base64.b64decode(line[0], validate=True))
    except (OSError, ValueError):
        return False


def read_tiktoken(file: Path, name: str, listed: Mapping[int, str]) -> tuple[Fields, Family]:
    """The content of a file with a token and its rank in each line, of the family of this name (of a tokenizer's class
    or a model's type); `listed` are tokens that tokenizer_config.json adds. Raises `TokenizerFileError`."""
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(FAMILIES)
        raise TokenizerFileError(
            file.name, "", "has tokens and ranks alone; how words are cut says the Python code of"
            f" {shown(name)}, which is not run; known are {known}",
        )  # fmt: skip
    fields = Fields({}, file.name)
    ranked = list(_lines(file, fields))
    content = _content(ranked, 0, fields, "")
    first = 1 + max(rank for rank, _ in ranked)
    added = {first + i: token for i, token in enumerate(family.special)} if not listed else {}
    added |= {i: token for i, token in listed.items() if i >= first}
    for i in range(first, first + family.reserved):
        added.setdefault(i, f"<|reserved_token_{i}|>")
    pre = PRE_TOKENIZERS[family.pre]
    content["normalizer"] = pre.normalizer
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(pre.steps)}
    content["added_tokens"] = _added(dict(sorted(added.items())))
    ids = {token: i for i, token in added.items()}
    if family.begins and all(token in ids for token in family.begins):
        special = [{"SpecialToken": {"id": token, "type_id": 0}} for token in family.begins]
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": [*special, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
            "special_tokens": {token: {"id": token, "ids": [ids[token]]} for token in family.begins},
        }  # fmt: skip
    return Fields(content, file.name), family


def _lines(file: Path, fields: Fields) -> Iterator[tuple[int, bytes]]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise TokenizerFileError(file.name, "", f"cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts:
            continue
        try:
            if len(parts) != 2 or not parts[1].isdigit():
                raise ValueError("expected a token in base 64 and its rank")
            yield int(parts[1]), base64.b64decode(parts[0], validate=True)
        except (binascii.Error, ValueError) as error:
            fields.fail(f"line {number}", f"{shown(line[:80].decode('ascii', 'replace'))}: {error}")


def _content(ranked: Sequence[tuple[int, bytes]], first: int, fields: Fields, name: str) -> dict[str, Any]:
    """The model and decoder of a `tokenizer.json` of these ranks and tokens; the id of rank 0 is `first`."""

    def fail(problem: str) -> NoReturn:
        raise TokenizerFileError(fields.file, name, problem)

    if not ranked:
        fail("has no tokens")
    vocab: dict[str, int] = {}
    ids: set[int] = set()
    for rank, token in ranked:
        text = token.decode("latin-1").translate(_LETTERS)
        if not token or text in vocab or rank in ids or rank >= _MOST_TOKENS:
            what = "is empty" if not token else "is there twice" if text in vocab else "has a rank of another token"
            fail(f"the token {shown(token)} of rank {rank} {what if rank < _MOST_TOKENS else 'has too high a rank'}")
        ids.add(rank)
        vocab[text] = first + rank
    missing = next((byte for byte, letter in _LETTERS.items() if letter not in vocab), None)
    if missing is not None:
        fail(f"has no token for the byte 0x{missing:02X}: the file is cut off")
    model = {"type": "BPE", "vocab": vocab, "ranks": [rank for rank, _ in ranked], "ignore_merges": True}
    return {"model": model, "decoder": byte_level(True)}


def _cut_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level(False)]}


def _added(tokens: Mapping[int, str]) -> list[dict[str, Any]]:
    return [{"id": i, "content": token, "special": True, "normalized": False} for i, token in tokens.items()]
