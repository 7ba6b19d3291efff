"""float16 read and written one value at a time, by the processor's instructions and without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numba_kernels.cache import njit
from numba_kernels.cpu.intrinsics.scalars import load_f32, store_f32
from numba_kernels.cpu.running.launch import address_of
from numba_kernels.cpu.target import VARIABLE, available_tiles


@njit
def _read(source, out, count):
    for index in range(count):
        store_f32(np.float32, out, index, load_f32(np.int16, source, index))


@njit
def _write(source, out, count):
    for index in range(count):
        store_f32(np.int16, out, index, load_f32(np.float32, source, index))


def test_every_float16_is_read_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.empty(halves.size, np.float32)
    _read(address_of(halves), address_of(out), halves.size)
    np.testing.assert_array_equal(out, halves.astype(np.float32))


def test_floats_are_written_as_numpy_rounds_them():
    rng = np.random.default_rng(0)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    ties = (halves[:-1] + halves[1:]) / np.float32(2)
    ends = [65519.996, 65520, 65536, 1e9, np.inf, np.nan, 2.0**-25, 2.0**-25 * 1.0001, 1e-30, 0.0]
    near = np.array(ends, np.float32)
    any_bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    above = np.nextafter(ties, np.float32(9e9))
    values = np.concatenate([halves, ties, above, near, -near, any_bits])
    out = np.empty(values.size, np.float16)
    _write(address_of(values), address_of(out), values.size)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    is_number = ~np.isnan(values)
    np.testing.assert_array_equal(out[is_number].view(np.uint16), expected[is_number].view(np.uint16))
    assert np.isnan(out[~is_number]).all()


@pytest.mark.skipif("portable" not in available_tiles(), reason="no code for any processor of this kind")
def test_the_same_without_instructions_for_float16():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-k", "float16_is_read or floats_are_written"],
        cwd=Path(__file__).resolve().parents[3], env={**os.environ, VARIABLE: "portable"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout
