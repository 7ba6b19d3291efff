"""Models: config, strict weight loading, and one file for each family of architectures. The names below are imported
when they are first used, since each module of the package imports this one."""

from importlib import import_module
from typing import Any

_HOME = {
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
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
