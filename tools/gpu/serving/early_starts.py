"""Decode steps whose kernels start before the previous one has ended, and the same steps without it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from runtime.device.gpu import Gpu
from tools.gpu.sections import Case, Options, Result
from tools.gpu.serving.models import Model, decode

COUNTS = 1, 2, 8, 16, 32, 64
QUICK_COUNTS = (2,)
PROMPT_TOKENS = 256
"""Tokens of each sequence's prompt: few, since products are compared."""

Chained = Callable[[Gpu], AbstractContextManager[Any]]


def cases(options: Options, name: str) -> Iterator[Case]:
    """Steps of each number of sequences, by two engines, whose graphs are recorded either way."""
    counts = QUICK_COUNTS if options.is_quick else COUNTS
    ways: tuple[tuple[str, Chained], ...] = (("early", Gpu.chained), ("none early", _unchained))
    for how, chained in ways:
        model = Model(options, name, max_num_seqs=max(counts))
        for count in counts:
            yield Case(f"{count} sequences, {how}", functools.partial(_decode, model, count, chained))
        model.close()


def _unchained(_: Gpu) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _decode(model: Model, count: int, chained: Chained) -> Result:
    with patch.object(Gpu, "chained", chained):
        return decode(model, count, prompt_len=6 if model.options.is_quick else PROMPT_TOKENS)
