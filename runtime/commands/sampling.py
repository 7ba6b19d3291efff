"""The sampling parameters of a command: what the user named, over what the model's authors meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine.sampling_params import SamplingParams
    from runtime.llm import LLM


def default_sampling(model_path: str) -> dict[str, Any]:
    """What `generation_config.json` says, by `SamplingParams`' names; `do_sample: false` is temperature 0."""
    from models.generation_config import load_generation_config

    config = load_generation_config(model_path)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if config.do_sample is False:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"}
        values["temperature"] = 0.0
    if config.max_new_tokens is not None:
        values["max_tokens"] = config.max_new_tokens
    return values


def sampling_params(llm: LLM, given: dict[str, Any], max_tokens: int | None) -> SamplingParams:
    """`given` over the model's defaults; `max_tokens` where neither says how long."""
    from runtime.engine.sampling_params import SamplingParams

    return SamplingParams(
        **{"max_tokens": max_tokens, **default_sampling(llm.client.info.model_path), **given}
    )
