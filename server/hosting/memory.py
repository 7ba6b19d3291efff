"""The memory that loaded models share: by device, how much there is, and how much a model takes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.device.context import query_properties
from runtime.device.device import Device
from runtime.device.driver import open_driver
from runtime.engine.limits import DEFAULT_KV_CACHE_BYTES, available_memory_bytes
from runtime.engine.messages import EngineInfo
from server.hosting.facts import ModelFacts
from server.hosting.places import HOST
from server.hosting.settings import ModelSettings

SHARE = 0.9
"""Models' part of the host's memory that is free at the start, and of all of a GPU's. The rest is for what is neither
weights nor KV cache."""


def place_of(settings: ModelSettings) -> str:
    """The device whose memory the model takes. Raises `Device.parse`'s errors."""
    device = Device.parse(settings.engine_options.get("device", "auto"))
    return device.type if device.kind == "cuda" else HOST


def budgets(places: Iterable[str], given: int | None) -> dict[str, int]:
    """Bytes that models may take of each place; of the host, too, which keeps the weights of those that sleep."""
    return {place: int(SHARE * _memory_bytes(place)) if given is None else given for place in {*places, HOST}}


def _memory_bytes(place: str) -> int:
    if place == HOST:
        return available_memory_bytes()
    device = Device.parse(place)
    return query_properties(open_driver(device.arch), device.index).total_memory_bytes


def expected_bytes(settings: ModelSettings, facts: ModelFacts, place: str, budget: int) -> int:
    """A model's memory before it was ever loaded: of its files and its KV cache, as far as that is known."""
    if settings.memory_bytes is not None:
        return settings.memory_bytes
    cache = settings.engine_options.get("kv_cache_bytes")
    if cache is None:
        is_default = place == HOST and facts.purpose == "generate"
        cache = min(DEFAULT_KV_CACHE_BYTES, budget // 4) if is_default else 0
    return facts.stored_bytes + int(cache)


def held_bytes(info: EngineInfo, place: str) -> int:
    """A loaded model's memory; of one that is split over several GPUs, on each of them."""
    num_devices = 1 if place == HOST else max(1, len(info.ranks))
    return -(-(info.weight_bytes + info.kv_cache_bytes) // num_devices)


def default_cache_bytes(
    settings: ModelSettings, beside: Sequence[tuple[ModelSettings, ModelFacts]], place: str, budget: int
) -> int | None:
    """A GPU's KV cache for one of several models (`beside`, with itself) that does not say how large its own is: an
    equal part of what all weights leave, since that of an engine alone takes nearly all that is free. None if they do
    not fit together, and take turns."""
    if place == HOST or len(beside) < 2 or _says_cache(settings):
        return None
    caches = [each for each, facts in beside if facts.purpose in ("generate", None) and not _says_cache(each)]
    taken = sum(
        each.memory_bytes or facts.stored_bytes + int(each.engine_options.get("kv_cache_bytes") or 0)
        for each, facts in beside
    )
    left = (budget - taken - len(beside) * WORKSPACE_BYTES) // max(1, len(caches))
    return left if settings in caches and left >= LEAST_CACHE_BYTES else None


def _says_cache(settings: ModelSettings) -> bool:
    return bool({"kv_cache_bytes", "num_blocks"} & settings.engine_options.keys())


WORKSPACE_BYTES = 1 << 30
"""Memory of a GPU for each model's activations and recordings."""

LEAST_CACHE_BYTES = 1 << 30
