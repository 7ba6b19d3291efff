"""Host code compiles to the same machine code by Numba's own passes and by those that replace them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest
from numba import carray, types

from numba_kernels import closure_cache
from numba_kernels import quick_host_passes as passes
from numba_kernels.cache import njit
from numba_kernels.cache_files import read_entry
from numba_kernels.closure_cache import CFunction
from numba_kernels.quick_host_passes import quick_host_passes

SIGNATURE = types.float32(types.CPointer(types.float32), types.int64, types.int64)


def made() -> Callable[..., Any]:
    """A function with loops, branches, a tuple, an array over memory, and a part."""

    @njit
    def part(row: Any, first: int) -> Any:
        total, largest = row.dtype.type(0), row[0]
        for i in range(first, len(row)):
            if row[i] > largest:
                largest = row[i]
            elif row[i] != row[i]:
                continue
            total += row[i] * row[i]
        return total, largest

    def function(numbers: Any, rows: int, width: int) -> Any:
        values = carray(numbers, (rows, width))
        result = values.dtype.type(0)
        for row in range(rows):
            total, largest = part(values[row], row % 3)
            values[row, 0] = max(total, largest) - min(total, 1)
            result += values[row, 0] if row & 1 else -largest
        return result

    return function


def code_in(folder: Path) -> list[bytes]:
    """The machine code of `made()`, without names, which count what was compiled before."""
    folder.mkdir()
    CFunction(SIGNATURE, made(), folder, error_model="numpy")
    (path,) = folder.glob("*.o")
    entry = read_entry(path)
    assert entry is not None
    sections = llvm.ObjectFileRef.from_data(entry[1]).sections()
    return [section.data() for section in sections if section.is_text()]


def test_the_machine_code_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = code_in(tmp_path / "quick")
    monkeypatch.setattr(closure_cache, "quick_host_passes", nullcontext)
    assert code_in(tmp_path / "own") == quick
    assert sum(map(len, quick)) > 100


def replaced() -> list[object]:
    from numba.core import ir, lowering, postproc
    from numba.core.types import BaseFunction

    return [
        ir.Stmt.list_vars, ir.Expr.list_vars, postproc.PostProcessor.run, BaseFunction.get_call_type,
        vars(lowering).get("str"),
    ]  # fmt: skip


def test_numba_is_as_it_was_afterwards() -> None:
    before = replaced()
    assert gc.isenabled()
    with quick_host_passes():
        with quick_host_passes():
            pass
        assert all(now is not then for now, then in zip(replaced(), before, strict=True))
        assert not gc.isenabled()
    assert replaced() == before
    assert gc.isenabled()


def test_another_version_of_numba_keeps_its_own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "REPLACED_VERSION", "0.67")
    before = replaced()
    with quick_host_passes():
        assert replaced() == before
