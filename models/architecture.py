"""The description of an architecture that a family's file gives to the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.base import Model
from models.configuration.config import ModelConfig
from models.configuration.json_fields import Fields


@dataclass(frozen=True, slots=True)
class Architecture:
    """One name that `architectures` in `config.json` may hold.

    Attributes:
        name: such as "LlamaForCausalLM".
        model_type: such as "llama"; a config without `architectures` is known by it.
        read_config: makes the config of the file's fields. It reads every field that the arithmetic depends on;
            a field left unread is refused by name, unless it is harmless (`models.configuration.harmless_fields`).
        model_class: built from the result of `read_config`.
        saved_as: the name that transformers gives it when it saves a model of this `model_type`, if another one.
    """

    name: str
    model_type: str
    read_config: Callable[[Fields], ModelConfig]
    model_class: type[Model]
    saved_as: str = ""
