"""Models: config, strict weight loading, and one file for each family of architectures.

Names are imported lazily: reading a config must not import the kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.base import Model
    from models.checkpoints.hub import resolve_model
    from models.configuration.config import ModelConfig
    from models.configuration.generation_config import GenerationConfig, load_generation_config
    from models.errors import ConfigError, ModelLoadError
    from models.registry import load_config, load_model

_HOMES = {
    "ConfigError": "models.errors",
    "GenerationConfig": "models.configuration.generation_config",
    "Model": "models.base",
    "ModelConfig": "models.configuration.config",
    "ModelLoadError": "models.errors",
    "load_config": "models.registry",
    "load_generation_config": "models.configuration.generation_config",
    "load_model": "models.registry",
    "resolve_model": "models.checkpoints.hub",
}

__all__ = [
    "ConfigError",
    "GenerationConfig",
    "Model",
    "ModelConfig",
    "ModelLoadError",
    "load_config",
    "load_generation_config",
    "load_model",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
