"""The sampling parameters of a command: the user's, over the model's generation config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine.sampling_params import SamplingParams
    from runtime.llm import LLM


def sampling_params(llm: LLM, given: dict[str, Any], max_tokens: int | None) -> SamplingParams:
    """`given` over the model's generation config; `max_tokens` if neither has a limit.

    Raises `RequestError` naming the field that is wrong.
    """
    import msgspec

    from models.configuration.generation_config import load_generation_config

    config = load_generation_config(llm.client.info.model_path)
    length = max_tokens if config.max_new_tokens is None else config.max_new_tokens
    return msgspec.structs.replace(llm.default_sampling_params(), **{"max_tokens": length, **given})
