"""Reads the files of a tokenizer folder.

`tokenizer.json` is read first; without it, `vocab.json` and `merges.txt` in GPT-2's form, `tekken.json`, a
SentencePiece model or tiktoken's file.
`tokenizer_config.json`,
`special_tokens_map.json`, `added_tokens.json`, `chat_template.jinja`, `chat_template.json` and the template of
`processor_config.json` are read if they exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizer.byte_ranks import FAMILIES, TEKKEN_FILE, is_tiktoken, read_tekken, read_tiktoken
from tokenizer.classes import GPT2, LLAMA, QWEN2, as_class_has_it, class_of, tokens_of_class
from tokenizer.components.added_tokens import AddedToken
from tokenizer.errors import TokenizerFileError
from tokenizer.json_fields import Fields, shown
from tokenizer.piece_classes import content_of_class
from tokenizer.sentencepiece import added_tokens, content_of_pieces, read_pieces
from tokenizer.templates.mistral import mistral_template
from tokenizer.warn import warn_once

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ID_LIMIT = 1 << 32
VOCABULARIES = (
    "tokenizer.json", "vocab.json", TEKKEN_FILE, "tokenizer.model", "tiktoken.model", "*.tiktoken",
    "sentencepiece.bpe.model", "spiece.model",
)  # fmt: skip
"""Names of files with a vocabulary; the first that a folder has is read. `vocab.json` counts beside `merges.txt`."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(slots=True)
class TokenizerFiles:
    """The contents of a folder's files."""

    tokenizer: Fields
    """The content of tokenizer.json, or the same made of vocab.json and merges.txt."""
    named_tokens: dict[str, AddedToken] = field(default_factory=dict)
    """"bos_token", "eos_token", ... as far as they are named."""
    extra_special_tokens: list[AddedToken] = field(default_factory=list)
    config_tokens: list[tuple[int, AddedToken]] = field(default_factory=list)
    """Added tokens that tokenizer_config.json or added_tokens.json lists, by id."""
    add_bos_token: bool = False
    add_eos_token: bool = False
    """Beside what the post-processor adds; where a tokenizer.json exists, that alone decides."""
    splits_special_tokens: bool = False
    """Special tokens are ordinary text in whatever is encoded."""
    num_embeddings: int = _ID_LIMIT
    """Ids that the model has, by its config; named tokens that no file lists are added below it."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """By name; the usual one is "default"."""
    response_template: Any = None
    """How the model's answers are parsed, as tokenizer_config.json has it, unchecked; None if it says nothing."""
    has_own_ids: bool = False
    """Added tokens have the ids that they are listed with; else those of the vocabulary, or the next ones after it."""
    passes_over_merges: bool = False
    """Merges that name a token which is not in the vocabulary are a warning, as in llama.cpp; else an error."""


def read_folder(folder: Path) -> TokenizerFiles:
    """Read a tokenizer folder. Raises `TokenizerFileError`."""
    if not folder.is_dir():
        raise TokenizerFileError(str(folder), "", "is not a folder")
    config = _read_optional(folder / "tokenizer_config.json")
    model_config = _read_optional(folder / "config.json")
    name = class_of(config, model_config)
    source = vocabulary_file(folder)
    if source is None:
        raise TokenizerFileError(folder.name, "", f"holds no tokenizer: none of {', '.join(VOCABULARIES)}")
    lowers = _read_optional(folder / "sentence_bert_config.json").boolean("do_lower_case", False)
    has_json = source.name == "tokenizer.json"
    if has_json:
        files = TokenizerFiles(as_class_has_it(Fields.read(source), name, config))
    elif source.name == TEKKEN_FILE:
        files = _read_tekken(source)
    elif source.name == "vocab.json":
        files = TokenizerFiles(_read_vocabulary(folder, config, name or GPT2))
    elif source.suffix == ".tiktoken" or source.name == "tiktoken.model" or is_tiktoken(source):
        files = _read_tiktoken(source, config, model_config)
    else:
        files = _read_sentencepiece(source, config, name)
    if not has_json and files.tokenizer.get("post_processor") is None:  # else that has the tokens added to a text
        files.add_bos_token = config.boolean("add_bos_token", files.add_bos_token)
        files.add_eos_token = config.boolean("add_eos_token", False)
    if lowers:
        files.tokenizer = _lowering(files.tokenizer)
    files.num_embeddings = _num_embeddings(model_config)
    is_gpt2 = source.name == "vocab.json" and not name
    _read_special_tokens(folder, config, files, tokens_of_class(GPT2 if is_gpt2 else name))
    _read_chat_templates(folder, config, files)
    files.response_template = config.get("response_template")
    if source.name == TEKKEN_FILE and not files.chat_templates:
        template = mistral_template(files.tokenizer)
        files.chat_templates |= {} if template is None else {"default": template}
    return files


