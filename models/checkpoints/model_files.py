"""The interface to a model's files in either form: config, tensors, tokenizer and template.

A folder in Hugging Face's form has a file for each; a GGUF file has all of it in its metadata.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Protocol

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weight_files import open_checkpoint
from models.configuration.json_fields import Fields, config_path, read_json_object
from models.configuration.overrides import overridden
from models.errors import ConfigError
from models.gguf.mmproj import NONE as NO_MMPROJ
from models.gguf.mmproj import towers_of
from models.gguf.model_file import GgufModel
from models.quantized.scheme import add_quantization, read_quantization, with_quantized
from tokenizer.ends import EndTokens, end_tokens
from tokenizer.errors import TokenizerFileError
from tokenizer.loading import TokenizerFiles, read_folder, vocabulary_file
from tokenizer.warn import warn_once

_IMAGES_FILE = "preprocessor_config.json"


class ModelFiles(Protocol):
    """A model that is not loaded yet. Methods raise `ModelLoadError` and `TokenizerFileError`."""

    path: Path

    def config(self) -> Fields:
        """The fields of `config.json`."""

    def preprocessor(self) -> Fields | None:
        """The fields of `preprocessor_config.json`; None if there is no such file."""

    def generation_config(self) -> Fields:
        """The fields of `generation_config.json`; none if there is no such file."""

    def end_tokens(self) -> EndTokens | None:
        """End-of-answer ids of the tokenizer; None without a tokenizer, or if `generation_config` has them."""

    def checkpoint(self) -> Checkpoint:
        """The stored tensors, which are not checked against a model yet."""

    def has_tokenizer(self) -> bool:
        """Whether there is one."""

    def tokenizer_files(self) -> TokenizerFiles | None:
        """The tokenizer's files; None if there is none: such a model serves token ids."""


class ModelFolder:
    """A folder with `config.json`, safetensors and perhaps a tokenizer; see `ModelFiles`."""

    def __init__(self, path: Path, overrides: str = "") -> None:
        self.path = path
        self._overrides = overrides

    def config(self) -> Fields:
        path = config_path(self.path)
        fields = add_quantization(Fields(read_json_object(path), str(path)), self.path)
        return Fields(overridden(fields.values(), self._overrides), str(path)) if self._overrides else fields

    def preprocessor(self) -> Fields | None:
        path = self.path / _IMAGES_FILE
        return Fields(read_json_object(path), str(path)) if path.is_file() else None

    def generation_config(self) -> Fields:
        path = self.path / "generation_config.json"
        return Fields(read_json_object(path) if path.is_file() else {}, str(path))

    def end_tokens(self) -> EndTokens | None:
        files = self.tokenizer_files()
        return None if files is None else end_tokens(files)

    def checkpoint(self) -> Checkpoint:
        return with_quantized(open_checkpoint(self.path), read_quantization(self.config()))

    def has_tokenizer(self) -> bool:
        return self.tokenizer_files() is not None

    def tokenizer_files(self) -> TokenizerFiles | None:
        source = vocabulary_file(self.path)
        if source is None:
            return None
        try:
            return read_folder(self.path)
        except TokenizerFileError as error:
            if source.name in ("tokenizer.json", "vocab.json"):
                raise
            warn_once(
                f"{self.path}: {error}, and there is no tokenizer.json: the model serves ids alone;"
                " make one with transformers: `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`"
            )
            return None


def open_model(path: str | Path, overrides: str = "", mmproj: str = "") -> ModelFiles:
    """The files of a model: of a folder, or of a GGUF file. `overrides` replace fields of its config
    (`models.configuration.overrides`), `mmproj` is the file of its tower (`models.gguf.mmproj`). Raises
    `ModelLoadError` for a file that is not readable."""
    path = Path(path)
    if not path.is_file():
        if mmproj not in ("", NO_MMPROJ):
            raise ConfigError(f"{path}: mmproj is {mmproj!r:.200}, but the model is no GGUF file: leave it out")
        return ModelFolder(path, overrides)
    towers = towers_of(path, mmproj)
    return _gguf_model(path, overrides, mmproj, tuple(_identity(each) for each in (path, *towers) if each.is_file()))


def _identity(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=1)
def _gguf_model(path: Path, overrides: str, mmproj: str, identities: tuple[tuple[int, ...], ...]) -> GgufModel:
    """The header, which lists the vocabulary, is cached: it is read once per file."""
    return GgufModel(path, overrides, mmproj)
