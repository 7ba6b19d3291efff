"""Names of samplers, and the texts that DRY does not reach over, as users give them."""

from __future__ import annotations

from typing import Any

from numba_kernels.sampler_chain import STAGES
from runtime.engine.errors import RequestError

_BEFORE = "penalties", "dry"
NAMES = (*_BEFORE, *STAGES)
"""llama.cpp's names, in the order of its default chain."""
_ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "typ": "typ_p", "nucleus": "top_p", "temp": "temperature"}
_KNOWN = {key.replace("_", ""): name for key, name in (dict(zip(NAMES, NAMES)) | _ALIASES).items()}

DEFAULT_BREAKERS = ["\n", ":", '"', "*"]
"""llama.cpp's."""
MAX_BREAKERS = 64
MAX_BREAKER_LENGTH = 40
"""Bounds of ``dry_sequence_breakers``: how many texts, and how many bytes of UTF-8 each (llama.cpp cuts there)."""


def checked_samplers(value: Any, *, is_last: bool) -> list[str] | None:
    """The canonical names of ``samplers``. ``is_last``: ``temperature_last``. Raises ``RequestError``."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise RequestError(f"samplers must be a list of names or None, got {value!r:.80}", param="samplers")
    if is_last:
        raise RequestError("samplers and temperature_last both give the order; send one", param="samplers")
    names = []
    for given in value:
        name = _KNOWN.get(given.lower().replace("_", "").replace("-", ""))
        if name is None:
            raise RequestError(f"samplers has {given!r:.40}; known are {', '.join(NAMES)}", param="samplers")
        if name in names:
            raise RequestError(f"samplers names {name} twice; once each", param="samplers")
        names.append(name)
    first = [name for name in _BEFORE if name in names]
    if names[: len(first)] != first:
        problem = "penalties and then dry act before all others, so they come first in this order"
        raise RequestError(f"samplers: {problem}, got {', '.join(names)}", param="samplers")
    return names


def checked_breakers(value: Any) -> list[str] | None:
    """``dry_sequence_breakers``. Raises ``RequestError``."""
    field = "dry_sequence_breakers"
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise RequestError(f"{field} must be a list of texts or None, got {value!r:.80}", param=field)
    if len(value) > MAX_BREAKERS:
        raise RequestError(f"{field} must have at most {MAX_BREAKERS} entries, got {len(value)}", param=field)
    for text in value:
        size = len(text.encode(errors="surrogatepass"))
        if not 1 <= size <= MAX_BREAKER_LENGTH:
            raise RequestError(f"{field}: a text must have 1 to {MAX_BREAKER_LENGTH} bytes, got {size}", param=field)
    return list(value)
