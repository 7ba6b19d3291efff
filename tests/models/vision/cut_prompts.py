"""Runs a prompt with pictures through a model in pieces that may cut the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.base import Model
from runtime.batch import Batch, EncodedTokens
from runtime.tensor.tensor import Tensor
from tests.models.driver import ModelDriver


def run_cut(
    model: Model, ids: Sequence[int], firsts: Sequence[int], pictures: Sequence[tuple[Tensor, ...]],
    sizes: Sequence[int],
) -> np.ndarray[Any, Any]:  # fmt: skip
    """The logits of all tokens, computed so many at a time; the pictures' tokens begin at `firsts`."""

    def complete(batch: Batch, start: int) -> None:
        found = []
        for first, picture in zip(firsts, pictures, strict=True):
            low, high = max(first, start), min(first + picture[0].shape[0], start + batch.num_tokens)
            if low < high:
                found.append(EncodedTokens(low - start, tuple(part[low - first : high - first] for part in picture)))
        batch.encoded = tuple(found)

    driver, rows, start = ModelDriver(model, complete=complete, block_size=8), [], 0
    for size in sizes:
        rows.append(driver.step({0: ids[start : start + size]})[0])
        start += size
    assert start == len(ids)
    return np.concatenate(rows)
