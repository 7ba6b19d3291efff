"""The model's recommended sampling parameters, read from ``generation_config.json`` for ``LLM`` and the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.configuration.generation_config import load_generation_config


def recommended_sampling(folder: str | Path) -> dict[str, Any]:
    """The recommended values by ``SamplingParams``' names, used where a user sets none.

    Raises ``ConfigError``.
    """
    config = load_generation_config(folder)
    length = {} if config.max_new_tokens is None else {"max_tokens": config.max_new_tokens}
    return config.sampling | length
