"""How a model's authors mean it to be sampled: the one reading of ``generation_config.json`` that ``LLM`` and
the server share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.generation_config import load_generation_config


def recommended_sampling(folder: str | Path) -> dict[str, Any]:
    """The recommended values by ``SamplingParams``' names, for where a user says nothing.

    ``do_sample: false`` recommends greedy decoding; then temperature, top_k, top_p and min_p of the file mean
    nothing. Raises ``ConfigError``.
    """
    config = load_generation_config(folder)
    recommended: dict[str, Any] = {
        "repetition_penalty": config.repetition_penalty,
        "max_tokens": config.max_new_tokens,
    }
    if config.do_sample is False:
        recommended["temperature"] = 0.0
    else:
        recommended |= {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {name: value for name, value in recommended.items() if value is not None}
