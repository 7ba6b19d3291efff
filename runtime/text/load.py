"""Loads a model's tokenizer, from a folder or a GGUF file; None if it has none: such a model serves token ids."""

from __future__ import annotations

from pathlib import Path

from models.checkpoints.model_files import open_model
from runtime.errors import InvalidArgumentError
from runtime.text_files import read_text_file
from tokenizer import Tokenizer
from tokenizer.errors import TokenizerFileError
from tokenizer.loading import TokenizerFiles


def load_tokenizer(model: str | Path, chat_template: str | None = None) -> Tokenizer | None:
    """The tokenizer, with this chat template instead of its own if one is given.

    Raises ``TokenizerFileError`` if there is a tokenizer and it cannot be read, and ``ModelLoadError`` for an
    unreadable GGUF file.
    """
    files = open_model(model).tokenizer_files()
    return None if files is None else tokenizer_of(files, chat_template)


def tokenizer_of(files: TokenizerFiles, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of files that were read; see `load_tokenizer`."""
    if chat_template is not None:
        files.chat_templates = {"default": chat_template}
    return Tokenizer.from_files(files)


def read_tokenizer(model: str | Path, chat_template: str | None = None) -> Tokenizer:
    """As ``load_tokenizer``, of a model that must have one."""
    tokenizer = load_tokenizer(model, chat_template)
    if tokenizer is None:
        problem = "has no tokenizer that can be read (tokenizer.json, tokenizer.model, tekken.json, ...)"
        raise TokenizerFileError(str(model), "", problem)
    return tokenizer


def read_chat_template(option: str | None) -> str | None:
    """The text of a template that is given as a file's path, or as itself: a path has no braces and no line break.

    Raises ``TokenizerFileError`` for a file that cannot be read.
    """
    if option is None or any(mark in option for mark in "{\n"):
        return option
    try:
        return read_text_file(option)
    except (OSError, InvalidArgumentError) as error:
        raise TokenizerFileError(option, "", f"cannot be read as a chat template: {error}") from error
