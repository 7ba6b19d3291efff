"""Reads the files of a tokenizer folder.

`tokenizer.json` is read first; without it, `vocab.json` and `merges.txt` in GPT-2's form.
`tokenizer_config.json`,
`special_tokens_map.json`, `added_tokens.json`, `chat_template.jinja` and `chat_template.json` are read where
they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizer.components.added_tokens import AddedToken
from tokenizer.errors import TokenizerFileError
from tokenizer.json_fields import Fields, shown
from tokenizer.llama_class import is_rebuilt, rebuild

_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(slots=True)
class TokenizerFiles:
    """What the files of a folder say."""

    tokenizer: Fields
    """The content of tokenizer.json, or the same made of vocab.json and merges.txt."""
    named_tokens: dict[str, AddedToken] = field(default_factory=dict)
    """"bos_token", "eos_token", ... as far as they are named."""
    extra_special_tokens: list[AddedToken] = field(default_factory=list)
    config_tokens: list[tuple[int, AddedToken]] = field(default_factory=list)
    """Added tokens that tokenizer_config.json or added_tokens.json lists, by id."""
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    """None: the post-processor of tokenizer.json decides."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """By name; the usual one is "default"."""


def read_folder(folder: Path) -> TokenizerFiles:
    """Read a tokenizer folder. Raises `TokenizerFileError`."""
    if not folder.is_dir():
        raise TokenizerFileError(str(folder), "", "is not a folder")
    config = _read_optional(folder / "tokenizer_config.json")
    content = _read_tokenizer(folder, config)
    if is_rebuilt(content, config, _read_optional(folder / "config.json")):
        content = rebuild(content, config)
    files = TokenizerFiles(content)
    files.add_bos_token = _optional_boolean(config, "add_bos_token")
    files.add_eos_token = _optional_boolean(config, "add_eos_token")
    _read_special_tokens(folder, config, files)
    _read_chat_templates(folder, config, files)
    return files


def _read_optional(file: Path) -> Fields:
    return Fields.read(file) if file.is_file() else Fields({}, file.name)


def _optional_boolean(config: Fields, name: str) -> bool | None:
    return None if config.get(name) is None else config.boolean(name)


def _read_tokenizer(folder: Path, config: Fields) -> Fields:
    if (folder / "tokenizer.json").is_file():
        return Fields.read(folder / "tokenizer.json")
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not vocab.is_file() or not merges.is_file():
        raise TokenizerFileError(
            folder.name, "", "holds neither tokenizer.json nor vocab.json with merges.txt"
        )
    kind = config.get("tokenizer_class") or "GPT2Tokenizer"
    if kind not in _GPT2_CLASSES + _QWEN2_CLASSES:
        config.fail("tokenizer_class", f"{shown(kind)} is not supported without a tokenizer.json")
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerFileError(merges.name, "", f"cannot be read: {error}") from error
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    pre_tokenizer: dict[str, Any] = byte_level | {
        "add_prefix_space": config.boolean("add_prefix_space", False)
    }
    if kind in _QWEN2_CLASSES:
        split = {
            "type": "Split",
            "pattern": {"Regex": _QWEN2_PATTERN},
            "behavior": "Isolated",
            "invert": False,
        }
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, pre_tokenizer | {"use_regex": False}]}
    model = {
        "type": "BPE",
        "vocab": Fields.read(vocab).values,
        "merges": [line.rstrip("\r") for line in lines if line.strip()],
    }
    content = {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if kind in _QWEN2_CLASSES else None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_level,
        "model": model,
    }
    return Fields(content, f"{vocab.name} + {merges.name}")


def _read_special_tokens(folder: Path, config: Fields, files: TokenizerFiles) -> None:
    sources = [config]
    if config.get("added_tokens_decoder") is not None:
        decoder = config.object("added_tokens_decoder")
        for key in decoder.values:
            if not (key.isascii() and key.isdigit()):
                decoder.fail(key, "is not a token id")
            files.config_tokens.append((int(key), AddedToken.read(decoder.object(key))))
        files.config_tokens.sort(key=lambda entry: entry[0])
    else:  # the older files count only where the newer one does not list the tokens
        sources.insert(0, _read_optional(folder / "special_tokens_map.json"))
    for source in sources:
        for name in NAMED_TOKENS:
            if name not in files.named_tokens and source.get(name) is not None:
                files.named_tokens[name] = _read_token(source, name, source.get(name))
    for source in sources:
        for name in ("additional_special_tokens", "extra_special_tokens"):
            listed = source.get(name)
            values = listed.values() if isinstance(listed, dict) else listed or []
            files.extra_special_tokens += [_read_token(source, name, value) for value in values]
    if config.get("added_tokens_decoder") is None:
        _read_added_tokens(folder, files)


def _read_added_tokens(folder: Path, files: TokenizerFiles) -> None:
    added = _read_optional(folder / "added_tokens.json")
    special = {token.content for token in [*files.named_tokens.values(), *files.extra_special_tokens]}
    for content in added.values:
        files.config_tokens.append((added.count(content), AddedToken(content, is_special=content in special)))
    files.config_tokens.sort(key=lambda entry: entry[0])


def _read_token(source: Fields, name: str, value: object) -> AddedToken:
    """A special token: a string, or an object with its rules."""
    if isinstance(value, str):
        return AddedToken(value, is_special=True)
    if not isinstance(value, dict):
        source.fail(name, f"expected a token, found {shown(value)}")
    return AddedToken.read(Fields(value | {"special": True}, source.file, source.field(name)))


def _read_chat_templates(folder: Path, config: Fields, files: TokenizerFiles) -> None:
    listed = config.get("chat_template")
    if isinstance(listed, list):
        for entry in config.objects("chat_template"):
            files.chat_templates[entry.string("name")] = entry.string("template")
    elif listed is not None:
        files.chat_templates["default"] = config.string("chat_template")
    if (folder / "chat_template.json").is_file():
        files.chat_templates["default"] = Fields.read(folder / "chat_template.json").string("chat_template")
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in paths.items():
        if path.is_file():
            try:
                files.chat_templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerFileError(path.name, "", f"cannot be read: {error}") from error