def _lowering(content: Fields) -> Fields:
    """The same tokenizer over small letters, as sentence-transformers has it by `do_lower_case`."""
    own = content.get("normalizer")
    nested = own.get("normalizers") if isinstance(own, dict) else None
    parts = nested if isinstance(nested, list) else [own] if own else []
    maps = [part for part in parts if isinstance(part, dict)]  # others are refused where the normalizer is built
    if any(part.get("type") == "Lowercase" or part.get("lowercase") is True for part in maps):
        return content
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *parts]}
    return Fields({**content.values, "normalizer": normalizer}, content.file)


def vocabulary_file(folder: Path) -> Path | None:
    """The file that the tokenizer of a folder is read from; of a pair `vocab.json`. None if there is none."""
    for name in VOCABULARIES:
        for path in sorted(folder.glob(name)):
            if path.is_file() and (path.name != "vocab.json" or (folder / "merges.txt").is_file()):
                return path
    return None


def _num_embeddings(model_config: Fields) -> int:
    inner = model_config.get("text_config")
    for values in (model_config.values, inner if isinstance(inner, dict) else {}):
        if type(size := values.get("vocab_size")) is int:
            return size
    return _ID_LIMIT


def _read_optional(file: Path) -> Fields:
    return Fields.read(file) if file.is_file() else Fields({}, file.name)


def _read_vocabulary(folder: Path, config: Fields, kind: str) -> Fields:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if kind not in (GPT2, QWEN2):
        config.fail("tokenizer_class", f"{shown(kind)} is not supported without a tokenizer.json")
    lines = _read_text(merges).split("\n")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    pre_tokenizer: dict[str, Any] = byte_level | {"add_prefix_space": config.boolean("add_prefix_space", False)}
    if kind == QWEN2:
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
        "normalizer": {"type": "NFC"} if kind == QWEN2 else None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_level,
        "model": model,
    }
    return Fields(content, f"{vocab.name} + {merges.name}")


def _read_sentencepiece(file: Path, config: Fields, name: str) -> TokenizerFiles:
    """The content of a SentencePiece model alone. Tokens that tokenizer_config.json lists replace those of their
    ids."""
    pieces = read_pieces(file)
    if (content := content_of_class(name, pieces, config.get("extra_ids"))) is not None:
        return TokenizerFiles(Fields(content, file.name))
    listed = config.get("added_tokens_decoder")
    for key, entry in listed.items() if isinstance(listed, dict) else ():
        if key.isascii() and key.isdigit() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            pieces.replace(int(key), entry["content"])
    is_legacy = config.boolean("legacy", True)
    content = content_of_pieces(pieces, is_first_alone=not is_legacy)
    if name == LLAMA:
        content["added_tokens"] = list(added_tokens(pieces.tokens, pieces.types))
    files = TokenizerFiles(as_class_has_it(Fields(content, file.name), name, config), add_bos_token=True)
    for role, i in pieces.special_ids.items():
        if config.get(role) is None:
            files.named_tokens[role] = AddedToken(pieces.tokens[i], is_special=True)
    return files


def _read_tekken(file: Path) -> TokenizerFiles:
    files = TokenizerFiles(read_tekken(file), add_bos_token=True, has_own_ids=True)
    known = {entry["content"] for entry in files.tokenizer.items("added_tokens")}
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    files.named_tokens = {role: AddedToken(text, is_special=True) for role, text in named.items() if text in known}
    return files


def _read_tiktoken(file: Path, config: Fields, model_config: Fields) -> TokenizerFiles:
    """The content of tiktoken's file, by the class or the model's type, whichever is known."""
    names = [source.get(key) for source, key in ((config, "tokenizer_class"), (model_config, "model_type"))]
    texts = [name for name in names if isinstance(name, str)]
    name = next((name for name in texts if name in FAMILIES), texts[0] if texts else "an unnamed family")
    listed = config.get("added_tokens_decoder")
    added = {
        int(key): entry["content"] for key, entry in (listed.items() if isinstance(listed, dict) else ())
        if key.isascii() and key.isdigit() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
    }  # fmt: skip
    content, family = read_tiktoken(file, name, added)
    files = TokenizerFiles(content, has_own_ids=True)
    for role, text in family.named:
        if config.get(role) is None:
            files.named_tokens[role] = AddedToken(text, is_special=True)
    return files


