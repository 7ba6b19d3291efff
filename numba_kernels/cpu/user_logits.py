"""A user's function of one token's logit, over a whole row, on the calling thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import njit, types

_LOGITS, _IDS = types.float32[::1], types.int32[::1]
_SIGNATURE = types.void(_LOGITS, _LOGITS, _IDS, _IDS, _LOGITS)


@functools.lru_cache(64)
def row_function(function: Callable[..., Any]) -> Any:
    """``(out, logits, prompt_ids, output_ids, numbers)``, compiled. Raises Numba's errors."""
    each = njit(nogil=True, error_model="numpy")(function)

    @njit(_SIGNATURE, nogil=True, error_model="numpy")
    def row(out, logits, prompt_ids, output_ids, numbers):
        for token_id in range(logits.shape[0]):
            out[token_id] = each(
                token_id, logits, prompt_ids, prompt_ids.shape[0], output_ids, output_ids.shape[0], numbers
            )

    return row
