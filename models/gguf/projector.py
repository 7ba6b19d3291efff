"""The interface of a tower's file: its config, preprocessing and tensors, as the model's folder would have them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from models.checkpoints.stored_tensor import StoredTensor
from models.configuration.json_fields import REQUIRED, Fields
from models.errors import ConfigError
from models.gguf.reader import GgufFile


class Projector(ABC):
    """A tower's file. `fields` are its keys under `clip`; `class_name` is the model's, with pictures."""

    def __init__(self, file: GgufFile, fields: Fields, class_name: str) -> None:
        self.file, self._fields, self._class_name = file, fields, class_name

    @abstractmethod
    def vision_config(self) -> dict[str, Any]:
        """The fields of a `vision_config`. Raises `ConfigError`."""

    @abstractmethod
    def preprocessor(self) -> Fields:
        """The fields of a `preprocessor_config.json`."""

    @abstractmethod
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by their names in safetensors; an unknown name stays as it is, and fails the check for
        leftovers."""

    @abstractmethod
    def text_changes(self, text: Mapping[str, Any], model: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of config.json besides, and those of its `text_config` that a model of text lacks or has otherwise.
        Raises `ConfigError`."""

    def misfit(self, model: GgufFile) -> str:
        """Why the tower is another model's; "" if it is this one's."""
        width = model.metadata.get(f"{model.metadata['general.architecture']}.embedding_length")
        own = self._fields.integer("clip.vision.projection_dim", REQUIRED)
        return (
            "" if own == width else f"clip.vision.projection_dim = {own} must be the model's embedding_length = {width}"
        )

    def with_text(self, values: Mapping[str, Any], model: GgufFile) -> dict[str, Any]:
        """The config.json of a model with this tower, made of that of its text. Raises `ConfigError` for values that
        are not supported."""
        text = {name: value for name, value in values.items() if name != "architectures"}
        outer = {key: text.pop(key) for key in ("tie_word_embeddings", "dtype")}
        vision = self.vision_config()
        own, changes = self.text_changes(text, model)
        return {
            "architectures": [self._class_name], **outer, **own, "text_config": text | changes,
            "vision_config": vision,
        }  # fmt: skip

    def sizes(self, names: Mapping[str, str]) -> dict[str, int]:
        """The required integers of `clip.vision` by their names in `vision_config`."""
        return {ours: self._fields.integer(f"clip.vision.{name}", REQUIRED) for name, ours in names.items()}


def token_id(model: GgufFile, token: str, purpose: str) -> int:
    """A token's place in the model's vocabulary. Raises `ConfigError` if it is not there."""
    tokens: Any = model.metadata.get("tokenizer.ggml.tokens", ())
    found = next((index for index, each in enumerate(tokens) if each == token), None)
    if found is None:
        raise ConfigError(f"{model.path}: tokenizer.ggml.tokens has no {token!r}, which {purpose}")
    return found
