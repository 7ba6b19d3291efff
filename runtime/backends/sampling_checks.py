"""Checks of sampling's arguments on the host, whatever the device of the logits."""

from __future__ import annotations

import numpy as np

from runtime.backends.checks import fail
from runtime.sampling_arrays import SAMPLING_FIELDS, Int32Array, SamplingArrays


def check_sampling(op: str, rows: int, vocab: int, params: SamplingArrays) -> None:
    """Raises InvalidArgumentError where an array of the parameters is not what ``logits [rows, vocab]`` need."""
    mask_words = -(-vocab // 32)
    for name, dtype, shape in SAMPLING_FIELDS:
        value = getattr(params, name)
        wanted = (rows,) if shape == "n" else value.shape[:1]
        if value.dtype != dtype or value.shape != wanted or not value.flags.c_contiguous:
            raise fail(op, f"params.{name}", f"is {value.dtype} {value.shape}, must be contiguous {dtype} {wanted}")
    for name in ("prompt", "output", "bias") if rows else ():
        start, end = getattr(params, f"{name}_start"), getattr(params, f"{name}_end")
        size = getattr(params, f"{name}_ids").size
        if not size and not np.count_nonzero(start) and not np.count_nonzero(end):
            continue  # nearly always
        if start.min() < 0 or end.max() > size or (start > end).any():
            raise fail(op, f"params.{name}_end", f"must lie between {name}_start, from 0 on, and the {size} {name}_ids")
    if params.bias_values.size != params.bias_ids.size:
        raise fail(op, "params.bias_values", f"has {params.bias_values.size} entries, bias_ids {params.bias_ids.size}")
    mask = params.allowed_mask
    fits = mask is None or (mask.dtype == np.uint32 and mask.shape == (rows, mask_words) and mask.flags.c_contiguous)
    if mask is not None and not fits:
        raise fail(op, "params.allowed_mask", f"is {mask.dtype} {mask.shape}, must be uint32 {(rows, mask_words)}")
    if rows and vocab == 0:
        raise fail(op, "logits", "has no columns")


def check_chosen(op: str, rows: int, vocab: int, chosen: Int32Array, top_n: int) -> None:
    """Raises InvalidArgumentError where `chosen` is not an id a row, or `top_n` more than there are."""
    if chosen.dtype != np.int32 or chosen.shape != (rows,) or not chosen.flags.c_contiguous:
        raise fail(op, "chosen", f"is {chosen.dtype} {chosen.shape}, must be contiguous int32 ({rows},)")
    if rows and (chosen.min() < 0 or chosen.max() >= vocab):
        raise fail(op, "chosen", f"holds {chosen.min()} to {chosen.max()}, must lie in 0 to {vocab - 1}")
    if not 0 <= top_n <= vocab:
        raise fail(op, "top_n", f"is {top_n}, must lie in 0 to {vocab}")
