"""Compiled code of functions that factories make: found again though every helper is a new object, told apart by what
the closures hold."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.extending import intrinsic

from numba_kernels import cache
from numba_kernels.closure_cache import CFunction, describe, kept_njit
from numba_kernels.numba_patches.patching import is_known

TABLE = np.arange(1 << 20)  # too large to be copied into the code: numba takes its address


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


def call(compiled: CFunction, x: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)(x)


def test_what_a_factory_makes_again_is_found(tmp_path: Path) -> None:
    first, again = (CFunction(types.int64(types.int64), make(3, is_odd=True), tmp_path) for _ in range(2))
    assert (first.was_kept, again.was_kept) == (False, True)
    assert call(first, 5) == call(again, 5) == 16
    other = CFunction(types.int64(types.int64), make(4, is_odd=True), tmp_path)
    assert (other.was_kept, call(other, 5)) == (False, 21)
    for hits in (0, 1):
        dispatcher = kept_njit(make(7), tmp_path, nogil=True)
        assert dispatcher(2) == 14
        assert sum(dispatcher.stats.cache_hits.values()) == hits


def test_signatures_are_told_apart(tmp_path: Path) -> None:
    for hits in (0, 1):
        dispatcher = kept_njit(make(3), tmp_path)
        assert (dispatcher(2), dispatcher(1.5)) == (6, 4.5)
        assert sum(dispatcher.stats.cache_hits.values()) == 2 * hits
    assert len(list(tmp_path.iterdir())) == 2


def test_code_that_is_not_whole_is_compiled_again(tmp_path: Path) -> None:
    CFunction(types.int64(types.int64), make(3), tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    for was_kept in (False, True):
        mended = CFunction(types.int64(types.int64), make(3), tmp_path)
        assert (mended.was_kept, call(mended, 5)) == (was_kept, 15)


def test_what_no_other_process_can_run_is_refused(tmp_path: Path) -> None:
    def look_up(x):
        return TABLE[x]

    with pytest.raises(TypeError, match="address of this process"):
        CFunction(types.int64(types.int64), look_up, tmp_path)


def test_closures_are_told_apart() -> None:
    functions = [make(3), make(4), make(3, is_odd=True), make(4, is_odd=True)]
    assert len({describe(function) for function in functions}) == 4
    assert describe(make(3)) == describe(make(3))
    values = [1, 1.0, True, "1", np.uint8, np.dtype("u1"), np.int32(1), types.float32, (1, 1), ((1,), 1), None]
    assert len({describe(value) for value in values}) == len(values)
    with pytest.raises(TypeError, match="holds <object object"):
        describe([object()])


@pytest.mark.skipif(not is_known("numba"), reason="written for one version of Numba: with others the patch is off")
def test_what_a_kernel_calls_is_linked_and_no_function_of_its_own(tmp_path: Path) -> None:
    compiled_alone = []
    finalize = JITCodeLibrary._finalize_specific

    def note(library: Any) -> None:
        compiled_alone.append(library.name)
        finalize(library)

    @numba.njit
    def inner(x):
        return x + 1

    @numba.njit
    def outer(x):
        return 2 * inner(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITCodeLibrary, "_finalize_specific", note)
        first = CFunction(types.int64(types.int64), lambda x: outer(x) + inner(x), tmp_path)
        second = CFunction(types.int64(types.int64), lambda x: outer(x), tmp_path)  # finds both parts
        assert len(compiled_alone) == 2
        assert (call(first, 5), call(second, 5)) == (18, 12)
        assert not outer.overloads
        assert (outer(5), inner(5)) == (12, 6)  # Python compiles them for itself
        assert len(compiled_alone) == 4
        assert call(CFunction(types.int64(types.int64), lambda x: inner(outer(x)), tmp_path), 5) == 13


def counter(make: Any) -> Any:
    """A function that passes an array on to another one."""

    def callee(array, place):
        array[place] += 1.0
        return place + 1

    inner = make(callee)

    def caller(array, count):
        place = 0
        while place < count:
            place = inner(array, place)
        return array[0]

    return make(caller)


def test_a_borrowing_function_counts_as_no_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for make in (cache.njit, cache.njit_borrowing):
        folder = tmp_path / make.__name__
        folder.mkdir()
        monkeypatch.setattr(cache, "_folder_of", lambda _, folder=folder: folder)
        function, array = counter(make), np.zeros(3)
        assert function(array, 2) == 1.0
        assert function(array, 3) == 2.0
        assert array.tolist() == [2.0, 2.0, 1.0]
        counts.append(sum(text.count("NRT_incref") for text in function.inspect_llvm().values()))
        held = weakref.ref(array)
        del array
        assert held() is None
    assert counts[0] > 0
    assert counts[1] == 0
