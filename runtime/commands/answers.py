"""Sampling parameters and completions of the commands that generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from models.adapter_changes import largest_rank_and_base
from models.configuration.generation_config import load_generation_config
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM, Logprob, LoRARequest, RequestOutput


def sampling_params(llm: LLM, given: dict[str, Any], max_tokens: int | None) -> SamplingParams:
    """`given` over the model's generation config; `max_tokens` if neither has a limit.

    Raises `RequestError` naming the field that is wrong.
    """
    config = load_generation_config(llm.client.info.model_path)
    length = max_tokens if config.max_new_tokens is None else config.max_new_tokens
    return msgspec.structs.replace(llm.default_sampling_params(), **{"max_tokens": length, **given})


def with_adapter(arguments: dict[str, Any], folder: Path | None) -> tuple[dict[str, Any], LoRARequest | None]:
    """Arguments of `LLM` with room for the adapter in a folder, and its base model if none was named; and the request
    for it, None without a folder. Raises `ConfigError`, `WeightsError`."""
    if folder is None:
        return arguments, None
    rank, base = largest_rank_and_base(folder)
    arguments = {**arguments, "enable_lora": True, "max_lora_rank": max(rank, arguments["max_lora_rank"])}
    if arguments.get("model") is None and base:
        arguments["model"] = base
    return arguments, LoRARequest(folder.name or str(folder), 1, str(folder))


def completions(output: RequestOutput) -> list[dict[str, Any]]:
    """One plain object for each completion of a request."""
    found = []
    for completion in output.outputs:
        item: dict[str, Any] = {
            "index": completion.index,
            "prompt": output.prompt,
            "prompt_token_ids": list(output.prompt_token_ids),
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            item["cumulative_logprob"] = completion.cumulative_logprob
            item["logprobs"] = [
                _logprobs(token_id, entry)
                for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
        found.append(item)
    return found


def _logprobs(token_id: int, entry: dict[int, Logprob]) -> dict[str, Any]:
    def plain(token: int) -> dict[str, Any]:
        found = entry[token]
        return {"token_id": token, "token": found.decoded_token, "logprob": found.logprob, "rank": found.rank}

    top = [plain(token) for token in sorted(entry, key=lambda token: entry[token].rank)]
    return {**plain(token_id), "top_logprobs": top}
