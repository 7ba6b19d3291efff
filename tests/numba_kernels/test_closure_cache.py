"""Compiled code of functions that factories make: found again though every helper is a new object, told apart by what
the closures hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from numba_kernels.closure_cache import describe, kept_cfunc, kept_njit


def make(factor: int, *, is_odd: bool = False) -> Any:
    @numba.njit
    def helper(x):
        return x * factor

    @intrinsic
    def one(typingctx):
        def codegen(context, builder, signature, args):
            return context.get_constant(types.int64, 1)

        return types.int64(), codegen

    if is_odd:

        def function(x):
            return helper(x) + one()

    else:

        def function(x):
            return helper(x)

    return function


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))


def test_what_a_factory_makes_again_is_found() -> None:
    first, again = (kept_cfunc(types.int64(types.int64), make(3, is_odd=True)) for _ in range(2))
    assert (first.cache_hits, again.cache_hits) == (0, 1)
    assert again.ctypes(5) == 16
    assert kept_cfunc(types.int64(types.int64), make(4, is_odd=True)).cache_hits == 0
    for hits in (0, 1):
        dispatcher = kept_njit(make(7), nogil=True)
        assert dispatcher(2) == 14
        assert sum(dispatcher.stats.cache_hits.values()) == hits


def test_closures_are_told_apart() -> None:
    functions = [make(3), make(4), make(3, is_odd=True), make(4, is_odd=True)]
    assert len({describe(function) for function in functions}) == 4
    assert describe(make(3)) == describe(make(3))
    values = [1, 1.0, True, "1", np.uint8, np.dtype("u1"), np.int32(1), types.float32, (1, 1), ((1,), 1), None]
    assert len({describe(value) for value in values}) == len(values)
    with pytest.raises(TypeError, match="holds <object object"):
        describe([object()])
