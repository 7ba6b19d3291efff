"""Host code compiles to the same machine code by Numba's own passes and by those that replace them; for a version of
numba that the patches were not written for, by its own."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest
from numba import carray, types

from numba_kernels import closure_cache
from numba_kernels.cache import njit
from numba_kernels.cache_files import read_entry
from numba_kernels.closure_cache import CFunction
from numba_kernels.numba_patches import patching
from numba_kernels.numba_patches.host_passes import host_passes
from numba_kernels.numba_patches.linked_parts import linked_parts

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
    monkeypatch.setattr(closure_cache, "host_passes", nullcontext)
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
    with host_passes():
        with host_passes():
            pass
        assert all(now is not then for now, then in zip(replaced(), before, strict=True))
        assert not gc.isenabled()
    assert replaced() == before
    assert gc.isenabled()


def test_an_unknown_version_turns_the_patches_off_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(patching, "_found", {"numba": "0.69.1", "numba-cuda": "0.30.4"}.__getitem__)
    before = replaced()
    with caplog.at_level(logging.WARNING, logger="xserv.cache"):
        with host_passes(), linked_parts():
            assert replaced() == before
        function = CFunction(SIGNATURE, made(), tmp_path, error_model="numpy")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["numba is 0.69.1"]
    numbers = (ctypes.c_float * 6)(1, 2, 3, 4, 5, 6)
    call = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(function.address)
    assert call(ctypes.addressof(numbers), 2, 3) == 60.0 - 3.0


def test_each_patch_is_for_a_version_that_is_installed() -> None:
    """Fails with a new Numba: compare its parts with the patches, then change `VERSIONS`."""
    assert all(patching.is_known(package) for package in patching.VERSIONS)
