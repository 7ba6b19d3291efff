"""A user's function of one token's logit, over a whole row: a thread has a token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.specialisation import THREADS, Launch, Specialisation

int32, uint32 = types.int32, types.uint32
_FLOATS, _IDS = types.CPointer(types.float32), types.CPointer(types.int32)
_ARGUMENTS = _FLOATS, _FLOATS, _IDS, int32, _IDS, int32, _FLOATS, int32


@functools.lru_cache(64)
def specialisation(function: Callable[..., Any]) -> Specialisation:
    """Arguments: the new logits, the logits, the prompt's ids and their number, the output's and their number, the
    function's numbers, the size of the vocabulary."""
    each = device_function(function)

    @cuda.jit
    def user_logits(out, logits, prompt_ids, num_prompt, output_ids, num_output, numbers, vocab):
        token_id = int32(cuda.blockIdx.x) * int32(THREADS) + int32(cuda.threadIdx.x)
        if token_id < vocab:
            out[token_id] = each(token_id, logits, prompt_ids, num_prompt, output_ids, num_output, numbers)

    return Specialisation(f"user_logits_{function.__name__}", user_logits, _ARGUMENTS, THREADS, uses_float64=True)


@functools.lru_cache(64)
def plan(function: Callable[..., Any], vocab: int) -> Launch:
    """The launch over a row."""
    return Launch(specialisation(function), (-(-vocab // THREADS), 1, 1), (THREADS, 1, 1))
