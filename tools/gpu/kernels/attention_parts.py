"""Into how many parts the decode tier of attention is to cut sequences: what `planning._wanted` says, measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from numba_kernels.cuda.attention import planning
from runtime.bench.kernels.cases import attention_case
from runtime.bench.kernels.table import prepare, verify
from runtime.device.gpu import Gpu
from tools.gpu.kernels.speed import stopwatch_of
from tools.gpu.sections import Case, Options, Result

SHAPES = ((32, 1023), (1, 1023), (1, 16383), (8, 2047), (128, 1023))
"""Sequences, and tokens of each before the one that is decoded; 32 query heads on 8 KV heads of 128."""
WANTED = (24, 49, 98, 196, 392)
"""Parts for a KV head, in all; 49 blocks a KV head fill an H200 once."""


def cases(options: Options) -> Iterator[Case]:
    """A batch each."""
    for seqs, context in ((2, 300),) if options.is_quick else SHAPES:
        yield Case(f"{seqs} x {context + 1}", functools.partial(_measure, options, seqs, context))


def _measure(options: Options, seqs: int, context: int) -> Result:
    """{"us": {parts: median}, "planned": parts of the plan}."""
    gpu, kept = Gpu.of(options.device), []
    heads = (4, 2, 64) if options.is_quick else (32, 8, 128)
    runs: dict[str, Callable[[], Any]] = {}
    for wanted in WANTED:
        with patch.object(planning, "_wanted", lambda *_, wanted=wanted: wanted):
            inputs, ready = prepare(gpu, attention_case("auto", "bf16", seqs, context, 1, *heads), 1)
        if not options.is_dry:
            verify(gpu, attention_case("auto", "bf16", seqs, context, 1, *heads), ready, ready.run)
        kept.append(inputs)
        runs[str(wanted)] = ready.run
    times = stopwatch_of(options).times(runs)
    planned = planning._wanted(seqs, heads[1], gpu.properties.num_sms)
    return {"us": {name: round(each.median_us, 2) for name, each in times.items()}, "planned": planned}
