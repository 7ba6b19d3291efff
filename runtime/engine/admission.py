"""Checks a request before it reaches the engine's loop.

The checks need the request and ``EngineInfo`` alone, so any client can make them on any thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.engine.checks import check_seconds, check_texts, check_weight, is_integer
from runtime.engine.errors import ContextLengthExceededError, QueueFullError, RequestError
from runtime.engine.messages import EngineInfo, EngineRequest, ImageItem, ImageSupport
from runtime.engine.sampling_params import SamplingParams, check_token_ids
from runtime.engine.scheduling.pictures import Picture, Pictures
from runtime.engine.scheduling.sequence import NO_IDS, Request
from runtime.images.decoding import ImageError


def check_generates(info: EngineInfo) -> None:
    """Raises ``RequestError`` for a model that only embeds or classifies."""
    if not info.pooling.generates:
        others = "embeddings or scores" if info.pooling.labels else "embeddings"
        raise RequestError(f"{info.architecture} generates no text: ask for {others}", param="model")


def prepare(request: EngineRequest, info: EngineInfo) -> Request:
    """Check a request and make the engine's record of it; ``max_tokens`` is capped at the end of the context.

    Raises ``ContextLengthExceededError``, ``RequestError``.
    """
    if not isinstance(request.request_id, str) or not request.request_id:
        given = request.request_id
        raise RequestError(f"request_id must be a string, not empty, got {given!r:.80}", param="request_id")
    if not isinstance(request.params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {type(request.params)}", param="params")
    check_generates(info)
    _check_scheduling(request, info.scheduling_policy)
    prompt_ids = prompt_of("prompt", request.prompt_token_ids, info.vocab_size, info.max_model_len)
    request.params.validate(info.vocab_size)
    if request.params.extra_args is not None and not info.logits_processors:
        message = "extra_args (vllm_xargs) are for logits processors, and the engine has none: start it with "
        raise RequestError(f"{message}logits_processors", param="extra_args")
    check_token_ids("eos_token_ids", request.eos_token_ids, info.vocab_size)
    if request.prediction:
        as_token_ids("prediction", request.prediction, info.vocab_size)
    return record_of(request, info, prompt_ids)


def record_of(request: EngineRequest, info: EngineInfo, prompt_ids: NDArray[np.int32] | None = None) -> Request:
    """The record of a request that another process has prepared, whose engine may since have started with a shorter
    context. Raises as ``prepare`` does, for its adapter, its length and its images."""
    if prompt_ids is None:
        prompt_ids = np.array(request.prompt_token_ids, np.int32)
    if request.adapter is not None and not info.max_loras:
        raise RequestError("the engine takes no adapters: start it with enable_lora", param="model")
    if request.begun and len(request.begun) != request.params.n:
        raise RequestError(f"begun has {len(request.begun)} choices, n is {request.params.n}", param="begun")
    params, room = request.params, info.max_model_len - len(prompt_ids)
    if room < 1:
        raise ContextLengthExceededError(len(prompt_ids), info.max_model_len)
    if params.min_tokens > room:
        left = f"a prompt of {len(prompt_ids)} tokens leaves {room} of the context of {info.max_model_len}"
        raise RequestError(f"min_tokens={params.min_tokens} does not fit: {left}", param="min_tokens")
    pictures = pictures_of(request.images, prompt_ids, info.images)
    return Request(
        request.request_id,
        prompt_ids,
        params,
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
        ttft_target_s=request.ttft_target_s,
        tpot_target_s=request.tpot_target_s,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        arrival_s=request.arrival_time_s or time.monotonic(),
        speculates=bool(request.speculates),
        prediction=np.array(request.prediction, np.int32) if request.prediction else NO_IDS,
        pictures=pictures,
        boundaries=_boundaries(request, prompt_ids) if info.has_states else (),
        shows_difference=request.shows_difference,
        adapter_digest=b"" if request.adapter is None else bytes.fromhex(request.adapter.digest),
        begun=request.begun,
        lease=request.lease,
        source=request.source,
        asked=request,
        tenant=request.tenant,
        tenant_weight=request.tenant_weight,
    )


def _boundaries(request: EngineRequest, prompt_ids: NDArray[np.int32]) -> tuple[int, ...]:
    """The places inside a prompt after which states are kept: its turns, and, if another engine asks for the same
    prompt, its last token but one, since the last is computed there."""
    turns = turn_starts(prompt_ids, request.turn_start_id)
    last = len(prompt_ids) - 1
    asks_again = bool(request.lease) and request.params.max_tokens == 1  # else it goes on after its first token
    return (*(each for each in turns if each < last), last) if asks_again and last > 0 else turns


def turn_starts(prompt_ids: NDArray[np.int32], turn_start_id: int | None) -> tuple[int, ...]:
    """The places of the prompt at which its turns begin, but for its own beginning."""
    if turn_start_id is None:
        return ()
    return tuple((np.flatnonzero(prompt_ids[1:] == turn_start_id) + 1).tolist())


def pictures_of(
    images: Sequence[ImageItem], prompt_ids: NDArray[np.int32], support: ImageSupport | None
) -> Pictures | None:
    """The scheduler's record of a prompt's images. Raises ``RequestError``."""
    if not images:
        return None
    if support is None:
        raise RequestError(f"the model reads no images, got {len(images)}", param="images")
    items, end = [], 0
    for index, image in enumerate(images):
        name = f"images[{index}]"
        try:
            lines, across = support.rule.token_grid(image.rows, image.columns)
        except ImageError as error:
            raise RequestError(f"{name}: {error}", param=name) from error
        if len(image.patches) != image.rows * image.columns * support.patch_bytes:
            wanted = image.rows * image.columns * support.patch_bytes
            raise RequestError(f"{name}: patches have {len(image.patches)} bytes, must have {wanted}", param=name)
        if not 16 <= len(image.digest) <= 64:
            raise RequestError(f"{name}: digest has {len(image.digest)} bytes, must have 16 to 64", param=name)
        item = Picture(image.digest, image.first_token, lines, across)
        if item.first_token < end or item.end > len(prompt_ids):
            raise RequestError(
                f"{name}: its {item.num_tokens} tokens from {item.first_token} on are not within the prompt's rest, "
                f"which is from {end} to {len(prompt_ids)}",
                param=name,
            )
        wanted_ids, ids = support.picture_ids(lines, across), prompt_ids[item.first_token : item.end].tolist()
        if ids != wanted_ids:
            place, got = next((i, a) for i, (a, b) in enumerate(zip(ids, wanted_ids), item.first_token) if a != b)
            where = f"the {item.num_tokens} tokens from {item.first_token} on"
            ends = "" if support.line_ends is None else ", lines ending with {} and the last with {}".format(
                *support.line_ends
            )  # fmt: skip
            raise RequestError(f"{name}: {where} must be {support.token_id}{ends}; got {got} at {place}", param=name)
        items.append(item)
        end = item.end
    total = sum(item.num_tokens for item in items)
    if total > support.max_tokens:
        raise RequestError(f"images have {total} tokens, limit {support.max_tokens}", param="images")
    patches = [np.frombuffer(image.patches, np.uint8).reshape(-1, support.patch_bytes) for image in images]
    grids = [(image.rows, image.columns) for image in images]
    most = support.most_whole
    pictures = Pictures.of(
        items, len(prompt_ids), patches, grids, has_axes=support.has_axes, are_whole=most is not None
    )
    for first, after in pictures.whole:
        if most is not None and after - first > most:
            raise RequestError(
                f"images have {after - first} tokens side by side, from {first} on, limit {most}: one "
                "step computes them (max_num_batched_tokens, max_num_seqs, num_blocks)",
                param="images",
            )
    return pictures


def _check_scheduling(request: EngineRequest, policy: str) -> None:
    """Refuse a wrong field, and one that the engine's policy would ignore."""
    if not is_integer(request.priority):
        raise RequestError(f"priority must be an integer, got {request.priority!r:.80}", param="priority")
    if request.priority != 0 and policy != "priority":
        raise RequestError(f"the {policy} policy takes no priority, got {request.priority}", param="priority")
    for name in ("ttft_target_s", "tpot_target_s"):
        target = getattr(request, name)
        if target is not None:
            check_seconds(name, target)
            if policy != "deadline":
                raise RequestError(f"the {policy} policy takes no {name}, got {target}", param=name)
    check_texts(request, "cache_salt", "tenant")
    check_weight("tenant_weight", request.tenant_weight)