def _read_special_tokens(folder: Path, config: Fields, files: TokenizerFiles, of_class: Mapping[str, str]) -> None:
    files.splits_special_tokens = config.boolean("split_special_tokens", False)
    if files.splits_special_tokens:
        warn_once(
            f"{folder}: tokenizer_config.json: split_special_tokens is true: special tokens are ordinary text in all"
            " prompts, those of the chat template too, as in transformers; set it to false if chats go wrong"
        )
    sources = [config]
    if config.get("added_tokens_decoder") is not None:
        decoder = config.object("added_tokens_decoder")
        for key in decoder.values:
            if not (key.isascii() and key.isdigit()):
                decoder.fail(key, "is not a token id")
            files.config_tokens.append((int(key), AddedToken.read(decoder.object(key))))
        files.config_tokens.sort(key=lambda entry: entry[0])
    else:  # the older files count only if the newer one does not list the tokens
        sources.insert(0, _read_optional(folder / "special_tokens_map.json"))
    for source in sources:
        for name in NAMED_TOKENS:
            if name not in files.named_tokens and source.get(name) is not None:
                files.named_tokens[name] = _read_token(source, name, source.get(name))
    for name, text in of_class.items():
        if name not in files.named_tokens and name not in config.values:
            files.named_tokens[name] = AddedToken(text, is_special=True)
    files.named_tokens = {name: files.named_tokens[name] for name in NAMED_TOKENS if name in files.named_tokens}
    for source in sources:
        for name in ("additional_special_tokens", "extra_special_tokens"):
            listed = source.get(name)
            values = listed.values() if isinstance(listed, dict) else listed or []
            files.extra_special_tokens += [_read_token(source, name, value) for value in values]
        own = source.get("model_specific_special_tokens")
        for name, value in {**source.values, **(own if isinstance(own, dict) else {})}.items():
            if name.endswith("_token") and name not in NAMED_TOKENS and isinstance(value, str):  # such as image_token
                files.extra_special_tokens.append(_read_token(source, name, value))
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
    """A template that cannot be read is a warning, and is replaced by one that refuses every chat with the reason. A
    file's default template replaces all of tokenizer_config.json's, as in transformers, which writes no others beside
    it."""

    def read(name: str, text: Callable[[], str]) -> None:
        try:
            files.chat_templates[name] = text()
        except TokenizerFileError as error:
            warn_once(f"{folder}: the chat template {name!r} cannot be used: {error}")
            files.chat_templates[name] = refusing_template(str(error))

    listed = config.get("chat_template")
    if isinstance(listed, list):
        for i, entry in enumerate(listed):
            one = Fields(entry if isinstance(entry, dict) else {}, config.file, f"chat_template[{i}]")
            name = one.get("name")
            read(name if isinstance(name, str) else "default", partial(one.string, "template"))
    elif isinstance(listed, dict):
        for name in listed:
            read(name, partial(config.object("chat_template").string, name))
    elif listed is not None:
        read("default", lambda: config.string("chat_template"))
    if (file := folder / "chat_template.json").is_file():
        read("default", lambda: Fields.read(file).string("chat_template"))
    paths = {"default": folder / "chat_template.jinja"}
    if paths["default"].is_file():
        files.chat_templates.clear()
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in paths.items():
        if path.is_file():
            read(name, partial(_read_text, path))
    processor = _read_optional(folder / "processor_config.json")  # takes precedence over all, as in transformers
    if isinstance(processor.get("chat_template"), str):
        read("default", partial(processor.string, "chat_template"))
    if files.chat_templates and "default" not in files.chat_templates:
        problem = f"there is no chat template 'default', only {', '.join(sorted(files.chat_templates))}"
        files.chat_templates["default"] = refusing_template(problem)


def refusing_template(problem: str) -> str:
    """A chat template that refuses every conversation, with this reason."""
    return f"{{{{ raise_exception({json.dumps(problem)}) }}}}"


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerFileError(file.name, "", f"cannot be read: {error}") from error
