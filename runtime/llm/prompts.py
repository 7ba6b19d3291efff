"""The forms of a prompt, and the list of prompts of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from runtime.engine.checks import is_integer
from runtime.engine.errors import RequestError
from runtime.engine.option_names import unknown_option

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. Such a mapping may also have
``EngineRequest``'s "cache_salt", "priority", "ttft_target_s" and "tpot_target_s", and "images": a list of
``PIL.Image.Image``, paths, bytes of files, or uint8 arrays, one for each of the model's image tokens in the prompt."""

_SCHEDULING_KEYS = ("cache_salt", "priority", "ttft_target_s", "tpot_target_s")

T = TypeVar("T")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. Raises ``RequestError`` for anything else."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(is_integer(item) for item in listed):
        return [listed]
    for item in listed:
        if not isinstance(item, (str, Mapping)) and not hasattr(item, "__iter__"):
            raise RequestError(f"a prompt is a text or a list of token ids, got {item!r:.80}", param="prompts")
    return listed


def scheduling_of(prompt: Prompt) -> dict[str, Any]:
    """The scheduling fields and cache salt of a prompt that is a mapping. Raises ``RequestError`` for unknown keys."""
    if not isinstance(prompt, Mapping):
        return {}
    known = ("prompt", "prompt_token_ids", "images", *_SCHEDULING_KEYS)
    for name in prompt:
        if name not in known:
            raise unknown_option("a prompt", str(name), known, param="prompt")
    return {name: prompt[name] for name in _SCHEDULING_KEYS if name in prompt}


def one_each(name: str, prompts: Sequence[Prompt], given: T | Sequence[T], kind: type[T]) -> Iterable[T]:
    """``given`` once for all prompts, or one a prompt. Raises ``RequestError`` if the numbers differ."""
    if isinstance(given, kind):
        return [given] * len(prompts)
    listed: Any = given
    if len(listed) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts, but {len(listed)} {name}", param=name)
    result: Iterable[T] = listed
    return result
