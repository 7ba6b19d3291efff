"""Facts about a model that its files tell before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.checkpoints.hub import local_model
from models.checkpoints.model_files import open_model
from runtime.engine.messages import EngineInfo
from runtime.errors import XservError
from server.hosting.settings import ModelSettings

Purpose = Literal["generate", "embed", "classify"]

_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForImageTextToText")
_CLASSIFIES = ("ForSequenceClassification",)
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """purpose        the model's main one; None: not known before it is loaded
    architecture   "" if it is not known, as of a hub id that is not on this machine
    max_model_len  tokens of prompt and answer; None: not known
    stored_bytes   of its files of weights
    format         of these
    """

    purpose: Purpose | None = None
    architecture: str = ""
    max_model_len: int | None = None
    stored_bytes: int = 0
    format: Literal["safetensors", "gguf"] = "safetensors"

    @classmethod
    def of(cls, settings: ModelSettings) -> ModelFacts:
        """By its files; nothing is known of files that are not here, or cannot be read: its loading reports that."""
        limit = settings.engine_options.get("max_model_len")
        try:
            path = local_model(settings.model)
            if path is None:
                return cls(max_model_len=limit)
            fields = open_model(path, str(settings.engine_options.get("hf_overrides") or "")).config().values()
        except (XservError, OSError):
            return cls(max_model_len=limit)
        architecture = next((each for each in fields.get("architectures") or () if isinstance(each, str)), "")
        return cls(
            purpose=_purpose(architecture),
            architecture=architecture,
            max_model_len=limit or _positions(fields),
            stored_bytes=_stored_bytes(path),
            format="gguf" if path.is_file() else "safetensors",
        )


def purpose_of(info: EngineInfo) -> Purpose:
    """The main purpose of a loaded model."""
    return "generate" if info.pooling.generates else "classify" if info.pooling.labels else "embed"


def _purpose(architecture: str) -> Purpose | None:
    if architecture.endswith(_GENERATES):
        return "generate"
    return "classify" if architecture.endswith(_CLASSIFIES) else "embed" if architecture else None


def _positions(fields: dict[str, Any]) -> int | None:
    for of_text in (fields, fields.get("text_config")):
        for name in _POSITIONS:
            if isinstance(of_text, dict) and isinstance(found := of_text.get(name), int):
                return found
    return None


def _stored_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(each.stat().st_size for each in files)