def prompt_of(
    field: str, token_ids: Sequence[int], vocab_size: int, max_model_len: int, *, has_answer: bool = True
) -> NDArray[np.int32]:
    """`as_token_ids` of a prompt that fits the context, with one token of the answer if there is one. Raises
    ``ContextLengthExceededError``, before any work for each id, and ``RequestError``."""
    is_row = token_ids.ndim > 0 if isinstance(token_ids, np.ndarray) else isinstance(token_ids, (list, tuple))
    if is_row and len(token_ids) > max_model_len - has_answer:
        raise ContextLengthExceededError(len(token_ids), max_model_len, has_answer=has_answer, param=field)
    return as_token_ids(field, token_ids, vocab_size)


def as_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Checked ids as ``[num_tokens]`` int32, a copy. Raises ``RequestError`` naming the field."""
    if isinstance(token_ids, np.ndarray):
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, (list, tuple)):
        raise RequestError(f"{field} must be a list of token ids, got {type(token_ids).__name__}", param=field)
    if not token_ids:
        raise RequestError(f"{field} must have at least one token", param=field)
    for kind in set(map(type, token_ids)) - {int}:
        if not issubclass(kind, np.integer):  # a bool is not an id
            raise RequestError(f"{field} must hold integers, got {kind.__name__}", param=field)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        check_token_ids(field, token_ids, vocab_size)
    return np.array(token_ids, np.int32)


RETRY_AFTER_S = 1.0
"""Retry-after seconds of a refused request: about the time in which a busy engine starts several requests."""


def check_room(info: EngineInfo, num_waiting: int, num_waiting_tokens: int, num_prompt_tokens: int) -> None:
    """Raises ``QueueFullError`` if the queue, of so many requests and prompt tokens, has no room for this prompt. An
    empty queue takes any prompt."""
    if num_waiting >= info.max_waiting:
        raise QueueFullError(info.max_waiting, RETRY_AFTER_S)
    if num_waiting and num_waiting_tokens + num_prompt_tokens > info.max_waiting_tokens:
        raise QueueFullError(info.max_waiting_tokens, RETRY_AFTER_S, "tokens")
